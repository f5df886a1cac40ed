// parameter.h — named fp32 tensors of a model: value always, gradient when the model is trainable.
// The store owns them and keeps their addresses; layers and the optimizer hold pointers into it.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "tensor/storage.h"
#include "tensor/view.h"

namespace tandem::nn {

struct Parameter {
  std::string name;                 // the checkpoint's tensor name
  std::vector<std::int64_t> shape;  // the checkpoint's shape
  Storage value_storage;
  Storage grad_storage;  // empty when the model is not trainable
  bool frozen = false;   // has no gradient by definition (e_score_correction_bias)

  [[nodiscard]] std::span<float> value() { return value_storage.as<float>(); }
  [[nodiscard]] std::span<const float> value() const { return value_storage.as<float>(); }
  [[nodiscard]] std::span<float> grad() { return grad_storage.as<float>(); }
  [[nodiscard]] std::int64_t numel() const { return value_storage.size_bytes() / 4; }

  /// All axes but the first folded together: [shape[0], rest].
  [[nodiscard]] F32Mat value_mat() { return mat_of(value_storage.as<float>().data()); }
  [[nodiscard]] F32Mat grad_mat() { return mat_of(grad_storage.as<float>().data()); }
  [[nodiscard]] F32Vec value_vec() { return {value().data(), {numel()}}; }
  [[nodiscard]] F32Vec grad_vec() { return {grad().data(), {numel()}}; }

 private:
  [[nodiscard]] F32Mat mat_of(float* data) const { return {data, {shape[0], numel() / shape[0]}}; }
};

class ParameterStore {
 public:
  /// A zero-filled parameter with a stable address, in the memory of `device`.
  Parameter& add(Device& device, std::string name, std::vector<std::int64_t> shape, bool trainable);

  [[nodiscard]] std::deque<Parameter>& all() { return parameters_; }
  [[nodiscard]] const std::deque<Parameter>& all() const { return parameters_; }
  [[nodiscard]] Parameter* find(std::string_view name);
  void zero_grads();

 private:
  std::deque<Parameter> parameters_;
};

}  // namespace tandem::nn

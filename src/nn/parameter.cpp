#include "nn/parameter.h"

#include <algorithm>

namespace tandem::nn {

Parameter& ParameterStore::add(Device& device, std::string name, std::vector<std::int64_t> shape,
                               bool trainable) {
  std::int64_t numel = 1;
  for (const std::int64_t extent : shape) {
    numel *= extent;
  }
  Parameter& parameter = parameters_.emplace_back();
  parameter.name = std::move(name);
  parameter.shape = std::move(shape);
  parameter.value_storage = Storage(numel * 4, device);
  if (trainable) {
    parameter.grad_storage = Storage(numel * 4, device);
  }
  return parameter;
}

Parameter* ParameterStore::find(std::string_view name) {
  const auto found =
      std::find_if(parameters_.begin(), parameters_.end(),
                   [&](const Parameter& parameter) { return parameter.name == name; });
  return found == parameters_.end() ? nullptr : &*found;
}

void ParameterStore::zero_grads() {
  for (Parameter& parameter : parameters_) {
    parameter.grad_storage.zero();
  }
}

}  // namespace tandem::nn

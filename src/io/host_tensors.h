// host_tensors.h — named tensors to be written to a file, wherever their memory is.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "io/safetensors.h"
#include "tensor/storage.h"

namespace tandem {

class HostTensors {
 public:
  /// Reads `storage` when it is called where the host cannot see it; else later, so it must live
  /// and keep its values as long as this object is used.
  void add(TensorSpec spec, const Storage& storage);

  [[nodiscard]] std::span<const TensorInfo> infos() const { return infos_; }

 private:
  std::deque<std::vector<std::byte>> copies_;
  std::vector<TensorInfo> infos_;
};

}  // namespace tandem

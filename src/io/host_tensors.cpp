#include "io/host_tensors.h"

namespace tandem {

void HostTensors::add(TensorSpec spec, const Storage& storage) {
  const auto size = static_cast<std::size_t>(storage.size_bytes());
  if (size == 0 || storage.device().host_visible()) {
    infos_.push_back({std::move(spec), {storage.data(), size}});
    return;
  }
  std::vector<std::byte>& copy = copies_.emplace_back(size);
  storage.device().download(copy.data(), storage.data(), size);
  infos_.push_back({std::move(spec), copy});
}

}  // namespace tandem

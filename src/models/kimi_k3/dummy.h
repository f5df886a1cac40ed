// dummy.h — a checkpoint of any K3 shape whose numbers are made up, for measuring what cannot be
// downloaded. Values are random (never zeros, which hardware computes faster) and repeat.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "models/kimi_k3/config.h"
#include "models/kimi_k3/init.h"

namespace tandem::kimi_k3 {

class DummyTensors {
 public:
  DummyTensors(const Config& config, const InitOptions& options);

  /// Valid as long as this object. `label` stands for the folder in messages.
  [[nodiscard]] Checkpoint checkpoint(std::string label) const;

 private:
  std::vector<TensorInfo> tensors_;
  std::vector<std::vector<std::byte>> pools_;  // one a kind of value; tensors share them
};

}  // namespace tandem::kimi_k3

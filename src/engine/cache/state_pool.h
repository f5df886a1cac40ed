// state_pool.h — one slot a running sequence or checkpoint: the KDA states and convolution windows
// of every state layer. A state is the sum of everything a sequence has read, so a slot is zeroed
// or copied into when it is taken, and belongs to exactly one sequence or checkpoint.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache/free_list.h"
#include "engine/ids.h"
#include "models/cache_spec.h"
#include "tensor/storage.h"

namespace tandem {

class StatePool {
 public:
  /// Errors: std::bad_alloc, or what the device throws.
  StatePool(std::span<const StateSpec> state_layers, std::int64_t num_slots,
            Device& device = host_device());

  [[nodiscard]] std::int64_t num_slots() const { return isize(owned_); }
  [[nodiscard]] std::int64_t num_free() const { return free_.size(); }
  [[nodiscard]] const std::vector<StateBuffer>& layers() const { return layers_; }

  /// The lowest free slot, zeroed; there must be one.
  [[nodiscard]] SlotId take();
  /// The lowest free slot as a copy of `from`; there must be one.
  [[nodiscard]] SlotId take_copy(SlotId from);
  void release(SlotId slot);
  void copy(SlotId to, SlotId from);
  [[nodiscard]] const std::vector<StateSpec>& specs() const { return specs_; }
  /// Of a slot in one layer: the state, then the convolution window.
  [[nodiscard]] std::int64_t record_bytes(std::size_t layer) const;
  /// To host memory: record_bytes(layer) of them.
  void download(std::span<std::byte> to, std::size_t layer, SlotId slot) const;
  void upload(std::size_t layer, SlotId slot, std::span<const std::byte> from);

  /// Free and owned slots make up the pool, none twice. TDM_CHECK fails otherwise.
  void check_integrity() const;

 private:
  [[nodiscard]] SlotId take_as_it_is();
  [[nodiscard]] std::span<float> states(std::size_t layer, SlotId slot) const;
  [[nodiscard]] std::span<float> conv(std::size_t layer, SlotId slot) const;

  Device& device_;
  std::vector<StateSpec> specs_;
  FreeList free_;
  std::vector<bool> owned_;  // [slots]
  std::vector<Storage> storage_;
  std::vector<StateBuffer> layers_;  // views of storage_
};

}  // namespace tandem

#include "engine/cache/state_pool.h"

#include <algorithm>

namespace tandem {

StatePool::StatePool(std::span<const StateSpec> state_layers, std::int64_t num_slots,
                     Device& device)
    : device_(device),
      specs_(state_layers.begin(), state_layers.end()),
      free_(num_slots),
      owned_(usize(num_slots), false) {
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  for (const StateSpec& spec : specs_) {
    Storage& states = storage_.emplace_back(num_slots * spec.state_floats() * kFloat, device);
    float* state_data = states.as<float>().data();
    Storage& windows = storage_.emplace_back(num_slots * spec.conv_floats() * kFloat, device);
    layers_.push_back({state_data, F32Cube(windows.as<float>().data(),
                                           {num_slots, spec.conv_rows, spec.conv_channels})});
  }
}

std::span<float> StatePool::states(std::size_t layer, SlotId slot) const {
  const std::int64_t floats = specs_[layer].state_floats();
  return {layers_[layer].states + index_of(slot) * floats, usize(floats)};
}

std::span<float> StatePool::conv(std::size_t layer, SlotId slot) const {
  return {layers_[layer].conv.row(index_of(slot)), usize(specs_[layer].conv_floats())};
}

SlotId StatePool::take_as_it_is() {
  const SlotId slot{free_.take()};
  TDM_CHECK(!owned_[usize(index_of(slot))], index_of(slot));
  owned_[usize(index_of(slot))] = true;
  return slot;
}

SlotId StatePool::take() {
  const SlotId slot = take_as_it_is();
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    device_.zero(states(layer, slot).data(), states(layer, slot).size_bytes());
    device_.zero(conv(layer, slot).data(), conv(layer, slot).size_bytes());
  }
  return slot;
}

SlotId StatePool::take_copy(SlotId from) {
  const SlotId slot = take_as_it_is();
  copy(slot, from);
  return slot;
}

void StatePool::release(SlotId slot) {
  TDM_CHECK(owned_[usize(index_of(slot))], index_of(slot));
  owned_[usize(index_of(slot))] = false;
  free_.put(static_cast<std::int32_t>(slot));
}

void StatePool::copy(SlotId to, SlotId from) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto copy = [&](std::span<float> target, std::span<const float> source) {
      device_.copy(target.data(), source.data(), source.size_bytes());
    };
    copy(states(layer, to), states(layer, from));
    copy(conv(layer, to), conv(layer, from));
  }
}

std::int64_t StatePool::record_bytes(std::size_t layer) const {
  return (specs_[layer].state_floats() + specs_[layer].conv_floats()) *
         static_cast<std::int64_t>(sizeof(float));
}

void StatePool::download(std::span<std::byte> to, std::size_t layer, SlotId slot) const {
  TDM_CHECK(isize(to) == record_bytes(layer), to.size());
  const std::size_t state_bytes = states(layer, slot).size_bytes();
  device_.download(to.data(), states(layer, slot).data(), state_bytes);
  to = to.subspan(state_bytes);
  device_.download(to.data(), conv(layer, slot).data(), to.size());
}

void StatePool::upload(std::size_t layer, SlotId slot, std::span<const std::byte> from) {
  TDM_CHECK(isize(from) == record_bytes(layer), from.size());
  const std::size_t state_bytes = states(layer, slot).size_bytes();
  device_.upload(states(layer, slot).data(), from.data(), state_bytes);
  from = from.subspan(state_bytes);
  device_.upload(conv(layer, slot).data(), from.data(), from.size());
}

void StatePool::check_integrity() const {
  std::vector<bool> is_free(owned_.size(), false);
  for (const std::int32_t id : free_.ids()) {
    TDM_CHECK(!is_free[usize(id)] && !owned_[usize(id)], id);
    is_free[usize(id)] = true;
  }
  const auto owned = std::count(owned_.begin(), owned_.end(), true);
  TDM_CHECK(num_free() + owned == num_slots(), num_free(), owned, num_slots());
}

}  // namespace tandem

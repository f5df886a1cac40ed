// ids.h — strong ids of the engine: a page, a state slot, a node of the prefix tree and a request
// cannot be swapped by accident.
#pragma once

#include <cstdint>

namespace tandem {

enum class PageId : std::int32_t {};
enum class SlotId : std::int32_t {};
enum class NodeId : std::int32_t {};
enum class RequestId : std::uint64_t {};

[[nodiscard]] constexpr std::int64_t index_of(PageId id) {
  return static_cast<std::int64_t>(id);
}
[[nodiscard]] constexpr std::int64_t index_of(SlotId id) {
  return static_cast<std::int64_t>(id);
}
[[nodiscard]] constexpr std::int64_t index_of(NodeId id) {
  return static_cast<std::int64_t>(id);
}
[[nodiscard]] constexpr std::uint64_t value_of(RequestId id) {
  return static_cast<std::uint64_t>(id);
}

}  // namespace tandem

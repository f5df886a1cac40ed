#include "text/stop_strings.h"

#include <algorithm>
#include <utility>

#include "core/checked_cast.h"

namespace tandem {

Expected<StopStrings> StopStrings::create(std::vector<std::string> stops) {
  if (stops.size() > kMaxStrings) {
    return fail("expected at most {} stop strings, got {}", kMaxStrings, stops.size());
  }
  StopStrings result;
  for (std::size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty() || stops[i].size() > kMaxBytes) {
      return fail("stop string {}: expected 1 to {} bytes, got {}", i, kMaxBytes, stops[i].size());
    }
    result.add(stops[i], checked_cast<std::int32_t>(i));
  }
  result.link();
  result.stops_ = std::move(stops);
  return result;
}

void StopStrings::add(const std::string& stop, std::int32_t idx) {
  std::int32_t node = 0;
  for (const char c : stop) {
    std::int32_t next = child_of(node, c);
    if (next < 0) {
      next = checked_cast<std::int32_t>(isize(nodes_));
      nodes_[usize(node)].children.emplace_back(c, next);
      const std::int32_t depth = nodes_[usize(node)].depth + 1;
      nodes_.emplace_back().depth = depth;
    }
    node = next;
  }
  nodes_[usize(node)].stop = idx;
}

// Breadth first, so that a fallback, being shorter, is complete before it is looked at.
void StopStrings::link() {
  std::vector<std::int32_t> queue{0};
  for (std::size_t i = 0; i < queue.size(); ++i) {
    const std::int32_t parent = queue[i];
    for (const auto& [c, child] : nodes_[usize(parent)].children) {
      Node& node = nodes_[usize(child)];
      std::int32_t fallback = parent;
      std::int32_t next = -1;
      while (fallback != 0 && next < 0) {
        fallback = nodes_[usize(fallback)].fallback;
        next = child_of(fallback, c);
      }
      node.fallback = std::max(next, 0);
      const Node& shorter = nodes_[usize(node.fallback)];
      node.growing_depth = node.children.empty() ? shorter.growing_depth : node.depth;
      if (node.stop < 0) {
        node.stop = shorter.stop;
      }
      queue.push_back(child);
    }
  }
}

std::int32_t StopStrings::child_of(std::int32_t node, char c) const {
  for (const auto& [edge, child] : nodes_[usize(node)].children) {
    if (edge == c) {
      return child;
    }
  }
  return -1;
}

void StopStrings::advance(char c) {
  std::int32_t next = child_of(node_, c);
  while (next < 0 && node_ != 0) {
    node_ = nodes_[usize(node_)].fallback;
    next = child_of(node_, c);
  }
  node_ = std::max(next, 0);
  ++position_;
  held_ += c;
  const std::int32_t stop = nodes_[usize(node_)].stop;
  if (stop < 0) {
    return;
  }
  // A later end with the same begin is a longer match.
  const std::int64_t begin = position_ - isize(stops_[usize(stop)]);
  if (match_ < 0 || begin <= match_at_) {
    match_at_ = begin;
    match_ = stop;
  }
}

std::string StopStrings::emit_up_to(std::int64_t position) {
  const std::size_t length = usize(std::max<std::int64_t>(position - emitted_, 0));
  std::string out = held_.substr(0, length);
  held_.erase(0, length);
  emitted_ += isize(out);
  return out;
}

void StopStrings::settle() {
  if (match_ >= 0) {
    matched_ = stops_[usize(match_)];
  }
}

std::string StopStrings::push(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (!matched_.empty()) {
      break;
    }
    advance(c);
    const std::int64_t growing = position_ - nodes_[usize(node_)].growing_depth;
    if (match_ >= 0 && growing > match_at_) {
      settle();
    }
    const std::int64_t sure = match_ >= 0 ? std::min(match_at_, growing) : growing;
    if (sure > emitted_) {
      out += emit_up_to(sure);
    }
  }
  return out;
}

std::string StopStrings::finish() {
  if (!matched_.empty()) {
    return {};
  }
  settle();
  return emit_up_to(match_ >= 0 ? match_at_ : position_);
}

}  // namespace tandem

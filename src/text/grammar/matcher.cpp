#include "text/grammar/matcher.h"

#include <algorithm>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

// Frames that nothing returns to are dropped when the graph has grown by more than this.
constexpr std::int32_t kMaxUselessFrames = 256;

}  // namespace

Matcher::Matcher(std::shared_ptr<MaskCache> cache) : cache_(std::move(cache)) {
  places_.push_back({cache_->automaton().start_of(0), FrameGraph::kBase});
  Walker(cache_->automaton()).reach(places_, graph_, reach_);
}

void Matcher::add_allowed(std::span<std::uint32_t> bits) const {
  Seen seen;
  for (const Place& place : places_) {
    add_entry(bits, {.state = place.state}, cache_->root(), place.frame, seen);
  }
}

void Matcher::add_entry(std::span<std::uint32_t> bits, const MaskKey& key,
                        const std::shared_ptr<const NodeSet>& from, std::int32_t frame,
                        Seen& seen) const {
  const auto entry = cache_->find(key, from);
  set_bits(bits, entry->ids);
  const std::size_t num_words = std::min(bits.size(), entry->bits.size());
  for (std::size_t i = 0; i < num_words; ++i) {
    bits[i] |= entry->bits[i];
  }
  if (!entry->exits->nodes.empty()) {
    add_behind_frame(bits, frame, entry->exits, seen);
  }
}

void Matcher::add_behind_frame(std::span<std::uint32_t> bits, std::int32_t frame,
                               const std::shared_ptr<const NodeSet>& from, Seen& seen) const {
  if (frame == FrameGraph::kBase || !seen.emplace(frame, from).second) {
    return;
  }
  const Frame& call = graph_.frame(frame);
  const MaskKey key{.call = call.edge, .need = call.need, .left = call.left};
  for (std::int32_t i = call.first_link; i >= 0; i = graph_.link(i).next) {
    add_entry(bits, key, from, graph_.link(i).parent, seen);
  }
}

bool Matcher::accept_bytes(std::string_view bytes) {
  const Walker walker(cache_->automaton());
  FrameGraph graph = graph_;
  Reach reach = reach_;
  std::vector<Place> places;
  std::int32_t most_frames = kMaxUselessFrames;
  for (const char c : bytes) {
    walker.step(reach, static_cast<std::uint8_t>(c), places);
    if (places.empty()) {
      return false;
    }
    if (graph.num_frames() > most_frames) {
      graph.compact(places);
      most_frames = 2 * graph.num_frames() + kMaxUselessFrames;
    }
    walker.reach(places, graph, reach);
  }
  if (!bytes.empty()) {
    places_ = std::move(places);
    graph_ = std::move(graph);
    reach_ = std::move(reach);
  }
  return true;
}

bool Matcher::accept(std::int32_t id) {
  const std::string_view bytes = cache_->trie().bytes_of(id);
  return !bytes.empty() && accept_bytes(bytes);
}

bool Matcher::can_continue() const {
  return Walker(cache_->automaton()).can_continue(reach_);
}

void GrammarConstraint::fill_mask(std::span<std::uint32_t> bits) {
  std::fill(bits.begin(), bits.end(), 0U);
  if (stopped_) {
    return;
  }
  matcher_.add_allowed(bits);
  if (matcher_.can_end()) {
    set_bits(bits, stop_ids_);
  }
}

bool GrammarConstraint::accept(std::int32_t id) {
  if (stopped_) {
    return false;
  }
  if (std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end()) {
    stopped_ = matcher_.can_end();
    return stopped_;
  }
  return matcher_.accept(id);
}

bool GrammarConstraint::is_complete() const {
  return stopped_ || (matcher_.can_end() && !matcher_.can_continue());
}

}  // namespace tandem::grammar

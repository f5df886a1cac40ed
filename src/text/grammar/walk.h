// walk.h — walks an automaton byte by byte. Calls nest, and a grammar may be ambiguous, so where a
// walk stands is a set of states over a graph of stacks: calls made at the same place merge, which
// keeps the set small whatever the grammar (the graph-structured stack of generalised parsers).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "text/grammar/automaton.h"

namespace tandem::grammar {

/// A place: a state of a rule, and the call (a frame) that runs the rule.
struct Place {
  std::int32_t state = 0;
  std::int32_t frame = 0;

  friend bool operator==(const Place&, const Place&) = default;
};

/// A call that runs: its edge, how many texts are still required and allowed behind this one, and
/// the frames that it may return to.
struct Frame {
  std::int32_t edge = 0;
  std::int32_t need = 0;
  std::int32_t left = 0;
  std::int32_t first_link = -1;
};

struct FrameLink {
  std::int32_t parent = 0;
  std::int32_t next = -1;
};

/// Frame 0 is the base: the rule that the walk began in.
class FrameGraph {
 public:
  static constexpr std::int32_t kBase = 0;

  FrameGraph() : frames_(1) {}

  [[nodiscard]] const Frame& frame(std::int32_t idx) const {
    return frames_[static_cast<std::size_t>(idx)];
  }
  [[nodiscard]] const FrameLink& link(std::int32_t idx) const {
    return links_[static_cast<std::size_t>(idx)];
  }
  [[nodiscard]] std::int32_t num_frames() const {
    return static_cast<std::int32_t>(frames_.size());
  }
  std::int32_t add_frame(Frame frame);
  /// False when the link was there.
  bool add_link(std::int32_t frame, std::int32_t parent);

  /// What stands now, for truncate().
  struct Mark {
    std::size_t frames = 1;
    std::size_t links = 0;
  };
  [[nodiscard]] Mark mark() const { return {frames_.size(), links_.size()}; }
  void truncate(Mark mark);

  /// Drops every frame that no place can return to, and renumbers `places`.
  void compact(std::span<Place> places);

 private:
  std::vector<Frame> frames_;
  std::vector<FrameLink> links_;
};

/// Everything a walk may do next: the places closed under calls and returns.
struct Reach {
  std::vector<Place> places;
  bool leaves_base = false;  // the base rule's text may end here

  void clear() {
    places.clear();
    leaves_base = false;
  }
};

class Walker {
 public:
  explicit Walker(const Automaton& automaton) : automaton_(&automaton) {}

  /// Follows calls and returns from `from`; new frames are added to `graph`.
  void reach(std::span<const Place> from, FrameGraph& graph, Reach& out) const;
  /// The same from behind one text of a call that stands in the base, with `need` and `left`
  /// repetitions to come.
  void reach_after_call(std::int32_t edge, std::int32_t need, std::int32_t left, FrameGraph& graph,
                        Reach& out) const;
  /// The places behind a byte.
  void step(const Reach& from, std::uint8_t byte, std::vector<Place>& out) const;
  /// True when some byte can follow.
  [[nodiscard]] bool can_continue(const Reach& from) const;

 private:
  class Closure;

  const Automaton* automaton_;
};

}  // namespace tandem::grammar

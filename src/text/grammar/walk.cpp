#include "text/grammar/walk.h"

#include <algorithm>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

void add_place(std::vector<Place>& places, Place place) {
  if (std::find(places.begin(), places.end(), place) == places.end()) {
    places.push_back(place);
  }
}

}  // namespace

std::int32_t FrameGraph::add_frame(Frame frame) {
  frames_.push_back(frame);
  return num_frames() - 1;
}

bool FrameGraph::add_link(std::int32_t frame, std::int32_t parent) {
  Frame& from = frames_[usize(frame)];
  for (std::int32_t i = from.first_link; i >= 0; i = link(i).next) {
    if (link(i).parent == parent) {
      return false;
    }
  }
  links_.push_back({parent, from.first_link});
  from.first_link = checked_cast<std::int32_t>(isize(links_) - 1);
  return true;
}

void FrameGraph::truncate(Mark mark) {
  frames_.resize(mark.frames);
  links_.resize(mark.links);
}

void FrameGraph::compact(std::span<Place> places) {
  std::vector<std::int32_t> new_ids(frames_.size(), -1);
  std::vector<std::int32_t> kept;  // old ids
  const auto keep = [&](std::int32_t frame) {
    if (new_ids[usize(frame)] < 0) {
      new_ids[usize(frame)] = checked_cast<std::int32_t>(isize(kept));
      kept.push_back(frame);
    }
    return new_ids[usize(frame)];
  };
  keep(kBase);
  for (Place& place : places) {
    place.frame = keep(place.frame);
  }
  std::vector<Frame> frames;
  std::vector<FrameLink> links;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    Frame copy = frame(kept[i]);
    std::int32_t next = -1;
    for (std::int32_t old = copy.first_link; old >= 0; old = link(old).next) {
      links.push_back({keep(link(old).parent), next});
      next = checked_cast<std::int32_t>(isize(links) - 1);
    }
    copy.first_link = next;
    frames.push_back(copy);
  }
  frames_ = std::move(frames);
  links_ = std::move(links);
}

// Works off the places it finds; the list of the result is the queue.
class Walker::Closure {
 public:
  Closure(const Automaton& automaton, FrameGraph& graph, Reach& out)
      : automaton_(automaton), graph_(graph), out_(out), first_new_(graph.num_frames()) {}

  // `left` and `need` repetitions of a call may or must come before its target.
  void continue_call(std::int32_t edge_idx, std::int32_t need, std::int32_t left,
                     std::int32_t frame) {
    const CallEdge& edge = automaton_.call(edge_idx);
    if (left > 0) {
      enter({edge_idx, std::max(need - 1, 0), left == kUnbounded ? left : left - 1}, edge.rule,
            frame);
    }
    if (need == 0) {
      add_place(out_.places, {edge.target, frame});
    }
  }

  void run() {
    for (std::size_t i = 0; i < out_.places.size(); ++i) {
      const Place place = out_.places[i];
      const std::int32_t end = automaton_.first_call_of(place.state + 1);
      for (std::int32_t edge = automaton_.first_call_of(place.state); edge < end; ++edge) {
        const CallEdge& call = automaton_.call(edge);
        continue_call(edge, call.min, call.max, place.frame);
      }
      if (automaton_.is_accepting(place.state)) {
        leave(place.frame);
      }
    }
  }

 private:
  // Calls made here with the same continuation share a frame. None of them can have ended yet,
  // because a rule matches at least one byte, so a parent that is added later misses nothing.
  void enter(Frame key, std::int32_t rule, std::int32_t parent) {
    for (std::int32_t i = first_new_; i < graph_.num_frames(); ++i) {
      const Frame& other = graph_.frame(i);
      if (other.edge == key.edge && other.need == key.need && other.left == key.left) {
        graph_.add_link(i, parent);
        return;
      }
    }
    const std::int32_t frame = graph_.add_frame(key);
    graph_.add_link(frame, parent);
    out_.places.push_back({automaton_.start_of(rule), frame});
  }

  void leave(std::int32_t frame_idx) {
    if (frame_idx == FrameGraph::kBase) {
      out_.leaves_base = true;
      return;
    }
    const Frame frame = graph_.frame(frame_idx);
    for (std::int32_t i = frame.first_link; i >= 0;) {
      const FrameLink link = graph_.link(i);  // a copy: continuing may grow the graph
      continue_call(frame.edge, frame.need, frame.left, link.parent);
      i = link.next;
    }
  }

  const Automaton& automaton_;
  FrameGraph& graph_;
  Reach& out_;
  std::int32_t first_new_;
};

void Walker::reach(std::span<const Place> from, FrameGraph& graph, Reach& out) const {
  out.clear();
  out.places.assign(from.begin(), from.end());
  Closure(*automaton_, graph, out).run();
}

void Walker::reach_after_call(std::int32_t edge, std::int32_t need, std::int32_t left,
                              FrameGraph& graph, Reach& out) const {
  out.clear();
  Closure closure(*automaton_, graph, out);
  closure.continue_call(edge, need, left, FrameGraph::kBase);
  closure.run();
}

void Walker::step(const Reach& from, std::uint8_t byte, std::vector<Place>& out) const {
  out.clear();
  for (const Place& place : from.places) {
    for (const ByteEdge& edge : automaton_->bytes_of(place.state)) {
      if (byte <= edge.high) {
        if (byte >= edge.low) {
          add_place(out, {edge.target, place.frame});
        }
        break;
      }
    }
  }
}

bool Walker::can_continue(const Reach& from) const {
  return std::any_of(from.places.begin(), from.places.end(), [&](const Place& place) {
    return !automaton_->bytes_of(place.state).empty();
  });
}

}  // namespace tandem::grammar

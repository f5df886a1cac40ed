#include "text/grammar/walk.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

// Up to here a search through all is faster than hashing.
constexpr std::size_t kFewPlaces = 32;

// Adds places to a list, each once.
class PlaceList {
 public:
  explicit PlaceList(std::vector<Place>& places) : places_(places) {}

  void add(Place place) {
    if (is_new(place)) {
      places_.push_back(place);
    }
  }

 private:
  static std::uint64_t key_of(Place place) {
    return std::uint64_t{static_cast<std::uint32_t>(place.frame)} << 32 |
           static_cast<std::uint32_t>(place.state);
  }

  bool is_new(Place place) {
    if (places_.size() < kFewPlaces) {
      return std::find(places_.begin(), places_.end(), place) == places_.end();
    }
    for (; num_hashed_ < places_.size(); ++num_hashed_) {
      seen_.insert(key_of(places_[num_hashed_]));
    }
    return !seen_.contains(key_of(place));
  }

  std::vector<Place>& places_;
  std::unordered_set<std::uint64_t> seen_;
  std::size_t num_hashed_ = 0;
};

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
      : automaton_(automaton),
        graph_(graph),
        out_(out),
        places_(out.places),
        first_new_(graph.num_frames()) {}

  // `left` and `need` repetitions of a call may or must come before its target.
  void continue_call(std::int32_t edge_idx, std::int32_t need, std::int32_t left,
                     std::int32_t frame) {
    const CallEdge& edge = automaton_.call(edge_idx);
    if (left > 0) {
      enter({edge_idx, std::max(need - 1, 0), left == kUnbounded ? left : left - 1}, edge.rule,
            frame);
    }
    if (need == 0) {
      places_.add({edge.target, frame});
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
    if (const std::int32_t known = find_new(key); known >= 0) {
      graph_.add_link(known, parent);
      return;
    }
    const std::int32_t frame = graph_.add_frame(key);
    graph_.add_link(frame, parent);
    out_.places.push_back({automaton_.start_of(rule), frame});
  }

  // The frame of this place with the same continuation; -1: none.
  std::int32_t find_new(const Frame& key) {
    const std::int32_t end = graph_.num_frames();
    if (end - first_new_ < static_cast<std::int32_t>(kFewPlaces)) {
      for (std::int32_t i = first_new_; i < end; ++i) {
        const Frame& other = graph_.frame(i);
        if (other.edge == key.edge && other.need == key.need && other.left == key.left) {
          return i;
        }
      }
      return -1;
    }
    for (num_indexed_ = std::max(num_indexed_, first_new_); num_indexed_ < end; ++num_indexed_) {
      const Frame& other = graph_.frame(num_indexed_);
      index_.emplace(std::tuple(other.edge, other.need, other.left), num_indexed_);
    }
    const auto place = index_.find(std::tuple(key.edge, key.need, key.left));
    return place == index_.end() ? -1 : place->second;
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
  PlaceList places_;
  std::int32_t first_new_;
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::int32_t> index_;
  std::int32_t num_indexed_ = 0;
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
  if (from.places.size() == 1) {  // most steps; without the list's bookkeeping
    const Place place = from.places.front();
    if (const std::int32_t next = automaton_->next(place.state, byte); next >= 0) {
      out.push_back({next, place.frame});
    }
    return;
  }
  PlaceList places(out);
  for (const Place& place : from.places) {
    if (const std::int32_t next = automaton_->next(place.state, byte); next >= 0) {
      places.add({next, place.frame});
    }
  }
}

bool Walker::can_continue(const Reach& from) const {
  return std::any_of(from.places.begin(), from.places.end(), [&](const Place& place) {
    return !automaton_->bytes_of(place.state).empty();
  });
}

}  // namespace tandem::grammar

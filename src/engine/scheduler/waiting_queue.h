// waiting_queue.h — sequences that wait, and whose turn it is.
//
// Higher priorities first; among equal ones those that were preempted, in order of arrival; then
// the client that was given the fewest tokens so far, and of its requests the oldest. A client that
// comes starts level with the one that was given least, so that idling earns nothing.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/sequence.h"

namespace tandem {

/// What each client with unfinished requests was given.
class ClientShares {
 public:
  /// A request came; sets its share.
  void join(Sequence& seq);
  /// The request ended.
  void leave(Sequence& seq);
  [[nodiscard]] std::int64_t num_clients() const { return isize(shares_); }

 private:
  std::unordered_map<std::string, ClientShare> shares_;
};

/// Running sequences in the order in which they get rows, and lose their pages last.
[[nodiscard]] bool ranks_before(const Sequence& a, const Sequence& b);

class WaitingQueue {
 public:
  [[nodiscard]] bool empty() const { return sequences_.empty(); }
  [[nodiscard]] std::int64_t size() const { return isize(sequences_); }
  [[nodiscard]] const std::vector<Sequence*>& sequences() const { return sequences_; }

  void add(Sequence& seq);
  void remove(Sequence& seq);
  /// Whose turn it is; the queue must not be empty.
  [[nodiscard]] Sequence& head() const;
  /// Of those that never ran the newest of the lowest priority, if that is below `priority`; else
  /// null.
  [[nodiscard]] Sequence* last_below(std::int32_t priority) const;

  /// How many such there are.
  [[nodiscard]] std::int64_t num_below(std::int32_t priority) const;

  void check_integrity() const;

 private:
  // By priority, then preempted ones first, then by arrival.
  std::vector<Sequence*> sequences_;
};

}  // namespace tandem

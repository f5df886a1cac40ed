// grammars.h — compiled grammars for requests: made once for equal sources, on a thread of their
// own, and bound to the part of a response that they govern.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/api/sampling.h"
#include "server/metrics.h"
#include "server/worker.h"
#include "text/grammar.h"
#include "text/response_parser.h"

namespace tandem::server {

class Grammars {
 public:
  using Result = Expected<std::shared_ptr<const Grammar>>;

  Grammars(const Tokenizer& tokenizer, Worker& worker, Metrics& metrics)
      : tokenizer_(tokenizer), worker_(worker), metrics_(metrics) {}

  /// Calls `done` with the grammar or what is wrong with its source: at once when it was asked for
  /// before, else from the worker's thread.
  void get(const GrammarSource& source, const std::function<void(Result)>& done);

  /// The constraint of one response. `thinking`: it begins in the reasoning channel, which is free;
  /// the grammar governs the answer, however the tokenizer's format encloses it.
  [[nodiscard]] std::shared_ptr<TokenConstraint> constraint(const Grammar& grammar, bool thinking,
                                                            bool is_chat);

 private:
  struct Entry {
    Result result;
    std::uint64_t last_use = 0;
  };
  [[nodiscard]] Result compile(const GrammarSource& source) const;
  [[nodiscard]] std::shared_ptr<const TokenTrie> trie();

  const Tokenizer& tokenizer_;
  Worker& worker_;
  Metrics& metrics_;
  std::mutex mutex_;                        // guards all below
  std::map<GrammarSource, Entry> entries_;  // failures as well: they take as long
  std::uint64_t num_uses_ = 0;
  std::shared_ptr<const TokenTrie> trie_;
};

}  // namespace tandem::server

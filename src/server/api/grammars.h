// grammars.h — the grammars of requests, compiled and bound to the part of a response that they
// govern: made once for equal sources, on a thread of their own.
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
#include "text/token_constraint.h"
#include "text/tokenizer.h"

namespace tandem::server {

class Grammars {
 public:
  /// What a response begins with: each takes a clone.
  using Result = Expected<std::shared_ptr<const TokenConstraint>>;
  /// The part of a response that a grammar governs: all of it, or what follows the reasoning.
  struct Place {
    bool is_chat = false;
    bool thinking = false;  // it begins in the reasoning channel, which is free

    friend auto operator<=>(const Place&, const Place&) = default;
  };

  Grammars(const Tokenizer& tokenizer, Worker& worker, Metrics& metrics)
      : tokenizer_(tokenizer), worker_(worker), metrics_(metrics) {}

  /// Calls `done` with the constraint or what is wrong with its source: at once when it was asked
  /// for before, else from the worker's thread.
  void get(const GrammarSource& source, Place place, const std::function<void(Result)>& done);

 private:
  struct Key {
    GrammarSource source;
    Place place;

    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Entry {
    Result result;
    std::uint64_t last_use = 0;
  };
  // On the worker's thread:
  [[nodiscard]] Result compile(const Key& key);
  [[nodiscard]] Result compile_tools(const Key& key);
  [[nodiscard]] const std::shared_ptr<const TokenTrie>& trie();

  const Tokenizer& tokenizer_;
  Worker& worker_;
  Metrics& metrics_;
  std::shared_ptr<const TokenTrie> trie_;  // the worker's
  std::mutex mutex_;                       // guards all below
  std::map<Key, Entry> entries_;           // failures as well: they take as long
  std::uint64_t num_uses_ = 0;
};

}  // namespace tandem::server

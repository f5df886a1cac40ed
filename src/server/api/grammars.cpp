#include "server/api/grammars.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/timing.h"
#include "server/api/channel_constraint.h"

namespace tandem::server {
namespace {

constexpr std::size_t kMaxEntries = 256;

}  // namespace

Grammars::Result Grammars::compile(const GrammarSource& source) const {
  const Clock::time_point start = Clock::now();
  Result result = fail("no grammar");
  switch (source.kind) {
    case GrammarSource::Kind::kNone:
      break;
    case GrammarSource::Kind::kJsonObject:
      result = compile_json_object();
      break;
    case GrammarSource::Kind::kJsonSchema:
      result = compile_json_schema(
          source.text, {}, source.is_strict ? SchemaDefaults::kClosed : SchemaDefaults::kOpen);
      break;
    case GrammarSource::Kind::kRegex:
      result = compile_regex(source.text);
      break;
  }
  metrics_.observe_grammar_compilation(seconds_since(start));
  return result;
}

void Grammars::get(const GrammarSource& source, const std::function<void(Result)>& done) {
  GrammarSource key = source;
  key.param.clear();
  {
    std::unique_lock lock(mutex_);
    if (const auto found = entries_.find(key); found != entries_.end()) {
      found->second.last_use = ++num_uses_;
      Result result = found->second.result;
      lock.unlock();
      done(std::move(result));
      return;
    }
  }
  worker_.post([this, key = std::move(key), done] {
    Result result = compile(key);
    {
      const std::lock_guard lock(mutex_);
      if (entries_.size() >= kMaxEntries) {
        entries_.erase(std::ranges::min_element(
            entries_, {}, [](const auto& entry) { return entry.second.last_use; }));
      }
      entries_.insert_or_assign(key, Entry{result, ++num_uses_});
    }
    done(std::move(result));
  });
}

std::shared_ptr<const TokenTrie> Grammars::trie() {
  const std::lock_guard lock(mutex_);
  if (trie_ == nullptr) {
    trie_ = make_token_trie(tokenizer_);
  }
  return trie_;
}

std::shared_ptr<TokenConstraint> Grammars::constraint(const Grammar& grammar, bool thinking,
                                                      bool is_chat) {
  const auto close = is_chat ? tokenizer_.special_id("<|close|>") : std::nullopt;
  if (!close) {
    const auto stops = tokenizer_.stop_ids();
    return grammar.make_constraint(trie(), {stops.begin(), stops.end()});
  }
  return std::make_shared<ChannelConstraint>(tokenizer_, thinking,
                                             grammar.make_constraint(trie(), {*close}));
}

}  // namespace tandem::server

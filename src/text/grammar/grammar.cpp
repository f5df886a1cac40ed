#include "text/grammar.h"

#include <mutex>
#include <utility>

#include "core/checked_cast.h"
#include "text/grammar/compiled.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/json_schema.h"
#include "text/grammar/mask_cache.h"
#include "text/grammar/matcher.h"
#include "text/grammar/regex.h"

namespace tandem {
namespace {

using grammar::Automaton;
using grammar::Budget;
using grammar::JsonRules;
using grammar::MaskCache;

// Trie nodes that make_constraint() may walk before the first mask: about 0.1 s.
constexpr std::int64_t kWarmUpSteps = 2'000'000;

class CompiledGrammar final : public Grammar {
 public:
  explicit CompiledGrammar(Automaton automaton)
      : automaton_(std::make_shared<const Automaton>(std::move(automaton))) {}

  [[nodiscard]] std::unique_ptr<TokenConstraint> make_constraint(
      std::shared_ptr<const TokenTrie> trie, std::vector<std::int32_t> stop_ids) const override {
    return std::make_unique<grammar::GrammarConstraint>(
        grammar::Matcher(cache_for(std::move(trie))), std::move(stop_ids));
  }

 private:
  std::shared_ptr<MaskCache> cache_for(std::shared_ptr<const TokenTrie> trie) const {
    std::shared_ptr<MaskCache> cache;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& known : caches_) {
        if (&known->trie() == trie.get()) {
          return known;
        }
      }
      cache = std::make_shared<MaskCache>(automaton_, std::move(trie));
      caches_.push_back(cache);
    }
    cache->warm_up(kWarmUpSteps);
    return cache;
  }

  std::shared_ptr<const Automaton> automaton_;
  mutable std::mutex mutex_;                                // of what follows
  mutable std::vector<std::shared_ptr<MaskCache>> caches_;  // one for each vocabulary
};

Expected<std::shared_ptr<const Grammar>> link(const std::vector<grammar::Dfa>& rules,
                                              const Budget& budget) {
  auto linked = grammar::link_grammar(rules, budget);
  if (linked.ok() && *linked == nullptr) {
    return fail("no text can match");
  }
  return linked;
}

Status check_size(std::string_view source, const GrammarLimits& limits) {
  if (isize(source) > limits.max_source_bytes) {
    return fail("{} bytes; at most {} are supported", source.size(), limits.max_source_bytes);
  }
  return Ok{};
}

}  // namespace

Expected<std::shared_ptr<const Grammar>> grammar::link_grammar(const std::vector<Dfa>& rules,
                                                               const Budget& budget) {
  if (budget.exhausted()) {
    return budget.failure();
  }
  auto automaton = Automaton::link(rules);
  std::shared_ptr<const Grammar> made;
  if (automaton) {
    made = std::make_shared<CompiledGrammar>(std::move(*automaton));
  }
  return made;
}

Expected<std::shared_ptr<const Grammar>> compile_json_schema(std::string_view schema_json,
                                                             const GrammarLimits& limits,
                                                             SchemaDefaults defaults) {
  if (const Status size = check_size(schema_json, limits); !size) {
    return size.failure();
  }
  const auto schema = parse_json(schema_json);
  if (!schema) {
    return schema.failure();
  }
  Budget budget(limits);
  JsonRules rules(budget);
  const auto index = grammar::SchemaIndex::create(*schema, limits);
  if (!index) {
    return index.failure();
  }
  const Status added = grammar::add_value_rules(*index, {{&*schema}}, defaults, rules);
  if (!added) {
    return added.failure();
  }
  return link(rules.rules(), budget);
}

Expected<std::shared_ptr<const Grammar>> compile_json_object(const GrammarLimits& limits) {
  return compile_json_schema(R"({"type": "object"})", limits);
}

Expected<std::shared_ptr<const Grammar>> compile_regex(std::string_view pattern,
                                                       const GrammarLimits& limits) {
  if (const Status size = check_size(pattern, limits); !size) {
    return size.failure();
  }
  const auto branches = grammar::parse_regex(pattern, limits.max_depth);
  if (!branches) {
    return branches.failure();
  }
  Budget budget(limits);
  std::vector<grammar::Dfa> rules{
      grammar::regex_dfa(*branches, grammar::RegexMatch::kWhole, budget)};
  return link(rules, budget);
}

}  // namespace tandem

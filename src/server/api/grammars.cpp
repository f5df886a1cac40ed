#include "server/api/grammars.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/timing.h"
#include "server/api/fields.h"
#include "text/response_constraint.h"

namespace tandem::server {
namespace {

constexpr std::size_t kMaxEntries = 256;

Expected<std::shared_ptr<const Grammar>> compile_grammar(const GrammarSource& source) {
  switch (source.kind) {
    case GrammarSource::Kind::kJsonObject:
      return compile_json_object();
    case GrammarSource::Kind::kJsonSchema:
      return compile_json_schema(
          source.text, {}, source.is_strict ? SchemaDefaults::kClosed : SchemaDefaults::kOpen);
    case GrammarSource::Kind::kRegex:
      return compile_regex(source.text);
    case GrammarSource::Kind::kNone:
    case GrammarSource::Kind::kTools:
      break;
  }
  TDM_CHECK(false, static_cast<int>(source.kind));
  return fail("no grammar");
}

/// A small vocabulary may lack the characters that every text of a grammar begins with.
Status check_beginning(const TokenConstraint& constraint, std::int64_t vocab_size) {
  const std::unique_ptr<TokenConstraint> start = constraint.clone();
  std::vector<std::uint32_t> mask(static_cast<std::size_t>((vocab_size + 31) / 32), ~0U);
  if (start->is_active()) {
    start->fill_mask(mask);
  }
  if (std::ranges::all_of(mask, [](std::uint32_t bits) { return bits == 0; })) {
    return fail("no token of this model's vocabulary can begin such a text");
  }
  return Ok{};
}

}  // namespace

Grammars::Result Grammars::compile_tools(const Key& key) {
  std::vector<ToolGrammar> tools;
  // In the order of the text, which was checked when the request was read.
  for (const auto& tool : OrderedJson::parse(key.source.text)) {
    const auto& function = tool.at("function");
    const auto parameters = function.find("parameters");
    tools.push_back({function.at("name").get<std::string>(),
                     parameters == function.end() || parameters->is_null() ? std::string()
                                                                           : parameters->dump()});
  }
  auto constraint = make_tool_call_constraint(tools, !key.source.single_call, trie(), tokenizer_,
                                              key.place.thinking);
  if (!constraint) {
    return constraint.failure();
  }
  return std::shared_ptr<const TokenConstraint>(*std::move(constraint));
}

Grammars::Result Grammars::compile(const Key& key) {
  if (key.source.kind == GrammarSource::Kind::kTools) {
    return compile_tools(key);
  }
  const auto grammar = compile_grammar(key.source);
  if (!grammar) {
    return grammar.failure();
  }
  if (key.place.is_chat) {
    return std::shared_ptr<const TokenConstraint>(
        make_answer_constraint(**grammar, trie(), tokenizer_, key.place.thinking));
  }
  const auto stops = tokenizer_.stop_ids();
  return std::shared_ptr<const TokenConstraint>(
      (*grammar)->make_constraint(trie(), {stops.begin(), stops.end()}));
}

void Grammars::get(const GrammarSource& source, Place place,
                   const std::function<void(Result)>& done) {
  Key key{source, place};
  key.source.param.clear();
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
    const Clock::time_point start = Clock::now();
    Result result = compile(key);
    if (result) {
      if (const Status begins = check_beginning(**result, tokenizer_.vocab_size()); !begins) {
        result = begins.failure();
      }
    }
    metrics_.observe_grammar_compilation(seconds_since(start));
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

const std::shared_ptr<const TokenTrie>& Grammars::trie() {
  if (trie_ == nullptr) {
    trie_ = make_token_trie(tokenizer_);
  }
  return trie_;
}

}  // namespace tandem::server

#include "text/grammar/json_schema.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "core/checked_cast.h"
#include "text/grammar/regex.h"
#include "text/grammar/string_formats.h"

namespace tandem::grammar {
namespace {

using Part = Nfa::Part;

constexpr std::size_t kMaxReferenceDepth = 64;

class SchemaCompiler {
 public:
  SchemaCompiler(const SchemaIndex& index, SchemaDefaults defaults, JsonRules& rules)
      : index_(index), defaults_(defaults), rules_(rules), budget_(rules.budget()) {}

  Status compile(const SchemaSet& schemas) {
    Nfa nfa(budget_);
    const Part whole = nfa.call(rule_of(schemas));
    rules_.define(0, nfa.determinize(whole));
    // Rules wait in a queue rather than on the stack: chains of references may be long.
    while (!waiting_.empty() && !failure_ && !budget_.exhausted()) {
      const auto [rule, set] = std::move(waiting_.front());
      waiting_.pop_front();
      build(rule, set);
    }
    return outcome();
  }

  Status compile_plain_string(const SchemaSet& schemas) {
    Nfa nfa(budget_);
    const Part whole = plain_string(nfa, flattened(schemas), 0);
    rules_.define(0, budget_.exhausted() || failure_ ? Dfa{} : nfa.determinize(whole));
    return outcome();
  }

  Expected<ObjectFacts> object_facts_of(const JsonNode& schema) {
    const SchemaSet set = flattened({{&schema}});
    if (first_alternatives(set) || listed_values(set)) {
      fail_at(schema, "expected the properties of an object, without alternatives");
    } else if ((types_of(set) & kObjectBit) == 0) {
      fail_at(schema, "expected type object");
    }
    if (const Status status = outcome(); !status) {
      return status.failure();
    }
    return object_facts(set, defaults_);
  }

 private:
  void fail_at(const JsonNode& schema, std::string_view what) {
    if (!failure_) {
      failure_ = fail("{}: {}", index_.pointer_of(schema), what);
    }
  }

  [[nodiscard]] Status outcome() const {
    if (failure_) {
      return *failure_;
    }
    return budget_.exhausted() ? Status(budget_.failure()) : Status(Ok{});
  }

  SchemaSet flattened(const SchemaSet& schemas) {
    SchemaSet flat;
    std::vector<const JsonNode*> path;
    for (const SchemaPart& part : schemas) {
      flatten(part, flat, path);
    }
    return flat;
  }

  std::int32_t rule_of(const SchemaSet& schemas) {
    SchemaSet flat = flattened(schemas);
    const auto [place, is_new] = known_.emplace(flat, -1);
    if (is_new) {
      place->second = rules_.add_rule();
      waiting_.emplace_back(place->second, std::move(flat));
    }
    return place->second;
  }

  // `path`: the schemas whose references and allOf lead here.
  void flatten(SchemaPart part, SchemaSet& flat, std::vector<const JsonNode*>& path) {
    const JsonNode& schema = *part.schema;
    const auto add = [&] {
      if (std::find(flat.begin(), flat.end(), part) == flat.end()) {
        flat.push_back(part);
      }
    };
    if (part.flattened) {
      add();
      return;
    }
    if (schema.is_true() || failure_ || !budget_.take_work(1)) {
      return;
    }
    if (std::find(path.begin(), path.end(), &schema) != path.end()) {
      fail_at(schema, "the schema refers to itself without a value in between");
      return;
    }
    if (path.size() == kMaxReferenceDepth) {
      fail_at(schema, fmt::format("more than {} references in a row", kMaxReferenceDepth));
      return;
    }
    part.flattened = true;
    add();
    path.push_back(&schema);
    if (const JsonNode* reference = schema.find("$ref")) {
      flatten({&index_.target_of(reference->text)}, flat, path);
    }
    if (const JsonNode* all = schema.find("allOf")) {
      for (const JsonNode& item : all->items) {
        flatten({&item}, flat, path);
      }
    }
    path.pop_back();
  }

  void build(std::int32_t rule, const SchemaSet& set) {
    Nfa nfa(budget_);
    const auto alternatives = first_alternatives(set);
    Part whole = nfa.never();
    if (alternatives) {
      for (const SchemaSet& alternative : *alternatives) {
        whole = nfa.either(whole, nfa.call(rule_of(alternative)));
      }
    } else if (const auto values = values_of(set)) {
      for (const JsonNode& value : *values) {
        whole = nfa.either(whole, rules_.value(nfa, value));
      }
    } else {
      whole = by_type(nfa, set);
    }
    rules_.define(rule, budget_.exhausted() || failure_ ? Dfa{} : nfa.determinize(whole));
  }

  std::optional<std::vector<JsonNode>> values_of(const SchemaSet& set) {
    auto values = listed_values(set);
    if (values) {
      if (const std::string keyword = unchecked_beside_values(set); !keyword.empty()) {
        fail_at(*set.front().schema, keyword + " beside enum or const is not supported");
      }
    }
    return values;
  }

  // The set once for each choice from its first anyOf or oneOf that is still open.
  static std::optional<std::vector<SchemaSet>> first_alternatives(const SchemaSet& set) {
    for (std::size_t i = 0; i < set.size(); ++i) {
      for (const bool is_any_of : {true, false}) {
        const bool is_done = is_any_of ? set[i].any_of_done : set[i].one_of_done;
        const JsonNode* list = set[i].schema->find(is_any_of ? "anyOf" : "oneOf");
        if (list == nullptr || is_done) {
          continue;
        }
        std::vector<SchemaSet> result;
        for (const JsonNode& choice : list->items) {
          SchemaSet& chosen = result.emplace_back(set);
          (is_any_of ? chosen[i].any_of_done : chosen[i].one_of_done) = true;
          chosen.push_back({&choice});
        }
        return result;
      }
    }
    return std::nullopt;
  }

  Part by_type(Nfa& nfa, const SchemaSet& set) {
    const std::uint32_t types = types_of(set);
    Part whole = nfa.never();
    const auto add = [&](Part part) { whole = nfa.either(whole, part); };
    if ((types & kNullBit) != 0) {
      add(nfa.literal("null"));
    }
    if ((types & kBooleanBit) != 0) {
      add(nfa.literal("true"));
      add(nfa.literal("false"));
    }
    if ((types & kNumberBit) != 0) {
      add(nfa.call(number_rule(set)));
    } else if ((types & kIntegerBit) != 0) {
      add(nfa.call(rules_.integer(integer_range(set))));
    }
    if ((types & kStringBit) != 0) {
      add(nfa.call(string_rule(string_facts(set))));
    }
    if ((types & kArrayBit) != 0) {
      add(array(nfa, array_facts(set)));
    }
    if ((types & kObjectBit) != 0) {
      add(object(nfa, object_facts(set, defaults_)));
    }
    return whole;
  }

  std::int32_t number_rule(const SchemaSet& set) {
    const auto facts = number_facts(set);
    if (!facts) {
      fail_at(*set.front().schema, facts.message());
      return rules_.number();
    }
    return facts->low || facts->high ? rules_.number_between(facts->low, facts->high)
                                     : rules_.number();
  }

  // Characters by pattern and format, and their number too then; none: anything goes.
  std::optional<Dfa> characters_of(const StringFacts& facts) {
    std::optional<Dfa> decoded;
    const auto restrict_to = [&](Dfa dfa) {
      decoded = decoded ? intersect(*decoded, dfa, budget_) : std::move(dfa);
    };
    const auto regex = [&](std::string_view pattern, RegexMatch match) {
      restrict_to(regex_dfa(*parse_regex(pattern, budget_.limits().max_depth), match, budget_));
    };
    for (const std::string& format : facts.formats) {
      regex(format_pattern(format), RegexMatch::kWhole);
    }
    for (const std::string& pattern : facts.patterns) {
      regex(pattern, RegexMatch::kSearch);
    }
    if (facts.min > facts.max) {
      return Dfa{};
    }
    if (decoded && facts.has_length()) {
      restrict_to(characters_between(facts.min, facts.max, budget_));
    }
    return decoded;
  }

  std::int32_t string_rule(const StringFacts& facts) {
    if (const auto decoded = characters_of(facts)) {
      return rules_.string_of(*decoded);
    }
    return facts.has_length() ? rules_.string_of_length(facts.min, facts.max) : rules_.any_string();
  }

  Part plain_string(Nfa& nfa, const SchemaSet& set, std::size_t depth) {
    Part whole = nfa.never();
    if (failure_ || !budget_.take_work(isize(set))) {
      return whole;
    }
    if (depth == kMaxReferenceDepth) {
      fail_at(*set.front().schema, "too many lists of alternatives");
    } else if (const auto alternatives = first_alternatives(set)) {
      for (const SchemaSet& alternative : *alternatives) {
        whole = nfa.either(whole, plain_string(nfa, flattened(alternative), depth + 1));
      }
    } else if (const auto values = values_of(set)) {
      for (const JsonNode& value : *values) {
        if (value.is(JsonKind::kString)) {
          whole = nfa.either(whole, nfa.literal(value.text));
        }
      }
    } else if ((types_of(set) & kStringBit) != 0) {
      const StringFacts facts = string_facts(set);
      if (const auto decoded = characters_of(facts)) {
        return nfa.copy_of(*decoded, [&](std::int32_t from, ByteEdge edge, std::int32_t to) {
          nfa.add_edge(from, {edge.low, edge.high, to});
        });
      }
      return facts.has_length() ? nfa.call(rules_.plain_character(), facts.min, facts.max)
                                : nfa.star(nfa.chars(CharSet::all()));
    }
    return whole;
  }

  Part array(Nfa& nfa, const ArrayFacts& facts) {
    const Part whole = nfa.never();
    const Part close = nfa.sequence(rules_.space(nfa), nfa.literal("]"));
    nfa.add_empty_edge(close.end, whole.end);
    Part items = nfa.literal("[");
    nfa.add_empty_edge(whole.start, items.start);
    std::int32_t count = 0;
    const auto may_end = [&] {
      if (count >= facts.min && count <= facts.max) {
        nfa.add_empty_edge(items.end, close.start);
      }
    };
    const auto separator = [&] { return count == 0 ? rules_.space(nfa) : rules_.spaced(nfa, ","); };
    may_end();
    for (const SchemaSet& item : facts.prefix) {
      if (count == facts.max) {
        return whole;
      }
      items = rules_.all_of(nfa, {items, separator(), nfa.call(rule_of(item))});
      ++count;
      may_end();
    }
    if (!facts.more || count >= facts.max) {
      return whole;
    }
    const std::int32_t rest = rule_of(facts.rest);
    if (count == 0) {
      items = rules_.all_of(nfa, {items, separator(), nfa.call(rest)});
      ++count;
    }
    const std::int32_t tail = rules_.add_rule();
    Nfa tail_nfa(budget_);
    const Part comma = rules_.spaced(tail_nfa, ",");
    const Part tail_part = tail_nfa.sequence(comma, tail_nfa.call(rest));
    rules_.define(tail, tail_nfa.determinize(tail_part));
    const std::int32_t most = facts.max == kUnbounded ? kUnbounded : facts.max - count;
    if (const std::int32_t least = std::max(facts.min - count, 0); least <= most) {
      items = nfa.sequence(items, nfa.call(tail, least, most));
      nfa.add_empty_edge(items.end, close.start);
    }
    return whole;
  }

  // Two threads run through the properties in order: nothing was written yet, or something was and
  // a comma comes first.
  Part object(Nfa& nfa, const ObjectFacts& facts) {
    const Part whole = nfa.never();
    const Part open = nfa.literal("{");
    nfa.add_empty_edge(whole.start, open.start);
    std::optional<std::int32_t> none = open.end;
    std::optional<std::int32_t> some;
    const auto member = [&](Part key, std::int32_t value) {
      const Part part = rules_.all_of(nfa, {key, rules_.spaced(nfa, ":"), nfa.call(value)});
      const auto lead_in = [&](std::int32_t from, Part separator) {
        nfa.add_empty_edge(from, separator.start);
        nfa.add_empty_edge(separator.end, part.start);
      };
      if (none) {
        lead_in(*none, rules_.space(nfa));
      }
      if (some) {
        lead_in(*some, rules_.spaced(nfa, ","));
      }
      const std::int32_t behind = nfa.add_state();
      nfa.add_empty_edge(part.end, behind);
      return behind;
    };
    std::vector<std::string> names;
    for (const PropertyFacts& property : facts.properties) {
      const JsonNode name{JsonKind::kString, property.name, {}, {}};
      const std::int32_t behind = member(rules_.value(nfa, name), rule_of(property.schemas));
      if (property.required) {
        none.reset();
      } else if (some) {
        nfa.add_empty_edge(*some, behind);
      }
      some = behind;
      names.push_back(property.name);
    }
    if (facts.more) {
      const std::int32_t key =
          names.empty() ? rules_.any_string() : rules_.string_other_than(names);
      const std::int32_t value = rule_of(facts.additional);
      const std::int32_t behind = member(nfa.call(key), value);
      const Part again = rules_.all_of(
          nfa, {rules_.spaced(nfa, ","), nfa.call(key), rules_.spaced(nfa, ":"), nfa.call(value)});
      nfa.add_empty_edge(behind, again.start);
      nfa.add_empty_edge(again.end, behind);
      if (some) {
        nfa.add_empty_edge(*some, behind);
      }
      some = behind;
    }
    const Part close = nfa.sequence(rules_.space(nfa), nfa.literal("}"));
    for (const auto& from : {none, some}) {
      if (from) {
        nfa.add_empty_edge(*from, close.start);
      }
    }
    nfa.add_empty_edge(close.end, whole.end);
    return whole;
  }

  const SchemaIndex& index_;
  SchemaDefaults defaults_;
  JsonRules& rules_;
  Budget& budget_;
  std::map<SchemaSet, std::int32_t> known_;
  std::deque<std::pair<std::int32_t, SchemaSet>> waiting_;
  std::optional<Failure> failure_;
};

}  // namespace

Status add_value_rules(const SchemaIndex& index, const SchemaSet& schemas, SchemaDefaults defaults,
                       JsonRules& rules) {
  return SchemaCompiler(index, defaults, rules).compile(schemas);
}

Status add_plain_string_rules(const SchemaIndex& index, const SchemaSet& schemas,
                              JsonRules& rules) {
  return SchemaCompiler(index, SchemaDefaults::kOpen, rules).compile_plain_string(schemas);
}

Expected<ObjectFacts> object_of(const SchemaIndex& index, const JsonNode& schema,
                                SchemaDefaults defaults, JsonRules& rules) {
  return SchemaCompiler(index, defaults, rules).object_facts_of(schema);
}

}  // namespace tandem::grammar

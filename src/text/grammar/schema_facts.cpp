#include "text/grammar/schema_facts.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

struct ImpliedType {
  std::string_view keyword;
  std::uint32_t types;
};

constexpr std::uint32_t kNumeric = kIntegerBit | kNumberBit;
constexpr auto kImplied = std::to_array<ImpliedType>({
    {"properties", kObjectBit},
    {"required", kObjectBit},
    {"additionalProperties", kObjectBit},
    {"items", kArrayBit},
    {"prefixItems", kArrayBit},
    {"minItems", kArrayBit},
    {"maxItems", kArrayBit},
    {"minLength", kStringBit},
    {"maxLength", kStringBit},
    {"pattern", kStringBit},
    {"format", kStringBit},
    {"minimum", kNumeric},
    {"maximum", kNumeric},
    {"exclusiveMinimum", kNumeric},
    {"exclusiveMaximum", kNumeric},
});

std::uint32_t bits_of_name(std::string_view name) {
  return name == "null"      ? kNullBit
         : name == "boolean" ? kBooleanBit
         : name == "integer" ? kIntegerBit
         : name == "number"  ? kNumeric
         : name == "string"  ? kStringBit
         : name == "array"   ? kArrayBit
                             : kObjectBit;
}

std::uint32_t bits_of_value(const JsonNode& value) {
  if (value.is(JsonKind::kNumber)) {
    return value.text.find_first_of(".eE") == std::string::npos ? kIntegerBit : kNumberBit;
  }
  return bits_of_name(json_kind_name(value.kind));
}

bool is_false(const JsonNode& node) {
  return node.is(JsonKind::kBoolean) && !node.is_true();
}

bool contains_value(const std::vector<JsonNode>& values, const JsonNode& value) {
  const std::string text = dump_json(value, JsonStyle::kCompactSorted);
  return std::any_of(values.begin(), values.end(), [&](const JsonNode& other) {
    return dump_json(other, JsonStyle::kCompactSorted) == text;
  });
}

// The first integer that is not below, or the last not above, the number; beyond 64 bits the
// nearest that there is.
std::int64_t rounded(const JsonNode& number, bool upwards) {
  const std::string& text = number.text;
  std::int64_t exact = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), exact);
  if (error == std::errc() && end == text.data() + text.size()) {
    return exact;
  }
  constexpr double kLimit = 9.2e18;
  const double value = std::strtod(text.c_str(), nullptr);
  if (std::abs(value) > kLimit) {
    return value < 0 ? std::numeric_limits<std::int64_t>::min()
                     : std::numeric_limits<std::int64_t>::max();
  }
  return static_cast<std::int64_t>(upwards ? std::ceil(value) : std::floor(value));
}

bool is_whole(const JsonNode& number) {
  return rounded(number, true) == rounded(number, false);
}

void append(SchemaSet& set, const JsonNode& schema) {
  set.push_back({&schema});
}

}  // namespace

std::uint32_t types_of(const SchemaSet& set) {
  std::uint32_t types = kAllTypes;
  std::uint32_t implied = 0;
  bool has_type = false;
  bool has_values = false;
  for (const SchemaPart& part : set) {
    if (is_false(*part.schema)) {
      return 0;
    }
    for (const ImpliedType& keyword : kImplied) {
      implied |= part.schema->find(keyword.keyword) != nullptr ? keyword.types : 0;
    }
    has_values |= part.schema->find("enum") != nullptr || part.schema->find("const") != nullptr;
    if (const JsonNode* type = part.schema->find("type")) {
      has_type = true;
      std::uint32_t named = type->is(JsonKind::kString) ? bits_of_name(type->text) : 0;
      for (const JsonNode& name : type->items) {
        named |= bits_of_name(name.text);
      }
      types &= named;
    }
  }
  return !has_type && !has_values && implied != 0 ? implied : types;
}

std::optional<std::vector<JsonNode>> listed_values(const SchemaSet& set) {
  std::optional<std::vector<JsonNode>> left;
  const auto keep = [&](std::vector<JsonNode> values) {
    if (!left) {
      left = std::move(values);
    } else {
      std::erase_if(*left, [&](const JsonNode& value) { return !contains_value(values, value); });
    }
  };
  for (const SchemaPart& part : set) {
    if (const JsonNode* list = part.schema->find("enum")) {
      keep(list->items);
    }
    if (const JsonNode* value = part.schema->find("const")) {
      keep({*value});
    }
  }
  if (left) {
    const std::uint32_t types = types_of(set);
    std::erase_if(*left,
                  [&](const JsonNode& value) { return (bits_of_value(value) & types) == 0; });
  }
  return left;
}

std::string unchecked_beside_values(const SchemaSet& set) {
  for (const SchemaPart& part : set) {
    for (const ImpliedType& keyword : kImplied) {
      if (part.schema->find(keyword.keyword) != nullptr) {
        return std::string(keyword.keyword);
      }
    }
  }
  return {};
}

ObjectFacts object_facts(const SchemaSet& set, SchemaDefaults defaults) {
  ObjectFacts facts;
  std::set<std::string> names;
  std::set<std::string> required;
  bool says_additional = false;
  const auto add_name = [&](const std::string& name) {
    if (names.insert(name).second) {
      facts.properties.push_back({name, {}, false});
    }
  };
  for (const SchemaPart& part : set) {
    if (const JsonNode* properties = part.schema->find("properties")) {
      for (const JsonMember& member : properties->members) {
        add_name(member.key);
      }
    }
    if (const JsonNode* additional = part.schema->find("additionalProperties")) {
      says_additional = true;
      facts.more = facts.more && !is_false(*additional);
      append(facts.additional, *additional);
    }
  }
  for (const SchemaPart& part : set) {
    if (const JsonNode* list = part.schema->find("required")) {
      for (const JsonNode& name : list->items) {
        add_name(name.text);
        required.insert(name.text);
      }
    }
  }
  facts.more = facts.more && (says_additional || defaults == SchemaDefaults::kOpen);
  for (PropertyFacts& property : facts.properties) {
    property.required = required.contains(property.name);
    for (const SchemaPart& part : set) {
      const JsonNode* properties = part.schema->find("properties");
      const JsonNode* own = properties != nullptr ? properties->find(property.name) : nullptr;
      const JsonNode* schema = own != nullptr ? own : part.schema->find("additionalProperties");
      if (schema != nullptr) {
        append(property.schemas, *schema);
      }
    }
  }
  return facts;
}

ArrayFacts array_facts(const SchemaSet& set) {
  ArrayFacts facts;
  std::size_t num_prefix = 0;
  for (const SchemaPart& part : set) {
    if (const JsonNode* prefix = part.schema->find("prefixItems")) {
      num_prefix = std::max(num_prefix, prefix->items.size());
    }
    if (const JsonNode* items = part.schema->find("items")) {
      facts.more = facts.more && !is_false(*items);
      append(facts.rest, *items);
    }
    if (const JsonNode* min = part.schema->find("minItems")) {
      facts.min = std::max(facts.min, *count_of(*min));
    }
    if (const JsonNode* max = part.schema->find("maxItems")) {
      facts.max = std::min(facts.max, *count_of(*max));
    }
  }
  for (std::size_t i = 0; i < num_prefix; ++i) {
    SchemaSet& item = facts.prefix.emplace_back();
    for (const SchemaPart& part : set) {
      const JsonNode* prefix = part.schema->find("prefixItems");
      const bool has_own = prefix != nullptr && i < prefix->items.size();
      const JsonNode* schema = has_own ? &prefix->items[i] : part.schema->find("items");
      if (schema != nullptr) {
        append(item, *schema);
      }
    }
  }
  return facts;
}

StringFacts string_facts(const SchemaSet& set) {
  StringFacts facts;
  for (const SchemaPart& part : set) {
    if (const JsonNode* min = part.schema->find("minLength")) {
      facts.min = std::max(facts.min, *count_of(*min));
    }
    if (const JsonNode* max = part.schema->find("maxLength")) {
      facts.max = std::min(facts.max, *count_of(*max));
    }
    if (const JsonNode* pattern = part.schema->find("pattern")) {
      facts.patterns.push_back(pattern->text);
    }
    if (const JsonNode* format = part.schema->find("format")) {
      facts.formats.push_back(format->text);
    }
  }
  return facts;
}

Expected<NumberFacts> number_facts(const SchemaSet& set) {
  NumberFacts facts;
  for (const SchemaPart& part : set) {
    for (const auto& [name, excluded] :
         {std::pair("minimum", false), std::pair("exclusiveMinimum", true),
          std::pair("maximum", false), std::pair("exclusiveMaximum", true)}) {
      const JsonNode* node = part.schema->find(name);
      if (node == nullptr) {
        continue;
      }
      const auto value = parse_decimal(node->text);
      if (!value) {
        return fail(
            "{} of a number: at most {} digits before and {} behind the point are supported", name,
            kMaxIntegerDigits, kMaxFractionDigits);
      }
      const bool is_low = std::string_view(name).ends_with("inimum");
      const NumberBound bound{*value, excluded};
      std::optional<NumberBound>& tightest = is_low ? facts.low : facts.high;
      const auto order = tightest ? compare(bound.value, tightest->value) : 0;
      const bool is_tighter =
          !tightest || (is_low ? order > 0 : order < 0) || (order == 0 && excluded);
      if (is_tighter) {
        tightest = bound;
      }
    }
  }
  return facts;
}

IntegerRange integer_range(const SchemaSet& set) {
  constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();
  std::optional<std::int64_t> low;
  std::optional<std::int64_t> high;
  bool is_empty = false;
  const auto above = [&](std::int64_t value) { low = std::max(low.value_or(value), value); };
  const auto below = [&](std::int64_t value) { high = std::min(high.value_or(value), value); };
  for (const SchemaPart& part : set) {
    if (const JsonNode* bound = part.schema->find("minimum")) {
      above(rounded(*bound, true));
    }
    if (const JsonNode* bound = part.schema->find("maximum")) {
      below(rounded(*bound, false));
    }
    if (const JsonNode* bound = part.schema->find("exclusiveMinimum")) {
      const std::int64_t value = rounded(*bound, true);
      is_empty |= value == kHighest;
      above(is_whole(*bound) && value < kHighest ? value + 1 : value);
    }
    if (const JsonNode* bound = part.schema->find("exclusiveMaximum")) {
      const std::int64_t value = rounded(*bound, false);
      is_empty |= value == kLowest;
      below(is_whole(*bound) && value > kLowest ? value - 1 : value);
    }
  }
  const IntegerRange widest = widest_integers();
  if (is_empty) {
    return {1, 0};
  }
  // An open end lies where integers end, or beyond when the other bound does.
  IntegerRange range{low.value_or(widest.low), high.value_or(widest.high)};
  if (!high && range.low > widest.high) {
    range.high = kHighest;
  }
  if (!low && range.high < widest.low) {
    range.low = kLowest;
  }
  return range;
}

}  // namespace tandem::grammar

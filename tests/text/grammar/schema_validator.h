// schema_validator.h — says whether a JSON value is valid under a schema, for the keywords that
// grammars support. Straight from the standard's definitions; shares nothing with the compiler.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include <nlohmann/json.hpp>

#include "text/grammar/posix_regex.h"

namespace tandem::testing {

class SchemaValidator {
 public:
  using Json = nlohmann::ordered_json;

  explicit SchemaValidator(Json root) : root_(std::move(root)) {}
  [[nodiscard]] bool is_valid(const Json& value) const { return check(root_, value); }

 private:
  [[nodiscard]] static bool has_type(const Json& value, const std::string& name) {
    return (name == "null" && value.is_null()) || (name == "boolean" && value.is_boolean()) ||
           (name == "integer" &&
            (value.is_number_integer() ||
             (value.is_number() && value.get<double>() == std::floor(value.get<double>())))) ||
           (name == "number" && value.is_number()) || (name == "string" && value.is_string()) ||
           (name == "array" && value.is_array()) || (name == "object" && value.is_object());
  }

  [[nodiscard]] static std::size_t characters(const std::string& text) {
    return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
    }));
  }

  [[nodiscard]] bool check(const Json& schema, const Json& value) const {
    if (schema.is_boolean()) {
      return schema.get<bool>();
    }
    return check_general(schema, value) && check_number(schema, value) &&
           check_string(schema, value) && check_array(schema, value) && check_object(schema, value);
  }

  [[nodiscard]] bool check_general(const Json& schema, const Json& value) const {
    const auto any = [&](const Json& list) {
      return std::any_of(list.begin(), list.end(), [&](const Json& s) { return check(s, value); });
    };
    const auto all = [&](const Json& list) {
      return std::all_of(list.begin(), list.end(), [&](const Json& s) { return check(s, value); });
    };
    if (schema.contains("type")) {
      const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
      if (std::none_of(types.begin(), types.end(), [&](const Json& type) {
            return has_type(value, type.get<std::string>());
          })) {
        return false;
      }
    }
    const auto equals = [&](const Json& other) {
      return nlohmann::json(other) == nlohmann::json(value);
    };
    if (schema.contains("enum") &&
        std::none_of(schema["enum"].begin(), schema["enum"].end(), equals)) {
      return false;
    }
    if (schema.contains("const") && !equals(schema["const"])) {
      return false;
    }
    if (schema.contains("$ref")) {
      const auto pointer = schema["$ref"].get<std::string>().substr(1);
      if (!check(root_.at(Json::json_pointer(pointer)), value)) {
        return false;
      }
    }
    // oneOf as anyOf: that is what the grammars promise.
    return (!schema.contains("anyOf") || any(schema["anyOf"])) &&
           (!schema.contains("oneOf") || any(schema["oneOf"])) &&
           (!schema.contains("allOf") || all(schema["allOf"]));
  }

  [[nodiscard]] static bool check_number(const Json& schema, const Json& value) {
    if (!value.is_number()) {
      return true;
    }
    const auto bound = [&](const char* name) {
      return schema.contains(name) ? &schema[name] : nullptr;
    };
    const Json* low = bound("minimum");
    const Json* high = bound("maximum");
    const Json* above = bound("exclusiveMinimum");
    const Json* below = bound("exclusiveMaximum");
    return (low == nullptr || value >= *low) && (high == nullptr || value <= *high) &&
           (above == nullptr || value > *above) && (below == nullptr || value < *below);
  }

  [[nodiscard]] static bool check_string(const Json& schema, const Json& value) {
    if (!value.is_string()) {
      return true;
    }
    const auto text = value.get<std::string>();
    if (schema.contains("minLength") && characters(text) < schema["minLength"].get<std::size_t>()) {
      return false;
    }
    if (schema.contains("maxLength") && characters(text) > schema["maxLength"].get<std::size_t>()) {
      return false;
    }
    return !schema.contains("pattern") ||
           PosixRegex(schema["pattern"].get<std::string>()).finds(text);
  }

  [[nodiscard]] bool check_array(const Json& schema, const Json& value) const {
    if (!value.is_array()) {
      return true;
    }
    if ((schema.contains("minItems") && value.size() < schema["minItems"].get<std::size_t>()) ||
        (schema.contains("maxItems") && value.size() > schema["maxItems"].get<std::size_t>())) {
      return false;
    }
    const Json prefix = schema.value("prefixItems", Json::array());
    const Json rest = schema.value("items", Json(true));
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (!check(i < prefix.size() ? prefix[i] : rest, value[i])) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] bool check_object(const Json& schema, const Json& value) const {
    if (!value.is_object()) {
      return true;
    }
    for (const Json& name : schema.value("required", Json::array())) {
      if (!value.contains(name.get<std::string>())) {
        return false;
      }
    }
    const Json properties = schema.value("properties", Json::object());
    const Json more = schema.value("additionalProperties", Json(true));
    for (const auto& [key, item] : value.items()) {
      if (!check(properties.contains(key) ? properties[key] : more, item)) {
        return false;
      }
    }
    return true;
  }

  Json root_;
};

}  // namespace tandem::testing

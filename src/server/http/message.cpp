#include "server/http/message.h"

#include <algorithm>
#include <cstdint>

#include <nlohmann/json.hpp>

namespace tandem::server {
namespace {

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  const char low = lower(c);
  return low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
}

std::string_view type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 409:
      return "conflict_error";
    case 429:
      return "rate_limit_error";
    case 500:
      return "internal_error";
    case 503:
      return "service_unavailable_error";
    default:
      return "invalid_request_error";
  }
}

}  // namespace

const std::string* HttpRequest::header(std::string_view name) const {
  for (const HttpHeader& header : headers) {
    if (std::ranges::equal(header.name, name,
                           [](char a, char b) { return lower(a) == lower(b); })) {
      return &header.value;
    }
  }
  return nullptr;
}

std::string HttpRequest::query_value(std::string_view name) const {
  std::string_view rest = query;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('&'), rest.size());
    const std::string_view pair = rest.substr(0, end);
    const std::size_t equals = std::min(pair.find('='), pair.size());
    if (pair.substr(0, equals) == name) {
      return equals == pair.size() ? std::string() : percent_decoded(pair.substr(equals + 1), true);
    }
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return {};
}

std::string error_body(const ApiError& error) {
  nlohmann::ordered_json body;
  nlohmann::ordered_json& inner = body["error"];
  inner["message"] = error.message;
  inner["type"] = type_of(error.status);
  inner["param"] = nullptr;
  if (!error.param.empty()) {
    inner["param"] = error.param;
  }
  inner["code"] = error.code;
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response;
  response.status = error.status;
  response.body = error_body(error);
  if (error.retry_after_s > 0) {
    response.headers.push_back({"Retry-After", std::to_string(error.retry_after_s)});
  }
  if (error.status == 401) {
    response.headers.push_back({"WWW-Authenticate", "Bearer"});
  }
  return response;
}

std::string percent_decoded(std::string_view text, bool plus_is_space) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      const int high = hex_digit(text[i + 1]);
      const int low = hex_digit(text[i + 2]);
      if (high >= 0 && low >= 0) {
        out += static_cast<char>(high * 16 + low);
        i += 2;
        continue;
      }
    }
    out += plus_is_space && text[i] == '+' ? ' ' : text[i];
  }
  return out;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  std::size_t difference = a.size() ^ b.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const char other = b.empty() ? '\0' : b[i % b.size()];
    difference |= static_cast<unsigned char>(a[i] ^ other);
  }
  return difference == 0;
}

}  // namespace tandem::server

// message.h — an HTTP request and its answer as the endpoints see them, and the one form that
// errors have. No library's type stands here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tandem::server {

struct HttpHeader {
  std::string name;
  std::string value;
};

struct HttpRequest {
  std::string method;  // upper case; HEAD arrives as GET, its body is not sent
  std::string path;    // percent-decoded, without the query
  std::string query;   // as sent, without '?'
  std::vector<HttpHeader> headers;
  std::string body;
  std::string id;  // x-request-id of the answer

  /// The first header of this name (any case); nullptr when there is none.
  [[nodiscard]] const std::string* header(std::string_view name) const;
  /// The decoded value of `name` in the query; empty when there is none.
  [[nodiscard]] std::string query_value(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string body = {};
  std::string content_type = "application/json";
  std::vector<HttpHeader> headers = {};
};

/// A refused request. Source: spec serving.md 1.8.
struct ApiError {
  int status = 400;
  std::string code = "invalid_request_error";  // stable: clients decide by it
  std::string message;
  std::string param = {};  // JSON path of the field; empty: none
  int retry_after_s = 0;   // header Retry-After; 0: none
};

/// {"error": {"message", "type", "param", "code"}} in one line.
[[nodiscard]] std::string error_body(const ApiError& error);
[[nodiscard]] HttpResponse error_response(const ApiError& error);

/// "%41" and, in queries, '+'. Bad escapes stay as they are.
[[nodiscard]] std::string percent_decoded(std::string_view text, bool plus_is_space);

/// Takes as long for a wrong key as for a right one of the same length.
[[nodiscard]] bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace tandem::server

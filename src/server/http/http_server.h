// http_server.h — listener, connections and their threads. HTTP/1.1 with keep-alive, chunked bodies
// both ways and Expect: 100-continue; every wait for a client has a limit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/http/router.h"

namespace tandem::server {

/// Seconds, bytes and counts. Source of the defaults: spec serving.md 1.1.
struct HttpOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 30000;  // 0: any free one
  int num_threads = 2;
  double header_timeout_s = 10;  // from the first byte of a request to the end of its headers
  double body_timeout_s = 30;    // without progress
  double idle_timeout_s = 60;    // between requests
  double write_timeout_s = 30;   // a client that does not read
  double linger_s = 2;           // for the client to close after a last answer
  double event_comment_s = 10;   // silence on a stream of events until a comment is sent
  std::uint32_t max_header_bytes = 64 * 1024;
  std::uint32_t max_headers = 100;
  std::uint64_t max_body_bytes = std::uint64_t{64} << 20;
  int max_connections = 8192;
};

class HttpServer {
 public:
  /// Listens; requests are answered from start() on. `router` outlives the server.
  /// Errors: throws Error when the address cannot be had.
  HttpServer(HttpOptions options, const Router& router);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  void start();
  [[nodiscard]] std::uint16_t port() const;
  [[nodiscard]] int num_connections() const;
  /// Requests whose answer is not complete.
  [[nodiscard]] int num_open_requests() const;

  /// No new connections; idle ones are closed, the others after their present answer.
  void drain();
  /// Closes everything and joins the threads.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::server

// server.h — the whole server: engine's thread, endpoints and HTTP, in the order in which they
// start and stop.
#pragma once

#include <cstdint>
#include <memory>

#include "server/api/service.h"
#include "server/engine_loop.h"
#include "server/http/http_server.h"

namespace tandem::server {

struct ServerOptions {
  HttpOptions http = {};
  AccessKeys keys = {};
  ServiceOptions service = {};
  EngineOptions engine = {};
  PrefixCacheFileOptions prefix_cache_file = {};
};

class Server {
 public:
  /// Answers from here on. `tokenizer` and what `ctx` points to outlive the server.
  /// Errors: throws Error when the options do not fit, or the address or the cache's folder cannot
  /// be had.
  Server(std::unique_ptr<Model> model, const ExecCtx& ctx, const Tokenizer& tokenizer,
         ModelLoader loader, ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  [[nodiscard]] std::uint16_t port() const { return http_.port(); }
  [[nodiscard]] EngineLoop& loop() { return loop_; }
  [[nodiscard]] const HttpServer& http() const { return http_; }
  [[nodiscard]] Service& service() { return service_; }

  /// Takes nothing new from here on.
  void begin_drain();
  /// Whether what was there at begin_drain() is answered.
  [[nodiscard]] bool is_drained() const;
  /// Ends what is unfinished with errors.
  void stop();

 private:
  EngineLoop loop_;
  Service service_;
  Router router_;
  HttpServer http_;
};

}  // namespace tandem::server

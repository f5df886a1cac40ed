#include "server/server.h"

#include <string_view>
#include <utility>

#include "server/api/chat.h"
#include "server/api/completions.h"
#include "server/api/control.h"
#include "server/api/info.h"
#include "server/api/native.h"

namespace tandem::server {

namespace assets {  // page/ and api/openapi.json, compiled in by CMake
std::string_view page_html();
std::string_view page_js();
std::string_view page_icon();
std::string_view openapi_json();
}  // namespace assets

namespace {

using EndpointFunction = void (*)(Service&, const std::shared_ptr<Exchange>&);

void add_asset(Router& router, std::string path, std::string type, std::string_view bytes) {
  router.add("GET", std::move(path), Access::kOpen,
             [type = std::move(type), bytes](const std::shared_ptr<Exchange>& exchange) {
               HttpResponse response{200, std::string(bytes), type};
               response.headers.push_back({"Content-Security-Policy",
                                           "default-src 'self'; style-src 'unsafe-inline' 'self'"});
               exchange->respond(std::move(response));
             });
}

Router make_router(AccessKeys keys, Service& service) {
  Router router(std::move(keys));
  const auto add = [&](std::string_view method, std::string path, EndpointFunction function) {
    router.add(method, std::move(path), Access::kUser,
               [&service, function](const std::shared_ptr<Exchange>& exchange) {
                 function(service, exchange);
               });
  };
  add("POST", "/v1/chat/completions", handle_chat);
  add("POST", "/v1/completions", handle_completions);
  add("POST", "/generate", handle_generate);
  add("PUT", "/generate", handle_generate);
  add_info_routes(router, service);
  add_control_routes(router, service);
  add_asset(router, "/", "text/html; charset=utf-8", assets::page_html());
  add_asset(router, "/page.js", "text/javascript; charset=utf-8", assets::page_js());
  add_asset(router, "/icon.svg", "image/svg+xml", assets::page_icon());
  add_asset(router, "/openapi.json", "application/json", assets::openapi_json());
  return router;
}

std::unique_ptr<PrefixCacheFile> open_cache_file(PrefixCacheFileOptions options) {
  return options.dir.empty() ? nullptr : std::make_unique<PrefixCacheFile>(std::move(options));
}

}  // namespace

Server::Server(std::unique_ptr<Model> model, const ExecCtx& ctx, const Tokenizer& tokenizer,
               ModelLoader loader, ServerOptions options)
    : loop_(std::move(model), ctx, options.engine,
            open_cache_file(std::move(options.prefix_cache_file))),
      service_(loop_, tokenizer, std::move(loader), std::move(options.service),
               {loop_.vocab_size(), options.engine.max_seq_len}),
      router_(make_router(std::move(options.keys), service_)),
      http_(std::move(options.http), router_) {
  http_.start();
}

Server::~Server() {
  stop();
}

void Server::begin_drain() {
  loop_.begin_drain();
  http_.drain();
}

bool Server::is_drained() const {
  return http_.num_open_requests() == 0;
}

void Server::stop() {
  // The engine's and the worker's last words go out through the connections.
  loop_.begin_drain();
  loop_.stop();
  service_.worker.stop();
  http_.stop();
}

}  // namespace tandem::server

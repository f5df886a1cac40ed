#include "server/http/router.h"

#include <algorithm>
#include <exception>

#include "core/log.h"

namespace tandem::server {

void Router::add(std::string_view method, std::string path, Access access, Handler handler) {
  routes_[std::move(path)].push_back({std::string(method), access, std::move(handler)});
}

const std::vector<Router::Route>* Router::find(const std::string& path) const {
  if (const auto found = routes_.find(path); found != routes_.end()) {
    return &found->second;
  }
  // "/v1/models/org/name" is also an entry below "/v1/models/".
  for (std::size_t slash = path.rfind('/'); slash != std::string::npos && slash > 0;
       slash = path.rfind('/', slash - 1)) {
    const auto found = routes_.find(std::string_view(path).substr(0, slash + 1));
    if (found != routes_.end() && slash + 1 < path.size()) {
      return &found->second;
    }
  }
  return nullptr;
}

bool Router::may(const HttpRequest& request, Access access) const {
  const bool is_admin = access == Access::kAdmin && !keys_.admin_key.empty();
  const std::string& key = is_admin ? keys_.admin_key : keys_.api_key;
  if (key.empty() || (access == Access::kOpen && !keys_.protect_all)) {
    return true;
  }
  constexpr std::string_view kScheme = "Bearer ";
  const std::string* header = request.header("authorization");
  return header != nullptr && header->starts_with(kScheme) &&
         equal_in_constant_time(std::string_view(*header).substr(kScheme.size()), key);
}

void Router::dispatch(const std::shared_ptr<Exchange>& exchange) const {
  const HttpRequest& request = exchange->request();
  const std::vector<Route>* routes = find(request.path);
  if (routes == nullptr) {
    exchange->respond(error_response(
        {404, "not_found", "there is no " + request.path + "; /openapi.json lists what there is"}));
    return;
  }
  const auto route = std::ranges::find(*routes, request.method, &Route::method);
  if (route == routes->end()) {
    std::string allowed;
    for (const Route& other : *routes) {
      allowed += (allowed.empty() ? "" : ", ") + other.method;
    }
    HttpResponse response =
        error_response({405, "method_not_allowed",
                        request.path + " takes " + allowed + ", not " + request.method});
    response.headers.push_back({"Allow", allowed});
    exchange->respond(std::move(response));
    return;
  }
  if (!may(request, route->access)) {
    exchange->respond(error_response(
        {401, "invalid_api_key", "expected the header 'Authorization: Bearer KEY' with the key"}));
    return;
  }
  try {
    route->handler(exchange);
  } catch (const std::exception& error) {
    log_warn("http.handler_failed", "request={} path={} error={}", request.id, request.path,
             error.what());
    exchange->respond(error_response(
        {500, "internal_error", "request " + request.id + " failed inside the server"}));
  }
}

}  // namespace tandem::server

// router.h — from method and path to a handler, and who may call it.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/exchange.h"

namespace tandem::server {

enum class Access {
  kOpen,   // anybody, unless AccessKeys::protect_all
  kUser,   // the API key, when there is one
  kAdmin,  // the admin key; without one, the API key
};

struct AccessKeys {
  std::string api_key = {};  // empty: none is asked for
  std::string admin_key = {};
  bool protect_all = false;
};

class Router {
 public:
  explicit Router(AccessKeys keys) : keys_(std::move(keys)) {}

  /// A path that ends in '/' takes whatever follows, which the handler reads from the request.
  void add(std::string_view method, std::string path, Access access, Handler handler);

  /// Checks the key, then calls the handler. What it throws becomes a 500 with the request's id.
  void dispatch(const std::shared_ptr<Exchange>& exchange) const;

 private:
  struct Route {
    std::string method;
    Access access;
    Handler handler;
  };
  [[nodiscard]] const std::vector<Route>* find(const std::string& path) const;
  [[nodiscard]] bool may(const HttpRequest& request, Access access) const;

  AccessKeys keys_;
  std::map<std::string, std::vector<Route>, std::less<>> routes_;
};

}  // namespace tandem::server

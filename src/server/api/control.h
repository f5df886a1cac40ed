// control.h — endpoints that change the server's state: caches, pausing, weights. Source: spec
// serving.md 1.7.
#pragma once

#include "server/api/service.h"
#include "server/http/router.h"

namespace tandem::server {

void add_control_routes(Router& router, Service& service);

/// `path` (relative ones: below `root`) with links resolved. Errors: no root is configured; no such
/// folder; it lies outside the root.
[[nodiscard]] Expected<std::string> path_below_root(const std::string& root,
                                                    const std::string& path);

}  // namespace tandem::server

// info.h — endpoints that tell: health, models, state, metrics, tokenization. Source: spec
// serving.md 1.2, 1.3.
#pragma once

#include "server/api/service.h"
#include "server/http/router.h"

namespace tandem::server {

void add_info_routes(Router& router, Service& service);

}  // namespace tandem::server

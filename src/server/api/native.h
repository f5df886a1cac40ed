// native.h — POST and PUT /generate, SGLang's native interface. Source: spec serving.md 1.6.
#pragma once

#include <memory>

#include "server/api/service.h"
#include "server/http/exchange.h"

namespace tandem::server {

void handle_generate(Service& service, const std::shared_ptr<Exchange>& exchange);

}  // namespace tandem::server

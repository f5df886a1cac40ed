// completions.h — POST /v1/completions. Source: spec serving.md 1.4.
#pragma once

#include <memory>

#include "server/api/service.h"
#include "server/http/exchange.h"

namespace tandem::server {

void handle_completions(Service& service, const std::shared_ptr<Exchange>& exchange);

}  // namespace tandem::server

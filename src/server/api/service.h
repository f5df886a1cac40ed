// service.h — what every endpoint works with.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "models/model.h"
#include "server/api/grammars.h"
#include "server/api/sampling.h"
#include "server/engine_loop.h"
#include "server/metrics.h"
#include "server/worker.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tandem::server {

/// Reads a checkpoint folder; called on a thread of its own while the engine runs, so it must not
/// share the engine's workspace or threads.
using ModelLoader = std::function<Expected<std::unique_ptr<Model>>(const std::string& dir)>;

struct ServiceOptions {
  std::string served_name = "tandem";
  std::string model_path = {};
  std::string model_root = {};  // update_weights_from_disk reads below it only; empty: refused
  std::string version = {};
  std::string model_type = {};
  bool any_model_name = false;
  bool incremental_events = false;  // /generate streams differences instead of the whole so far
  double queue_timeout_s = 0;       // 0: never
  double request_timeout_s = 0;
  double health_timeout_s = 20;
  OrderedJson launch_arguments = OrderedJson::object();
};

struct Service {
  Service(EngineLoop& engine_loop, const Tokenizer& text_tokenizer, ModelLoader model_loader,
          ServiceOptions service_options, ModelLimits model_limits);

  EngineLoop& loop;
  const Tokenizer& tokenizer;
  ModelLoader loader;
  ServiceOptions options;
  ModelLimits limits;
  std::unique_ptr<ChatTemplate> chat_template;
  Metrics metrics;
  std::int64_t start_time;               // Unix seconds
  std::atomic<bool> is_updating{false};  // weights
  Worker worker;
  Grammars grammars;
};

/// Seconds of the Unix epoch.
[[nodiscard]] std::int64_t unix_time();
/// 24 characters nobody else has.
[[nodiscard]] std::string random_id();
[[nodiscard]] std::uint64_t random_seed();

/// A problem unless the request's "model" is a name of the served one.
void check_model_name(const Service& service, const FieldReader& fields);

}  // namespace tandem::server

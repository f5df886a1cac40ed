#include "server/api/control.h"

#include <algorithm>
#include <charconv>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/log.h"

namespace tandem::server {
namespace {

namespace fs = std::filesystem;
using ExchangePtr = std::shared_ptr<Exchange>;

void respond_ok(const ExchangePtr& exchange, const std::string& message) {
  exchange->respond({200, to_line(OrderedJson{{"success", true}, {"message", message}})});
}

/// A callback for the engine's thread that answers on the connection's.
std::function<void()> then_ok(const ExchangePtr& exchange, std::string message) {
  return [exchange, message = std::move(message)] {
    exchange->post([exchange, message] { respond_ok(exchange, message); });
  };
}

void flush(Service& service, const ExchangePtr& exchange, double seconds_left) {
  constexpr double kRetrySeconds = 0.05;
  service.loop.flush_cache([&service, exchange, seconds_left](Status status) {
    exchange->post([&service, exchange, seconds_left, status = std::move(status)] {
      if (status) {
        respond_ok(exchange, "the cache is empty");
      } else if (seconds_left > 0) {
        exchange->post_after(kRetrySeconds, [&service, exchange, seconds_left] {
          flush(service, exchange, seconds_left - kRetrySeconds);
        });
      } else {
        exchange->respond(error_response({409, "conflict", status.message()}));
      }
    });
  });
}

void handle_flush(Service& service, const ExchangePtr& exchange) {
  double timeout = 0;
  const std::string text = exchange->request().query_value("timeout");
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), timeout);
  if (!text.empty() &&
      (error != std::errc() || end != text.data() + text.size() || !(timeout >= 0))) {
    exchange->respond(error_response(
        {400, "invalid_request_error", "timeout: expected a number of seconds", "timeout"}));
    return;
  }
  flush(service, exchange, timeout);
}

void handle_abort(Service& service, const ExchangePtr& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), true, problem);
  const FieldReader fields(body, problem);
  const bool all = fields.boolean("abort_all", false);
  const std::string rid = fields.string("rid");
  const std::string prefix = fields.string("rid_prefix");
  if (!problem && !all && rid.empty() && prefix.empty()) {
    fields.reject("rid", "expected rid, rid_prefix or abort_all: true");
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  auto done = then_ok(exchange, "aborted");
  if (all) {
    service.loop.abort_all(std::move(done));
  } else {
    service.loop.abort_rid(rid.empty() ? prefix : rid, rid.empty(), std::move(done));
  }
}

void handle_pause(Service& service, const ExchangePtr& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), true, problem);
  const FieldReader fields(body, problem);
  const std::string mode = fields.string("mode", "abort");
  if (!problem && mode != "abort" && mode != "retract" && mode != "in_place") {
    fields.reject("mode", fmt::format("mode is \"{}\": expected abort, retract or in_place", mode));
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  service.loop.pause(mode == "retract" ? PauseMode::kRetract : PauseMode::kInPlace, mode == "abort",
                     then_ok(exchange, "paused"));
}

void handle_continue(Service& service, const ExchangePtr& exchange) {
  service.loop.resume(then_ok(exchange, "running"));
}

void handle_weight_version(Service& service, const ExchangePtr& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  const FieldReader fields(body, problem);
  const std::string label = fields.string("new_version");
  if (!problem && label.empty()) {
    fields.reject("new_version", "new_version is missing: expected a name for the weights");
  }
  const bool aborts = fields.boolean("abort_all_requests", false);
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  if (aborts) {
    service.loop.abort_all();
  }
  service.loop.set_weight_label(label, then_ok(exchange, "the weights are called " + label));
}

void answer_update(Service& service, const ExchangePtr& exchange, const Status& status) {
  service.is_updating = false;
  exchange->post([&service, exchange, status] {
    const std::string label = service.loop.weight_label();
    OrderedJson answer{{"success", status.ok()},
                       {"message", status.ok() ? "the weights are now " + label : status.message()},
                       {"num_paused_requests", 0},
                       {"weight_version", label}};
    exchange->respond({status.ok() ? 200 : 400, to_line(answer)});
  });
}

/// Reads the checkpoint as a whole beside the live weights, so that a bad one changes nothing.
void update_weights(Service& service, const ExchangePtr& exchange, const std::string& dir,
                    std::string label) {
  EngineLoop::LoadModel load = [&service, dir]() -> Expected<std::unique_ptr<Model>> {
    try {
      return service.loader(dir);
    } catch (const std::exception& error) {
      return fail("{}: {}", dir, error.what());
    }
  };
  if (service.loop.can_load_beside()) {
    const auto model = std::make_shared<Expected<std::unique_ptr<Model>>>(load());
    load = [model] { return std::move(*model); };
  }
  service.loop.replace_model(
      std::move(load), std::move(label),
      [&service, exchange](const Status& status) { answer_update(service, exchange, status); });
}

void handle_update_from_disk(Service& service, const ExchangePtr& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  const FieldReader fields(body, problem);
  const std::string path = fields.string("model_path");
  std::string label = fields.string("weight_version");
  const bool aborts = fields.boolean("abort_all_requests", false);
  const std::string format = fields.string("load_format", "auto");
  if (format != "auto" && format != "safetensors") {
    fields.reject("load_format",
                  fmt::format("load_format is \"{}\": expected auto or safetensors", format));
  }
  if (path.empty()) {
    fields.reject("model_path", "model_path is missing: expected a checkpoint folder");
  }
  const auto dir = path_below_root(service.options.model_root, path);
  if (!problem && !dir) {
    fields.reject("model_path", "model_path: " + dir.message());
  }
  if (!problem && service.is_updating.exchange(true)) {
    problem.set({409, "conflict", "an update of the weights is under way"});
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  if (aborts) {
    service.loop.abort_all();
  }
  log_info("server.update_weights", "dir={}", *dir);
  service.worker.post([&service, exchange, dir = *dir, label = std::move(label)] {
    update_weights(service, exchange, dir, label);
  });
}

}  // namespace

Expected<std::string> path_below_root(const std::string& root, const std::string& path) {
  if (root.empty()) {
    return fail("no folder may be read: the server was started without --model-root");
  }
  std::error_code error;
  const fs::path real_root = fs::canonical(root, error);
  if (error) {
    return fail("the model root cannot be read: {}", error.message());
  }
  // operator/ keeps an absolute path as it is.
  const fs::path real = fs::canonical(real_root / path, error);
  const auto mismatch = std::mismatch(real_root.begin(), real_root.end(), real.begin(), real.end());
  if (error || mismatch.first != real_root.end() || !fs::is_directory(real, error)) {
    return fail("expected a folder below the model root");  // and no word on what is outside
  }
  return real.string();
}

void add_control_routes(Router& router, Service& service) {
  const auto add = [&](std::string_view method, std::string path, Access access, auto handler) {
    router.add(method, std::move(path), access,
               [&service, handler](const ExchangePtr& exchange) { handler(service, exchange); });
  };
  add("POST", "/flush_cache", Access::kAdmin, handle_flush);
  add("GET", "/flush_cache", Access::kAdmin, handle_flush);
  add("POST", "/abort_request", Access::kUser, handle_abort);
  add("POST", "/pause_generation", Access::kAdmin, handle_pause);
  add("POST", "/continue_generation", Access::kAdmin, handle_continue);
  add("POST", "/update_weight_version", Access::kAdmin, handle_weight_version);
  add("POST", "/update_weights_from_disk", Access::kAdmin, handle_update_from_disk);
}

}  // namespace tandem::server

#include "server/api/info.h"

#include <utility>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "server/api/chat.h"
#include "text/utf8.h"

namespace tandem::server {
namespace {

void respond(const std::shared_ptr<Exchange>& exchange, const OrderedJson& json) {
  exchange->respond({200, to_line(json)});
}

void handle_health(Service& service, const std::shared_ptr<Exchange>& exchange) {
  if (service.loop.is_draining()) {
    exchange->respond(
        error_response({503, "shutting_down", "the server finishes what it has and ends"}));
    return;
  }
  respond(exchange, {{"status", "ok"}});
}

/// One token of a prompt that shares nothing with any other. Any token of any request counts: a
/// server that is busy is well.
class HealthProbe : public std::enable_shared_from_this<HealthProbe> {
 public:
  HealthProbe(Service& service, std::shared_ptr<Exchange> exchange)
      : service_(service), exchange_(std::move(exchange)) {}

  void start() {
    if (service_.loop.is_draining()) {
      answer(false, "the server finishes what it has and ends");
      return;
    }
    num_tokens_before_ = service_.loop.stats().num_tokens;
    Request request;
    request.prompt = {0};
    request.max_new_tokens = 1;
    request.ignore_eos = true;
    request.priority = 1000000;
    request.cache_salt = "health " + random_id();
    Job job;
    job.mailbox = std::make_shared<Mailbox>([weak = weak_from_this()] {
      if (const auto self = weak.lock()) {
        self->exchange_->post([self] { self->answer(true, {}); });
      }
    });
    job.prompts.push_back({std::move(request), 1, ""});
    job.on_admitted = [](const std::optional<ApiError>&) {};
    job_ = service_.loop.submit(std::move(job));
    exchange_->on_closed([self = shared_from_this()] { self->service_.loop.abort(self->job_); });
    poll();
  }

 private:
  static constexpr double kPollSeconds = 0.05;

  void poll() {
    exchange_->post_after(kPollSeconds, [self = shared_from_this()] {
      self->waited_s_ += kPollSeconds;
      const LoopStats stats = self->service_.loop.stats();
      if (stats.num_tokens > self->num_tokens_before_ || stats.is_paused) {
        self->answer(true, {});
      } else if (self->waited_s_ >= self->service_.options.health_timeout_s) {
        self->answer(false, fmt::format("no token within {} s; the present step takes {:.1f} s",
                                        self->service_.options.health_timeout_s,
                                        self->service_.loop.seconds_in_step()));
      } else if (!self->is_answered_) {
        self->poll();
      }
    });
  }

  void answer(bool is_well, const std::string& why) {
    if (std::exchange(is_answered_, true)) {
      return;
    }
    service_.loop.abort(job_);
    if (is_well) {
      respond(exchange_, {{"status", "ok"}});
    } else {
      exchange_->respond(error_response({503, "not_ready", why}));
    }
  }

  Service& service_;
  std::shared_ptr<Exchange> exchange_;
  JobId job_{};
  std::int64_t num_tokens_before_ = 0;
  double waited_s_ = 0;
  bool is_answered_ = false;
};

OrderedJson model_card(const Service& service) {
  return {{"id", service.options.served_name},
          {"object", "model"},
          {"created", service.start_time},
          {"owned_by", "tandem"},
          {"root", service.options.model_path},
          {"parent", nullptr},
          {"max_model_len", service.limits.max_seq_len}};
}

void handle_models(Service& service, const std::shared_ptr<Exchange>& exchange) {
  respond(exchange, {{"object", "list"}, {"data", OrderedJson::array({model_card(service)})}});
}

void handle_model(Service& service, const std::shared_ptr<Exchange>& exchange) {
  constexpr std::string_view kPrefix = "/v1/models/";
  Problem problem;
  const Json body = {{"model", exchange->request().path.substr(kPrefix.size())}};
  check_model_name(service, FieldReader(body, problem));
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  respond(exchange, model_card(service));
}

void handle_model_info(Service& service, const std::shared_ptr<Exchange>& exchange) {
  respond(exchange, {{"model_path", service.options.model_path},
                     {"tokenizer_path", service.options.model_path},
                     {"is_generation", true},
                     {"preferred_sampling_params", nullptr},
                     {"weight_version", service.loop.weight_label()},
                     {"model_type", service.options.model_type},
                     {"architectures", OrderedJson::array()}});
}

OrderedJson load_json(const LoopStats& stats) {
  const EngineStats& engine = stats.engine;
  const std::int64_t used_pages =
      stats.plan.num_pages - engine.num_free_pages - engine.num_cached_pages;
  return {{"num_running_reqs", engine.num_running},
          {"num_waiting_reqs", engine.num_waiting},
          {"num_reqs", stats.num_unfinished},
          {"num_tokens", used_pages * stats.plan.page_size},
          {"num_cached_tokens", engine.num_cached_pages * stats.plan.page_size},
          {"max_total_num_tokens", stats.plan.num_pages * stats.plan.page_size},
          {"gen_throughput", stats.tokens_per_s},
          {"generated_tokens", stats.num_tokens},
          {"prefix_hits", engine.prefix.num_hits},
          {"prefix_lookups", engine.prefix.num_lookups},
          {"is_paused", stats.is_paused}};
}

void handle_server_info(Service& service, const std::shared_ptr<Exchange>& exchange) {
  const LoopStats stats = service.loop.stats();
  const MemoryPlan& plan = stats.plan;
  OrderedJson info = service.options.launch_arguments;
  info["version"] = service.options.version;
  info["model_path"] = service.options.model_path;
  info["served_model_name"] = service.options.served_name;
  info["weight_version"] = service.loop.weight_label();
  info["status"] = service.loop.is_draining() ? "draining" : stats.is_paused ? "paused" : "ready";
  info["max_total_num_tokens"] = plan.num_pages * plan.page_size;
  info["max_req_input_len"] = service.limits.max_seq_len - 1;
  info["context_length"] = service.limits.max_seq_len;
  info["last_gen_throughput"] = stats.tokens_per_s;
  info["avg_spec_accept_length"] = nullptr;
  info["memory_bytes"] = {{"weights", plan.weight_bytes},
                          {"latent_pages", plan.num_pages * plan.page_bytes},
                          {"state_slots", plan.num_slots * plan.slot_bytes},
                          {"checkpoint_slots", plan.num_checkpoint_slots * plan.slot_bytes},
                          {"batches", plan.batch_bytes},
                          {"workspace", plan.workspace_bytes}};
  info["load"] = load_json(stats);
  respond(exchange, info);
}

void handle_metrics(Service& service, const std::shared_ptr<Exchange>& exchange) {
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = service.metrics.text(service.loop.stats(), service.loop.options(),
                                       service.options.served_name);
  exchange->respond(std::move(response));
}

void handle_tokenize(Service& service, const std::shared_ptr<Exchange>& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  std::vector<std::int32_t> ids;
  if (!problem) {
    const FieldReader fields(body, problem);
    const std::string_view key = fields.has("prompt") ? "prompt" : "text";
    if (fields.has("messages")) {
      ids = encode_chat(service, body, exchange->request().body, problem);
    } else if (!fields.has(key)) {
      fields.reject("text", "expected text or messages");
    } else {
      const bool special = fields.boolean("parse_special", false);
      const std::vector<Segment> segments{{fields.string(key), special}};
      ids = service.tokenizer.encode_segments(segments);
    }
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  respond(exchange,
          {{"tokens", ids}, {"count", ids.size()}, {"max_model_len", service.limits.max_seq_len}});
}

void handle_detokenize(Service& service, const std::shared_ptr<Exchange>& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  const FieldReader fields(body, problem);
  const auto ids = fields.token_ids("tokens", service.limits.vocab_size);
  const bool skips = fields.boolean("skip_special_tokens", false);
  if (!problem && !fields.has("tokens")) {
    fields.reject("tokens", "tokens is missing: expected a list of token ids");
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  const std::string text =
      service.tokenizer.decode(ids, skips ? SpecialText::kSkip : SpecialText::kKeep);
  respond(exchange, {{"text", to_valid_utf8(text)}, {"prompt", to_valid_utf8(text)}});
}

}  // namespace

void add_info_routes(Router& router, Service& service) {
  const auto add = [&](std::string_view method, std::string path, Access access, auto handler) {
    router.add(method, std::move(path), access,
               [&service, handler](const std::shared_ptr<Exchange>& exchange) {
                 handler(service, exchange);
               });
  };
  add("GET", "/health", Access::kOpen, handle_health);
  add("GET", "/health_generate", Access::kOpen,
      [](Service& to_probe, const std::shared_ptr<Exchange>& exchange) {
        std::make_shared<HealthProbe>(to_probe, exchange)->start();
      });
  add("GET", "/metrics", Access::kOpen, handle_metrics);
  add("GET", "/v1/models", Access::kUser, handle_models);
  add("GET", "/v1/models/", Access::kUser, handle_model);
  for (const char* path : {"/get_model_info", "/model_info"}) {
    add("GET", path, Access::kUser, handle_model_info);
  }
  for (const char* path : {"/get_server_info", "/server_info"}) {
    add("GET", path, Access::kUser, handle_server_info);
  }
  for (const char* path : {"/v1/loads", "/get_load"}) {
    add("GET", path, Access::kUser, [](Service& loaded, const std::shared_ptr<Exchange>& exchange) {
      respond(exchange, load_json(loaded.loop.stats()));
    });
  }
  for (const char* prefix : {"", "/v1"}) {
    add("POST", std::string(prefix) + "/tokenize", Access::kUser, handle_tokenize);
    add("POST", std::string(prefix) + "/detokenize", Access::kUser, handle_detokenize);
  }
}

}  // namespace tandem::server

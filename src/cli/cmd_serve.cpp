// tandem serve — the HTTP server.
#include <chrono>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "backends/cpu/cpu_backend.h"
#include "cli/common.h"
#include "core/checked_cast.h"
#include "core/timing.h"
#include "engine/warm_up.h"
#include "io/fingerprint.h"
#include "models/registry.h"
#include "server/server.h"

#ifndef TDM_VERSION
#error "TDM_VERSION comes from CMake"
#endif

namespace tandem::cli {
namespace {

struct ServeFlags {
  std::string dir;
  server::HttpOptions http;
  server::AccessKeys keys;
  server::ServiceOptions service;
  EngineOptions engine;
  double cache_gib = 0;
  std::string cache_dir;
  double drain_seconds = 30;
};

/// Every client is a file descriptor; the usual soft limit of 1,024 is less than the hard one.
void raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

std::string model_type_of(const std::string& dir) {
  std::ifstream in(dir + "/config.json");
  const auto config = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  return config.is_object() ? config.value("model_type", std::string()) : std::string();
}

std::string last_name_of(std::string dir) {
  while (dir.size() > 1 && dir.ends_with('/')) {
    dir.pop_back();
  }
  return dir.substr(dir.rfind('/') + 1);
}

/// Reads checkpoints beside the running engine: with threads and memory of its own.
/// On the host from any thread; on a device with memory of its own from the engine's only.
server::ModelLoader make_loader(const ExecCtx& ctx) {
  return [&ctx](const std::string& dir) -> Expected<std::unique_ptr<Model>> {
    if (!ctx.device->host_visible()) {
      return load_model(ctx, dir, {});
    }
    ThreadPool pool(1);
    Arena workspace;
    return load_model({ctx.ops, &pool, &workspace, nullptr, ctx.device}, dir, {});
  };
}

/// What decides about the bits of a cached beginning, the engine's own options aside.
Expected<SnapshotKey> cache_key(const std::string& dir, const GlobalOptions& global,
                                const Device& device) {
  Expected<std::string> weights = model_fingerprint(dir);
  if (!weights) {
    return weights.failure();
  }
  const bool is_gpu = gpu_of(global.device.name) >= 0;
  return SnapshotKey{{"program", TDM_VERSION},
                     {"weights", *std::move(weights)},
                     {"device", is_gpu ? device.name() : "cpu " + cpu_instruction_set()},
                     {"deterministic", is_gpu && !global.device.deterministic ? "no" : "yes"}};
}

Expected<server::PrefixCacheFileOptions> cache_file(const ServeFlags& flags,
                                                    const GlobalOptions& global,
                                                    const Device& device) {
  if (flags.cache_dir.empty()) {
    return server::PrefixCacheFileOptions{};
  }
  auto key = cache_key(flags.dir, global, device);
  if (!key) {
    return key.failure();
  }
  // Shared by the copies of the function; a phase begins when the bar has ended the one before.
  struct Shown {
    ProgressBar bar = make_progress_bar();
    bool is_active = false;
  };
  const auto shown = std::make_shared<Shown>();
  const auto progress = [shown](std::string_view label, std::int64_t done, std::int64_t total) {
    if (!std::exchange(shown->is_active, true)) {
      shown->bar.start(label, total);
    }
    shown->bar.update(done);
    if (done == total) {
      shown->bar.finish();
      shown->is_active = false;
    }
  };
  return server::PrefixCacheFileOptions{flags.cache_dir, *std::move(key), progress};
}

nlohmann::ordered_json launch_arguments(const ServeFlags& flags) {
  return {{"host", flags.http.host},
          {"port", flags.http.port},
          {"max_running_requests", flags.engine.max_running_seqs},
          {"max_queued_requests", flags.engine.max_queued},
          {"max_batch_tokens", flags.engine.max_batch_tokens},
          {"page_size", flags.engine.page_size},
          {"prefix_cache", flags.engine.prefix_cache},
          {"cache_dir", flags.cache_dir},
          {"queue_timeout", flags.service.queue_timeout_s},
          {"request_timeout", flags.service.request_timeout_s},
          {"drain_seconds", flags.drain_seconds},
          {"model_root", flags.service.model_root}};
}

/// Serves until a signal comes, then until all is answered or the time is up.
void serve_until_stopped(server::Server& server, double drain_seconds, Interrupts& interrupts) {
  using std::chrono::milliseconds;
  const Interrupts::Graceful graceful(
      interrupts, "tandem: finishing what is under way; once more ends it at once");
  while (!interrupts.stop()) {
    std::this_thread::sleep_for(milliseconds(50));
  }
  server.begin_drain();
  const Clock::time_point start = Clock::now();
  while (!server.is_drained() && seconds_since(start) < drain_seconds) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  server.stop();
}

Expected<ExitCode> run_serve(ServeFlags flags, const GlobalOptions& global,
                             Interrupts& interrupts) {
  const Clock::time_point start = Clock::now();
  raise_file_limit();
  Runtime runtime(global, global.threads);
  auto loaded = load_model_and_tokenizer(runtime.ctx(), flags.dir);
  if (!loaded) {
    return loaded.failure();
  }
  const auto stop_ids = loaded->tokenizer->stop_ids();
  flags.engine.eos_ids.assign(stop_ids.begin(), stop_ids.end());
  flags.engine.cache_bytes = static_cast<std::int64_t>(flags.cache_gib * (1 << 30));
  if (const auto plan = plan_memory(*loaded->model, flags.engine); !plan) {
    return plan.failure();
  }
  if (flags.service.served_name.empty()) {
    flags.service.served_name = last_name_of(flags.dir);
  }
  flags.service.model_path = flags.dir;
  flags.service.version = TDM_VERSION;
  flags.service.model_type = model_type_of(flags.dir);
  flags.service.launch_arguments = launch_arguments(flags);
  auto kept = cache_file(flags, global, *runtime.ctx().device);
  if (!kept) {
    return kept.failure();
  }
  server::Server server(std::move(loaded->model), runtime.ctx(), *loaded->tokenizer,
                        make_loader(runtime.ctx()),
                        {flags.http, flags.keys, flags.service, flags.engine, *std::move(kept)});
  write_err(fmt::format("memory plan\n{}", server.loop().stats().plan.to_string()));
  const bool is_any = flags.http.host == "0.0.0.0" || flags.http.host == "::";
  if (is_any && flags.keys.api_key.empty()) {
    write_err("tandem: anybody who reaches this machine can use the server: no --api-key\n");
  }
  print_out("tandem serves {} at http://{}:{}/ after {:.2f} s\n", flags.service.served_name,
            is_any ? "127.0.0.1" : flags.http.host, server.port(), seconds_since(start));
  serve_until_stopped(server, flags.drain_seconds, interrupts);
  return kExitOk;
}

void add_http_flags(CLI::App& command, ServeFlags& flags) {
  command.add_option("--host", flags.http.host, "Address to listen on; 0.0.0.0 is all of them")
      ->capture_default_str();
  command.add_option("--port", flags.http.port, "0 takes any free one")->capture_default_str();
  command.add_option("--api-key", flags.keys.api_key,
                     "Clients must send it as Authorization: Bearer KEY");
  command.add_option("--admin-api-key", flags.keys.admin_key,
                     "Asked for instead of the API key where weights, pauses and caches change");
  command.add_flag("--protect-all", flags.keys.protect_all,
                   "Ask for the key for /health, /metrics and the page as well");
  command
      .add_option("--drain-seconds", flags.drain_seconds,
                  "After SIGTERM or Ctrl-C: how long requests may finish")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_option("--max-body-bytes", flags.http.max_body_bytes, "Longest body of a request")
      ->capture_default_str();
  command
      .add_option("--keep-alive-seconds", flags.http.event_comment_s,
                  "Silence on a stream until a comment is sent")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--http-threads", flags.http.num_threads, "Threads for connections and text")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
}

void add_service_flags(CLI::App& command, ServeFlags& flags) {
  command.add_option("--model", flags.dir, "Checkpoint folder")->required();
  command.add_option("--served-model-name", flags.service.served_name,
                     "What clients call the model; the folder's name by default");
  command.add_flag("--any-model-name", flags.service.any_model_name,
                   "Accept any \"model\" in requests instead of answering 404");
  command.add_option("--model-root", flags.service.model_root,
                     "Folder that /update_weights_from_disk may read below; none by default");
  command.add_flag("--incremental-streaming-output", flags.service.incremental_events,
                   "/generate streams differences instead of the whole so far");
  command
      .add_option("--queue-timeout", flags.service.queue_timeout_s,
                  "Seconds a request may wait to run (then 503); 0 is no limit")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      .add_option("--request-timeout", flags.service.request_timeout_s,
                  "Seconds a request may take, with what it has by then; 0 is no limit")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void add_engine_flags(CLI::App& command, ServeFlags& flags) {
  command
      .add_option("--max-running", flags.engine.max_running_seqs,
                  "Responses made at once; changes speed and memory, never a response")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option("--max-queued", flags.engine.max_queued,
                  "Responses that may wait; beyond, requests get 429")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option("--max-seq-len", flags.engine.max_seq_len,
                  "Longest prompt and response together, in tokens")
      ->check(CLI::Range(2, 1 << 30))
      ->capture_default_str();
  command
      .add_option("--max-batch-tokens", flags.engine.max_batch_tokens,
                  "Rows of a step: decodes first, then parts of prompts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option("--cache-gib", flags.cache_gib,
                  "Cache memory, GiB; 0 is enough for --max-running full sequences")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_flag_callback(
      "--no-prefix-cache", [&flags] { flags.engine.prefix_cache = false; },
      "Compute every prompt anew");
  command
      .add_option("--cache-dir", flags.cache_dir,
                  "Folder in which the prefix cache is kept when the server stops, for its next "
                  "start; none by default")
      ->excludes("--no-prefix-cache");
  add_kv_cache_dtype(command, flags.engine.kv_cache_dtype);
}

}  // namespace

void add_serve(CommandLine& line) {
  CLI::App* command =
      line.add("serve", "Serve a model over HTTP: OpenAI's interface, SGLang's, and a chat page");
  auto flags = std::make_shared<ServeFlags>();
  flags->service.served_name.clear();
  flags->engine.max_queued = 1024;
  add_service_flags(*command, *flags);
  add_http_flags(*command, *flags);
  add_engine_flags(*command, *flags);
  command->footer("docs/howto/serve.md shows clients; GET /openapi.json lists all endpoints.");
  command->callback([&line, flags] {
    line.action = [flags, &line] { return run_serve(*flags, line.global, line.interrupts); };
  });
}

}  // namespace tandem::cli

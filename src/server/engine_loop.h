// engine_loop.h — the engine's thread. Everybody else reaches the Engine through here: commands go
// in through a queue and run between two steps, tokens come out through one mailbox a job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "core/timing.h"
#include "engine/engine.h"
#include "server/http/message.h"
#include "server/prefix_cache_file.h"
#include "server/replaceable_model.h"

namespace tandem::server {

/// What one step did to one sample of a job.
struct Update {
  std::int64_t sample = 0;  // counts through the job's prompts: prompt 0's samples come first
  std::int32_t token = -1;  // -1: none
  float logprob = 0;
  std::vector<TokenLogprob> top_logprobs = {};
  std::optional<RequestOutput> output = {};  // with the last update of a sample, and only then
};

/// Updates of one job on their way from the engine's thread to the connection's.
class Mailbox {
 public:
  /// `notify` is called from the engine's thread when the first update since the last take() lies
  /// here.
  explicit Mailbox(std::function<void()> notify) : notify_(std::move(notify)) {}

  void push(Update update);
  [[nodiscard]] std::vector<Update> take();

 private:
  std::function<void()> notify_;
  std::mutex mutex_;  // guards updates_
  std::vector<Update> updates_;
};

enum class JobId : std::uint64_t {};

/// Some prompts, each with n samples, that are admitted and answered together.
struct Job {
  struct Prompt {
    Request request;
    std::int64_t n = 1;
    std::string rid = {};  // a label of the client's, for abort_rid()
  };
  std::vector<Prompt> prompts;
  std::shared_ptr<Mailbox> mailbox;
  /// Called on the engine's thread: without an error before the first update, else instead of any.
  std::function<void(std::optional<ApiError>)> on_admitted;
};

/// A consistent picture between two steps.
struct LoopStats {
  EngineStats engine = {};
  MemoryPlan plan = {};
  std::int64_t num_unfinished = 0;  // samples, running and waiting
  std::int64_t num_tokens = 0;      // sampled since the start
  double tokens_per_s = 0;          // sampled, over about the last second with work
  bool is_paused = false;
};

class EngineLoop {
 public:
  /// Builds the Engine on its own thread, with the prefix cache of `cache_file` if there is one; it
  /// is saved there by stop(). What `ctx` points to outlives the loop.
  /// Errors: what Engine's constructor and PrefixCacheFile::load() throw.
  EngineLoop(std::unique_ptr<Model> model, const ExecCtx& ctx, const EngineOptions& options,
             std::unique_ptr<PrefixCacheFile> cache_file = nullptr);
  ~EngineLoop() { stop(); }
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  // All of these may be called from any thread; callbacks run on the engine's.
  JobId submit(Job job);
  void abort(JobId id);
  /// One sample: what it has so far is its output.
  void abort(JobId id, std::int64_t sample);
  /// Samples of prompts with this label, or whose label begins with it. Unknown ones are no error.
  void abort_rid(std::string rid, bool is_prefix, std::function<void()> done = {});
  void abort_all(std::function<void()> done = {});
  /// No step runs from `done` until resume(). Jobs may be submitted meanwhile.
  /// `aborts`: unfinished ones end first.
  void pause(PauseMode mode, bool aborts, std::function<void()> done);
  void resume(std::function<void()> done);
  /// `done` gets why nothing was flushed, or success.
  void flush_cache(std::function<void(Status)> done);
  using LoadModel = std::function<Expected<std::unique_ptr<Model>>()>;
  /// Between two steps, `load` included: the old weights are gone afterwards, unfinished samples go
  /// on under the new ones. `label` names them; empty: their number. `done` gets a sentence when
  /// they cannot be had or do not fit, and the old ones stay.
  void replace_model(LoadModel load, std::string label, std::function<void(Status)> done);
  void set_weight_label(std::string label, std::function<void()> done);
  /// Ends what is unfinished with an error and the thread with it; later commands are dropped.
  void stop();
  /// New jobs are refused with 503 from now on.
  void begin_drain() { is_draining_ = true; }
  [[nodiscard]] bool is_draining() const { return is_draining_; }

  [[nodiscard]] LoopStats stats() const;
  /// Seconds that the present step takes already; 0 between steps.
  [[nodiscard]] double seconds_in_step() const;
  [[nodiscard]] std::string weight_label() const;
  [[nodiscard]] std::string weight_label(std::int64_t version) const;
  [[nodiscard]] const EngineOptions& options() const { return options_; }
  [[nodiscard]] std::int64_t vocab_size() const { return vocab_size_; }
  /// Whether a model may be loaded beside running steps. A device with memory of its own is the
  /// engine's thread's alone: there replace_model() is the place.
  [[nodiscard]] bool can_load_beside() const { return ctx_.device->host_visible(); }
  /// Every invariant, on the engine's thread; returns when it held. For tests.
  void check_integrity();

 private:
  struct Entry {  // an unfinished sample
    JobId job{};
    std::int64_t sample = 0;
    std::string rid;
  };
  struct OpenJob {
    std::shared_ptr<Mailbox> mailbox;
    std::unordered_map<std::int64_t, RequestId> samples;  // unfinished
  };

  void run();
  void post(std::function<void()> command);
  void step();
  void admit(JobId id, Job job);
  [[nodiscard]] std::optional<ApiError> try_admit(JobId id, const Job& job);
  void deliver(RequestId id, Update update);
  void abort_sample(RequestId id, const std::string& error);
  void abort_matching(const std::function<bool(const Entry&)>& matches, const std::string& error);
  void abort_everything(const std::string& error);
  void publish_stats();

  ReplaceableModel model_;
  std::int64_t vocab_size_;
  ExecCtx ctx_;
  EngineOptions options_;
  std::atomic<std::uint64_t> next_job_{1};
  std::atomic<bool> is_draining_{false};
  std::atomic<std::int64_t> step_began_ns_{0};  // of the steady clock; 0: no step runs

  // The engine's thread only.
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<PrefixCacheFile> cache_file_;  // null: the cache ends with the engine
  std::unordered_map<RequestId, Entry> entries_;
  std::unordered_map<JobId, OpenJob> jobs_;
  std::int64_t num_tokens_ = 0;
  Clock::time_point window_start_ = Clock::now();
  std::int64_t window_tokens_ = 0;
  double tokens_per_s_ = 0;

  mutable std::mutex mutex_;  // guards the four below
  std::vector<std::function<void()>> commands_;
  bool stop_ = false;
  LoopStats stats_;
  std::map<std::int64_t, std::string> labels_;  // of weight versions, the last one is the present
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace tandem::server

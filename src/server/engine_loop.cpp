#include "server/engine_loop.h"

#include <exception>
#include <future>
#include <utility>

#include "core/checked_cast.h"
#include "core/log.h"

namespace tandem::server {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

/// What a refusal of Engine::submit_group() is to a client.
ApiError refused(const Failure& failure) {
  if (failure.kind == Failure::Kind::kOverloaded) {
    return {429, "queue_full", failure.message, "", 1};
  }
  return {400, "invalid_request_error", failure.message};
}

}  // namespace

void Mailbox::push(Update update) {
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = updates_.empty();
    updates_.push_back(std::move(update));
  }
  if (is_first) {
    notify_();
  }
}

std::vector<Update> Mailbox::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(updates_, {});
}

EngineLoop::EngineLoop(std::unique_ptr<Model> model, const ExecCtx& ctx,
                       const EngineOptions& options, std::unique_ptr<PrefixCacheFile> cache_file)
    : model_(std::move(model)),
      vocab_size_(model_.vocab_size()),
      ctx_(ctx),
      options_(options),
      cache_file_(std::move(cache_file)) {
  labels_[options.first_weight_version] = "default";
  std::promise<void> built;
  std::future<void> is_built = built.get_future();
  thread_ = std::thread([this, &built] {
    try {
      engine_ = std::make_unique<Engine>(model_, ctx_, options_);
      if (cache_file_) {
        cache_file_->load(*engine_);
      }
      publish_stats();
    } catch (...) {
      built.set_exception(std::current_exception());
      return;
    }
    built.set_value();
    run();
  });
  try {
    is_built.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

void EngineLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
  // They hold exchanges, which must not outlive the HTTP server.
  std::vector<std::function<void()>> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(commands_);
  }
}

void EngineLoop::post(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) {
      return;
    }
    commands_.push_back(std::move(command));
  }
  wake_.notify_one();
}

void EngineLoop::run() {
  for (;;) {
    std::vector<std::function<void()>> commands;
    bool is_last = false;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !commands_.empty() || engine_->has_work(); });
      commands = std::exchange(commands_, {});
      is_last = stop_;
    }
    for (const auto& command : commands) {
      command();
    }
    if (is_last) {
      break;
    }
    if (engine_->has_work()) {
      step();
    }
    publish_stats();
  }
  abort_everything("the server is shutting down");
  if (cache_file_) {
    cache_file_->save(*engine_);
    cache_file_.reset();  // another server may have the folder
  }
  engine_.reset();
}

void EngineLoop::step() {
  step_began_ns_ = now_ns();
  std::span<const StepEvent> events;
  try {
    events = engine_->step();
  } catch (const std::exception& error) {
    step_began_ns_ = 0;
    // The engine would repeat the step, and fail again: it keeps no list of whose rows were in it.
    log_warn("engine.step_failed", "error={} unfinished={}", error.what(), entries_.size());
    abort_everything(fmt::format("a step of the model failed: {}", error.what()));
    return;
  }
  step_began_ns_ = 0;
  for (const StepEvent& event : events) {
    Update update;
    update.token = event.token;
    update.logprob = event.logprob;
    update.top_logprobs.assign(event.top_logprobs.begin(), event.top_logprobs.end());
    if (event.token >= 0) {
      ++num_tokens_;
      ++window_tokens_;
    }
    if (event.finish) {
      update.output = engine_->take_output(event.id).value_or_throw();
    }
    deliver(event.id, std::move(update));
  }
}

void EngineLoop::deliver(RequestId id, Update update) {
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) {
    return;
  }
  const auto job = jobs_.find(entry->second.job);
  TDM_CHECK(job != jobs_.end());
  update.sample = entry->second.sample;
  const bool is_last = update.output.has_value();
  const std::shared_ptr<Mailbox> mailbox = job->second.mailbox;
  if (is_last) {
    job->second.samples.erase(entry->second.sample);
    if (job->second.samples.empty()) {
      jobs_.erase(job);
    }
    entries_.erase(entry);
  }
  mailbox->push(std::move(update));
}

JobId EngineLoop::submit(Job job) {
  const JobId id{next_job_.fetch_add(1)};
  // std::function wants to be copied; the job is moved once, when it runs.
  auto shared = std::make_shared<Job>(std::move(job));
  post([this, id, shared] { admit(id, std::move(*shared)); });
  return id;
}

void EngineLoop::admit(JobId id, Job job) {
  std::optional<ApiError> error = try_admit(id, job);
  if (error) {
    jobs_.erase(id);
  }
  job.on_admitted(std::move(error));
}

std::optional<ApiError> EngineLoop::try_admit(JobId id, const Job& job) {
  if (is_draining_) {
    return ApiError{503, "shutting_down", "the server is shutting down"};
  }
  OpenJob& open = jobs_[id];
  open.mailbox = job.mailbox;
  std::vector<RequestId> submitted;
  for (const Job::Prompt& prompt : job.prompts) {
    const auto ids = engine_->submit_group(prompt.request, prompt.n);
    if (!ids) {
      for (const RequestId sample : submitted) {
        engine_->abort(sample);
        (void)engine_->take_output(sample);
        entries_.erase(sample);
      }
      return refused(ids.failure());
    }
    for (const RequestId sample : *ids) {
      const std::int64_t index = isize(submitted);
      entries_[sample] = {id, index, prompt.rid};
      open.samples[index] = sample;
      submitted.push_back(sample);
    }
  }
  return std::nullopt;
}

void EngineLoop::abort_sample(RequestId id, const std::string& error) {
  engine_->abort(id);
  Update update;
  update.output = engine_->take_output(id).value_or_throw();
  if (!error.empty()) {
    update.output->finish_reason = FinishReason::kError;
    update.output->error = error;
  }
  deliver(id, std::move(update));
}

void EngineLoop::abort_matching(const std::function<bool(const Entry&)>& matches,
                                const std::string& error) {
  std::vector<RequestId> ids;
  for (const auto& [id, entry] : entries_) {
    if (matches(entry)) {
      ids.push_back(id);
    }
  }
  for (const RequestId id : ids) {
    abort_sample(id, error);
  }
}

void EngineLoop::abort_everything(const std::string& error) {
  abort_matching([](const Entry&) { return true; }, error);
}

void EngineLoop::abort(JobId id) {
  post([this, id] {
    if (const auto job = jobs_.find(id); job != jobs_.end()) {
      const auto samples = job->second.samples;
      for (const auto& [sample, request] : samples) {
        abort_sample(request, "");
      }
    }
  });
}

void EngineLoop::abort(JobId id, std::int64_t sample) {
  post([this, id, sample] {
    const auto job = jobs_.find(id);
    if (job == jobs_.end()) {
      return;
    }
    if (const auto found = job->second.samples.find(sample); found != job->second.samples.end()) {
      abort_sample(RequestId(found->second), "");
    }
  });
}

void EngineLoop::abort_rid(std::string rid, bool is_prefix, std::function<void()> done) {
  post([this, rid = std::move(rid), is_prefix, done = std::move(done)] {
    abort_matching(
        [&](const Entry& entry) {
          return is_prefix ? entry.rid.starts_with(rid) : entry.rid == rid;
        },
        "");
    if (done) {
      done();
    }
  });
}

void EngineLoop::abort_all(std::function<void()> done) {
  abort_rid("", true, std::move(done));
}

void EngineLoop::pause(PauseMode mode, bool aborts, std::function<void()> done) {
  post([this, mode, aborts, done = std::move(done)] {
    if (aborts) {
      abort_everything("");
    }
    engine_->pause(mode);
    publish_stats();
    done();
  });
}

void EngineLoop::resume(std::function<void()> done) {
  post([this, done = std::move(done)] {
    engine_->resume();
    publish_stats();
    done();
  });
}

void EngineLoop::flush_cache(std::function<void(Status)> done) {
  post([this, done = std::move(done)] {
    Status status = engine_->flush_cache();
    publish_stats();
    done(std::move(status));
  });
}

void EngineLoop::replace_model(LoadModel load, std::string label,
                               std::function<void(Status)> done) {
  post([this, load = std::move(load), label = std::move(label), done = std::move(done)] {
    Expected<std::unique_ptr<Model>> model = load();
    Status status = model ? model_.replace(*std::move(model)) : Status(model.failure());
    if (status) {
      engine_->on_weights_moved();
      if (cache_file_) {
        cache_file_->on_weights_changed();
      }
      const std::int64_t version = engine_->weight_version();
      const std::lock_guard lock(mutex_);
      labels_[version] = label.empty() ? std::to_string(version) : label;
    }
    done(std::move(status));
  });
}

void EngineLoop::set_weight_label(std::string label, std::function<void()> done) {
  post([this, label = std::move(label), done = std::move(done)] {
    {
      const std::lock_guard lock(mutex_);
      labels_[engine_->weight_version()] = label;
    }
    done();
  });
}

void EngineLoop::publish_stats() {
  const double elapsed = seconds_since(window_start_);
  if (elapsed >= 1) {
    tokens_per_s_ = static_cast<double>(window_tokens_) / elapsed;
    window_start_ = Clock::now();
    window_tokens_ = 0;
  }
  LoopStats stats;
  stats.engine = engine_->stats();
  stats.plan = engine_->memory_plan();
  stats.num_unfinished = isize(entries_);
  stats.num_tokens = num_tokens_;
  stats.tokens_per_s = entries_.empty() ? 0 : tokens_per_s_;
  stats.is_paused = engine_->paused();
  const std::lock_guard lock(mutex_);
  stats_ = stats;
}

LoopStats EngineLoop::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

double EngineLoop::seconds_in_step() const {
  const std::int64_t began = step_began_ns_;
  return began == 0 ? 0 : 1e-9 * static_cast<double>(now_ns() - began);
}

std::string EngineLoop::weight_label() const {
  const std::lock_guard lock(mutex_);
  return labels_.rbegin()->second;
}

std::string EngineLoop::weight_label(std::int64_t version) const {
  const std::lock_guard lock(mutex_);
  const auto found = labels_.find(version);
  return found == labels_.end() ? labels_.rbegin()->second : found->second;
}

void EngineLoop::check_integrity() {
  std::promise<void> checked;
  post([this, &checked] {
    engine_->check_integrity();
    std::size_t num_samples = 0;
    for (const auto& [id, job] : jobs_) {
      TDM_CHECK(!job.samples.empty());
      num_samples += job.samples.size();
    }
    TDM_CHECK(num_samples == entries_.size(), num_samples, entries_.size());
    publish_stats();
    checked.set_value();
  });
  checked.get_future().wait();
}

}  // namespace tandem::server

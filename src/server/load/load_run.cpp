#include "server/load/load_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"
#include "io/json_strict.h"
#include "server/load/client_connection.h"
#include "server/load/event_stream.h"

namespace tandem::load {
namespace {

namespace asio = boost::asio;

constexpr std::size_t kMaxErrorBytes = 64 * 1024;
constexpr auto kTick = std::chrono::milliseconds(100);

/// A conversation that has begun.
struct Talk {
  const Conversation* conversation;
  std::size_t first_record;  // of its first turn
  std::size_t turn = 0;
  Prompt history;
  std::shared_ptr<ClientConnection> connection;
};

/// One request under way.
struct Exchange {
  Exchange(Endpoint endpoint, RequestRecord& out) : reader(endpoint), record(out) {}

  EventStream events;
  AnswerReader reader;
  RequestRecord& record;
  std::string error_body;
};

bool is_event_stream(const HttpHead& head) {
  return head.content_type.starts_with("text/event-stream");
}

class Run {
 public:
  Run(const RunOptions& options, const Workload& workload, const std::atomic<bool>& stop,
      const std::function<void(const RunProgress&)>& on_progress, Server server)
      : options_(options),
        workload_(workload),
        stop_(stop),
        on_progress_(on_progress),
        server_(std::move(server)),
        arrival_timer_(context_),
        tick_timer_(context_),
        arrivals_(arrival_times(options, workload)),
        order_(arrivals_.size()) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::ranges::stable_sort(order_, {}, [&](std::size_t c) { return arrivals_[c]; });
    for (const Conversation& conversation : workload.conversations) {
      first_records_.push_back(records_.size());
      records_.resize(records_.size() + conversation.turns.size());
    }
    for (RequestRecord& record : records_) {
      record.was_sent = false;
      record.error_kind = "not_sent";
      record.error = "the run was stopped before";
    }
  }

  std::vector<RequestRecord> run() {
    start_ = Clock::now();
    tick();
    arrive();
    context_.run();
    on_progress_(progress_);
    return std::move(records_);
  }

 private:
  [[nodiscard]] double now_s() const { return seconds_since(start_); }

  void tick() {
    on_progress_(progress_);
    if (stop_) {
      stop_now();
      return;
    }
    tick_timer_.expires_after(kTick);
    tick_timer_.async_wait([this](boost::system::error_code error) {
      if (!error) {
        tick();
      }
    });
  }

  void stop_now() {
    is_stopped_ = true;
    waiting_.clear();
    arrival_timer_.cancel();
    const auto live = live_;  // cancelling takes them out
    for (const auto& talk : live) {
      talk->connection->cancel();
    }
  }

  /// Takes in every conversation whose time has come, then waits for the next.
  void arrive() {
    while (num_arrived_ < order_.size() && !is_stopped_) {
      const double at_s = arrivals_[order_[num_arrived_]];
      if (at_s > now_s()) {
        arrival_timer_.expires_at(start_ + std::chrono::duration_cast<Clock::duration>(
                                               std::chrono::duration<double>(at_s)));
        arrival_timer_.async_wait([this](boost::system::error_code error) {
          if (!error) {
            arrive();
          }
        });
        break;
      }
      waiting_.push_back(order_[num_arrived_++]);
    }
    begin_waiting();
  }

  void begin_waiting() {
    while (!waiting_.empty() &&
           (options_.max_concurrency == 0 || isize(live_) < options_.max_concurrency)) {
      const std::size_t c = waiting_.front();
      waiting_.pop_front();
      auto talk = std::make_shared<Talk>();
      talk->conversation = &workload_.conversations[c];
      talk->first_record = first_records_[c];
      if (idle_.empty()) {
        talk->connection =
            std::make_shared<ClientConnection>(context_, server_, options_.timeout_s);
      } else {
        talk->connection = std::move(idle_.back());
        idle_.pop_back();
      }
      live_.insert(talk);
      ask(talk);
    }
  }

  void ask(const std::shared_ptr<Talk>& talk) {
    const Turn& turn = talk->conversation->turns[talk->turn];
    if (talk->conversation->keeps_history) {
      append(talk->history, turn.prompt);
    } else {
      talk->history = turn.prompt;
    }
    RequestRecord& record = records_[talk->first_record + talk->turn];
    record = {};
    record.prompt_tokens = isize(talk->history.ids);
    HttpCall call{"POST", std::string(path_of(options_.form.endpoint)),
                  request_body(options_.form, talk->history, turn.output_len), options_.api_key};
    auto exchange = std::make_shared<Exchange>(options_.form.endpoint, record);
    ++progress_.running;
    record.start_s = now_s();
    record.end_s = record.start_s;
    talk->connection->send(
        std::move(call),
        [this, exchange](const HttpHead& head, std::string_view bytes) {
          take_bytes(*exchange, head, bytes);
        },
        [this, exchange, talk](const HttpHead& head, const std::optional<AnswerProblem>& problem) {
          end(talk, *exchange, head, problem);
        });
  }

  void take_bytes(Exchange& exchange, const HttpHead& head, std::string_view bytes) const {
    const double at_s = now_s();
    if (head.status != 200 || !is_event_stream(head)) {
      const std::size_t room =
          kMaxErrorBytes - std::min(kMaxErrorBytes, exchange.error_body.size());
      exchange.error_body += bytes.substr(0, room);
      return;
    }
    exchange.events.push(bytes, [&](std::string_view data) {
      if (data == "[DONE]") {
        return;
      }
      exchange.record.end_s = at_s;
      if (const double num_tokens = exchange.reader.push(data); num_tokens > 0) {
        exchange.record.events.push_back({at_s, num_tokens});
      }
    });
  }

  /// Why the answer does not count; nullopt: it does.
  [[nodiscard]] static std::optional<AnswerProblem> problem_of(
      const Exchange& exchange, const HttpHead& head, const std::optional<AnswerProblem>& problem) {
    if (head.status != 0 && head.status != 200) {
      return AnswerProblem{
          fmt::format("http_{}", head.status),
          fmt::format("HTTP {}: {}", head.status, error_text(exchange.error_body))};
    }
    if (problem) {
      return problem;
    }
    if (!is_event_stream(head)) {
      return AnswerProblem{"not_a_stream",
                           fmt::format("expected text/event-stream, the server sent '{}': {}",
                                       head.content_type, error_text(exchange.error_body))};
    }
    if (exchange.reader.problem()) {
      return exchange.reader.problem();
    }
    if (!exchange.reader.is_finished()) {
      return AnswerProblem{"incomplete_answer", "the stream ended without a finish reason"};
    }
    return std::nullopt;
  }

  void end(const std::shared_ptr<Talk>& talk, Exchange& exchange, const HttpHead& head,
           const std::optional<AnswerProblem>& io_problem) {
    RequestRecord& record = exchange.record;
    const AnswerReader& reader = exchange.reader;
    record.prompt_tokens = reader.prompt_tokens().value_or(record.prompt_tokens);
    record.output_tokens = reader.output_tokens().value_or(isize(record.events));
    record.cached_tokens = reader.cached_tokens();
    const auto problem = problem_of(exchange, head, io_problem);
    --progress_.running;
    ++progress_.finished;
    if (problem) {
      record.error_kind = problem->kind;
      record.error = problem->text;
      record.end_s = now_s();
      ++progress_.failed;
    } else if (talk->conversation->keeps_history) {
      append_reply(talk->history, options_.form.endpoint, reader.text(), reader.ids(),
                   record.output_tokens, options_.vocab_size);
    }
    const bool has_more = ++talk->turn < talk->conversation->turns.size();
    if (has_more && !problem && !is_stopped_) {
      ask(talk);
      return;
    }
    if (has_more && !is_stopped_) {
      skip_rest(*talk);
    }
    live_.erase(talk);
    idle_.push_back(std::move(talk->connection));
    begin_waiting();
    if (live_.empty() && waiting_.empty() && (is_stopped_ || num_arrived_ == order_.size())) {
      tick_timer_.cancel();
      context_.stop();
    }
  }

  /// Turns that cannot be asked since one before them failed.
  void skip_rest(const Talk& talk) {
    for (std::size_t t = talk.turn; t < talk.conversation->turns.size(); ++t) {
      RequestRecord& record = records_[talk.first_record + t];
      record.error_kind = "skipped_turn";
      record.error = "a turn before it failed";
      ++progress_.finished;
      ++progress_.failed;
    }
  }

  const RunOptions& options_;
  const Workload& workload_;
  const std::atomic<bool>& stop_;
  const std::function<void(const RunProgress&)>& on_progress_;
  Server server_;
  asio::io_context context_{1};
  asio::steady_timer arrival_timer_;
  asio::steady_timer tick_timer_;
  std::vector<double> arrivals_;     // of each conversation
  std::vector<std::size_t> order_;   // conversations by arrival
  std::size_t num_arrived_ = 0;      // of order_
  std::deque<std::size_t> waiting_;  // arrived, not begun
  std::unordered_set<std::shared_ptr<Talk>> live_;
  std::vector<std::shared_ptr<ClientConnection>> idle_;
  std::vector<std::size_t> first_records_;  // of each conversation
  std::vector<RequestRecord> records_;
  RunProgress progress_;
  Clock::time_point start_;
  bool is_stopped_ = false;
};

}  // namespace

std::vector<double> arrival_times(const RunOptions& options, const Workload& workload) {
  std::vector<double> times;
  Rng rng(mix_key({options.seed, 0xA77}));
  double at_s = 0;
  for (const Conversation& conversation : workload.conversations) {
    if (options.uses_arrivals) {
      times.push_back(conversation.arrival_s);
    } else {
      times.push_back(at_s);
      if (options.request_rate) {
        at_s += -std::log1p(-rng.uniform()) / *options.request_rate;
      }
    }
  }
  return times;
}

Expected<std::vector<RequestRecord>> run_load(
    const RunOptions& options, const Workload& workload, const std::atomic<bool>& stop,
    const std::function<void(const RunProgress&)>& on_progress) {
  auto server = resolve(options.target);
  if (!server) {
    return server.failure();
  }
  return Run(options, workload, stop, on_progress, *std::move(server)).run();
}

Expected<std::string> first_model(const RunOptions& options) {
  const auto server = resolve(options.target);
  if (!server) {
    return server.failure();
  }
  const auto reply = call(*server, {"GET", "/v1/models", "", options.api_key}, options.timeout_s);
  if (!reply) {
    return reply.failure();
  }
  const auto json = detail::parse_json_strict(reply->body, 64);
  const auto pointer = nlohmann::json::json_pointer("/data/0/id");
  if (reply->status == 200 && json && json->contains(pointer) && (*json)[pointer].is_string()) {
    return (*json)[pointer].get<std::string>();
  }
  return fail("{}/v1/models answers HTTP {}: {}: expected a list of models; or give --model NAME",
              options.target.url(), reply->status, error_text(reply->body));
}

Status flush_cache(const RunOptions& options) {
  const auto server = resolve(options.target);
  if (!server) {
    return server.failure();
  }
  const auto reply =
      call(*server, {"POST", "/flush_cache?timeout=10", "", options.api_key}, options.timeout_s);
  if (!reply) {
    return reply.failure();
  }
  if (reply->status != 200) {
    return fail("--flush-cache: {}/flush_cache answers HTTP {}: {}", options.target.url(),
                reply->status, error_text(reply->body));
  }
  return Ok{};
}

}  // namespace tandem::load

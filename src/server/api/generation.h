// generation.h — one generating request from admission to its last byte. What differs between the
// endpoints, the JSON, is behind ResponseForm.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/api/sample_text.h"
#include "server/api/service.h"
#include "server/http/exchange.h"

namespace tandem::server {

struct PromptPlan {
  std::vector<std::int32_t> ids;
  Sampling sampling;
  std::int64_t max_new_tokens = 0;  // 0: only the prompt is wanted (scored, echoed)
  std::string rid = {};             // the client's label
  bool is_chat = false;             // the response has channels
  bool thinking = false;            // and begins in the reasoning one
  bool single_call = false;         // it ends with its first complete tool call
};

struct GenerationPlan {
  std::vector<PromptPlan> prompts;
  bool stream = false;
};

/// One choice.
struct Sample {
  Sample(std::int64_t sample_index, std::size_t prompt_index, SampleText sample_text)
      : index(sample_index), prompt(prompt_index), text(std::move(sample_text)) {}

  std::int64_t index;
  std::size_t prompt;
  SampleText text;
  std::vector<TokenEntry> tokens = {};  // every one, also those without text
  Delta total = {};                     // the sum of its deltas
  bool is_cut = false;                  // ended by us, though the engine may not know yet
  bool is_finished = false;
  std::string finish_reason = {};  // "stop", "length", "abort"; set when finished
  std::optional<std::int32_t> stop_token = {};
  RequestOutput output = {};
};

/// The samples and what they came from, for a form.
struct GenerationState {
  const Service& service;
  GenerationPlan plan;
  std::vector<Sample> samples;
  std::string id;        // of the answer
  std::int64_t created;  // Unix seconds
  double seconds = 0;    // since the request came

  [[nodiscard]] const PromptPlan& prompt_of(const Sample& sample) const {
    return plan.prompts[sample.prompt];
  }
};

/// Writes answers. Events are lines of JSON.
class ResponseForm {
 public:
  using Send = std::function<void(const std::string& event)>;
  virtual ~ResponseForm() = default;

  [[nodiscard]] virtual std::string whole(const GenerationState& state) = 0;
  virtual void begin(const GenerationState&, const Send&) {}
  /// `delta` may be empty; it is in sample.total already. A finished sample comes once as such, and
  /// then no more.
  virtual void advance(const GenerationState& state, const Sample& sample, const Delta& delta,
                       const Send& send) = 0;
  virtual void end(const GenerationState&, const Send&) {}
};

/// Lives as long as the request's exchange; runs on its strand.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(Service& service, std::shared_ptr<Exchange> exchange,
             std::unique_ptr<ResponseForm> form, GenerationPlan plan, std::string id);

  /// Compiles grammars, submits, and answers; any error is answered as well.
  void start();

 private:
  using Clock = std::chrono::steady_clock;
  void prepare_grammars(std::size_t next_prompt);
  void submit();
  [[nodiscard]] Job make_job();
  void on_admitted(const std::optional<ApiError>& error);
  void on_mail();
  void handle(Update update);
  void take_token(Sample& sample, const Update& update, Delta& delta);
  void finish_sample(Sample& sample, RequestOutput output, Delta& delta);
  [[nodiscard]] bool is_stop_token(const Sample& sample, std::int32_t id) const;
  void answer();
  void fail_with(const ApiError& error);
  void record(const Sample& sample);
  /// Counts the samples that did not finish.
  void record_lost(const char* finish_reason);
  void on_client_gone();

  Service& service_;
  std::shared_ptr<Exchange> exchange_;
  std::unique_ptr<ResponseForm> form_;
  GenerationState state_;
  ResponseForm::Send send_;
  std::vector<std::shared_ptr<const TokenConstraint>> constraints_;  // by prompt; null: none
  std::shared_ptr<Mailbox> mailbox_;
  std::optional<JobId> job_;
  Clock::time_point start_ = Clock::now();
  std::size_t num_finished_ = 0;
  bool is_over_ = false;
};

/// For on-the-wire counters of all forms.
struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t completion_tokens = 0;
  std::int64_t cached_tokens = 0;
  std::int64_t reasoning_tokens = 0;
};
[[nodiscard]] Usage usage_of(const GenerationState& state);
[[nodiscard]] OrderedJson usage_json(const GenerationState& state);
/// The label of the weights that sampled a sample's last token; of the present ones if it has none.
[[nodiscard]] std::string weight_version_of(const GenerationState& state, const Sample& sample);

}  // namespace tandem::server

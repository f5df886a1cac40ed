#include "server/load/workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/checked_cast.h"
#include "core/mmap_file.h"
#include "core/rng.h"

namespace tandem::load {
namespace {

constexpr std::int64_t kWarmUpTokens = 16;

// Streams of random numbers under one seed.
enum Stream : std::uint64_t { kLengths, kIds, kOrder, kReplies, kWarmUp };

// Short, frequent words: about one token each in usual vocabularies.
constexpr std::array<std::string_view, 32> kWords = {
    "the",  "of",    "and", "to",   "in",  "is",  "that", "for", "it",   "as",   "was",
    "with", "be",    "by",  "on",   "not", "he",  "this", "are", "or",   "his",  "from",
    "at",   "which", "but", "have", "an",  "had", "they", "you", "were", "their"};

/// Makes ids and, for chat, the words that stand for them.
class PromptMaker {
 public:
  PromptMaker(const WorkloadOptions& options, std::uint64_t stream)
      : options_(options), rng_(mix_key({options.seed, stream})) {}

  std::vector<std::int32_t> ids(std::int64_t count) {
    std::vector<std::int32_t> out(usize(count));
    for (std::int32_t& id : out) {
      id = static_cast<std::int32_t>(rng_.below(static_cast<std::uint64_t>(options_.vocab_size)));
    }
    return out;
  }

  /// Of a system part, which may be empty, and a user's.
  [[nodiscard]] Prompt prompt(const std::vector<std::int32_t>& system,
                              const std::vector<std::int32_t>& user) const {
    Prompt prompt;
    if (options_.endpoint == Endpoint::kChat) {
      if (!system.empty()) {
        prompt.messages.push_back({"system", words(system)});
      }
      prompt.messages.push_back({"user", words(user)});
    } else {
      prompt.ids = system;
      prompt.ids.insert(prompt.ids.end(), user.begin(), user.end());
    }
    return prompt;
  }

 private:
  static std::string words(const std::vector<std::int32_t>& ids) {
    std::string text;
    for (const std::int32_t id : ids) {
      text += text.empty() ? "" : " ";
      text += kWords[static_cast<std::size_t>(id) % kWords.size()];
    }
    return text;
  }

  const WorkloadOptions& options_;
  Rng rng_;
};

class LengthMaker {
 public:
  explicit LengthMaker(const WorkloadOptions& options)
      : options_(options), rng_(mix_key({options.seed, kLengths})) {}

  /// Uniform in [ratio * most, most], at least 1.
  std::int64_t uniform(std::int64_t most) {
    const auto least =
        std::max<std::int64_t>(1, std::llround(options_.range_ratio * static_cast<double>(most)));
    return least +
           static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(most - least + 1)));
  }
  /// Log-normal around `mean` before it is cut to [1, 8 * mean].
  std::int64_t log_normal(std::int64_t mean, double sigma) {
    const double mu = std::log(static_cast<double>(mean)) - sigma * sigma / 2;
    return std::clamp<std::int64_t>(std::llround(std::exp(mu + sigma * rng_.normal())), 1,
                                    8 * mean);
  }

 private:
  const WorkloadOptions& options_;
  Rng rng_;
};

Workload random_ids(const WorkloadOptions& options) {
  PromptMaker maker(options, kIds);
  LengthMaker lengths(options);
  Workload workload;
  for (std::int64_t i = 0; i < options.num_prompts; ++i) {
    const std::int64_t input = lengths.uniform(options.input_length());
    const std::int64_t output = lengths.uniform(options.output_length());
    workload.conversations.push_back({{{maker.prompt({}, maker.ids(input)), output}}});
  }
  return workload;
}

Workload sharegpt_like(const WorkloadOptions& options) {
  PromptMaker maker(options, kIds);
  LengthMaker lengths(options);
  Workload workload;
  for (std::int64_t i = 0; i < options.num_prompts; ++i) {
    const std::int64_t input = lengths.log_normal(options.input_length(), 1.2);
    const std::int64_t output = lengths.log_normal(options.output_length(), 0.9);
    workload.conversations.push_back({{{maker.prompt({}, maker.ids(input)), output}}});
  }
  return workload;
}

/// Groups in equal parts, in a shuffled order.
Workload shared_prefix(const WorkloadOptions& options) {
  PromptMaker maker(options, kIds);
  LengthMaker lengths(options);
  std::vector<std::vector<std::int32_t>> systems;
  for (std::int64_t g = 0; g < options.num_groups; ++g) {
    systems.push_back(maker.ids(options.system_length()));
  }
  Workload workload;
  for (std::int64_t i = 0; i < options.num_prompts; ++i) {
    const auto& system = systems[usize(i % options.num_groups)];
    const std::int64_t question = lengths.uniform(options.question_len);
    const std::int64_t output = lengths.uniform(options.output_length());
    workload.conversations.push_back({{{maker.prompt(system, maker.ids(question)), output}}});
  }
  Rng order(mix_key({options.seed, kOrder}));
  for (std::size_t i = workload.conversations.size(); i > 1; --i) {
    std::swap(workload.conversations[i - 1], workload.conversations[order.below(i)]);
  }
  return workload;
}

Workload multi_turn(const WorkloadOptions& options) {
  PromptMaker maker(options, kIds);
  LengthMaker lengths(options);
  Workload workload;
  for (std::int64_t left = options.num_prompts; left > 0; left -= options.turns) {
    Conversation conversation{{}, true};
    for (std::int64_t t = 0; t < std::min(left, options.turns); ++t) {
      const std::int64_t input = lengths.uniform(options.input_length());
      const std::int64_t output = lengths.uniform(options.output_length());
      conversation.turns.push_back({maker.prompt({}, maker.ids(input)), output});
    }
    workload.conversations.push_back(std::move(conversation));
  }
  return workload;
}

Status check(const WorkloadOptions& options) {
  constexpr std::int64_t kMost = 1 << 24;
  const std::array<std::pair<const char*, std::int64_t>, 7> counts = {{
      {"--num-prompts", options.num_prompts},
      {"--input-len", options.input_len.value_or(1)},
      {"--output-len", options.output_len.value_or(1)},
      {"--groups", options.num_groups},
      {"--question-len", options.question_len},
      {"--turns", options.turns},
      {"--vocab-size", options.vocab_size},
  }};
  for (const auto& [name, value] : counts) {
    if (value < 1 || value > kMost) {
      return fail("{} is {}: expected 1 to {}", name, value, kMost);
    }
  }
  if (options.system_len < 0 || options.system_len > kMost) {
    return fail("--system-len is {}: expected 0 to {}", options.system_len, kMost);
  }
  if (!(options.range_ratio >= 0 && options.range_ratio <= 1)) {
    return fail("--range-ratio is {}: expected 0 to 1", options.range_ratio);
  }
  return Ok{};
}

}  // namespace

std::int64_t WorkloadOptions::input_length() const {
  return input_len.value_or(dataset == "sharegpt-like" ? 161 : 1024);
}

std::int64_t WorkloadOptions::output_length() const {
  return output_len.value_or(dataset == "sharegpt-like" ? 338 : 128);
}

std::int64_t WorkloadOptions::system_length() const {
  return system_len > 0 ? system_len : input_length();
}

std::int64_t Workload::num_requests() const {
  std::int64_t count = 0;
  for (const Conversation& conversation : conversations) {
    count += isize(conversation.turns);
  }
  return count;
}

Expected<Workload> make_workload(const WorkloadOptions& options) {
  if (Status sound = check(options); !sound) {
    return sound.failure();
  }
  if (options.dataset != "jsonl" && !options.path.empty()) {
    return fail("--dataset-path: expected --dataset jsonl beside it");
  }
  if (options.dataset == "random-ids") {
    return random_ids(options);
  }
  if (options.dataset == "sharegpt-like") {
    return sharegpt_like(options);
  }
  if (options.dataset == "shared-prefix") {
    return shared_prefix(options);
  }
  if (options.dataset == "multi-turn") {
    return multi_turn(options);
  }
  if (options.dataset != "jsonl") {
    return fail(
        "--dataset '{}': expected random-ids, shared-prefix, multi-turn, sharegpt-like or jsonl",
        options.dataset);
  }
  if (options.path.empty()) {
    return fail("--dataset jsonl: expected --dataset-path FILE");
  }
  const auto file = MmapFile::open(options.path);
  if (!file) {
    return file.failure();
  }
  const auto bytes = file->bytes();
  return parse_workload(options.path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                        options);
}

Turn warm_up_turn(const WorkloadOptions& options, const Workload& workload) {
  Turn turn = workload.conversations.front().turns.front();
  turn.output_len = std::min(turn.output_len, kWarmUpTokens);
  if (options.dataset != "jsonl") {
    PromptMaker maker(options, kWarmUp);
    turn.prompt = maker.prompt({}, maker.ids(options.input_length()));
  }
  return turn;
}

void append(Prompt& history, const Prompt& turn) {
  history.ids.insert(history.ids.end(), turn.ids.begin(), turn.ids.end());
  history.text += turn.text;
  history.messages.insert(history.messages.end(), turn.messages.begin(), turn.messages.end());
}

void append_reply(Prompt& history, Endpoint endpoint, std::string_view reply_text,
                  const std::vector<std::int32_t>& reply_ids, std::int64_t reply_len,
                  std::int64_t vocab_size) {
  if (endpoint == Endpoint::kChat) {
    history.messages.push_back({"assistant", std::string(reply_text)});
  } else if (!reply_ids.empty()) {
    history.ids.insert(history.ids.end(), reply_ids.begin(), reply_ids.end());
  } else {
    Rng rng(mix_key({history.ids.size(), kReplies}));
    for (std::int64_t i = 0; i < reply_len; ++i) {
      history.ids.push_back(
          static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(vocab_size))));
    }
  }
}

}  // namespace tandem::load

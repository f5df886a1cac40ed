// tandem generate — continuations of many prompts in one batch.
#include <chrono>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/response_reader.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "io/jsonl.h"
#include "train/demonstrations.h"

namespace tandem::cli {
namespace {

struct GenerateFlags {
  std::string dir;
  std::vector<std::string> prompts;
  std::string prompt_file;
  std::int64_t limit = 0;
  bool raw = false;
  SamplingFlags sampling;
  std::int64_t n = 1;
  std::int64_t max_running_seqs = 32;
  std::optional<LatentFormat> kv_cache_dtype = {};
  bool logprobs = false;
  bool json = false;
};

struct Prompt {
  std::string text;
  std::vector<std::int32_t> ids;
};

/// One response and where it belongs.
struct Job {
  std::size_t prompt = 0;
  std::int64_t sample = 0;
  ResponseReader reader;
  RequestOutput output;
};

Expected<std::vector<Prompt>> read_prompts(const GenerateFlags& flags, const Tokenizer& tokenizer) {
  std::vector<Prompt> prompts;
  for (const std::string& text : flags.prompts) {
    prompts.push_back({text, {}});
  }
  if (!flags.prompt_file.empty()) {
    auto records = load_jsonl(flags.prompt_file, {});
    if (!records) {
      return records.failure();
    }
    for (PromptRecord& record : *records) {
      if (flags.limit == 0 || isize(prompts) < flags.limit) {
        prompts.push_back({std::move(record.prompt), {}});
      }
    }
    if (prompts.empty()) {
      return fail("{}: expected at least one record", flags.prompt_file);
    }
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Prompt& prompt = prompts[i];
    if (flags.raw) {
      prompt.ids = tokenizer.encode(prompt.text);
    } else {
      auto ids = encode_prompt(tokenizer, prompt.text);
      if (!ids) {
        return fail("prompt {}: {}", i + 1, ids.message());
      }
      prompt.ids = *std::move(ids);
    }
    if (prompt.ids.empty()) {
      return fail("prompt {}: expected at least one token", i + 1);
    }
  }
  return prompts;
}

/// Draws depend on the prompt's own tokens, not on its place among others: alone or in company, a
/// prompt gets the same response.
std::uint64_t sequence_id(const Prompt& prompt) {
  std::uint64_t key = 0;
  for (const std::int32_t id : prompt.ids) {
    key = mix_key({key, static_cast<std::uint64_t>(id)});
  }
  return key;
}

EngineOptions engine_options(const GenerateFlags& flags, const std::vector<Prompt>& prompts,
                             const Tokenizer& tokenizer) {
  std::int64_t longest = 0;
  for (const Prompt& prompt : prompts) {
    longest = std::max(longest, isize(prompt.ids));
  }
  EngineOptions options;
  options.max_seq_len = longest + flags.sampling.max_new_tokens;
  options.max_running_seqs = std::min(flags.max_running_seqs, isize(prompts) * flags.n);
  options.kv_cache_dtype = flags.kv_cache_dtype;
  options.eos_ids.assign(tokenizer.stop_ids().begin(), tokenizer.stop_ids().end());
  return options;
}

std::string json_line(const Job& job, const Prompt& prompt, bool logprobs) {
  nlohmann::ordered_json line;
  line["prompt_index"] = job.prompt;
  line["sample_index"] = job.sample;
  line["prompt"] = prompt.text;
  line["text"] = job.reader.content();
  line["finish_reason"] = finish_reason_name(job.output.finish_reason);
  line["num_prompt_tokens"] = prompt.ids.size();
  line["tokens"] = job.output.tokens;
  if (logprobs) {
    line["logprobs"] = job.output.logprobs;
  }
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

void print_logprobs(const Job& job, const Tokenizer& tokenizer) {
  for (std::size_t i = 0; i < job.output.logprobs.size(); ++i) {
    const nlohmann::json text = std::string(tokenizer.token_bytes(job.output.tokens[i]));
    print_out("{:>12.6f} {:>7} {}\n", job.output.logprobs[i], job.output.tokens[i],
              text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
}

/// Runs the jobs of one command.
class Generation {
 public:
  Generation(Engine& engine, const GenerateFlags& flags, const std::vector<Prompt>& prompts,
             const Tokenizer& tokenizer)
      : engine_(engine),
        flags_(flags),
        prompts_(prompts),
        tokenizer_(tokenizer),
        streams_(prompts.size() == 1 && flags.n == 1 && !flags.json) {}

  Status submit() {
    for (std::size_t p = 0; p < prompts_.size(); ++p) {
      Request request;
      request.prompt = prompts_[p].ids;
      request.sampling = flags_.sampling.params;
      request.max_new_tokens = flags_.sampling.max_new_tokens;
      request.seed = flags_.sampling.seed;
      request.sequence_id = sequence_id(prompts_[p]);
      request.want_logprobs = flags_.logprobs;
      const auto ids = engine_.submit_group(request, flags_.n);
      if (!ids) {
        return fail("prompt {}: {}", p + 1, ids.message());
      }
      for (std::size_t i = 0; i < ids->size(); ++i) {
        job_of_[(*ids)[i]] = jobs_.size();
        jobs_.push_back({p, static_cast<std::int64_t>(i), ResponseReader(tokenizer_, false), {}});
        jobs_.back().output.id = (*ids)[i];
      }
    }
    return Ok{};
  }

  /// Until all are done or `stop` is set; then what is unfinished ends as aborted.
  void run(const std::atomic<bool>& stop) {
    ProgressBar bar = make_progress_bar();
    if (!streams_) {
      bar.start("generate", isize(jobs_));
    }
    std::int64_t num_finished = 0;
    while (engine_.has_work() && !stop) {
      for (const StepEvent& event : engine_.step()) {
        Job& job = jobs_[job_of_.at(event.id)];
        if (event.token >= 0) {
          const std::string text = job.reader.push(event.token);
          if (streams_ && !text.empty()) {
            write_out(text);
          }
        }
        num_finished += event.finish ? 1 : 0;
      }
      bar.update(num_finished);
    }
    bar.finish();
    for (Job& job : jobs_) {
      engine_.abort(job.output.id);
      job.output = engine_.take_output(job.output.id).value_or_throw();
      const std::string rest = job.reader.finish();
      if (streams_) {
        write_out(rest + "\n");
      }
    }
  }

  void print() const {
    for (const Job& job : jobs_) {
      if (flags_.json) {
        write_out(json_line(job, prompts_[job.prompt], flags_.logprobs));
        continue;
      }
      if (!streams_) {
        print_out("--- prompt {}{} ({}): {}\n{}\n", job.prompt + 1,
                  flags_.n > 1 ? fmt::format(", sample {}", job.sample + 1) : "",
                  finish_reason_name(job.output.finish_reason), prompts_[job.prompt].text,
                  job.reader.content());
      }
      if (flags_.logprobs) {
        print_logprobs(job, tokenizer_);
      }
    }
  }

  /// Errors: the first response that the engine could not compute.
  [[nodiscard]] Status check() const {
    for (const Job& job : jobs_) {
      if (job.output.finish_reason == FinishReason::kError) {
        return fail("prompt {}: {}", job.prompt + 1, job.output.error);
      }
    }
    return Ok{};
  }

 private:
  Engine& engine_;
  const GenerateFlags& flags_;
  const std::vector<Prompt>& prompts_;
  const Tokenizer& tokenizer_;
  bool streams_;  // one response: shown as it is made
  std::vector<Job> jobs_;
  std::unordered_map<RequestId, std::size_t> job_of_;
};

void print_summary(const EngineStats& stats, std::size_t num_prompts, double seconds) {
  const auto rate = [](std::int64_t tokens, double spent) {
    return spent > 0 ? static_cast<double>(tokens) / spent : 0.0;
  };
  write_err(fmt::format(
      "{} prompt{}: {} tokens read at {:.0f} tok/s, {} written at {:.0f} tok/s, {:.2f} s\n",
      num_prompts, num_prompts == 1 ? "" : "s", stats.prefill_tokens,
      rate(stats.prefill_tokens, stats.prefill_s), stats.decode_tokens,
      rate(stats.decode_tokens, stats.decode_s), seconds));
}

Expected<ExitCode> run_generate(const GenerateFlags& flags, const GlobalOptions& global,
                                Interrupts& interrupts) {
  Runtime runtime(global, global.threads);
  const auto loaded = load_model_and_tokenizer(runtime.ctx(), flags.dir);
  if (!loaded) {
    return loaded.failure();
  }
  const Tokenizer& tokenizer = *loaded->tokenizer;
  const auto prompts = read_prompts(flags, tokenizer);
  if (!prompts) {
    return prompts.failure();
  }
  const EngineOptions options = engine_options(flags, *prompts, tokenizer);
  if (const auto plan = plan_memory(*loaded->model, options); !plan) {
    return plan.failure();
  }
  Engine engine(*loaded->model, runtime.ctx(), options);
  announce(engine);
  Generation generation(engine, flags, *prompts, tokenizer);
  if (Status submitted = generation.submit(); !submitted) {
    return submitted.failure();
  }
  const auto start = std::chrono::steady_clock::now();
  {
    const Interrupts::Graceful graceful(interrupts,
                                        "tandem: stopping; what is written so far follows");
    generation.run(interrupts.stop());
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  generation.print();
  print_summary(engine.stats(), prompts->size(), seconds);
  if (Status sound = generation.check(); !sound) {
    return sound.failure();
  }
  return interrupts.stop() ? kExitInterrupted : kExitOk;
}

}  // namespace

void add_generate(CommandLine& line) {
  CLI::App* command = line.add("generate", "Continue one or many prompts, in one batch");
  auto flags = std::make_shared<GenerateFlags>();
  command->add_option("DIR", flags->dir, "Checkpoint folder")->required();
  auto* source = command->add_option_group("Prompts");
  source->add_option("--prompt", flags->prompts, "A prompt; may be given several times")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  source->add_option("--prompt-file", flags->prompt_file,
                     "jsonl file with the keys question and answer (GSM8K's form)");
  source->require_option(1, 2);
  command->add_option("--limit", flags->limit, "Read only so many prompts of the file; 0 is all")
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--raw", flags->raw, "Continue the text as it is, without the chat template");
  command->add_option("--n", flags->n, "Responses a prompt")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_sampling_flags(*command, flags->sampling);
  command
      ->add_option("--max-running-seqs", flags->max_running_seqs,
                   "Responses made at once; changes speed and memory, never the text")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_kv_cache_dtype(*command, flags->kv_cache_dtype);
  command->add_flag("--logprobs", flags->logprobs,
                    "Natural log of each token's probability at the temperature, before filters");
  command->add_flag("--json", flags->json, "One JSON object a response, one a line");
  command->callback([&line, flags] {
    line.action = [flags, &line] { return run_generate(*flags, line.global, line.interrupts); };
  });
}

}  // namespace tandem::cli

// tandem chat — questions and answers, line by line.
#include <iostream>

#include <unistd.h>

#include "cli/common.h"
#include "cli/response_reader.h"
#include "core/checked_cast.h"
#include "text/chat_template.h"

namespace tandem::cli {
namespace {

struct ChatFlags {
  std::string dir;
  SamplingFlags sampling;
  std::int64_t max_seq_len = 4096;
  std::optional<LatentFormat> kv_cache_dtype = {};
  std::string system;
  bool thinking = false;
  bool keep_history = false;
};

constexpr std::string_view kHelp =
    "/reset  forget the conversation\n"
    "/help   this text\n"
    "/exit   leave (so does the end of the input)\n"
    "Ctrl-C stops an answer; at the prompt it leaves.\n";

ChatMessage message_of(ChatRole role, std::string text) {
  ChatMessage message;
  message.role = role;
  message.content = {std::move(text)};
  return message;
}

class Chat {
 public:
  Chat(Engine& engine, const Tokenizer& tokenizer, const ChatFlags& flags, Interrupts& interrupts)
      : engine_(engine),
        tokenizer_(tokenizer),
        flags_(flags),
        interrupts_(interrupts),
        template_(make_chat_template(tokenizer)),
        // Plain models were trained on single questions.
        keeps_history_(flags.keep_history || tokenizer.special_id("<|open|>").has_value()) {
    reset();
  }

  void reset() {
    conversation_ = {};
    conversation_.thinking = flags_.thinking;
    if (!flags_.thinking) {
      conversation_.effort.reset();
    }
    if (!flags_.system.empty()) {
      conversation_.messages.push_back(message_of(ChatRole::kSystem, flags_.system));
    }
  }

  /// Streams the answer to `question`. Errors: a prompt that does not fit; the conversation then
  /// stands as before.
  Status ask(const std::string& question) {
    if (!keeps_history_) {
      reset();
    }
    const Conversation before = conversation_;
    conversation_.messages.push_back(message_of(ChatRole::kUser, question));
    ResponseReader reader(tokenizer_, flags_.thinking);
    Status answered = answer(reader);
    if (!answered) {
      conversation_ = before;
      return answered;
    }
    ChatMessage message = message_of(ChatRole::kAssistant, reader.content());
    message.reasoning = reader.reasoning();
    conversation_.messages.push_back(std::move(message));
    return Ok{};
  }

 private:
  Status answer(ResponseReader& reader) {
    const auto segments = template_->render(conversation_);
    if (!segments) {
      return segments.failure();
    }
    Request request;
    request.prompt = tokenizer_.encode_segments(*segments);
    request.sampling = flags_.sampling.params;
    request.max_new_tokens =
        std::min(flags_.sampling.max_new_tokens, flags_.max_seq_len - isize(request.prompt));
    request.seed = flags_.sampling.seed;
    request.sequence_id = num_turns_++;
    if (request.max_new_tokens <= 0) {
      return fail(
          "the conversation has {} tokens and leaves no room for an answer in "
          "--max-seq-len {}; /reset forgets it",
          isize(request.prompt), flags_.max_seq_len);
    }
    const auto id = engine_.submit(std::move(request));
    if (!id) {
      return id.failure();
    }
    const Interrupts::Graceful graceful(interrupts_, "");
    while (engine_.has_work() && !interrupts_.stop()) {
      for (const StepEvent& event : engine_.step()) {
        if (event.token >= 0) {
          write_out(reader.push(event.token));
        }
      }
    }
    engine_.abort(*id);
    const RequestOutput output = engine_.take_output(*id).value_or_throw();
    write_out(reader.finish() + "\n");
    if (output.finish_reason == FinishReason::kError) {
      return fail("{}", output.error);
    }
    if (output.finish_reason == FinishReason::kLength) {
      write_err("(cut off at --max-new-tokens or --max-seq-len)\n");
    }
    return Ok{};
  }

  Engine& engine_;
  const Tokenizer& tokenizer_;
  const ChatFlags& flags_;
  Interrupts& interrupts_;
  std::unique_ptr<ChatTemplate> template_;
  bool keeps_history_;
  Conversation conversation_;
  std::uint64_t num_turns_ = 0;
};

Expected<ExitCode> run_chat(const ChatFlags& flags, const GlobalOptions& global,
                            Interrupts& interrupts) {
  Runtime runtime(global, global.threads);
  const auto loaded = load_model_and_tokenizer(runtime.ctx(), flags.dir);
  if (!loaded) {
    return loaded.failure();
  }
  const auto stop_ids = loaded->tokenizer->stop_ids();
  EngineOptions options;
  options.max_running_seqs = 1;
  options.max_seq_len = flags.max_seq_len;
  options.kv_cache_dtype = flags.kv_cache_dtype;
  options.eos_ids.assign(stop_ids.begin(), stop_ids.end());
  Engine engine(*loaded->model, runtime.ctx(), options);
  announce(engine);
  Chat chat(engine, *loaded->tokenizer, flags, interrupts);

  const bool interactive = ::isatty(STDIN_FILENO) != 0;
  if (interactive) {
    write_err("Ask a question; /help lists the commands.\n");
  }
  std::string question;
  for (;;) {
    if (interactive) {
      write_err("> ");
    }
    if (!std::getline(std::cin, question) || question == "/exit") {
      return kExitOk;
    }
    if (question.ends_with('\r')) {
      question.pop_back();
    }
    if (question == "/help") {
      write_err(kHelp);
    } else if (question == "/reset") {
      chat.reset();
    } else if (question.starts_with('/')) {
      write_err(fmt::format("unknown command '{}'\n{}", question, kHelp));
    } else if (!question.empty()) {
      if (Status answered = chat.ask(question); !answered) {
        if (!interactive) {
          return answered.failure();
        }
        write_err(fmt::format("tandem: {}\n", answered.message()));
      } else if (interrupts.stop() && !interactive) {
        return kExitInterrupted;
      }
    }
  }
}

}  // namespace

void add_chat(CommandLine& line) {
  CLI::App* command = line.add("chat", "Talk to a model, one line at a time");
  auto flags = std::make_shared<ChatFlags>();
  command->add_option("DIR", flags->dir, "Checkpoint folder")->required();
  add_sampling_flags(*command, flags->sampling);
  command->add_option("--max-seq-len", flags->max_seq_len, "Longest conversation, in tokens")
      ->check(CLI::Range(2, 1 << 30))
      ->capture_default_str();
  add_kv_cache_dtype(*command, flags->kv_cache_dtype);
  command->add_option("--system", flags->system, "A system message before the conversation");
  command->add_flag("--thinking", flags->thinking,
                    "Let the model think first (not shown; models with a think channel only)");
  command->add_flag("--keep-history", flags->keep_history,
                    "Earlier turns stay in the prompt also for models without a chat format");
  command->footer(std::string(kHelp));
  command->callback([&line, flags] {
    line.action = [flags, &line] { return run_chat(*flags, line.global, line.interrupts); };
  });
}

}  // namespace tandem::cli

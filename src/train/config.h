// config.h — the settings of `tandem sft` and `tandem rl`: plain structs with documented defaults,
// named after the flags people know from Miles/slime. Each table lists its fields once, in
// visit_fields(); parsing, printing, help and validation of choices all walk that list
// (toml_config.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tandem {

/// Where a field's value lives. An empty optional prints as unset.
using FieldPtr =
    std::variant<bool*, std::int64_t*, double*, std::string*, std::vector<std::string>*,
                 std::optional<std::int64_t>*, std::optional<double>*>;

/// One key of one table. `choices` is empty when any value of the type is allowed.
struct Field {
  std::string_view table;
  std::string_view key;
  FieldPtr value;
  std::string_view doc;
  std::vector<std::string_view> choices;
};

/// [model]: which weights to start from.
struct ModelConfig {
  std::string load;
  std::string init;
  std::string tokenizer;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("load", load, "folder of a checkpoint to start from (excludes init)");
    visit("init", init,
          "preset to initialise at random: k3-nano, k3-tiny, k3-mini (excludes load)");
    visit("tokenizer", tokenizer, "tokenizer file; empty = the one beside the checkpoint");
  }
};

/// [run]: where the run's files go and what it may use.
struct RunConfig {
  std::string name = "run";
  std::string dir = "runs";
  std::int64_t threads = 0;
  std::string note;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("name", name, "the run's folder is <dir>/<name>");
    visit("note", note, "plain text that the report opens with");
    visit("dir", dir, "folder of all runs");
    visit("threads", threads, "worker threads; 0 = one a core");
  }
};

/// [data]: prompts (RL) or demonstrations (SFT), one JSON object a line.
struct DataConfig {
  std::string prompt_data;
  std::string input_key = "input";
  std::string label_key = "label";
  std::string metadata_key;
  bool apply_chat_template = false;
  bool rollout_shuffle = false;
  std::int64_t rollout_seed = 42;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("prompt_data", prompt_data, "jsonl file; GSM8K's files are read as they are");
    visit("input_key", input_key, "field that holds the prompt (GSM8K: question)");
    visit("label_key", label_key, "field that holds the gold answer (GSM8K: answer)");
    visit("metadata_key", metadata_key, "field stored with each sample; empty = none");
    visit("apply_chat_template", apply_chat_template,
          "render the prompt through the chat template");
    visit("rollout_shuffle", rollout_shuffle,
          "new order each epoch, keyed by rollout_seed + epoch");
    visit("rollout_seed", rollout_seed, "seed of data order and sampling");
  }
};

/// [rollout]: how samples are made and graded (RL only).
struct RolloutConfig {
  std::int64_t rollout_batch_size = 32;
  std::int64_t n_samples_per_prompt = 8;
  std::int64_t rollout_max_response_len = 1024;
  std::optional<std::int64_t> rollout_max_context_len;
  double rollout_temperature = 1.0;
  double rollout_top_p = 1.0;
  std::int64_t rollout_top_k = -1;
  std::vector<std::string> rollout_stop;
  std::optional<std::int64_t> num_rollout;
  std::optional<std::int64_t> num_epoch;
  std::optional<std::int64_t> over_sampling_batch_size;
  std::string dynamic_sampling_filter = "none";
  bool partial_rollout = false;
  bool mask_offpolicy_in_partial_rollout = false;
  std::string rm_type = "gsm8k";
  std::string reward_key;
  std::optional<std::int64_t> max_weight_staleness;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("rollout_batch_size", rollout_batch_size, "P: prompts a rollout");
    visit("n_samples_per_prompt", n_samples_per_prompt, "n: samples a prompt (a group)");
    visit("rollout_max_response_len", rollout_max_response_len, "tokens; longer is truncated");
    visit("rollout_max_context_len", rollout_max_context_len, "tokens of prompt + response");
    visit("rollout_temperature", rollout_temperature, "the trainer divides its logits by the same");
    visit("rollout_top_p", rollout_top_p, "1 = off; training needs full-support sampling");
    visit("rollout_top_k", rollout_top_k, "-1 = off; training needs full-support sampling");
    visit("rollout_stop", rollout_stop, "stop strings besides the end-of-sequence token");
    visit("num_rollout", num_rollout, "rollout steps (excludes num_epoch)");
    visit("num_epoch", num_epoch, "passes over the data (excludes num_rollout)");
    visit("over_sampling_batch_size", over_sampling_batch_size,
          "groups drawn at a time when filtering");
    visit("dynamic_sampling_filter", dynamic_sampling_filter, "drop groups without reward spread",
          {"none", "check_reward_nonzero_std"});
    visit("partial_rollout", partial_rollout, "keep unfinished groups for the next rollout");
    visit("mask_offpolicy_in_partial_rollout", mask_offpolicy_in_partial_rollout,
          "do not train tokens of older weights");
    visit("rm_type", rm_type, "how answers are graded", {"gsm8k", "arithmetic"});
    visit("reward_key", reward_key, "which of several named rewards to train on");
    visit("max_weight_staleness", max_weight_staleness, "versions; asynchronous rollouts only");
  }
};

/// [train] of `tandem rl`.
struct RlTrainConfig {
  std::optional<std::int64_t> global_batch_size;
  std::optional<std::int64_t> num_steps_per_rollout;
  std::int64_t max_tokens_per_microbatch = 4096;
  std::int64_t seed = 1234;
  bool recompute = false;
  bool balance_data = false;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("global_batch_size", global_batch_size, "B: samples an optimizer step; P*n = B*K");
    visit("num_steps_per_rollout", num_steps_per_rollout,
          "K: optimizer steps a rollout; P*n = B*K");
    visit("max_tokens_per_microbatch", max_tokens_per_microbatch,
          "changes memory and speed, never the result");
    visit("seed", seed, "seed of the trainer");
    visit("recompute", recompute, "store layer inputs only and recompute the rest");
    visit("balance_data", balance_data, "balance token counts over data-parallel ranks");
  }
};

/// [train] of `tandem sft`.
struct SftTrainConfig {
  std::int64_t global_batch_size = 64;
  std::int64_t train_iters = 0;
  std::int64_t max_tokens_per_microbatch = 4096;
  std::int64_t seed = 1234;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("global_batch_size", global_batch_size, "sequences an optimizer step");
    visit("train_iters", train_iters, "optimizer steps");
    visit("max_tokens_per_microbatch", max_tokens_per_microbatch,
          "changes memory and speed, never the result");
    visit("seed", seed, "seed of weights and data order");
  }
};

/// [algo]: advantages and policy loss (RL only).
struct AlgoConfig {
  std::string advantage_estimator = "grpo";
  double eps_clip = 0.2;
  std::optional<double> eps_clip_high;
  std::optional<double> eps_clip_c;
  double value_clip = 0.2;
  double kl_coef = 0.0;
  bool use_kl_loss = false;
  double kl_loss_coef = 0.0;
  std::string kl_loss_type = "low_var_kl";
  double entropy_coef = 0.0;
  double gamma = 1.0;
  double lambd = 1.0;
  bool normalize_advantages = false;
  bool grpo_std_normalization = true;
  bool rewards_normalization = true;
  std::string loss_aggregation = "seq-mean-token-mean";
  bool use_tis = false;
  double tis_clip = 2.0;
  double tis_clip_low = 0.0;
  bool use_rollout_logprobs = false;
  bool use_routing_replay = false;
  bool use_rollout_routing_replay = false;
  bool use_opsm = false;
  double opsm_delta = 1e-4;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("advantage_estimator", advantage_estimator,
          "gspo and cispo: GRPO's advantages with their own loss; reinforce: no clip",
          {"grpo", "gspo", "cispo", "rloo", "reinforce", "reinforce_plus_plus",
           "reinforce_plus_plus_baseline"});
    visit("eps_clip", eps_clip,
          "the ratio's lower bound is 1 - eps_clip; for cispo >= 1 means none");
    visit("eps_clip_high", eps_clip_high,
          "the ratio's upper bound is 1 + eps_clip_high; unset = eps_clip");
    visit("eps_clip_c", eps_clip_c, "dual clip: bound on the loss of bad tokens, > 1; unset = off");
    visit("value_clip", value_clip, "critic only");
    visit("kl_coef", kl_coef, "KL taken off the reward, token by token (reinforce_plus_plus*)");
    visit("use_kl_loss", use_kl_loss, "add kl_loss_coef * KL(policy, reference) to the loss");
    visit("kl_loss_coef", kl_loss_coef, "0 loads no reference policy");
    visit("kl_loss_type", kl_loss_type, "k1 as a loss has zero expected gradient",
          {"k1", "k2", "k3", "low_var_kl"});
    visit("entropy_coef", entropy_coef, "bonus on the entropy at the sampling temperature");
    visit("gamma", gamma, "discount (reinforce_plus_plus)");
    visit("lambd", lambd, "GAE; critic only");
    visit("normalize_advantages", normalize_advantages,
          "whiten over all trainable tokens of the batch");
    visit("grpo_std_normalization", grpo_std_normalization,
          "divide by the group's std; false = Dr.GRPO");
    visit("rewards_normalization", rewards_normalization,
          "subtract the group's mean; false = raw rewards");
    visit("loss_aggregation", loss_aggregation,
          "constant divides by rollout_max_response_len (Dr.GRPO)",
          {"token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"});
    visit("use_tis", use_tis, "weight the loss by clamp(exp(old - rollout log-prob))");
    visit("tis_clip", tis_clip, "upper bound of that weight");
    visit("tis_clip_low", tis_clip_low, "lower bound of that weight");
    visit("use_rollout_logprobs", use_rollout_logprobs,
          "take the engine's log-probs as the old policy's");
    visit("use_routing_replay", use_routing_replay, "R2: replay the trainer's own expert choices");
    visit("use_rollout_routing_replay", use_rollout_routing_replay,
          "R3: replay the engine's expert choices");
    visit("use_opsm", use_opsm, "drop bad sequences that drifted by more than opsm_delta");
    visit("opsm_delta", opsm_delta, "nats a token");
  }
};

/// [optimizer], shared by SFT and RL. Iterations count optimizer steps.
struct OptimizerConfig {
  std::string optimizer = "adam";
  double lr = 1e-6;
  std::string lr_decay_style = "constant";
  std::int64_t lr_warmup_iters = 0;
  std::optional<std::int64_t> lr_decay_iters;
  double lr_wsd_decay_fraction = 0.2;
  double min_lr = 0.0;
  double weight_decay = 0.1;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.98;
  double adam_eps = 1e-8;
  double clip_grad = 1.0;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("optimizer", optimizer, "muon: hidden matrices by Muon, the rest by AdamW",
          {"adam", "muon"});
    visit("lr", lr, "peak learning rate");
    visit("lr_decay_style", lr_decay_style, "wsd: warm-up, stable, then linear decay",
          {"constant", "linear", "cosine", "inverse_sqrt", "wsd"});
    visit("lr_warmup_iters", lr_warmup_iters, "linear warm-up");
    visit("lr_decay_iters", lr_decay_iters, "where the decay ends; unset = the planned steps");
    visit("lr_wsd_decay_fraction", lr_wsd_decay_fraction, "last share of lr_decay_iters, wsd only");
    visit("min_lr", min_lr, "where the decay ends");
    visit("weight_decay", weight_decay, "decoupled; not on norms, biases and 1-D tensors");
    visit("adam_beta1", adam_beta1, "");
    visit("adam_beta2", adam_beta2, "");
    visit("adam_eps", adam_eps, "");
    visit("clip_grad", clip_grad, "global L2 norm; 0 = off");
  }
};

/// [lora]: the key exists so that asking for it gets an answer.
struct LoraConfig {
  std::int64_t lora_rank = 0;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("lora_rank", lora_rank, "0 = train all weights; nothing else is supported");
  }
};

/// [eval]: held-out accuracy.
struct EvalConfig {
  std::optional<std::int64_t> eval_interval;
  std::string eval_prompt_data;
  std::int64_t n_samples_per_eval_prompt = 1;
  double eval_temperature = 1.0;
  std::int64_t eval_top_k = -1;
  std::optional<std::int64_t> eval_max_response_len;
  bool skip_eval_before_train = false;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("eval_interval", eval_interval,
          "rollouts (RL) or steps (SFT) between evaluations; unset = never");
    visit("eval_prompt_data", eval_prompt_data, "held-out jsonl, same keys as [data]");
    visit("n_samples_per_eval_prompt", n_samples_per_eval_prompt, "samples a held-out prompt");
    visit("eval_temperature", eval_temperature,
          "of the sampled accuracy; greedy is always reported too");
    visit("eval_top_k", eval_top_k, "-1 = off, 1 = greedy");
    visit("eval_max_response_len", eval_max_response_len,
          "tokens; unset = rollout_max_response_len");
    visit("skip_eval_before_train", skip_eval_before_train, "no evaluation at step 0");
  }
};

/// [checkpoint]: what is saved, and what a run continues from.
struct CheckpointConfig {
  std::string save;
  std::optional<std::int64_t> save_interval;
  std::optional<std::int64_t> save_retain_interval;
  std::string save_hf;
  std::string load;
  std::string ref_load;

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("save", save, "folder of the trainer's checkpoints; empty = <run>/checkpoints");
    visit("save_interval", save_interval,
          "rollouts (RL) or steps (SFT) between saves; unset: each rollout, and the end of SFT");
    visit("save_retain_interval", save_retain_interval,
          "keep for ever every save that this divides");
    visit("save_hf", save_hf, "folder for the final safetensors export; empty = <run>/model");
    visit("load", load, "trainer checkpoint to continue from, with optimizer state");
    visit("ref_load", ref_load, "reference policy; empty = the initial weights");
  }
};

/// Everything `tandem sft` reads.
struct SftConfig {
  ModelConfig model;
  RunConfig run;
  DataConfig data;
  SftTrainConfig train;
  OptimizerConfig optimizer;
  CheckpointConfig checkpoint;

  template <typename Visitor>
  void visit_tables(Visitor&& visit) {
    visit("model", model);
    visit("run", run);
    visit("data", data);
    visit("train", train);
    visit("optimizer", optimizer);
    visit("checkpoint", checkpoint);
  }

  /// Fills what follows from other values; returns the `table.key` names it filled.
  std::vector<std::string> derive();
  /// Everything that is wrong, one sentence each; empty = valid. Call after derive().
  [[nodiscard]] std::vector<std::string> validate() const;
};

/// Everything `tandem rl` reads.
struct RlConfig {
  ModelConfig model;
  RunConfig run;
  DataConfig data;
  RolloutConfig rollout;
  RlTrainConfig train;
  AlgoConfig algo;
  OptimizerConfig optimizer;
  LoraConfig lora;
  EvalConfig eval;
  CheckpointConfig checkpoint;

  template <typename Visitor>
  void visit_tables(Visitor&& visit) {
    visit("model", model);
    visit("run", run);
    visit("data", data);
    visit("rollout", rollout);
    visit("train", train);
    visit("algo", algo);
    visit("optimizer", optimizer);
    visit("lora", lora);
    visit("eval", eval);
    visit("checkpoint", checkpoint);
  }

  /// Fills what follows from other values (B or K from P*n = B*K, eps_clip_high,
  /// eval_max_response_len).
  std::vector<std::string> derive();
  /// Everything that is wrong, one sentence each; empty = valid. Call after derive().
  [[nodiscard]] std::vector<std::string> validate() const;
};

/// The flat list of a config's fields, in table order. The pointers live as long as `config` does.
template <typename Config>
[[nodiscard]] std::vector<Field> fields_of(Config& config) {
  std::vector<Field> fields;
  config.visit_tables([&fields](std::string_view table, auto& part) {
    part.visit_fields([&fields, table](std::string_view key, auto& member, std::string_view doc,
                                       std::initializer_list<std::string_view> choices = {}) {
      fields.push_back({table, key, &member, doc, choices});
    });
  });
  return fields;
}

}  // namespace tandem

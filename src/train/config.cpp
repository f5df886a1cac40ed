// config.cpp — what follows from what, and which combinations are refused.
#include "train/config.h"

#include <limits>
#include <utility>

#include <fmt/format.h>

namespace tandem {
namespace {

/// Collects every problem instead of stopping at the first.
class Problems {
 public:
  template <typename... Args>
  void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
    if (!condition) {
      messages_.push_back(fmt::format(format, std::forward<Args>(args)...));
    }
  }
  /// A key people know that this engine does not act on: refused rather than ignored.
  void refuse(bool is_set, std::string_view key) {
    require(!is_set, "{}: not supported yet, leave it at its default", key);
  }
  [[nodiscard]] std::vector<std::string> take() { return std::move(messages_); }

 private:
  std::vector<std::string> messages_;
};

/// a * b, or the largest value where that overflows: hostile sizes must reach validate() intact.
std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

/// P*n, the samples of one rollout.
std::int64_t samples_per_rollout(const RolloutConfig& rollout) {
  return saturating_product(rollout.rollout_batch_size, rollout.n_samples_per_prompt);
}

bool positive_or_unset(const std::optional<std::int64_t>& value) {
  return !value.has_value() || *value > 0;
}

void check_model(Problems& problems, const ModelConfig& model) {
  problems.require(model.load.empty() != model.init.empty(),
                   "model: give exactly one of load (a checkpoint) and init (a preset)");
}

void check_run(Problems& problems, const RunConfig& run) {
  problems.require(!run.name.empty() && run.name.find('/') == std::string::npos,
                   "run.name: expected a name without '/', got '{}'", run.name);
  problems.require(run.threads >= 0, "run.threads: expected >= 0, got {}", run.threads);
}

void check_data(Problems& problems, const DataConfig& data) {
  problems.require(!data.prompt_data.empty(),
                   "data.prompt_data: expected the path of a jsonl file");
  problems.require(!data.input_key.empty(), "data.input_key: expected a field name");
  problems.require(!data.label_key.empty(), "data.label_key: expected a field name");
  problems.refuse(data.apply_chat_template, "data.apply_chat_template");
}

void check_optimizer(Problems& problems, const OptimizerConfig& opt) {
  problems.require(opt.lr > 0, "optimizer.lr: expected > 0, got {}", opt.lr);
  problems.require(opt.min_lr >= 0 && (opt.min_lr <= opt.lr || opt.lr <= 0),
                   "optimizer.min_lr: expected between 0 and lr ({}), got {}", opt.lr, opt.min_lr);
  problems.require(opt.lr_warmup_iters >= 0, "optimizer.lr_warmup_iters: expected >= 0, got {}",
                   opt.lr_warmup_iters);
  problems.require(positive_or_unset(opt.lr_decay_iters), "optimizer.lr_decay_iters: expected > 0");
  problems.require(!opt.lr_decay_iters || *opt.lr_decay_iters > opt.lr_warmup_iters,
                   "optimizer.lr_decay_iters: expected more than lr_warmup_iters ({})",
                   opt.lr_warmup_iters);
  problems.require(opt.lr_wsd_decay_fraction > 0 && opt.lr_wsd_decay_fraction <= 1,
                   "optimizer.lr_wsd_decay_fraction: expected in (0, 1], got {}",
                   opt.lr_wsd_decay_fraction);
  problems.require(opt.weight_decay >= 0, "optimizer.weight_decay: expected >= 0, got {}",
                   opt.weight_decay);
  problems.require(opt.adam_beta1 >= 0 && opt.adam_beta1 < 1,
                   "optimizer.adam_beta1: expected in [0, 1), got {}", opt.adam_beta1);
  problems.require(opt.adam_beta2 >= 0 && opt.adam_beta2 < 1,
                   "optimizer.adam_beta2: expected in [0, 1), got {}", opt.adam_beta2);
  problems.require(opt.adam_eps > 0, "optimizer.adam_eps: expected > 0, got {}", opt.adam_eps);
  problems.require(opt.clip_grad >= 0, "optimizer.clip_grad: expected >= 0, got {}", opt.clip_grad);
}

void check_eval(Problems& problems, const EvalConfig& eval) {
  problems.require(positive_or_unset(eval.eval_interval), "eval.eval_interval: expected > 0");
  problems.require(!eval.eval_interval || !eval.eval_prompt_data.empty(),
                   "eval.eval_prompt_data: needed because eval.eval_interval is set");
  problems.require(eval.n_samples_per_eval_prompt > 0,
                   "eval.n_samples_per_eval_prompt: expected > 0, got {}",
                   eval.n_samples_per_eval_prompt);
  problems.require(eval.eval_temperature >= 0, "eval.eval_temperature: expected >= 0, got {}",
                   eval.eval_temperature);
  problems.require(eval.eval_top_k == -1 || eval.eval_top_k > 0,
                   "eval.eval_top_k: expected -1 (off) or > 0, got {}", eval.eval_top_k);
  problems.require(!eval.eval_interval || positive_or_unset(eval.eval_max_response_len),
                   "eval.eval_max_response_len: expected > 0");
}

void check_checkpoint(Problems& problems, const CheckpointConfig& checkpoint) {
  problems.require(positive_or_unset(checkpoint.save_interval),
                   "checkpoint.save_interval: expected > 0");
  problems.require(positive_or_unset(checkpoint.save_retain_interval),
                   "checkpoint.save_retain_interval: expected > 0");
  problems.require(!checkpoint.save_retain_interval || checkpoint.save_interval,
                   "checkpoint.save_retain_interval: needs checkpoint.save_interval");
}

void check_rollout(Problems& problems, const RolloutConfig& rollout) {
  problems.require(rollout.rollout_batch_size > 0,
                   "rollout.rollout_batch_size: expected > 0, got {}", rollout.rollout_batch_size);
  problems.require(rollout.n_samples_per_prompt > 0,
                   "rollout.n_samples_per_prompt: expected > 0, got {}",
                   rollout.n_samples_per_prompt);
  problems.require(rollout.rollout_max_response_len > 0,
                   "rollout.rollout_max_response_len: expected > 0, got {}",
                   rollout.rollout_max_response_len);
  problems.require(
      !rollout.rollout_max_context_len ||
          *rollout.rollout_max_context_len > rollout.rollout_max_response_len,
      "rollout.rollout_max_context_len: expected more than rollout_max_response_len ({})",
      rollout.rollout_max_response_len);
  problems.require(rollout.rollout_temperature > 0,
                   "rollout.rollout_temperature: training rollouts need > 0, got {}",
                   rollout.rollout_temperature);
  problems.require(
      rollout.rollout_top_p == 1.0 && rollout.rollout_top_k == -1,
      "rollout: training needs full-support sampling (rollout_top_p = 1 and "
      "rollout_top_k = -1), else the trainer's log-probs belong to another distribution");
  problems.require(rollout.num_rollout.has_value() != rollout.num_epoch.has_value(),
                   "rollout: give exactly one of num_rollout and num_epoch");
  problems.require(positive_or_unset(rollout.num_rollout), "rollout.num_rollout: expected > 0");
  problems.require(positive_or_unset(rollout.num_epoch), "rollout.num_epoch: expected > 0");
  problems.require(!rollout.over_sampling_batch_size ||
                       *rollout.over_sampling_batch_size >= rollout.rollout_batch_size,
                   "rollout.over_sampling_batch_size: expected at least rollout_batch_size ({})",
                   rollout.rollout_batch_size);
  problems.require(
      !rollout.over_sampling_batch_size || rollout.dynamic_sampling_filter != "none",
      "rollout.over_sampling_batch_size: has no effect without dynamic_sampling_filter");
  problems.refuse(rollout.partial_rollout, "rollout.partial_rollout");
  problems.refuse(rollout.mask_offpolicy_in_partial_rollout,
                  "rollout.mask_offpolicy_in_partial_rollout");
  problems.refuse(!rollout.reward_key.empty(), "rollout.reward_key");
  problems.refuse(rollout.max_weight_staleness.has_value(), "rollout.max_weight_staleness");
}

/// P*n = B*K, with every way to break it named.
void check_batch_sizes(Problems& problems, const RlConfig& config) {
  const auto& batch = config.train.global_batch_size;
  const auto& steps = config.train.num_steps_per_rollout;
  const std::int64_t samples = samples_per_rollout(config.rollout);
  if (!positive_or_unset(batch) || !positive_or_unset(steps)) {
    problems.require(positive_or_unset(batch), "train.global_batch_size: expected > 0");
    problems.require(positive_or_unset(steps), "train.num_steps_per_rollout: expected > 0");
    return;
  }
  problems.require(batch.has_value() || steps.has_value(),
                   "train: give global_batch_size or num_steps_per_rollout; one follows from the "
                   "other by rollout_batch_size * n_samples_per_prompt = global_batch_size * "
                   "num_steps_per_rollout");
  if (batch && steps) {
    const std::int64_t trained = saturating_product(*batch, *steps);
    problems.require(
        trained == samples,
        "train: rollout_batch_size * n_samples_per_prompt = {} but global_batch_size * "
        "num_steps_per_rollout = {}; leave one of the last two out",
        samples, trained);
  } else if (batch || steps) {
    problems.require(
        false, "train.{} = {} does not divide rollout_batch_size * n_samples_per_prompt = {}",
        batch ? "global_batch_size" : "num_steps_per_rollout", batch ? *batch : *steps, samples);
  }
}

void check_clipping(Problems& problems, const AlgoConfig& algo) {
  const bool has_lower_bound = algo.advantage_estimator != "cispo";
  problems.require(algo.eps_clip > 0 && (algo.eps_clip < 1 || !has_lower_bound),
                   "algo.eps_clip: expected in (0, 1), got {}", algo.eps_clip);
  problems.require(!algo.eps_clip_high || *algo.eps_clip_high > 0,
                   "algo.eps_clip_high: expected > 0");
  problems.require(!algo.eps_clip_c || *algo.eps_clip_c > 1, "algo.eps_clip_c: expected > 1");
  problems.require(
      !algo.eps_clip_c ||
          (algo.advantage_estimator != "cispo" && algo.advantage_estimator != "reinforce"),
      "algo.eps_clip_c: has no effect with advantage_estimator {}", algo.advantage_estimator);
  problems.require(algo.tis_clip_low >= 0 && algo.tis_clip_low <= algo.tis_clip,
                   "algo.tis_clip_low: expected between 0 and tis_clip ({}), got {}", algo.tis_clip,
                   algo.tis_clip_low);
  problems.require(!(algo.use_tis && algo.use_rollout_logprobs),
                   "algo: use_tis excludes use_rollout_logprobs (the weight would be 1)");
}

void check_algo(Problems& problems, const AlgoConfig& algo) {
  const bool is_reinforce_pp = algo.advantage_estimator == "reinforce_plus_plus" ||
                               algo.advantage_estimator == "reinforce_plus_plus_baseline";
  check_clipping(problems, algo);
  problems.require(algo.kl_coef == 0 || algo.kl_loss_coef == 0,
                   "algo: kl_coef and kl_loss_coef cannot both be non-zero");
  problems.require(algo.kl_coef >= 0, "algo.kl_coef: expected >= 0, got {}", algo.kl_coef);
  problems.require(algo.kl_loss_coef >= 0, "algo.kl_loss_coef: expected >= 0, got {}",
                   algo.kl_loss_coef);
  problems.require(algo.kl_loss_coef == 0 || algo.use_kl_loss,
                   "algo.kl_loss_coef: has no effect without use_kl_loss = true");
  problems.require(algo.kl_coef == 0 || is_reinforce_pp,
                   "algo.kl_coef: only the reinforce_plus_plus estimators shape rewards; use "
                   "use_kl_loss and kl_loss_coef with {}",
                   algo.advantage_estimator);
  problems.require(!is_reinforce_pp || algo.normalize_advantages,
                   "algo.normalize_advantages: {} needs true", algo.advantage_estimator);
  problems.require(algo.gamma > 0 && algo.gamma <= 1, "algo.gamma: expected in (0, 1], got {}",
                   algo.gamma);
  problems.require(algo.gamma == 1 || algo.advantage_estimator == "reinforce_plus_plus",
                   "algo.gamma: only reinforce_plus_plus discounts");
  problems.require(algo.opsm_delta >= 0, "algo.opsm_delta: expected >= 0, got {}", algo.opsm_delta);
  const AlgoConfig defaults;
  problems.refuse(algo.value_clip != defaults.value_clip, "algo.value_clip");
  problems.refuse(algo.lambd != defaults.lambd, "algo.lambd");
}

}  // namespace

std::vector<std::string> SftConfig::derive() {
  return {};
}

std::vector<std::string> SftConfig::validate() const {
  Problems problems;
  check_model(problems, model);
  check_run(problems, run);
  check_data(problems, data);
  problems.require(train.global_batch_size > 0, "train.global_batch_size: expected > 0, got {}",
                   train.global_batch_size);
  problems.require(train.train_iters > 0, "train.train_iters: expected > 0, got {}",
                   train.train_iters);
  problems.require(train.max_tokens_per_microbatch > 0,
                   "train.max_tokens_per_microbatch: expected > 0, got {}",
                   train.max_tokens_per_microbatch);
  check_optimizer(problems, optimizer);
  check_checkpoint(problems, checkpoint);
  problems.require(checkpoint.ref_load.empty(), "checkpoint.ref_load: SFT has no reference policy");
  return problems.take();
}

std::vector<std::string> RlConfig::derive() {
  std::vector<std::string> derived;
  const std::int64_t samples = samples_per_rollout(rollout);
  const auto divides = [samples](std::int64_t value) { return value > 0 && samples % value == 0; };
  if (!train.global_batch_size && train.num_steps_per_rollout &&
      divides(*train.num_steps_per_rollout)) {
    train.global_batch_size = samples / *train.num_steps_per_rollout;
    derived.emplace_back("train.global_batch_size");
  } else if (!train.num_steps_per_rollout && train.global_batch_size &&
             divides(*train.global_batch_size)) {
    train.num_steps_per_rollout = samples / *train.global_batch_size;
    derived.emplace_back("train.num_steps_per_rollout");
  }
  if (!algo.eps_clip_high) {
    algo.eps_clip_high = algo.eps_clip;
    derived.emplace_back("algo.eps_clip_high");
  }
  if (!eval.eval_max_response_len) {
    eval.eval_max_response_len = rollout.rollout_max_response_len;
    derived.emplace_back("eval.eval_max_response_len");
  }
  return derived;
}

std::vector<std::string> RlConfig::validate() const {
  Problems problems;
  check_model(problems, model);
  check_run(problems, run);
  check_data(problems, data);
  check_rollout(problems, rollout);
  check_batch_sizes(problems, *this);
  problems.require(train.max_tokens_per_microbatch > 0,
                   "train.max_tokens_per_microbatch: expected > 0, got {}",
                   train.max_tokens_per_microbatch);
  problems.refuse(train.recompute, "train.recompute");
  problems.refuse(train.balance_data, "train.balance_data");
  check_algo(problems, algo);
  check_optimizer(problems, optimizer);
  problems.require(lora.lora_rank == 0, "lora.lora_rank: LoRA is not supported; expected 0, got {}",
                   lora.lora_rank);
  check_eval(problems, eval);
  check_checkpoint(problems, checkpoint);
  return problems.take();
}

}  // namespace tandem

// Loss and gradients of every parameter against the independent fp64 reference, and ten steps of
// fine-tuning with their resume.
#include <cstring>
#include <map>

#include "support/golden_checkpoint.h"
#include "train/packing.h"
#include "train/sft.h"
#include "train/train_checkpoint.h"

namespace tandem::test {
namespace {

/// Rows of gradients.* and sft.*: one a parameter.
class GoldenRows {
 public:
  explicit GoldenRows(std::string_view file) : file_(file) {
    const auto rows = golden_json("gradients.json")["rows"].get<std::vector<std::string>>();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      row_of_[std::string(kGoldenPrefix) + rows[i]] = i;
    }
  }
  [[nodiscard]] std::size_t size() const { return row_of_.size(); }
  [[nodiscard]] Fingerprint fingerprint(const std::string& table, const std::string& name) const {
    const std::vector<float> row = cut(table, name, 3);
    return {static_cast<double>(row[0]), static_cast<double>(row[1]), static_cast<double>(row[2])};
  }
  [[nodiscard]] std::vector<float> elements(const std::string& table,
                                            const std::string& name) const {
    return cut(table, name, 8);
  }

 private:
  [[nodiscard]] std::vector<float> cut(const std::string& table, const std::string& name,
                                       std::size_t width) const {
    const auto found = row_of_.find(name);
    TDM_CHECK(found != row_of_.end(), name);
    const TensorInfo& info = file_.info(table);
    std::vector<float> row(width);
    std::memcpy(row.data(), info.bytes.data() + found->second * width * 4, width * 4);
    return row;
  }

  GoldenFile file_;
  std::map<std::string, std::size_t> row_of_;
};

/// How far two fingerprints lie apart, all relative to the l2 norm: sum and dot cancel.
struct FingerprintErrors {
  Worst l2, sum, dot, elements;

  void add(const std::string& name, const Fingerprint& actual, const Fingerprint& expected) {
    l2.add(std::abs(actual.l2 - expected.l2) / expected.l2, name);
    sum.add(std::abs(actual.sum - expected.sum) / expected.l2, name);
    dot.add(std::abs(actual.dot - expected.dot) / expected.l2, name);
  }
  void add_elements(const std::string& name, std::span<const float> actual,
                    std::span<const float> expected, double l2_norm) {
    const auto indices = element_indices(isize(actual));
    for (std::size_t j = 0; j < indices.size(); ++j) {
      const double error =
          static_cast<double>(actual[indices[j]]) - static_cast<double>(expected[j]);
      elements.add(std::abs(error) / l2_norm, name);
    }
  }
};

class GoldenTraining : public GoldenCheckpoint {
 protected:
  /// rules.sft_ids for ten steps: two sequences a step.
  static std::vector<EncodedDemonstration> demonstrations() {
    std::vector<EncodedDemonstration> all;
    for (std::int32_t step = 0; step < 10; ++step) {
      for (std::int32_t p = 0; p < 2; ++p) {
        EncodedDemonstration& sequence = all.emplace_back();
        sequence.num_prompt = 1;
        for (std::int32_t i = 0; i < (p == 0 ? 21 : 37); ++i) {
          sequence.tokens.push_back((3 * i * i + 11 * i + 101 * p + 29 * step) % 512);
        }
      }
    }
    return all;
  }
  /// Settings of run `name` in sft.json.
  static SftConfig config(const std::string& name) {
    const auto golden = golden_json("sft.json");
    SftConfig config;
    config.train.global_batch_size = 2;
    config.train.train_iters = 10;
    config.data.rollout_shuffle = false;
    config.optimizer.lr = golden[name]["lr"];
    config.optimizer.adam_eps = golden[name]["eps"];
    config.optimizer.weight_decay = golden[name]["weight_decay"];
    config.optimizer.adam_beta1 = golden["betas"][0];
    config.optimizer.adam_beta2 = golden["betas"][1];
    config.optimizer.clip_grad = golden["max_norm"];
    return config;
  }
};

// The fp32 run of the reference differs from its fp64 run by 1.2e-5 of the gradient's l2 norm in
// the worst tensor (gradients.json, fp32_noise); this program sums in other orders, hence a factor
// of 4: |error|_2 <= r |g|_2 with r = 4 * 1.2e-5. That bounds the l2 norm and each element by
// r |g|_2; sum and dot add the errors of all elements, which have independent signs, so that
// 4 r |g|_2 is four standard deviations.
TEST_F(GoldenTraining, GradientOfEveryParameter) {
  TestContext context;
  const auto model = load(*context, true);
  std::vector<TrainSequence> sequences;
  const auto prompts = golden_prompts();
  for (const auto& prompt : prompts) {
    sequences.push_back({prompt, 1});
  }
  const std::vector<MicroBatch> batches = pack_sequences(sequences, 4096);
  ASSERT_EQ(batches.size(), 1U);
  TokenPass pass(*model, device_under_test());
  model->parameters().zero_grads();
  const TokenPass::Result forward = pass.forward(*context, batches[0], 1.0F);
  ASSERT_EQ(forward.logprobs.size(), 56U);
  pass.backward(*context, std::vector<float>(56, -1.0F / 56.0F), {});

  const auto golden = golden_json("gradients.json");
  const auto target_logprobs = golden_json("forward.json")["target_logprobs"];
  std::vector<double> expected_logprobs;
  for (const auto& prompt : target_logprobs) {
    expected_logprobs.insert(expected_logprobs.end(), prompt.begin(), prompt.end());
  }
  expect_within("target log-probs", worst_relative(forward.logprobs, expected_logprobs), 1e-5);

  const double noise = golden["fp32_noise"]["worst_relative_l2"];
  const double r = 4 * noise;
  const auto zero = golden["zero_gradient"].get<std::vector<std::string>>();
  const GoldenRows rows("gradients.safetensors");
  FingerprintErrors errors;
  std::size_t num_parameters = 0;
  double square_sum = 0;
  for (nn::Parameter& parameter : model->parameters().all()) {
    if (parameter.frozen) {
      continue;
    }
    ++num_parameters;
    const std::string& name = parameter.name;
    const Fingerprint actual = fingerprint(parameter.grad());
    square_sum += actual.l2 * actual.l2;
    if (std::ranges::count(zero, name.substr(kGoldenPrefix.size())) > 0) {
      EXPECT_EQ(actual.l2, 0.0) << name << ": the loss does not reach it";
      continue;
    }
    const Fingerprint expected = rows.fingerprint("fingerprints", name);
    errors.add(name, actual, expected);
    errors.add_elements(name, parameter.grad(), rows.elements("elements", name), expected.l2);
  }
  EXPECT_EQ(num_parameters, rows.size());
  expect_within("gradient l2", errors.l2, r);
  expect_within("gradient sum / l2", errors.sum, 4 * r);
  expect_within("gradient dot / l2", errors.dot, 4 * r);
  expect_within("gradient elements / l2", errors.elements, r);
  const double norm = golden["grad_norm"];
  expect_within("gradient norm", std::abs(std::sqrt(square_sum) - norm) / norm, noise);
}

// Losses to 1e-5 (issue 2; the reference's own fp32 run shows 1.5e-7). The change of a tensor over
// ten steps drifts by 4.5e-3 of its l2 norm between the reference's fp32 and fp64 runs (sft.json):
// Adam divides small gradients by themselves. Factors as for the gradients.
TEST_F(GoldenTraining, TenStepsOfFineTuning) {
  TestContext context;
  const auto model = load(*context, true);
  std::map<std::string, std::vector<float>> initial;
  for (const nn::Parameter& parameter : model->parameters().all()) {
    initial[parameter.name] = {parameter.value().begin(), parameter.value().end()};
  }
  const auto golden = golden_json("sft.json")["run0"];
  SftTrainer trainer(*context, *model, config("run0"), demonstrations());
  Worst loss;
  Worst norm;
  for (std::size_t s = 0; s < 10; ++s) {
    const SftStep step = trainer.step();
    const double expected_loss = golden["losses"][s];
    const double expected_norm = golden["grad_norms_before_clipping"][s];
    loss.add(std::abs(step.loss - expected_loss), fmt::format("step {}", s));
    norm.add(std::abs(step.optimizer.grad_norm - expected_norm) / expected_norm,
             fmt::format("step {}", s));
  }
  expect_within("SFT losses", loss, 1e-5);
  expect_within("SFT gradient norms", norm, 1e-5);

  const double r = 4 * golden["fp32_drift_of_the_change"]["worst"].get<double>();
  const GoldenRows rows("sft.safetensors");
  FingerprintErrors change_errors;
  FingerprintErrors final_errors;
  for (nn::Parameter& parameter : model->parameters().all()) {
    const std::string& name = parameter.name;
    std::vector<float> change(parameter.value().begin(), parameter.value().end());
    std::ranges::transform(change, initial[name], change.begin(), std::minus<>());
    if (parameter.frozen) {
      EXPECT_EQ(fingerprint(change).l2, 0.0) << name;
      continue;
    }
    const Fingerprint expected = rows.fingerprint("change_fingerprints", name);
    if (expected.l2 == 0) {
      EXPECT_EQ(fingerprint(change).l2, 0.0) << name;
      continue;
    }
    change_errors.add(name, fingerprint(change), expected);
    // The stored elements are of the final weight, their error is that of the change.
    final_errors.add_elements(name, parameter.value(), rows.elements("final_elements", name),
                              expected.l2);
    final_errors.add(name, fingerprint(parameter.value()),
                     rows.fingerprint("final_fingerprints", name));
  }
  expect_within("SFT change l2", change_errors.l2, r);
  expect_within("SFT change sum / l2", change_errors.sum, 4 * r);
  expect_within("SFT change dot / l2", change_errors.dot, 4 * r);
  expect_within("SFT final elements / change l2", final_errors.elements, r);
  // Weight decay alone moves an l2 norm by 10 lr wd = 3e-5: a tensor decayed by mistake, or not,
  // is three times over this bound.
  expect_within("SFT final l2", final_errors.l2, 1e-5);
}

/// Every parameter and moment, by name.
std::map<std::string, std::vector<float>> all_state(kimi_k3::KimiK3& model,
                                                    const Optimizer& optimizer) {
  std::map<std::string, std::vector<float>> all;
  for (const nn::Parameter& parameter : model.parameters().all()) {
    all[parameter.name] = {parameter.value().begin(), parameter.value().end()};
  }
  const HostTensors moments = optimizer.state();
  for (const TensorInfo& tensor : moments.infos()) {
    all[tensor.name] = tensor.copy<float>();
  }
  return all;
}

TEST_F(GoldenTraining, FiveStepsSavedLoadedAndFiveMoreAreTenStepsBitForBit) {
  TestContext context;
  const auto straight_model = load(*context, true);
  SftTrainer straight(*context, *straight_model, config("run1"), demonstrations());
  std::vector<double> losses;
  for (int s = 0; s < 10; ++s) {
    losses.push_back(straight.step().loss);
  }

  const TempDir saves;
  const CheckpointFolder folder(saves.path(), std::nullopt);
  {
    const auto model = load(*context, true);
    SftTrainer trainer(*context, *model, config("run1"), demonstrations());
    for (int s = 0; s < 5; ++s) {
      EXPECT_EQ(trainer.step().loss, losses[usize(s)]);
    }
    TrainState state;
    state.step = trainer.num_steps();
    state.optimizer_steps = trainer.optimizer().num_steps();
    folder.write(state, model->parameters(), trainer.optimizer(), dir());
    folder.publish(5);
  }
  const std::string saved = folder.latest().value();
  const auto model = kimi_k3::KimiK3::load(*context, saved, {.trainable = true}).value_or_throw();
  SftTrainer resumed(*context, *model, config("run1"), demonstrations());
  const TrainState state =
      CheckpointFolder::restore(saved, model->parameters(), resumed.optimizer()).value_or_throw();
  resumed.resume_after(state.step);
  for (std::size_t s = 5; s < 10; ++s) {
    EXPECT_EQ(resumed.step().loss, losses[s]);
  }

  const auto expected = all_state(*straight_model, straight.optimizer());
  const auto actual = all_state(*model, resumed.optimizer());
  ASSERT_EQ(actual.size(), expected.size());
  ASSERT_EQ(expected.size(), 618U + 2 * 610U);  // values, both moments of all but the biases
  for (const auto& [name, values] : expected) {
    const auto found = actual.find(name);
    ASSERT_NE(found, actual.end()) << name;
    ASSERT_EQ(found->second.size(), values.size()) << name;
    EXPECT_TRUE(same_bits(found->second.data(), values.data(), isize(values))) << name;
  }
}

}  // namespace
}  // namespace tandem::test

// random_operations_test.cpp — random sequences of submit, submit_group, step, abort, preempt_all
// under many small configurations; integrity after each, everything free at the end, every output
// as alone.
#include "engine_rig.h"

namespace tandem::test {
namespace {

struct Submitted {
  RequestId id{};
  Request request;
  bool aborted = false;
};

class Operations {
 public:
  Operations(Rig& rig, Engine& engine, std::uint64_t seed)
      : rig_(rig), engine_(engine), rng_(mix_key({seed, 0x0BE5})) {}

  void run(int count) {
    for (int i = 0; i < count; ++i) {
      one();
      engine_.check_integrity();
    }
    while (engine_.has_work()) {
      engine_.step();
      engine_.check_integrity();
    }
  }

  void expect_outputs() {
    for (const Submitted& submitted : submitted_) {
      Expected<RequestOutput> output = engine_.take_output(submitted.id);
      ASSERT_TRUE(output.ok()) << output.message();
      const RequestOutput expected = expected_output(rig_, submitted.request);
      if (!submitted.aborted) {
        EXPECT_TRUE(same_output(*output, expected));
        continue;
      }
      EXPECT_EQ(output->finish_reason, FinishReason::kAborted);
      ASSERT_LE(output->tokens.size(), expected.tokens.size());
      EXPECT_TRUE(
          std::equal(output->tokens.begin(), output->tokens.end(), expected.tokens.begin()));
      EXPECT_EQ(output->logprobs.size(), output->tokens.size());
    }
    expect_idle_and_empty(engine_);
  }

 private:
  void one() {
    const std::uint64_t choice = rng_.below(100);
    if (choice < 12) {
      const Request request = random_request();
      submitted_.push_back({engine_.submit(own_copy(request)).value_or_throw(), request});
    } else if (choice < 18) {
      Request request = random_request();
      const auto ids = engine_.submit_group(request, 1 + static_cast<std::int64_t>(rng_.below(6)));
      for (const RequestId id : *ids) {
        submitted_.push_back({id, request});
        ++request.sequence_id;
      }
    } else if (choice < 24 && !submitted_.empty()) {
      Submitted& victim = submitted_[rng_.below(submitted_.size())];
      victim.aborted = engine_.abort(victim.id) || victim.aborted;
    } else if (choice < 26) {
      engine_.preempt_all();
    } else {
      engine_.step();
    }
  }

  Request random_request() {
    Request request = make_request(1 + static_cast<std::int64_t>(rng_.below(14)),
                                   1 + static_cast<std::int64_t>(rng_.below(15)), rng_.below(1000));
    request.sampling.temperature = rng_.below(4) == 0 ? 0.0F : 1.0F;
    if (rng_.below(3) == 0) {
      request.stop_ids = {static_cast<std::int32_t>(rng_.below(FakeModel::kVocab))};
    }
    if (rng_.below(3) == 0) {
      request.rules.repetition_penalty = 1.5F;
      request.rules.frequency_penalty = 0.5F;
      request.rules.min_new_tokens = request.max_new_tokens / 2;
      request.rules.logit_bias = {{static_cast<std::int32_t>(rng_.below(FakeModel::kVocab)), 4.0F}};
    }
    if (rng_.below(4) == 0) {
      request.constraint = std::make_shared<FakeConstraint>(rng_.below(1000));
    }
    if (rng_.below(4) == 0) {
      request.prompt_logprobs_from =
          static_cast<std::int64_t>(rng_.below(request.prompt.size() + 1));
      request.num_top_logprobs = static_cast<std::int64_t>(rng_.below(3));
      request.max_new_tokens *= rng_.below(2) == 0 ? 0 : 1;
      request.rules.min_new_tokens = 0;
    }
    return request;
  }

  Rig& rig_;
  Engine& engine_;
  Rng rng_;
  std::vector<Submitted> submitted_;
};

TEST(RandomOperations, KeepEveryInvariantAndEveryOutput) {
  std::int64_t preemptions = 0;
  std::int64_t forks = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({seed, 0xC0F1}));
    EngineOptions options;
    options.max_seq_len = 30;
    options.page_size = 1 + static_cast<std::int64_t>(rng.below(7));
    options.max_batch_tokens = 1 + static_cast<std::int64_t>(rng.below(24));
    options.max_running_seqs = 1 + static_cast<std::int64_t>(rng.below(8));
    const std::int64_t least = (options.max_seq_len + options.page_size - 1) / options.page_size;
    options.num_pages = least + static_cast<std::int64_t>(rng.below(usize(2 * least)));
    Rig rig;
    const auto engine = rig.engine(options);
    Operations operations(rig, *engine, seed);
    operations.run(250);
    operations.expect_outputs();
    preemptions += engine->stats().num_preemptions;
    forks += engine->stats().num_forks;
  }
  EXPECT_GT(preemptions, 100);  // the configurations reach the rare paths
  EXPECT_GT(forks, 100);
}

}  // namespace
}  // namespace tandem::test

// The engine continues both golden prompts with exactly the tokens of the independent fp64
// reference,
#include "engine/engine.h"
#include "support/golden_checkpoint.h"

namespace tandem::test {
namespace {

using GoldenGreedy = GoldenCheckpoint;

TEST_F(GoldenGreedy, TheEngineGivesTheReferencesTokens) {
  TestContext context;
  const auto model = load(*context, false);
  const auto expected =
      golden_json("forward.json")["greedy"].get<std::vector<std::vector<std::int32_t>>>();
  // Small chunks and pages: both prompts are cut, and prefill and decode rows share steps.
  Engine engine(*model, *context,
                {.max_batch_tokens = 8, .max_running_seqs = 2, .max_seq_len = 64, .page_size = 4});
  std::vector<RequestId> ids;
  for (const auto& prompt : golden_prompts()) {
    Request request;
    request.prompt = prompt;
    request.sampling.temperature = 0.0F;
    request.max_new_tokens = isize(expected[ids.size()]);
    ids.push_back(engine.submit(request).value_or_throw());
  }
  engine.run_until_idle();
  for (std::size_t p = 0; p < ids.size(); ++p) {
    EXPECT_EQ(engine.take_output(ids[p]).value_or_throw().tokens, expected[p]) << "prompt " << p;
  }
}

}  // namespace
}  // namespace tandem::test

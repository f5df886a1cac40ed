// Workloads: made ones have the lengths asked for and repeat from their seed; files are checked.
#include "server/load/workload.h"

#include <algorithm>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

WorkloadOptions options_of(const std::string& dataset, std::int64_t num_prompts) {
  WorkloadOptions options;
  options.dataset = dataset;
  options.num_prompts = num_prompts;
  options.input_len = 40;
  options.output_len = 20;
  options.vocab_size = 30;
  return options;
}

std::vector<Turn> turns_of(const WorkloadOptions& options) {
  std::vector<Turn> turns;
  for (const Conversation& conversation : make_workload(options).value_or_throw().conversations) {
    turns.insert(turns.end(), conversation.turns.begin(), conversation.turns.end());
  }
  return turns;
}

TEST(Workload, RandomIdsHaveExactLengths) {
  WorkloadOptions options = options_of("random-ids", 200);
  for (const Turn& turn : turns_of(options)) {
    EXPECT_EQ(turn.prompt.ids.size(), 40U);
    EXPECT_EQ(turn.output_len, 20);
    EXPECT_LT(*std::ranges::max_element(turn.prompt.ids), 30);
    EXPECT_GE(*std::ranges::min_element(turn.prompt.ids), 0);
  }
  options.range_ratio = 0.5;
  std::set<std::size_t> lengths;
  for (const Turn& turn : turns_of(options)) {
    lengths.insert(turn.prompt.ids.size());
    EXPECT_GE(turn.output_len, 10);
    EXPECT_LE(turn.output_len, 20);
  }
  EXPECT_EQ(*lengths.begin(), 20U);
  EXPECT_EQ(*lengths.rbegin(), 40U);
}

TEST(Workload, TheSeedDecides) {
  for (const char* dataset : {"random-ids", "shared-prefix", "multi-turn", "sharegpt-like"}) {
    WorkloadOptions options = options_of(dataset, 10);
    const auto first = turns_of(options);
    EXPECT_EQ(first.size(), 10U) << dataset;
    EXPECT_EQ(first[3].prompt.ids, turns_of(options)[3].prompt.ids) << dataset;
    options.seed = 43;
    EXPECT_NE(first[3].prompt.ids, turns_of(options)[3].prompt.ids) << dataset;
  }
}

TEST(Workload, SharedPrefixesComeInEqualGroups) {
  WorkloadOptions options = options_of("shared-prefix", 12);
  options.num_groups = 3;
  options.question_len = 5;
  std::multiset<std::vector<std::int32_t>> prefixes;
  for (const Turn& turn : turns_of(options)) {
    ASSERT_EQ(turn.prompt.ids.size(), 45U);
    prefixes.emplace(turn.prompt.ids.begin(), turn.prompt.ids.begin() + 40);
  }
  EXPECT_EQ(prefixes.count(*prefixes.begin()), 4U);
  EXPECT_EQ(prefixes.count(*prefixes.rbegin()), 4U);
  options.endpoint = Endpoint::kChat;
  const Turn chat = turns_of(options).front();
  ASSERT_EQ(chat.prompt.messages.size(), 2U);
  EXPECT_EQ(chat.prompt.messages[0].role, "system");
  EXPECT_EQ(std::ranges::count(chat.prompt.messages[0].content, ' '), 39);
  EXPECT_TRUE(chat.prompt.ids.empty());
}

TEST(Workload, TurnsGrowAHistory) {
  WorkloadOptions options = options_of("multi-turn", 7);
  options.turns = 3;
  const Workload workload = make_workload(options).value_or_throw();
  ASSERT_EQ(workload.conversations.size(), 3U);
  EXPECT_EQ(workload.conversations[2].turns.size(), 1U);
  EXPECT_EQ(workload.num_requests(), 7);
  EXPECT_TRUE(workload.conversations[0].keeps_history);
  Prompt history;
  append(history, {{1, 2}, {}, {}});
  append_reply(history, Endpoint::kGenerate, "x", {7, 8}, 2, 30);
  append_reply(history, Endpoint::kCompletions, "x", {}, 3, 30);
  append(history, {{9}, {}, {}});
  ASSERT_EQ(history.ids.size(), 8U);
  EXPECT_EQ(history.ids[3], 8);
  EXPECT_EQ(history.ids.back(), 9);
  EXPECT_LT(history.ids[5], 30);
  append_reply(history, Endpoint::kChat, "the answer", {}, 3, 30);
  EXPECT_EQ(history.messages.back().role, "assistant");
  EXPECT_EQ(history.messages.back().content, "the answer");
}

TEST(Workload, ShareGptLikeMeans) {
  WorkloadOptions options = options_of("sharegpt-like", 4000);
  double input = 0;
  double output = 0;
  for (const Turn& turn : turns_of(options)) {
    input += static_cast<double>(turn.prompt.ids.size()) / 4000;
    output += static_cast<double>(turn.output_len) / 4000;
    EXPECT_LE(turn.prompt.ids.size(), 320U);
  }
  EXPECT_NEAR(input, 40, 5);
  EXPECT_NEAR(output, 20, 2);
}

TEST(Workload, WarmUpSharesNoBeginning) {
  const WorkloadOptions options = options_of("random-ids", 5);
  const Workload workload = make_workload(options).value_or_throw();
  const Turn turn = warm_up_turn(options, workload);
  EXPECT_EQ(turn.output_len, 16);
  EXPECT_EQ(turn.prompt.ids.size(), 40U);
  EXPECT_NE(turn.prompt.ids, workload.conversations[0].turns[0].prompt.ids);
}

TEST(Workload, BadOptionsAreNamed) {
  const auto message = [](auto change) {
    WorkloadOptions options = options_of("random-ids", 5);
    change(options);
    const auto workload = make_workload(options);
    return workload ? std::string() : workload.message();
  };
  EXPECT_THAT(message([](auto& o) { o.dataset = "mmlu"; }),
              HasSubstr("--dataset 'mmlu': expected"));
  EXPECT_THAT(message([](auto& o) { o.num_prompts = 0; }), HasSubstr("--num-prompts is 0"));
  EXPECT_THAT(message([](auto& o) { o.output_len = -1; }), HasSubstr("--output-len is -1"));
  EXPECT_THAT(message([](auto& o) { o.system_len = -1; }), HasSubstr("--system-len is -1"));
  EXPECT_THAT(message([](auto& o) { o.range_ratio = 1.5; }), HasSubstr("--range-ratio is 1.5"));
  EXPECT_THAT(message([](auto& o) { o.dataset = "jsonl"; }), HasSubstr("--dataset-path FILE"));
  EXPECT_THAT(message([](auto& o) { o.path = "x"; }), HasSubstr("--dataset jsonl"));
  EXPECT_THAT(message([](auto& o) {
                o.dataset = "jsonl";
                o.path = "/nowhere/x.jsonl";
              }),
              HasSubstr("/nowhere/x.jsonl"));
}

TEST(WorkloadFile, LinesOfAllKinds) {
  WorkloadOptions options = options_of("jsonl", 100);
  const Workload workload =
      parse_workload("f",
                     "{\"input_ids\": [1, 2], \"output_len\": 3, \"t\": 0.5, \"session\": 7}\n\n"
                     "{\"prompt\": \"abc\", \"t\": 1}\n"
                     "{\"question\": \"why\", \"answer\": \"so\", \"t\": 2, \"session\": 7}",
                     options)
          .value_or_throw();
  ASSERT_EQ(workload.conversations.size(), 2U);
  EXPECT_TRUE(workload.has_arrivals);
  const Conversation& session = workload.conversations[0];
  EXPECT_EQ(session.arrival_s, 0.5);
  EXPECT_FALSE(session.keeps_history);
  ASSERT_EQ(session.turns.size(), 2U);
  EXPECT_THAT(session.turns[0].prompt.ids, ElementsAre(1, 2));
  EXPECT_EQ(session.turns[0].output_len, 3);
  EXPECT_EQ(session.turns[1].prompt.text, "why");
  EXPECT_EQ(session.turns[1].output_len, 20);
  options.num_prompts = 1;
  options.endpoint = Endpoint::kChat;
  const Workload chat =
      parse_workload("f",
                     "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n"
                     "{\"not\": \"read\"}\n",
                     options)
          .value_or_throw();
  EXPECT_EQ(chat.num_requests(), 1);
  EXPECT_FALSE(chat.has_arrivals);
}

TEST(WorkloadFile, BadLinesAreNamed) {
  const auto message = [](const std::string& text, Endpoint endpoint = Endpoint::kCompletions) {
    WorkloadOptions options = options_of("jsonl", 100);
    options.endpoint = endpoint;
    const auto workload = parse_workload("f", "{\"prompt\": \"x\"}\n" + text, options);
    return workload ? std::string() : workload.message();
  };
  EXPECT_THAT(message("{"), HasSubstr("f:2: "));
  EXPECT_THAT(message("[]"), HasSubstr("f:2: expected a JSON object"));
  EXPECT_THAT(message("{\"text\": 1}"), HasSubstr("input_ids, prompt, messages, question"));
  EXPECT_THAT(message("{\"prompt\": \"\"}"), HasSubstr("prompt: expected a text"));
  EXPECT_THAT(message("{\"input_ids\": []}"), HasSubstr("at least one token id"));
  EXPECT_THAT(message("{\"input_ids\": [1, -2]}"), HasSubstr("input_ids[1]: expected a token id"));
  EXPECT_THAT(message("{\"prompt\": \"a\", \"output_len\": 0}"), HasSubstr("output_len: expected"));
  EXPECT_THAT(message("{\"prompt\": \"a\", \"t\": -1}"), HasSubstr("t: expected seconds"));
  EXPECT_THAT(message("{\"prompt\": \"a\", \"t\": 1}"), HasSubstr("on every line or on none"));
  EXPECT_THAT(message("{\"prompt\": \"a\", \"session\": []}"), HasSubstr("session: expected"));
  EXPECT_THAT(message("{\"messages\": []}"), HasSubstr("--endpoint chat"));
  EXPECT_THAT(message("{\"messages\": []}", Endpoint::kChat), HasSubstr("at least one message"));
  EXPECT_THAT(message("{\"messages\": [{\"role\": 1}]}", Endpoint::kChat),
              HasSubstr("messages[0]"));
  EXPECT_THAT(message("{\"input_ids\": [1]}", Endpoint::kChat), HasSubstr("takes no token ids"));
  EXPECT_THAT(parse_workload("f", "\n \n", options_of("jsonl", 3)).message(),
              HasSubstr("f: expected at least one line"));
}

}  // namespace
}  // namespace tandem::load

// Loads against a whole server in this process, and against servers that misbehave.
#include "server/load/load_run.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/load/load_report.h"
#include "server/load/scripted_server.h"
#include "server/server_rig.h"

namespace tandem::load {
namespace {

using test::FakeModel;
using test::json;
using test::ScriptedServer;
using test::ServerRig;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

const std::atomic<bool> kGoesOn{false};

RunOptions options_for(const std::string& url, Endpoint endpoint) {
  RunOptions options;
  options.target = parse_target(url).value_or_throw();
  options.form = {endpoint, "default", true, 0};
  options.vocab_size = FakeModel::kVocab - 2;
  options.timeout_s = 20;
  return options;
}

std::string url_of(const ServerRig& rig) {
  return "http://127.0.0.1:" + std::to_string(rig.port());
}

WorkloadOptions small_workload(const std::string& dataset, Endpoint endpoint) {
  WorkloadOptions options;
  options.dataset = dataset;
  options.endpoint = endpoint;
  options.num_prompts = 20;
  options.input_len = 8;
  options.output_len = 6;
  options.num_groups = 2;
  options.system_len = 16;
  options.question_len = 4;
  options.turns = 3;
  options.vocab_size = FakeModel::kVocab - 2;
  return options;
}

std::vector<RequestRecord> run(const RunOptions& options, const Workload& workload) {
  return run_load(options, workload, kGoesOn, [](const RunProgress&) {}).value_or_throw();
}

/// A chat's texts are words of letters: the tokenizer has one token a letter.
ServerRig make_rig() {
  server::ServerOptions options = test::test_options();
  options.engine.max_seq_len = 1024;
  return ServerRig(std::move(options));
}

struct Case {
  Endpoint endpoint;
  const char* dataset;
};

class EveryDataset : public ::testing::TestWithParam<Case> {};

TEST_P(EveryDataset, InBothModes) {
  const auto [endpoint, dataset] = GetParam();
  const ServerRig rig = make_rig();
  const WorkloadOptions asked = small_workload(dataset, endpoint);
  const Workload workload = make_workload(asked).value_or_throw();
  for (const bool is_paced : {false, true}) {
    RunOptions options = options_for(url_of(rig), endpoint);
    if (is_paced) {
      options.request_rate = 1000;
    } else {
      options.max_concurrency = 3;
    }
    const auto records = run(options, workload);
    const LoadSummary sum = summarize(records, {});
    ASSERT_EQ(sum.completed, 20) << sum.errors.begin()->second.example;
    EXPECT_LE(sum.peak_concurrency, is_paced ? 20 : 3);
    std::int64_t asked_tokens = 0;
    for (const Conversation& conversation : workload.conversations) {
      for (const Turn& turn : conversation.turns) {
        asked_tokens += turn.output_len;
      }
    }
    EXPECT_EQ(sum.output_tokens, asked_tokens);  // as the server counts them
    EXPECT_TRUE(sum.cache_hit_rate);
    for (const RequestRecord& record : records) {
      EXPECT_GE(record.end_s, record.start_s);
      // A few tokens may all be special ones, which have no text.
      EXPECT_TRUE(!record.events.empty() || record.output_tokens < 4);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryDataset,
                         ::testing::Values(Case{Endpoint::kCompletions, "random-ids"},
                                           Case{Endpoint::kCompletions, "multi-turn"},
                                           Case{Endpoint::kGenerate, "shared-prefix"},
                                           Case{Endpoint::kGenerate, "multi-turn"},
                                           Case{Endpoint::kGenerate, "sharegpt-like"},
                                           Case{Endpoint::kChat, "random-ids"},
                                           Case{Endpoint::kChat, "shared-prefix"},
                                           Case{Endpoint::kChat, "multi-turn"}),
                         [](const auto& chosen) {
                           std::string name =
                               std::string(path_of(chosen.param.endpoint)) + chosen.param.dataset;
                           std::erase_if(name, [](char c) { return c == '/' || c == '-'; });
                           return name;
                         });

TEST(LoadRun, LengthsAndCachesAsTheServerReports) {
  const ServerRig rig = make_rig();
  RunOptions options = options_for(url_of(rig), Endpoint::kGenerate);
  options.max_concurrency = 1;
  WorkloadOptions asked = small_workload("multi-turn", Endpoint::kGenerate);
  asked.num_prompts = 3;
  asked.input_len = 64;
  const auto records = run(options, make_workload(asked).value_or_throw());
  ASSERT_EQ(records.size(), 3U);
  // A turn's prompt is all before it: prompts of 64 and replies of 6.
  EXPECT_EQ(records[0].prompt_tokens, 64);
  EXPECT_EQ(records[1].prompt_tokens, 134);
  EXPECT_EQ(records[2].prompt_tokens, 204);
  EXPECT_EQ(records[0].cached_tokens, 0);
  EXPECT_GT(records[2].cached_tokens.value(), 0);
  EXPECT_TRUE(flush_cache(options));
  EXPECT_EQ(first_model(options).value_or_throw(), "org/test-model");
}

TEST(LoadRun, AFileAtItsOwnTimes) {
  const ServerRig rig = make_rig();
  RunOptions options = options_for(url_of(rig), Endpoint::kCompletions);
  options.uses_arrivals = true;
  const Workload workload =
      parse_workload("f",
                     R"({"input_ids": [1, 2], "output_len": 3, "t": 0.05, "session": "a"}
{"prompt": "abc", "output_len": 2, "t": 0.0}
{"input_ids": [4], "output_len": 1, "t": 0.0, "session": "a"})",
                     small_workload("jsonl", Endpoint::kCompletions))
          .value_or_throw();
  const auto records = run(options, workload);
  EXPECT_EQ(summarize(records, {}).completed, 3);
  EXPECT_GE(records[0].start_s, 0.05);
  EXPECT_GE(records[1].start_s, records[0].end_s);  // the session's second
  EXPECT_LT(records[2].start_s, records[0].start_s);
  EXPECT_EQ(records[2].output_tokens, 2);
}

TEST(LoadRun, TokensAreSeenWhenTheyCome) {
  auto script = std::make_shared<test::Script>();
  script->step_time = std::chrono::milliseconds(2);
  const ServerRig rig(test::test_options(),
                      std::make_unique<test::ScriptedModel>(FakeModel::kVocab, script));
  for (const Endpoint endpoint : {Endpoint::kCompletions, Endpoint::kGenerate}) {
    WorkloadOptions asked = small_workload("random-ids", endpoint);
    asked.num_prompts = 1;
    asked.output_len = 20;
    const auto records =
        run(options_for(url_of(rig), endpoint), make_workload(asked).value_or_throw());
    std::set<double> times;
    for (const TextEvent& event : records.front().events) {
      times.insert(event.at_s);
    }
    EXPECT_GT(times.size(), 3U);  // not all at the end
    EXPECT_LT(records.front().ttft_s().value(), records.front().latency_s());
  }
}

TEST(LoadRun, ArrivalsArePoisson) {
  RunOptions options = options_for("http://localhost", Endpoint::kCompletions);
  options.request_rate = 50;
  WorkloadOptions asked = small_workload("random-ids", Endpoint::kCompletions);
  asked.num_prompts = 5000;
  const Workload workload = make_workload(asked).value_or_throw();
  const std::vector<double> times = arrival_times(options, workload);
  EXPECT_EQ(times[0], 0);
  std::vector<double> gaps;
  for (std::size_t i = 1; i < times.size(); ++i) {
    gaps.push_back(times[i] - times[i - 1]);
  }
  const Distribution gap = distribution_of(gaps);
  EXPECT_NEAR(gap.mean, 0.02, 0.001);    // 1 / rate
  EXPECT_NEAR(gap.stddev, 0.02, 0.001);  // as large, of an exponential one
  EXPECT_NEAR(gap.median, 0.02 * 0.6931, 0.001);
  EXPECT_EQ(arrival_times(options, workload), times);
  options.request_rate = {};
  EXPECT_THAT(arrival_times(options, workload), Each(0.0));
}

TEST(LoadRun, RefusedRequestsShowTheServersWords) {
  const ServerRig rig = make_rig();
  RunOptions options = options_for(url_of(rig), Endpoint::kCompletions);
  WorkloadOptions asked = small_workload("multi-turn", Endpoint::kCompletions);
  asked.num_prompts = 6;
  asked.vocab_size = 10000;
  const auto records = run(options, make_workload(asked).value_or_throw());
  const LoadSummary sum = summarize(records, {});
  EXPECT_EQ(sum.completed, 0);
  EXPECT_EQ(sum.errors.at("http_400").count, 2);  // first turns
  EXPECT_THAT(sum.errors.at("http_400").example, HasSubstr("HTTP 400: prompt["));
  EXPECT_EQ(sum.errors.at("skipped_turn").count, 4);
  EXPECT_EQ(sum.not_sent, 4);
}

TEST(LoadRun, NobodyListens) {
  RunOptions options = options_for("http://127.0.0.1:1", Endpoint::kCompletions);
  const auto records =
      run(options,
          make_workload(small_workload("random-ids", Endpoint::kCompletions)).value_or_throw());
  EXPECT_EQ(records[19].error_kind, "connect_failed");
  EXPECT_THAT(records[19].error, HasSubstr("cannot connect to http://127.0.0.1:1: "));
  EXPECT_THAT(first_model(options).message(), HasSubstr("http://127.0.0.1:1"));
  options.target = parse_target("http://no-such-host.invalid").value_or_throw();
  EXPECT_THAT(first_model(options).message(), HasSubstr("no-such-host.invalid"));
}

constexpr const char* kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";

/// The record of one request, or of several one after the other.
std::vector<RequestRecord> ask(const ScriptedServer& server, std::int64_t num_prompts = 1,
                               double timeout_s = 20) {
  RunOptions options = options_for(server.url(), Endpoint::kCompletions);
  options.max_concurrency = 1;
  options.timeout_s = timeout_s;
  WorkloadOptions asked = small_workload("random-ids", Endpoint::kCompletions);
  asked.num_prompts = num_prompts;
  return run(options, make_workload(asked).value_or_throw());
}

TEST(OtherServers, WithoutUsageOrChunks) {
  const ScriptedServer server({std::string(kStreamHead) +
                               "data: {\"choices\":[{\"text\":\"a\"}]}\n\n"
                               "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}"
                               "\n\ndata: [DONE]\n\n"});
  const auto records = ask(server, 2);
  EXPECT_EQ(records[1].error, "");
  EXPECT_EQ(records[1].output_tokens, 2);  // chunks with text
  EXPECT_EQ(records[1].prompt_tokens, 8);  // as sent
  EXPECT_FALSE(records[1].cached_tokens);
}

TEST(OtherServers, BrokenAnswersHaveKinds) {
  const auto kind_of = [](const std::string& answer) {
    const ScriptedServer server({answer});
    const RequestRecord record = ask(server).front();
    EXPECT_NE(record.error, "");
    return record.error_kind;
  };
  EXPECT_EQ(kind_of(std::string(kStreamHead) + "data: {\"choices\":[{\"text\":\"a\"}]}\n\n"),
            "incomplete_answer");
  EXPECT_EQ(kind_of(std::string(kStreamHead) + "data: {\"error\":{\"message\":\"NaN\"}}\n\n"),
            "error_event");
  EXPECT_EQ(kind_of(std::string(kStreamHead) + "data: nonsense\n\n"), "bad_event");
  EXPECT_EQ(kind_of("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
                    "{}"),
            "not_a_stream");
  EXPECT_EQ(kind_of("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nbad"), "http_502");
  EXPECT_EQ(kind_of("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
                    "chunked\r\n\r\n5\r\ndata:"),
            "connection_lost");
  EXPECT_EQ(kind_of("garbage\r\n\r\n"), "connection_lost");
}

TEST(OtherServers, AnIdleConnectionThatWasClosedIsOpenedAgain) {
  // It says that it keeps the connection and closes it all the same.
  const ScriptedServer server(
      {"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 57\r\n\r\n"
       "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\n"});
  const auto records = ask(server, 3);
  EXPECT_EQ(records[0].error, "");
  EXPECT_EQ(records[1].error, "");
  EXPECT_EQ(records[2].error, "");
  EXPECT_EQ(server.num_connections(), 3);
}

TEST(OtherServers, SilenceEndsAtTheTimeout) {
  const ScriptedServer server({""});
  const RequestRecord record = ask(server, 1, 0.05).front();
  EXPECT_EQ(record.error_kind, "timeout");
  EXPECT_THAT(record.error, HasSubstr("nothing came for 0.05 s"));
}

TEST(OtherServers, StoppingEndsWhatIsUnderWay) {
  const ScriptedServer server({""});
  std::atomic<bool> stop{false};
  RunOptions options = options_for(server.url(), Endpoint::kCompletions);
  options.max_concurrency = 1;
  WorkloadOptions asked = small_workload("random-ids", Endpoint::kCompletions);
  asked.num_prompts = 3;
  const auto records = run_load(options, make_workload(asked).value_or_throw(), stop,
                                [&](const RunProgress& progress) { stop = progress.running > 0; })
                           .value_or_throw();
  EXPECT_EQ(records[0].error_kind, "cancelled");
  EXPECT_EQ(records[2].error_kind, "not_sent");
}

TEST(LoadReport, TableJsonAndPageAgree) {
  const ServerRig rig = make_rig();
  LoadReport report;
  report.setting = {{"endpoint", "<script>alert(1)</script>"}};
  report.slo = parse_slo(std::vector<std::string>{"e2el:60000"}).value_or_throw();
  report.records =
      run(options_for(url_of(rig), Endpoint::kGenerate),
          make_workload(small_workload("random-ids", Endpoint::kGenerate)).value_or_throw());
  report.records.back().error_kind = "http_500";
  report.records.back().error = "<b>broken</b>";
  report.summary = summarize(report.records, report.slo);
  const std::string table = to_table(report);
  EXPECT_THAT(table, HasSubstr("19 completed, 1 failed in "));
  EXPECT_THAT(table, HasSubstr("e2el <= 60000 ms"));
  EXPECT_THAT(table, HasSubstr("http_500                1  <b>broken</b>"));
  const json all = json::parse(to_json(report));
  EXPECT_EQ(all["completed"], 19);
  EXPECT_EQ(all["total_output_tokens"], 19 * 6);
  EXPECT_EQ(all["requests"].size(), 20U);
  EXPECT_NEAR(all["request_goodput"].get<double>(), all["request_throughput"].get<double>(), 1e-9);
  EXPECT_NEAR(all["p99_e2el_ms"].get<double>(), 1000 * report.summary.e2e.p99, 1e-9);
  EXPECT_EQ(all["errors"]["http_500"]["count"], 1);
  const std::string page = to_page(report);
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(1)"));
  EXPECT_THAT(page, HasSubstr("&lt;b&gt;broken"));
  EXPECT_THAT(page, HasSubstr("Time to the first token"));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("@TILES@")));
  report = {};
  report.summary = summarize({}, {});
  EXPECT_THAT(to_table(report), HasSubstr("0 completed"));
  EXPECT_EQ(json::parse(to_json(report))["mean_ttft_ms"], nullptr);
  EXPECT_THAT(to_page(report), HasSubstr("</html>"));
}

}  // namespace
}  // namespace tandem::load

// Addresses, bodies of requests, and what the events of answers say.
#include "server/load/endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/load/event_stream.h"
#include "server/load/target.h"

namespace tandem::load {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Target, PartsOfAnAddress) {
  const auto url_of = [](std::string_view text) {
    return parse_target(text).value_or_throw().url();
  };
  EXPECT_EQ(url_of("http://127.0.0.1:30000"), "http://127.0.0.1:30000");
  EXPECT_EQ(url_of("http://host"), "http://host:80");
  EXPECT_EQ(url_of("http://host:8/v1/"), "http://host:8");
  EXPECT_EQ(url_of("http://host:8/api/v1"), "http://host:8/api");
  EXPECT_EQ(url_of("http://[::1]:9/"), "http://[::1]:9");
  EXPECT_EQ(parse_target("http://[::1]:9").value_or_throw().host, "::1");
  for (const char* bad : {"", "localhost:30000", "ftp://x", "https://x", "http://", "http://:80",
                          "http://x:", "http://x:0", "http://x:65536", "http://x:1a", "http://[::1",
                          "http://x/?a=b", "http://x y", "http://u@x"}) {
    const auto target = parse_target(bad);
    ASSERT_FALSE(target) << bad;
    EXPECT_THAT(target.message(), HasSubstr(std::string("--url '") + bad + "': expected "));
  }
}

TEST(EventStream, CutAnywhere) {
  const std::string body =
      ": keep-alive\n\ndata: {\"a\":1}\n\nevent: x\r\ndata:two\r\ndata:  lines\r\n\r\ndata: "
      "[DONE]\n\n";
  for (std::size_t cut = 0; cut <= body.size(); ++cut) {
    EventStream events;
    std::vector<std::string> all;
    const auto take = [&](std::string_view data) { all.emplace_back(data); };
    events.push(body.substr(0, cut), take);
    events.push(body.substr(cut), take);
    EXPECT_THAT(all, ElementsAre("{\"a\":1}", "two\n lines", "[DONE]")) << cut;
  }
}

TEST(RequestBody, OnlyFieldsOfTheApi) {
  RequestForm form{Endpoint::kCompletions, "m", true, 0.5};
  EXPECT_EQ(json::parse(request_body(form, {{3, 4}, {}, {}}, 7)),
            json::parse(R"({"model": "m", "prompt": [3, 4], "max_tokens": 7, "temperature": 0.5,
                            "ignore_eos": true, "stream": true,
                            "stream_options": {"include_usage": true}})"));
  form.ignore_eos = false;
  EXPECT_EQ(json::parse(request_body(form, {{}, "text", {}}, 7)),
            json::parse(R"({"model": "m", "prompt": "text", "max_tokens": 7, "temperature": 0.5,
                            "stream": true, "stream_options": {"include_usage": true}})"));
  form.endpoint = Endpoint::kChat;
  EXPECT_EQ(json::parse(request_body(form, {{}, {}, {{"user", "hi"}}}, 7)),
            json::parse(R"({"model": "m", "messages": [{"role": "user", "content": "hi"}],
                            "max_completion_tokens": 7, "temperature": 0.5, "stream": true,
                            "stream_options": {"include_usage": true}})"));
  form = {Endpoint::kGenerate, "m", true, 0};
  EXPECT_EQ(json::parse(request_body(form, {{3}, {}, {}}, 7)),
            json::parse(R"({"input_ids": [3], "stream": true, "sampling_params":
                            {"max_new_tokens": 7, "temperature": 0.0, "ignore_eos": true}})"));
  EXPECT_FALSE(parse_endpoint("embeddings"));
}

TEST(AnswerReader, Completions) {
  AnswerReader reader(Endpoint::kCompletions);
  EXPECT_EQ(reader.push(R"({"choices": [{"text": "ab", "finish_reason": null}], "usage": null})"),
            1);
  EXPECT_EQ(reader.push(R"({"choices": [{"text": ""}]})"), 0);
  EXPECT_FALSE(reader.is_finished());
  EXPECT_EQ(reader.push(R"({"choices": [{"text": "c", "finish_reason": "length"}]})"), 1);
  EXPECT_EQ(reader.push(R"({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9,
                            "prompt_tokens_details": {"cached_tokens": 4}}})"),
            0);
  EXPECT_EQ(reader.push("[DONE]"), 0);
  EXPECT_TRUE(reader.is_finished());
  EXPECT_FALSE(reader.problem());
  EXPECT_EQ(reader.text(), "abc");
  EXPECT_EQ(reader.prompt_tokens(), 5);
  EXPECT_EQ(reader.output_tokens(), 9);
  EXPECT_EQ(reader.cached_tokens(), 4);
}

TEST(AnswerReader, ChatCountsReasoningAndCallsAsText) {
  AnswerReader reader(Endpoint::kChat);
  const auto push = [&](const std::string& delta) {
    return reader.push(R"({"choices": [{"delta": )" + delta + "}]}");
  };
  EXPECT_EQ(push(R"({"role": "assistant", "content": ""})"), 0);
  EXPECT_EQ(push(R"({"reasoning_content": "hm"})"), 1);
  EXPECT_EQ(push(R"({"reasoning": "hm"})"), 1);
  EXPECT_EQ(push(R"({"content": "yes"})"), 1);
  EXPECT_EQ(push(R"({"tool_calls": [{"index": 0}]})"), 1);
  EXPECT_EQ(push("{}"), 0);
  EXPECT_EQ(reader.text(), "yes");
}

TEST(AnswerReader, GenerateCumulativeAndIncremental) {
  AnswerReader whole(Endpoint::kGenerate);
  EXPECT_EQ(whole.push(R"({"text": "a", "output_ids": [1], "meta_info":
                           {"completion_tokens": 1, "finish_reason": null}})"),
            1);
  EXPECT_EQ(whole.push(R"({"text": "a", "output_ids": [1, 2], "meta_info":
                           {"completion_tokens": 2, "finish_reason": null}})"),
            0);  // its bytes are held back
  EXPECT_EQ(whole.push(R"({"text": "abcd", "output_ids": [1, 2, 3, 4], "meta_info":
                           {"completion_tokens": 4, "prompt_tokens": 6, "cached_tokens": 2,
                            "finish_reason": {"type": "length", "length": 4}}})"),
            3);
  EXPECT_THAT(whole.ids(), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(whole.text(), "abcd");
  EXPECT_TRUE(whole.is_finished());
  EXPECT_EQ(whole.cached_tokens(), 2);

  AnswerReader parts(Endpoint::kGenerate);
  const auto push = [&](int id, int count) {
    return parts.push(
        json{{"text", "a"}, {"output_ids", {id}}, {"meta_info", {{"completion_tokens", count}}}}
            .dump());
  };
  EXPECT_EQ(push(1, 1), 1);
  EXPECT_EQ(push(2, 2), 1);  // the same text again is new
  EXPECT_EQ(push(3, 3), 1);
  EXPECT_THAT(parts.ids(), ElementsAre(1, 2, 3));
  EXPECT_EQ(parts.text(), "aaa");
}

TEST(AnswerReader, Problems) {
  const auto problem_of = [](Endpoint endpoint, const char* data) {
    AnswerReader reader(endpoint);
    EXPECT_EQ(reader.push(data), 0);
    return reader.problem().value_or(AnswerProblem{});
  };
  EXPECT_EQ(problem_of(Endpoint::kChat, "{").kind, "bad_event");
  EXPECT_EQ(problem_of(Endpoint::kChat, "3").kind, "bad_event");
  const AnswerProblem error = problem_of(Endpoint::kChat, R"({"error": {"message": "NaN"}})");
  EXPECT_EQ(error.kind, "error_event");
  EXPECT_EQ(error.text, "NaN");
  EXPECT_EQ(problem_of(Endpoint::kCompletions, R"({"choices": [{"finish_reason": "abort"}]})").kind,
            "aborted");
  EXPECT_EQ(problem_of(Endpoint::kGenerate,
                       R"({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})")
                .kind,
            "aborted");
  // Members of the wrong type are as good as missing.
  EXPECT_EQ(problem_of(Endpoint::kChat, R"({"choices": {"a": 1}, "usage": [3]})").kind, "");
  EXPECT_EQ(
      problem_of(Endpoint::kGenerate, R"({"text": 3, "meta_info": 4, "output_ids": "x"})").kind,
      "");
}

TEST(ErrorText, MessageOrBytes) {
  EXPECT_EQ(error_text(R"({"error": {"message": "too long", "code": 1}})"), "too long");
  EXPECT_EQ(error_text(R"({"error": "no"})"), "no");
  EXPECT_EQ(error_text(R"({"message": "vanished", "object": "error"})"), "vanished");
  EXPECT_EQ(error_text(""), "(no body)");
  EXPECT_THAT(error_text("<html>Bad Gateway</html>"), HasSubstr("Bad Gateway"));
}

}  // namespace
}  // namespace tandem::load

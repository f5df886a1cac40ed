// /v1/completions and /generate: texts, streams, log-probabilities, stops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/server_rig.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

/// Events of a stream, parsed; the last is [DONE].
std::vector<json> stream_of(const ServerRig& rig, const std::string& path, json body) {
  body["stream"] = true;
  const Reply reply = rig.post(path, body);
  EXPECT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.header("content-type"), "text/event-stream; charset=utf-8");
  std::vector<std::string> events = reply.events();
  EXPECT_FALSE(events.empty());
  EXPECT_EQ(events.back(), "[DONE]");
  events.pop_back();
  std::vector<json> parsed;
  for (const std::string& event : events) {
    EXPECT_EQ(event.find('\n'), std::string::npos);
    parsed.push_back(json::parse(event));
  }
  return parsed;
}

TEST(Completions, StreamsAddUpToTheWholeAnswer) {
  ServerRig rig;
  for (int seed = 0; seed < 8; ++seed) {
    const json body{
        {"prompt", "abc"},    {"max_tokens", 40},        {"seed", seed}, {"n", 2}, {"logprobs", 2},
        {"ignore_eos", true}, {"return_token_ids", true}};
    const json whole = rig.post("/v1/completions", body).json();
    std::vector<std::string> texts(2);
    std::vector<json> ids(2, json::array());
    std::vector<json> logprobs(2, json::array());
    std::vector<json> offsets(2, json::array());
    std::vector<int> finished(2);
    for (const json& event : stream_of(rig, "/v1/completions", body)) {
      const json& choice = event["choices"][0];
      const auto index = choice["index"].get<std::size_t>();
      EXPECT_EQ(finished[index], 0) << "nothing after the finish";
      texts[index] += choice["text"].get<std::string>();
      for (const json& id : choice["token_ids"]) {
        ids[index].push_back(id);
      }
      for (const json& value : choice["logprobs"]["token_logprobs"]) {
        logprobs[index].push_back(value);
      }
      for (const json& value : choice["logprobs"]["text_offset"]) {
        offsets[index].push_back(value);
      }
      finished[index] += choice["finish_reason"].is_null() ? 0 : 1;
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const json& choice = whole["choices"][i];
      EXPECT_EQ(choice["text"], texts[i]);
      EXPECT_EQ(choice["token_ids"], ids[i]);
      EXPECT_EQ(choice["logprobs"]["token_logprobs"], logprobs[i]);
      EXPECT_EQ(choice["logprobs"]["text_offset"], offsets[i]);
      EXPECT_EQ(finished[i], 1);
      EXPECT_EQ(ids[i].size(), 40U);
      EXPECT_EQ(logprobs[i].size(), 40U);
    }
    EXPECT_NE(texts[0], texts[1]);
    EXPECT_EQ(whole["usage"]["completion_tokens"], 80);
    EXPECT_EQ(whole["usage"]["prompt_tokens"], 3) << "counted once";
  }
  rig.expect_idle();
}

TEST(Completions, BatchesComePromptMajor) {
  ServerRig rig;
  const json body{{"prompt", {"ab", "cd", "ef"}}, {"n", 2}, {"max_tokens", 5}, {"temperature", 0}};
  const json answer = rig.post("/v1/completions", body).json();
  ASSERT_EQ(answer["choices"].size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(answer["choices"][i]["index"], i);
    const std::string prompt = std::vector<std::string>{"ab", "cd", "ef"}[i / 2];
    const json alone =
        rig.post("/v1/completions", {{"prompt", prompt}, {"max_tokens", 5}, {"temperature", 0}})
            .json();
    EXPECT_EQ(answer["choices"][i]["text"], alone["choices"][0]["text"]);
  }
  const json ids = rig.post("/v1/completions",
                            {{"prompt", {{0, 1}, {2, 3}}}, {"max_tokens", 5}, {"temperature", 0}})
                       .json();
  EXPECT_EQ(ids["choices"][0]["text"], answer["choices"][0]["text"]);
  EXPECT_EQ(ids["choices"][1]["text"], answer["choices"][2]["text"]);
}

TEST(Completions, TheSeedDecides) {
  ServerRig rig;
  const auto text = [&](json seed) {
    return rig
        .post("/v1/completions",
              {{"prompt", "abc"}, {"max_tokens", 30}, {"seed", seed}, {"ignore_eos", true}})
        .json()["choices"][0]["text"];
  };
  EXPECT_EQ(text(5), text(5));
  EXPECT_NE(text(5), text(6));
  EXPECT_NE(text(nullptr), text(nullptr));
  EXPECT_EQ(text(-1), text(-1));
}

TEST(Completions, EchoAndUsageInStreams) {
  ServerRig rig;
  const json body{{"prompt", "héllo"},
                  {"max_tokens", 4},
                  {"echo", true},
                  {"temperature", 0},
                  {"ignore_eos", true}};
  const json whole = rig.post("/v1/completions", body).json();
  const std::string text = whole["choices"][0]["text"];
  EXPECT_THAT(text, ::testing::StartsWith("héllo"));
  json streamed = body;
  streamed["stream_options"] = {{"include_usage", true}};
  const std::vector<json> events = stream_of(rig, "/v1/completions", streamed);
  std::string sum;
  for (std::size_t i = 0; i + 1 < events.size(); ++i) {
    EXPECT_TRUE(events[i].contains("usage") && events[i]["usage"].is_null());
    EXPECT_EQ(events[i]["id"], events[0]["id"]);
    sum += events[i]["choices"][0]["text"];
  }
  EXPECT_EQ(sum, text);
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_EQ(events.back()["usage"], whole["usage"]);
  // Only the prompt: nothing is generated.
  json only = body;
  only["max_tokens"] = 0;
  const json echoed = rig.post("/v1/completions", only).json();
  EXPECT_EQ(echoed["choices"][0]["text"], "héllo");
  EXPECT_EQ(echoed["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(echoed["usage"]["completion_tokens"], 0);
}

class ScriptedTest : public ::testing::Test {
 protected:
  ScriptedTest() : tokenizer_(letters_tokenizer()) {
    script_->prompt_size = 2;
    script_->last = tokenizer_->special_id("<eos>").value();
  }
  /// The model will answer a prompt of two tokens with `text`.
  void say(const std::string& text) { script_->response = tokenizer_->encode(text); }
  json native(json params, json body = json::object()) {
    body["text"] = "ab";
    params["temperature"] = 0;
    body["sampling_params"] = params;
    const Reply reply = rig_.post("/generate", body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.json();
  }

  std::unique_ptr<CharTokenizer> tokenizer_;
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  ServerRig rig_{test_options(), std::make_unique<ScriptedModel>(FakeModel::kVocab, script_)};
};

TEST_F(ScriptedTest, StopStringsAcrossTokenBorders) {
  say("one two three");
  struct Case {
    std::vector<std::string> stop;
    std::string text;
    json matched;
    std::size_t tokens;
  };
  const std::vector<Case> cases{
      {{"two"}, "one ", "two", 7},
      {{"e t", "two"}, "on", "e t", 5},
      {{"x"}, "one two three", nullptr, 14},
      {{"three!", "ee"}, "one two thr", "ee", 14},
      {{"o", "on"}, "", "on", 2},
  };
  for (const Case& test : cases) {
    const json whole = native({{"stop", test.stop}}, {{"return_logprob", true}});
    EXPECT_EQ(whole["text"], test.text);
    const json& meta = whole["meta_info"];
    EXPECT_EQ(meta["finish_reason"]["type"], "stop");
    if (!test.matched.is_null()) {
      EXPECT_EQ(meta["finish_reason"]["matched"], test.matched);
    } else {
      EXPECT_EQ(meta["finish_reason"]["matched"], script_->last);
    }
    EXPECT_EQ(whole["output_ids"].size(), test.tokens);
    EXPECT_EQ(meta["completion_tokens"], test.tokens);
    EXPECT_EQ(meta["output_token_logprobs"].size(), test.tokens);
    // The same as a stream: no part of the stop string ever shows.
    std::string text;
    for (const json& event : stream_of(
             rig_, "/v1/completions",
             {{"prompt", "ab"}, {"temperature", 0}, {"stop", test.stop}, {"max_tokens", 50}})) {
      text += event["choices"][0]["text"].get<std::string>();
    }
    EXPECT_EQ(text, test.text);
  }
  EXPECT_EQ(native({{"stop", "two"}, {"no_stop_trim", true}})["text"], "one two");
  rig_.expect_idle();
}

TEST_F(ScriptedTest, WhatEndsAResponseIsReported) {
  say("abc");
  const json eos = native({});
  EXPECT_EQ(eos["text"], "abc");
  EXPECT_EQ(eos["output_ids"].size(), 4U) << "the stop token is among the ids";
  EXPECT_EQ(eos["meta_info"]["finish_reason"]["matched"], script_->last);
  const json length = native({{"max_new_tokens", 2}});
  EXPECT_EQ(length["text"], "ab");
  EXPECT_EQ(length["meta_info"]["finish_reason"], (json{{"type", "length"}, {"length", 2}}));
  const json token = native({{"stop_token_ids", {1}}});
  EXPECT_EQ(token["text"], "a") << "the text ends before a stop token";
  EXPECT_EQ(token["output_ids"], (json{0, 1}));
  EXPECT_EQ(token["meta_info"]["finish_reason"]["matched"], 1);
  EXPECT_EQ(native({{"stop_token_ids", {1}}, {"no_stop_trim", true}})["text"], "ab");
  EXPECT_EQ(native({{"max_new_tokens", 0}})["output_ids"].size(), 0U);
}

TEST_F(ScriptedTest, CharactersOfSeveralBytesComeWhole) {
  say("日é日");
  std::string text;
  for (const json& event :
       stream_of(rig_, "/v1/completions", {{"prompt", "ab"}, {"temperature", 0}})) {
    text += event["choices"][0]["text"].get<std::string>();
  }
  EXPECT_EQ(text, "日é日");
  const json whole =
      rig_.post("/v1/completions", {{"prompt", "ab"}, {"temperature", 0}, {"logprobs", 1}}).json();
  EXPECT_EQ(whole["choices"][0]["logprobs"]["text_offset"], (json{0, 1, 2}));
  EXPECT_EQ(whole["choices"][0]["logprobs"]["tokens"], (json{"日", "é", "日"}));
}

TEST_F(ScriptedTest, NativeStreamsAreCumulativeAndBatchesAreLists) {
  say("abcd");
  const std::vector<json> events = stream_of(
      rig_, "/generate",
      {{"text", "ab"}, {"sampling_params", {{"temperature", 0}}}, {"return_logprob", true}});
  ASSERT_GE(events.size(), 4U);
  EXPECT_EQ(events.back()["text"], "abcd");
  std::size_t tokens = 0;
  for (const json& event : events) {
    EXPECT_GE(event["output_ids"].size(), tokens);
    tokens = event["output_ids"].size();
    EXPECT_EQ(event["meta_info"]["output_token_logprobs"].size(), tokens);
    EXPECT_EQ(event["meta_info"]["completion_tokens"], tokens);
  }
  const json list = rig_.post("/generate", {{"text", {"ab", "cd"}},
                                            {"rid", {"first", "second"}},
                                            {"sampling_params",
                                             {{{"temperature", 0}, {"max_new_tokens", 1}},
                                              {{"temperature", 0}, {"max_new_tokens", 2}}}}})
                        .json();
  ASSERT_EQ(list.size(), 2U);
  EXPECT_EQ(list[0]["output_ids"].size(), 1U);
  EXPECT_EQ(list[1]["output_ids"].size(), 2U);
  EXPECT_EQ(list[1]["meta_info"]["id"], "second");
}

TEST_F(ScriptedTest, GrammarsLeaveOnlyWhatMatches) {
  say("zzzzzz");
  const json regex = native({{"regex", "ab|ba"}});
  EXPECT_TRUE(regex["text"] == "ab" || regex["text"] == "ba") << regex.dump();
  EXPECT_EQ(regex["meta_info"]["finish_reason"]["type"], "stop");
}

TEST_F(ScriptedTest, KeepAlivesFillTheTimeOfALongStep) {
  server::ServerOptions options = test_options();
  options.http.event_comment_s = 0.01;
  ServerRig slow(options, std::make_unique<ScriptedModel>(FakeModel::kVocab, script_));
  say("ab");
  script_->step_time = std::chrono::milliseconds(100);
  const Reply reply =
      slow.post("/v1/completions", {{"prompt", "ab"}, {"temperature", 0}, {"stream", true}});
  EXPECT_THAT(reply.body, ::testing::StartsWith(": keep-alive\n\n"));
}

}  // namespace
}  // namespace tandem::test

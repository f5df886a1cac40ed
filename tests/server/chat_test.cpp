// /v1/chat/completions: channels, tools, streams, with a model that says what the test wants.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/server_rig.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

/// The sum of a stream's chunks, with what must hold of their order checked on the way.
struct Folded {
  std::string content;
  std::string reasoning;
  json tool_calls = json::array();
  json content_logprobs = json::array();
  json reasoning_logprobs = json::array();
  json token_ids = json::array();
  std::string finish_reason;
};

class ChatTest : public ::testing::Test {
 protected:
  ChatTest() : tokenizer_(kimi_like_tokenizer()) {
    script_->last = tokenizer_->special_id("<|end_of_msg|>").value();
  }

  /// Ids of text with markers.
  [[nodiscard]] std::vector<std::int32_t> ids(const std::string& text) const {
    const std::vector<Segment> segments{{text, true}};
    return tokenizer_->encode_segments(segments);
  }
  /// A conversation without thinking, unless `body` says otherwise.
  json with_messages(json body) const {
    body["messages"] = {{{"role", "user"}, {"content", "hi"}}};
    body["temperature"] = 0;
    if (!body.contains("reasoning_effort")) {
      body["reasoning_effort"] = "none";
    }
    return body;
  }
  /// The model will answer `body` with `text`.
  void say(const std::string& text, const json& body) {
    const Reply reply = rig_.post("/tokenize", body);
    ASSERT_EQ(reply.status, 200) << reply.body;
    script_->prompt_size = reply.json()["count"];
    script_->response = ids(text);
  }
  json whole(const json& body) {
    const Reply reply = rig_.post("/v1/chat/completions", body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.json();
  }
  Folded fold(json body) {
    body["stream"] = true;
    const Reply reply = rig_.post("/v1/chat/completions", body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    std::vector<std::string> events = reply.events();
    EXPECT_EQ(events.back(), "[DONE]");
    events.pop_back();
    Folded sum;
    std::string id;
    for (std::size_t i = 0; i < events.size(); ++i) {
      const json event = json::parse(events[i]);
      EXPECT_EQ(event["object"], "chat.completion.chunk");
      id = i == 0 ? event["id"].get<std::string>() : id;
      EXPECT_EQ(event["id"], id);
      const json& choice = event["choices"][0];
      const json& delta = choice["delta"];
      EXPECT_TRUE(sum.finish_reason.empty()) << "nothing after the finish";
      EXPECT_EQ(delta.contains("role"), i == 0);
      add(sum, choice);
    }
    EXPECT_FALSE(sum.finish_reason.empty());
    return sum;
  }
  /// Streamed and whole answers of the same request say the same.
  json both(const json& body) {
    json answer = whole(body);
    const Folded sum = fold(body);
    const json& message = answer["choices"][0]["message"];
    EXPECT_EQ(message["content"].is_null() ? "" : message["content"], sum.content);
    EXPECT_EQ(message["reasoning_content"].is_null() ? "" : message["reasoning_content"],
              sum.reasoning);
    json calls = message["tool_calls"].is_null() ? json::array() : message["tool_calls"];
    EXPECT_EQ(calls.size(), sum.tool_calls.size());
    for (std::size_t i = 0; i < std::min(calls.size(), sum.tool_calls.size()); ++i) {
      EXPECT_EQ(calls[i]["function"], sum.tool_calls[i]["function"]);
      EXPECT_EQ(calls[i]["type"], "function");
      EXPECT_THAT(calls[i]["id"].get<std::string>(), ::testing::StartsWith("call_"));
    }
    EXPECT_EQ(answer["choices"][0]["finish_reason"], sum.finish_reason);
    return answer;
  }

  std::unique_ptr<CharTokenizer> tokenizer_;
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  ServerRig rig_{options(), std::make_unique<ScriptedModel>(110, script_), kimi_like_tokenizer()};

 private:
  static server::ServerOptions options() {
    server::ServerOptions options = test_options();
    options.engine.max_seq_len = 4096;
    return options;
  }
  static void add(Folded& sum, const json& choice) {
    const json& delta = choice["delta"];
    sum.content += delta.value("content", "");
    sum.reasoning += delta.value("reasoning_content", "");
    for (const json& call : delta.value("tool_calls", json::array())) {
      const auto index = call["index"].get<std::size_t>();
      if (index == sum.tool_calls.size()) {  // the first delta of a call has its name and id
        EXPECT_TRUE(call.contains("id") && call["function"].contains("name"));
        sum.tool_calls.push_back(call);
      } else {
        EXPECT_EQ(index + 1, sum.tool_calls.size());
        EXPECT_FALSE(call.contains("id") || call["function"].contains("name"));
        json& arguments = sum.tool_calls[index]["function"]["arguments"];
        arguments = arguments.get<std::string>() + call["function"]["arguments"].get<std::string>();
      }
    }
    if (choice["logprobs"].is_object()) {
      for (const json& entry : choice["logprobs"]["content"]) {
        sum.content_logprobs.push_back(entry);
      }
      for (const json& entry : choice["logprobs"].value("reasoning_content", json::array())) {
        sum.reasoning_logprobs.push_back(entry);
      }
    }
    for (const json& token : choice.value("token_ids", json::array())) {
      sum.token_ids.push_back(token);
    }
    if (!choice["finish_reason"].is_null()) {
      sum.finish_reason = choice["finish_reason"];
    }
  }
};

TEST_F(ChatTest, AnAnswerWithReasoning) {
  const json body = with_messages({{"reasoning_effort", "high"}, {"logprobs", true}});
  say("let me see<|close|>think<|sep|><|open|>response<|sep|>Paris<|close|>response<|sep|>"
      "<|close|>message<|sep|>",
      body);
  const json answer = both(body);
  const json& choice = answer["choices"][0];
  EXPECT_EQ(choice["message"]["content"], "Paris");
  EXPECT_EQ(choice["message"]["reasoning_content"], "let me see");
  EXPECT_TRUE(choice["message"]["tool_calls"].is_null());
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["matched_stop"], script_->last);
  EXPECT_EQ(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 10);
  std::string text;
  for (const json& entry : choice["logprobs"]["content"]) {
    text += entry["token"].get<std::string>();
  }
  EXPECT_EQ(text, "Paris") << "reasoning tokens are not among the content's";
  EXPECT_EQ(choice["logprobs"]["reasoning_content"].size(), 10U);
  const Folded sum = fold(body);
  EXPECT_EQ(sum.content_logprobs, choice["logprobs"]["content"]);
  EXPECT_EQ(sum.reasoning_logprobs, choice["logprobs"]["reasoning_content"]);
  json raw = body;
  raw["separate_reasoning"] = false;
  EXPECT_EQ(whole(raw)["choices"][0]["message"]["content"], "let me seeParis");
  rig_.expect_idle();
}

std::string call_text(const std::string& name, int index, const std::string& key,
                      const std::string& value) {
  return "<|open|>call tool=\"" + name + "\" index=\"" + std::to_string(index) +
         "\"<|sep|><|open|>argument key=\"" + key + "\" type=\"string\"<|sep|>" + value +
         "<|close|>argument<|sep|><|close|>call<|sep|>";
}

json tools() {
  return {
      {{"type", "function"},
       {"function",
        {{"name", "weather"},
         {"parameters", {{"type", "object"}, {"properties", {{"city", {{"type", "string"}}}}}}}}}}};
}

TEST_F(ChatTest, ToolCallsAreStreamedAndComplete) {
  const json body = with_messages({{"tools", tools()}});
  const std::string calls = "<|close|>response<|sep|><|open|>tools<|sep|>" +
                            call_text("weather", 1, "city", "Par\"is") +
                            call_text("weather", 2, "city", "Rome");
  say(calls + "<|close|>tools<|sep|><|close|>message<|sep|>", body);
  const json answer = both(body);
  const json& choice = answer["choices"][0];
  ASSERT_EQ(choice["message"]["tool_calls"].size(), 2U) << answer.dump();
  const json& first = choice["message"]["tool_calls"][0]["function"];
  EXPECT_EQ(first["name"], "weather");
  EXPECT_EQ(json::parse(first["arguments"].get<std::string>()), (json{{"city", "Par\"is"}}));
  EXPECT_TRUE(choice["message"]["content"].is_null());
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_NE(choice["message"]["tool_calls"][0]["id"], choice["message"]["tool_calls"][1]["id"]);
  // One call only.
  json single = body;
  single["parallel_tool_calls"] = false;
  EXPECT_EQ(both(single)["choices"][0]["message"]["tool_calls"].size(), 1U);
  // A call that is cut off: length wins.
  json cut = body;
  cut["max_tokens"] = ids(calls).size() - 10;
  EXPECT_EQ(both(cut)["choices"][0]["finish_reason"], "length");
  rig_.expect_idle();
}

TEST_F(ChatTest, ANamedToolIsTheOnlyOneInThePrompt) {
  json two = tools();
  two.push_back(two[0]);
  two[1]["function"]["name"] = "time";
  const auto prompt_of = [&](const json& body) {
    const json tokens = rig_.post("/tokenize", with_messages(body)).json()["tokens"];
    return rig_.post("/detokenize", {{"tokens", tokens}}).json()["text"].get<std::string>();
  };
  const std::string prompt = prompt_of(
      {{"tools", two}, {"tool_choice", {{"type", "function"}, {"function", {{"name", "time"}}}}}});
  EXPECT_THAT(prompt, HasSubstr("\"time\""));
  EXPECT_THAT(prompt, ::testing::Not(HasSubstr("\"weather\"")));
  EXPECT_THAT(prompt, HasSubstr("tool_choice=required"));
  EXPECT_THAT(prompt_of({{"tools", two}}), HasSubstr("\"weather\""));
}

TEST_F(ChatTest, StopStringsActInTheAnswerOnly) {
  const json body = with_messages({{"reasoning_effort", "high"}, {"stop", "stop"}});
  say("I stop here<|close|>think<|sep|><|open|>response<|sep|>an answer, stop it", body);
  const json answer = both(body);
  EXPECT_EQ(answer["choices"][0]["message"]["reasoning_content"], "I stop here");
  EXPECT_EQ(answer["choices"][0]["message"]["content"], "an answer, ");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(answer["choices"][0]["matched_stop"], "stop");
}

TEST_F(ChatTest, SpecialTokensInUserTextStayText) {
  const auto count = [&](const std::string& content) {
    json body = with_messages(json::object());
    body["messages"][0]["content"] = content;
    return rig_.post("/tokenize", body).json()["count"].get<int>();
  };
  const std::string marker = "<|end_of_msg|>";
  EXPECT_EQ(count(marker), count(std::string(marker.size(), 'x')));
}

TEST_F(ChatTest, TokenIdsInAndOut) {
  const json body = with_messages({{"return_token_ids", true}});
  say("abc<|close|>response<|sep|>", body);
  const json answer = whole(body);
  const json prompt = answer["prompt_token_ids"];
  EXPECT_EQ(prompt, rig_.post("/tokenize", body).json()["tokens"]);
  EXPECT_EQ(answer["choices"][0]["token_ids"].size(), answer["usage"]["completion_tokens"]);
  EXPECT_EQ(fold(body).token_ids, answer["choices"][0]["token_ids"]);
  const json again = whole({{"input_ids", prompt}, {"temperature", 0}, {"return_token_ids", true}});
  EXPECT_EQ(again["choices"][0]["token_ids"], answer["choices"][0]["token_ids"]);
  EXPECT_EQ(again["choices"][0]["message"]["content"], "abc");
}

TEST_F(ChatTest, AllKeysAreAlwaysThere) {
  const json body = with_messages({{"n", 4}});
  say("<|close|>response<|sep|>", body);
  const json answer = whole(body);
  for (const char* key :
       {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "metadata"}) {
    EXPECT_TRUE(answer.contains(key)) << key;
  }
  EXPECT_EQ(answer["metadata"]["weight_version"], "default");
  ASSERT_EQ(answer["choices"].size(), 4U);
  for (const json& choice : answer["choices"]) {
    EXPECT_TRUE(choice["logprobs"].is_null());
    EXPECT_EQ(choice["message"]["content"], "") << "not null without tool calls";
    for (const char* key : {"role", "reasoning_content", "tool_calls"}) {
      EXPECT_TRUE(choice["message"].contains(key)) << key;
    }
  }
}

TEST_F(ChatTest, FourSamplesOfAStreamEachFinishOnce) {
  const json body = with_messages({{"n", 4}, {"stream", true}});
  say("hello<|close|>response<|sep|>", body);
  std::vector<std::string> texts(4);
  std::vector<int> finished(4);
  std::vector<std::string> events = rig_.post("/v1/chat/completions", body).events();
  events.pop_back();
  for (const std::string& event : events) {
    const json choice = json::parse(event)["choices"][0];
    const auto index = choice["index"].get<std::size_t>();
    EXPECT_EQ(finished[index], 0);
    texts[index] += choice["delta"].value("content", "");
    finished[index] += choice["finish_reason"].is_null() ? 0 : 1;
  }
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(texts[i], "hello");
    EXPECT_EQ(finished[i], 1);
  }
}

}  // namespace
}  // namespace tandem::test

// What the openai Python client 3.57 sends, to the byte, but for the host's port; recorded by
// tools/serve_check's calls. The model closes each text as soon as it may and draws the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/server_rig.h"

namespace tandem::test {
namespace {

constexpr std::string_view kChat = "/v1/chat/completions";
constexpr std::string_view kCompletions = "/v1/completions";

std::string client_headers() {
  return "Host: 127.0.0.1:48429\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
         "authorization: Bearer none\r\naccept: application/json\r\n";
}

std::string stainless_headers() {
  return "user-agent: OpenAI/Python 3.57.0\r\nx-stainless-lang: python\r\n"
         "x-stainless-package-version: 3.57.0\r\nx-stainless-os: Linux\r\nx-stainless-arch: x64\r\n"
         "x-stainless-runtime: CPython\r\nx-stainless-runtime-version: 3.11.7\r\n"
         "x-stainless-async: false\r\nx-stainless-retry-count: 0\r\n"
         "x-stainless-read-timeout: 600\r\n";
}

class OpenaiClientTest : public ::testing::Test {
 protected:
  OpenaiClientTest() : tokenizer_(kimi_like_tokenizer()) {
    script_->prompt_size = 1 << 20;  // nothing but `last`
    script_->last = tokenizer_->special_id("<|close|>").value();
  }

  /// As the client sends it, over the connection that it keeps.
  Reply post(std::string_view path, const std::string& body) {
    client_.send("POST " + std::string(path) + " HTTP/1.1\r\n" + client_headers() +
                 "content-type: application/json\r\n" + stainless_headers() +
                 "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    Reply reply = client_.read_reply();
    EXPECT_EQ(reply.status, 200) << body << "\n" << reply.body;
    return reply;
  }
  Reply get(const std::string& path) {
    client_.send("GET " + path + " HTTP/1.1\r\n" + client_headers() + stainless_headers() + "\r\n");
    Reply reply = client_.read_reply();
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply;
  }
  /// The events of a stream, without the last one, [DONE].
  static std::vector<json> chunks(const Reply& reply) {
    std::vector<json> all;
    for (const std::string& event : reply.events()) {
      if (event != "[DONE]") {
        all.push_back(json::parse(event));
      }
    }
    EXPECT_EQ(reply.events().back(), "[DONE]");
    return all;
  }

  std::unique_ptr<CharTokenizer> tokenizer_;
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  ServerRig rig_{options(), std::make_unique<ScriptedModel>(110, script_), kimi_like_tokenizer()};
  HttpClient client_ = rig_.client();

 private:
  static server::ServerOptions options() {
    server::ServerOptions options = test_options();
    options.engine.max_seq_len = 4096;
    return options;
  }
};

TEST_F(OpenaiClientTest, Models) {
  EXPECT_EQ(get("/v1/models").json()["data"][0]["id"], "org/test-model");
  EXPECT_EQ(get("/v1/models/org/test-model").json()["id"], "org/test-model");
}

TEST_F(OpenaiClientTest, Chat) {
  const json answer =
      post(kChat, R"({"model":"default","messages":[{"role":"user","content":"hi"}],)"
                  R"("max_tokens":16})")
          .json();
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(answer["usage"]["completion_tokens"], 16);
}

TEST_F(OpenaiClientTest, StreamWithUsage) {
  const auto all = chunks(
      post(kChat, R"({"model":"default","stream":true,"messages":[{"role":"user","content":"hi"}],)"
                  R"("max_tokens":16,"stream_options":{"include_usage":true}})"));
  ASSERT_GE(all.size(), 2U);
  EXPECT_EQ(all.back()["choices"], json::array());
  EXPECT_EQ(all.back()["usage"]["completion_tokens"], 16);
  EXPECT_EQ(all[all.size() - 2]["choices"][0]["finish_reason"], "length");
}

TEST_F(OpenaiClientTest, StreamedToolCall) {
  const auto all = chunks(post(
      kChat,
      R"({"model":"default","stream":true,"messages":[{"role":"user","content":"hi"}],)"
      R"("reasoning_effort":"none","seed":1,"tool_choice":"required","tools":[{"type":"function",)"
      R"("function":{"name":"f","parameters":{"type":"object","properties":{"city":)"
      R"({"enum":["Rome","Oslo"]}},"required":["city"]}}}]})"));
  std::string arguments;
  for (const json& chunk : all) {
    for (const json& call : chunk["choices"][0]["delta"].value("tool_calls", json::array())) {
      if (call["index"] == 0) {
        arguments += call["function"]["arguments"].get<std::string>();
      }
    }
  }
  EXPECT_THAT(arguments, ::testing::AnyOf(R"({"city":"Rome"})", R"({"city": "Rome"})",
                                          R"({"city":"Oslo"})", R"({"city": "Oslo"})"));
  EXPECT_EQ(all.back()["choices"][0]["finish_reason"], "tool_calls");
}

TEST_F(OpenaiClientTest, NamedToolOnce) {
  const json answer =
      post(kChat, R"({"model":"default","messages":[{"role":"user","content":"hi"}],)"
                  R"("parallel_tool_calls":false,"reasoning_effort":"none","seed":1,"tool_choice":)"
                  R"({"type":"function","function":{"name":"g"}},"tools":[{"type":"function",)"
                  R"("function":{"name":"f","parameters":{"type":"object","properties":{}}}},)"
                  R"({"type":"function","function":{"name":"g","parameters":{"type":"object",)"
                  R"("properties":{"days":{"type":"integer","minimum":1,"maximum":9}},)"
                  R"("required":["days"]}}}]})")
          .json();
  const json& choice = answer["choices"][0];
  ASSERT_EQ(choice["message"]["tool_calls"].size(), 1U) << answer.dump();
  const json& function = choice["message"]["tool_calls"][0]["function"];
  EXPECT_EQ(function["name"], "g");
  const int days = json::parse(function["arguments"].get<std::string>())["days"];
  EXPECT_TRUE(days >= 1 && days <= 9) << days;
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
}

TEST_F(OpenaiClientTest, StreamedLogprobs) {
  const auto all = chunks(
      post(kChat, R"({"model":"default","stream":true,"messages":[{"role":"user","content":"hi"}],)"
                  R"("logprobs":true,"logit_bias":{"98":-100},"max_tokens":6,)"
                  R"("reasoning_effort":"none","temperature":0,"top_logprobs":3})"));
  std::size_t num_entries = 0;
  for (const json& chunk : all) {
    const json& logprobs = chunk["choices"][0]["logprobs"];
    for (const json& entry : logprobs.is_null() ? json::array() : logprobs["content"]) {
      ++num_entries;
      EXPECT_EQ(entry["top_logprobs"].size(), 3U);
      EXPECT_LE(entry["logprob"], 0);
    }
  }
  EXPECT_GT(num_entries, 0U);
}

TEST_F(OpenaiClientTest, ParsedIntoAPydanticModel) {
  const json answer =
      post(kChat,
           R"({"model":"default","stream":false,"messages":[{"role":"user","content":"hi"}],)"
           R"("max_tokens":2500,"reasoning_effort":"none","response_format":{"type":)"
           R"("json_schema","json_schema":{"schema":{"$defs":{"Leg":{"properties":{"city":)"
           R"({"enum":["Rome","Oslo"],"title":"City","type":"string"},"nights":)"
           R"({"title":"Nights","type":"integer"}},"required":["city","nights"],"title":"Leg",)"
           R"("type":"object","additionalProperties":false}},"properties":{"title":)"
           R"({"title":"Title","type":"string"},"legs":{"items":{"$ref":"#/$defs/Leg"},)"
           R"("title":"Legs","type":"array"}},"required":["title","legs"],"title":"Trip",)"
           R"("type":"object","additionalProperties":false},"name":"Trip","strict":true}},)"
           R"("seed":1})")
          .json();
  const json& choice = answer["choices"][0];
  ASSERT_EQ(choice["finish_reason"], "stop") << answer.dump();
  const json trip = json::parse(choice["message"]["content"].get<std::string>());
  EXPECT_TRUE(trip["title"].is_string());
  for (const json& leg : trip["legs"]) {
    EXPECT_TRUE(leg["city"] == "Rome" || leg["city"] == "Oslo") << leg;
    EXPECT_TRUE(leg["nights"].is_number_integer()) << leg;
  }
  EXPECT_EQ(trip.size(), 2U);
}

TEST_F(OpenaiClientTest, FourJsonObjects) {
  const std::string body =
      R"({"model":"default","messages":[{"role":"user","content":"hi"}],"max_tokens":2500,"n":4,)"
      R"("reasoning_effort":"none","response_format":{"type":"json_object"},"seed":7})";
  const json answer = post(kChat, body).json();
  std::set<std::string> texts;
  for (const json& choice : answer["choices"]) {
    ASSERT_EQ(choice["finish_reason"], "stop") << choice;
    const std::string text = choice["message"]["content"];
    EXPECT_TRUE(json::parse(text).is_object());
    texts.insert(text);
  }
  EXPECT_EQ(texts.size(), 4U);
  EXPECT_EQ(post(kChat, body).json()["choices"], answer["choices"]);
}

TEST_F(OpenaiClientTest, CompletionsOfABatch) {
  const auto all = chunks(
      post(kCompletions, R"({"model":"default","stream":true,"prompt":["one","two"],"echo":true,)"
                         R"("max_tokens":4,"stop":["x","never"],"stream_options":)"
                         R"({"include_usage":true}})"));
  std::vector<std::string> texts(2);
  for (const json& chunk : all) {
    for (const json& choice : chunk["choices"]) {
      texts[choice["index"].get<std::size_t>()] += choice["text"].get<std::string>();
    }
  }
  EXPECT_THAT(texts[0], ::testing::StartsWith("one"));
  EXPECT_THAT(texts[1], ::testing::StartsWith("two"));
  EXPECT_EQ(all.back()["usage"]["completion_tokens"], 8);
  const json several = post(kCompletions, R"({"model":"default","prompt":"é日","max_tokens":4,)"
                                          R"("n":2,"seed":1,"ignore_eos":true})")
                           .json();
  EXPECT_EQ(several["choices"].size(), 2U);
  rig_.expect_idle();
}

}  // namespace
}  // namespace tandem::test

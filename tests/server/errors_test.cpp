// Every refused request: its status, its code, and the field it names.
#include <algorithm>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/server_rig.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

struct ErrorCase {
  std::string path;
  std::string body;
  int status;
  std::string code;
  std::string param;
};

constexpr const char* kInvalid = "invalid_request_error";

std::vector<ErrorCase> chat_cases() {
  const std::string chat = "/v1/chat/completions";
  const std::string hi = R"("messages":[{"role":"user","content":"hi"}])";
  return {
      {chat, "{}", 400, kInvalid, "messages"},
      {chat, "{\"messages\":[]}", 400, kInvalid, "messages"},
      {chat, "{\"messages\":{}}", 400, kInvalid, "messages"},
      {chat, R"({"messages":[3]})", 400, kInvalid, "messages[0]"},
      {chat, R"({"messages":[{"role":"user","content":"x"},{"role":"robot"}]})", 400, kInvalid,
       "messages[1].role"},
      {chat, R"({"messages":[{"role":"user","content":5}]})", 400, kInvalid, "messages[0].content"},
      {chat, R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})", 400, kInvalid,
       "messages[0].content[0]"},
      {chat, "{" + hi + R"(,"model":"gpt-4"})", 404, "model_not_found", "model"},
      {chat, "{" + hi + R"(,"temperature":-1})", 400, kInvalid, "temperature"},
      {chat, "{" + hi + R"(,"temperature":"hot"})", 400, kInvalid, "temperature"},
      {chat, "{" + hi + R"(,"top_p":5})", 400, kInvalid, "top_p"},
      {chat, "{" + hi + R"(,"top_k":-2})", 400, kInvalid, "top_k"},
      {chat, "{" + hi + R"(,"min_p":1.5})", 400, kInvalid, "min_p"},
      {chat, "{" + hi + R"(,"n":0})", 400, kInvalid, "n"},
      {chat, "{" + hi + R"(,"n":129})", 400, kInvalid, "n"},
      {chat, "{" + hi + R"(,"n":2,"best_of":3})", 400, kInvalid, "best_of"},
      {chat, "{" + hi + R"(,"max_tokens":0})", 400, kInvalid, "max_tokens"},
      {chat, "{" + hi + R"(,"max_completion_tokens":"many"})", 400, kInvalid,
       "max_completion_tokens"},
      {chat, "{" + hi + R"(,"presence_penalty":2.5})", 400, kInvalid, "presence_penalty"},
      {chat, "{" + hi + R"(,"repetition_penalty":0})", 400, kInvalid, "repetition_penalty"},
      {chat, "{" + hi + R"(,"logit_bias":{"999":1}})", 400, kInvalid, "logit_bias.999"},
      {chat, "{" + hi + R"(,"logit_bias":{"x":1}})", 400, kInvalid, "logit_bias.x"},
      {chat, "{" + hi + R"(,"logit_bias":{"1":101}})", 400, kInvalid, "logit_bias.1"},
      {chat, "{" + hi + R"(,"stop":[""]})", 400, kInvalid, "stop"},
      {chat, "{" + hi + R"(,"stop":[1]})", 400, kInvalid, "stop[0]"},
      {chat, "{" + hi + R"(,"stop_token_ids":[99]})", 400, kInvalid, "stop_token_ids[0]"},
      {chat, "{" + hi + R"(,"seed":1.5})", 400, kInvalid, "seed"},
      {chat, "{" + hi + R"(,"top_logprobs":3})", 400, kInvalid, "top_logprobs"},
      {chat, "{" + hi + R"(,"logprobs":true,"top_logprobs":21})", 400, kInvalid, "top_logprobs"},
      {chat, "{" + hi + R"(,"logprobs":1})", 400, kInvalid, "logprobs"},
      {chat, "{" + hi + R"(,"stream":1})", 400, kInvalid, "stream"},
      {chat, "{" + hi + R"(,"stream_options":{"include_usage":true}})", 400, kInvalid,
       "stream_options"},
      {chat, "{" + hi + R"(,"stream":true,"stream_options":{"include_usage":1}})", 400, kInvalid,
       "stream_options.include_usage"},
      {chat, "{" + hi + R"(,"tools":[3]})", 400, kInvalid, "tools[0]"},
      {chat, "{" + hi + R"(,"tools":[{"type":"function","function":{}}]})", 400, kInvalid,
       "tools[0].function.name"},
      {chat, "{" + hi + R"(,"tools":[{"function":{"name":"f"}},{"function":{"name":"f"}}]})", 400,
       kInvalid, "tools[1].function.name"},
      {chat, "{" + hi + R"(,"tools":[{"function":{"name":"f","parameters":3}}]})", 400, kInvalid,
       "tools[0].function.parameters"},
      {chat, "{" + hi + R"(,"tool_choice":"required"})", 400, kInvalid, "tool_choice"},
      {chat, "{" + hi + R"(,"tool_choice":"maybe"})", 400, kInvalid, "tool_choice"},
      {chat, "{" + hi + R"(,"tool_choice":{"type":"function","function":{"name":"g"}}})", 400,
       kInvalid, "tool_choice.function.name"},
      {chat, "{" + hi + R"(,"tool_choice":{"type":"allowed_tools"}})", 400, kInvalid,
       "tool_choice.type"},
      {chat, "{" + hi + R"(,"functions":[{"name":"f"}]})", 400, kInvalid, "functions"},
      {chat, "{" + hi + R"(,"function_call":"auto"})", 400, kInvalid, "function_call"},
      {chat, "{" + hi + R"(,"audio":{"voice":"x"}})", 400, kInvalid, "audio"},
      {chat, "{" + hi + R"(,"modalities":["text","audio"]})", 400, kInvalid, "modalities"},
      {chat, "{" + hi + R"(,"web_search_options":{}})", 400, kInvalid, "web_search_options"},
      {chat, "{" + hi + R"(,"response_format":{"type":"xml"}})", 400, kInvalid,
       "response_format.type"},
      {chat, "{" + hi + R"(,"response_format":{"type":"json_schema"}})", 400, kInvalid,
       "response_format.json_schema.schema"},
      {chat,
       "{" + hi +
           R"(,"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"wrong"}}}})",
       400, kInvalid, "response_format.json_schema.schema"},
      {chat, "{" + hi + R"(,"regex":"(" })", 400, kInvalid, "regex"},
      {chat, "{" + hi + R"(,"regex":";" })", 400, kInvalid, "regex"},  // no token has one
      {chat, "{" + hi + R"(,"regex":"a","json_schema":"{}"})", 400, kInvalid, "regex"},
      {chat, "{" + hi + R"(,"ebnf":"root ::= x"})", 400, kInvalid, "ebnf"},
      {chat, "{" + hi + R"(,"reasoning_effort":"hard"})", 400, kInvalid, "reasoning_effort"},
      {chat, "{" + hi + R"(,"continue_final_message":true})", 400, kInvalid,
       "continue_final_message"},
      {chat, R"({"input_ids":[99]})", 400, kInvalid, "input_ids[0]"},
      {chat, R"({"input_ids":[]})", 400, kInvalid, "input_ids"},
  };
}

std::vector<ErrorCase> other_cases() {
  const std::string text = "/v1/completions";
  const std::string native = "/generate";
  return {
      {text, "{}", 400, kInvalid, "prompt"},
      {text, R"({"prompt":""})", 400, kInvalid, "prompt"},
      {text, R"({"prompt":[]})", 400, kInvalid, "prompt"},
      {text, R"({"prompt":["a",""]})", 400, kInvalid, "prompt[1]"},
      {text, R"({"prompt":["a",1]})", 400, kInvalid, "prompt"},
      {text, R"({"prompt":[[1],[99]]})", 400, kInvalid, "prompt[1][0]"},
      {text, R"({"prompt":[1,1.5]})", 400, kInvalid, "prompt[1]"},
      {text, R"({"prompt":"a","max_tokens":0})", 400, kInvalid, "max_tokens"},
      {text, R"({"prompt":"a","suffix":"b"})", 400, kInvalid, "suffix"},
      {text, R"({"prompt":"a","logprobs":21})", 400, kInvalid, "logprobs"},
      {text, R"({"prompt":"a","logprob_mode":"odd"})", 400, kInvalid, "logprob_mode"},
      {text, R"({"prompt":")" + std::string(256, 'a') + "\"}", 400, "context_length_exceeded",
       "prompt"},
      {native, "{}", 400, kInvalid, "text"},
      {native, R"({"text":"a","input_ids":[1]})", 400, kInvalid, "text"},
      {native, R"({"text":[]})", 400, kInvalid, "text"},
      {native, R"({"input_ids":[[1],[]]})", 400, kInvalid, "input_ids"},
      {native, R"({"text":"a","sampling_params":3})", 400, kInvalid, "sampling_params"},
      {native, R"({"text":"a","sampling_params":{"temperature":-1}})", 400, kInvalid,
       "sampling_params.temperature"},
      {native, R"({"text":"a","sampling_params":{"max_new_tokens":5,"min_new_tokens":6}})", 400,
       kInvalid, "sampling_params.min_new_tokens"},
      {native, R"({"text":["a","b"],"sampling_params":[{}]})", 400, kInvalid, "sampling_params"},
      {native, R"({"text":"a","return_logprob":true,"logprob_start_len":2})", 400, kInvalid,
       "logprob_start_len"},
      {native, R"({"text":"a","return_hidden_states":true})", 400, kInvalid,
       "return_hidden_states"},
      {native, R"({"text":"a","token_ids_logprob":[1]})", 400, kInvalid, "token_ids_logprob"},
      {"/tokenize", "{}", 400, kInvalid, "text"},
      {"/detokenize", R"({"tokens":[99]})", 400, kInvalid, "tokens[0]"},
      {"/abort_request", "{}", 400, kInvalid, "rid"},
      {"/pause_generation", R"({"mode":"later"})", 400, kInvalid, "mode"},
      {"/update_weights_from_disk", R"({"model_path":"x"})", 400, kInvalid, "model_path"},
      {"/v1/nothing", "{}", 404, "not_found", ""},
  };
}

TEST(Errors, EachNamesStatusCodeAndField) {
  ServerRig rig;
  HttpClient client = rig.client();
  std::vector<ErrorCase> cases = chat_cases();
  std::ranges::move(other_cases(), std::back_inserter(cases));
  for (const ErrorCase& test : cases) {
    const Reply reply = client.request("POST", test.path, test.body);
    const std::string what = test.path + " " + test.body.substr(0, 120);
    ASSERT_EQ(reply.status, test.status) << what << "\n" << reply.body;
    const json error = reply.json()["error"];
    EXPECT_EQ(error["code"], test.code) << what;
    EXPECT_EQ(error["param"], test.param.empty() ? json(nullptr) : json(test.param)) << what << "\n"
                                                                                     << reply.body;
    EXPECT_FALSE(error["message"].get<std::string>().empty());
    EXPECT_TRUE(error["type"].is_string());
  }
  rig.expect_idle();
}

TEST(Errors, ContextLengthTellsBothNumbers) {
  ServerRig rig;
  const Reply reply = rig.post("/v1/completions", {{"prompt", std::string(300, 'a')}});
  EXPECT_THAT(reply.body, HasSubstr("maximum context length is 256 tokens"));
  EXPECT_THAT(reply.body, HasSubstr("300 tokens"));
  // One below the limit still gives a token, and a huge wish is cut to what fits.
  const Reply fits = rig.post("/v1/completions", {{"prompt", std::string(255, 'a')},
                                                  {"max_tokens", 9223372036854775807LL},
                                                  {"ignore_eos", true}});
  ASSERT_EQ(fits.status, 200) << fits.body;
  EXPECT_EQ(fits.json()["usage"]["completion_tokens"], 1);
}

TEST(Errors, UnknownFieldsAndNullsMeanNothing) {
  ServerRig rig;
  const Reply reply =
      rig.post("/v1/chat/completions",
               {{"messages", {{{"role", "user"}, {"content", "hi"}, {"unknown", 1}}}},
                {"store", true},
                {"metadata", {{"a", 1}}},
                {"service_tier", "auto"},
                {"temperature", nullptr},
                {"max_tokens", 3.0},
                {"n", nullptr},
                {"stop", nullptr},
                {"tools", nullptr},
                {"logit_bias", nullptr},
                {"response_format", nullptr},
                {"suffix", nullptr}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_LE(reply.json()["usage"]["completion_tokens"], 3);
}

TEST(Errors, AFullQueueSaysWhenToComeAgain) {
  server::ServerOptions options = test_options();
  options.engine.max_running_seqs = 1;
  options.engine.max_queued = 2;
  ServerRig rig(options);
  const Reply reply = rig.post("/generate", {{"text", "a"}, {"sampling_params", {{"n", 8}}}});
  EXPECT_EQ(reply.status, 429) << reply.body;
  EXPECT_EQ(reply.json()["error"]["code"], "queue_full");
  EXPECT_EQ(reply.header("retry-after"), "1");
  EXPECT_EQ(rig.post("/generate", {{"text", "a"}}).status, 200);
  rig.expect_idle();
}

TEST(Errors, NumericalErrorsFailTheirRequestAlone) {
  auto model = std::make_unique<FakeModel>();
  model->nan_after_token = 3;
  ServerRig rig(test_options(), std::move(model));
  const Reply bad = rig.post("/generate", {{"input_ids", {3}}});
  EXPECT_EQ(bad.status, 500);
  EXPECT_EQ(bad.json()["error"]["code"], "internal_error");
  const Reply good =
      rig.post("/generate", {{"input_ids", {4}}, {"sampling_params", {{"max_new_tokens", 1}}}});
  EXPECT_EQ(good.status, 200);
  rig.expect_idle();
}

TEST(Errors, AStepThatThrowsFailsItsRequestsAndNothingElse) {
  auto model = std::make_unique<FakeModel>();
  FakeModel* const raw = model.get();
  raw->throw_at_call = 0;
  ServerRig rig(test_options(), std::move(model));
  const Reply bad = rig.post("/generate", {{"text", "a"}});
  EXPECT_EQ(bad.status, 500) << bad.body;
  EXPECT_EQ(rig.post("/generate", {{"text", "a"}}).status, 200);
  rig.expect_idle();
}

}  // namespace
}  // namespace tandem::test

// Info and control endpoints, clients that go, and what is left afterwards.
#include "server/api/control.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/rng.h"
#include "server/server_rig.h"
#include "support/temp_dir.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Script> slow_script() {
  auto script = std::make_shared<Script>();
  script->step_time = std::chrono::milliseconds(2);
  return script;
}

/// A server whose answers go on until the context is full.
class SlowRig : public ServerRig {
 public:
  explicit SlowRig(server::ServerOptions options = test_options())
      : ServerRig(std::move(options),
                  std::make_unique<ScriptedModel>(FakeModel::kVocab, slow_script())) {}
};

std::string generate_request(bool stream) {
  const std::string body = json{{"text", "abc"},
                                {"stream", stream},
                                {"rid", "the-rid"},
                                {"sampling_params", {{"max_new_tokens", 200}}}}
                               .dump();
  return "POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

TEST(Info, WhatTheServerTells) {
  ServerRig rig;
  EXPECT_EQ(rig.get("/health").status, 200);
  EXPECT_EQ(rig.client().request("HEAD", "/health").status, 200);
  EXPECT_EQ(rig.get("/health_generate").status, 200);
  const json models = rig.get("/v1/models").json();
  EXPECT_EQ(models["data"][0]["id"], "org/test-model");
  EXPECT_EQ(models["data"][0]["max_model_len"], 256);
  EXPECT_EQ(rig.get("/v1/models/org/test-model").json(), models["data"][0]);
  EXPECT_EQ(rig.get("/v1/models/test-model").status, 200);
  EXPECT_EQ(rig.get("/v1/models/other").json()["error"]["code"], "model_not_found");
  EXPECT_EQ(rig.get("/get_model_info").json()["weight_version"], "default");
  const json info = rig.get("/get_server_info").json();
  EXPECT_EQ(info["max_req_input_len"], 255);
  EXPECT_EQ(info["status"], "ready");
  EXPECT_EQ(rig.get("/v1/loads").json()["num_running_reqs"], 0);
  const json document = rig.get("/openapi.json").json();
  EXPECT_TRUE(document["paths"].contains("/v1/chat/completions"));
  const Reply page = rig.get("/");
  EXPECT_THAT(page.header("content-type"), HasSubstr("text/html"));
  EXPECT_THAT(page.body, HasSubstr("/page.js"));
  EXPECT_THAT(page.body, ::testing::Not(HasSubstr("http://")));
  EXPECT_EQ(rig.get("/page.js").status, 200);
  EXPECT_THAT(page.body, HasSubstr("href=\"/icon.svg\"")) << "else browsers ask for /favicon.ico";
  EXPECT_EQ(rig.get("/icon.svg").header("content-type"), "image/svg+xml");
  const json ids = rig.post("/tokenize", {{"text", "a é日"}}).json();
  EXPECT_EQ(ids["count"], 4);
  EXPECT_EQ(rig.post("/v1/detokenize", {{"tokens", ids["tokens"]}}).json()["text"], "a é日");
  rig.expect_idle();
}

/// The value of a metric without labels of its own.
double metric(const std::string& text, const std::string& name) {
  const std::size_t at = text.find("\n" + name + "{");
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? -1 : std::atof(text.c_str() + text.find("} ", at) + 2);
}

TEST(Info, MetricsAreTheSumsOfTheAnswers) {
  ServerRig rig;
  std::int64_t prompt = 0;
  std::int64_t completion = 0;
  for (int i = 0; i < 5; ++i) {
    const json usage =
        rig.post("/v1/completions", {{"prompt", {"abc", "de"}}, {"n", 2}}).json()["usage"];
    prompt += usage["prompt_tokens"].get<std::int64_t>();
    completion += usage["completion_tokens"].get<std::int64_t>();
  }
  (void)rig.get("/health_generate");
  const std::string text = rig.get("/metrics").body;
  EXPECT_EQ(metric(text, "sglang:prompt_tokens_total"), static_cast<double>(prompt));
  EXPECT_EQ(metric(text, "sglang:generation_tokens_total"), static_cast<double>(completion));
  EXPECT_EQ(metric(text, "vllm:generation_tokens_total"), static_cast<double>(completion));
  EXPECT_EQ(metric(text, "sglang:num_requests_total"), 5);
  EXPECT_EQ(metric(text, "sglang:e2e_request_latency_seconds_count"), 20);
}

TEST(Control, AbortedRequestsHaveWhatTheyGot) {
  SlowRig rig;
  for (const json& body :
       {json{{"rid", "the-rid"}}, json{{"rid_prefix", "the-"}}, json{{"abort_all", true}}}) {
    HttpClient client = rig.client();
    client.send(generate_request(false));
    ASSERT_TRUE(
        ServerRig::wait_for([&] { return rig.server().loop().stats().num_unfinished == 1; }));
    EXPECT_EQ(rig.post("/abort_request", {{"rid", "another"}}).status, 200);
    EXPECT_EQ(rig.post("/abort_request", body).status, 200);
    const json answer = client.read_reply().json();
    EXPECT_EQ(answer["meta_info"]["finish_reason"]["type"], "abort");
    EXPECT_LT(answer["output_ids"].size(), 200U);
    EXPECT_EQ(rig.post("/abort_request", body).status, 200) << "twice does no harm";
  }
  rig.expect_idle();
}

TEST(Control, PausedRequestsGoOnAsIfNothingHadBeen) {
  ServerRig rig;
  const json body{{"text", "abc"},
                  {"sampling_params", {{"max_new_tokens", 30}, {"seed", 3}, {"ignore_eos", true}}}};
  const json expected = rig.post("/generate", body).json()["output_ids"];
  for (const char* mode : {"retract", "in_place"}) {
    ASSERT_EQ(rig.post("/pause_generation", {{"mode", mode}}).status, 200);
    HttpClient client = rig.client();
    const std::string text = body.dump();
    client.send("POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
                std::to_string(text.size()) + "\r\n\r\n" + text);
    EXPECT_TRUE(
        ServerRig::wait_for([&] { return rig.server().loop().stats().num_unfinished == 1; }));
    EXPECT_EQ(rig.server().loop().stats().engine.num_running, 0);
    EXPECT_EQ(rig.get("/health_generate").status, 200) << "paused is not ill";
    EXPECT_EQ(rig.request_continue(), 200);
    EXPECT_EQ(client.read_reply().json()["output_ids"], expected);
  }
  ASSERT_EQ(rig.post("/pause_generation", {{"mode", "abort"}}).status, 200);
  ASSERT_EQ(rig.request_continue(), 200);
  rig.expect_idle();
}

TEST(Control, FlushWaitsForRunningRequestsWhenTold) {
  SlowRig rig;
  HttpClient client = rig.client();
  client.send(generate_request(false));
  ASSERT_TRUE(
      ServerRig::wait_for([&] { return rig.server().loop().stats().engine.num_running == 1; }));
  const Reply refused = rig.get("/flush_cache");
  EXPECT_EQ(refused.status, 409) << refused.body;
  EXPECT_EQ(rig.get("/flush_cache?timeout=x").json()["error"]["param"], "timeout");
  EXPECT_EQ(rig.get("/flush_cache?timeout=20").status, 200);
  EXPECT_EQ(client.read_reply().status, 200);
  EXPECT_EQ(rig.server().loop().stats().engine.num_cached_pages, 0);
}

TEST(Control, WeightsComeFromBelowTheRootAsAWholeOrNotAtAll) {
  const TempDir root;
  std::filesystem::create_directories(root.path() + "/good");
  std::filesystem::create_directories(root.path() + "/bad");
  std::filesystem::create_directories(root.path() + "/other");
  std::filesystem::create_directory_symlink("/", root.path() + "/link");
  server::ServerOptions options = test_options();
  options.service.model_root = root.path();
  const server::ModelLoader loader =
      [](const std::string& dir) -> Expected<std::unique_ptr<Model>> {
    if (dir.ends_with("/bad")) {
      return fail("{}: no weights here", dir);
    }
    if (dir.ends_with("/other")) {
      return std::unique_ptr<Model>(
          std::make_unique<ScriptedModel>(99, std::make_shared<Script>()));
    }
    auto model = std::make_unique<FakeModel>();
    model->weights = 2;
    return std::unique_ptr<Model>(std::move(model));
  };
  ServerRig rig(options, std::make_unique<FakeModel>(), letters_tokenizer(), loader);
  const auto output = [&] {
    return rig.post("/generate", {{"text", "abc"}, {"sampling_params", {{"temperature", 0}}}})
        .json();
  };
  const json before = output();
  for (const char* path : {"../", "/etc", "link", "link/etc", "missing", "", "good/../.."}) {
    const Reply reply = rig.post("/update_weights_from_disk", {{"model_path", path}});
    EXPECT_EQ(reply.status, 400) << path;
    EXPECT_EQ(reply.json()["error"]["param"], "model_path") << path;
  }
  for (const char* path : {"bad", "other"}) {
    const Reply reply = rig.post("/update_weights_from_disk", {{"model_path", path}});
    EXPECT_EQ(reply.status, 400) << path;
    EXPECT_EQ(reply.json()["success"], false);
    EXPECT_EQ(output()["output_ids"], before["output_ids"]) << "the old weights serve on";
  }
  const Reply reply = rig.post("/update_weights_from_disk", {{"model_path", root.path() + "/good"},
                                                             {"weight_version", "step-7"}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const json after = output();
  EXPECT_NE(after["output_ids"], before["output_ids"]);
  EXPECT_EQ(before["meta_info"]["weight_version"], "default");
  EXPECT_EQ(after["meta_info"]["weight_version"], "step-7");
  EXPECT_EQ(rig.get("/get_model_info").json()["weight_version"], "step-7");
  EXPECT_EQ(rig.post("/update_weight_version", {{"new_version", "again"}}).status, 200);
  EXPECT_EQ(output()["meta_info"]["weight_version"], "again");
  rig.expect_idle();
}

TEST(Disconnect, AtEveryStageFreesEverything) {
  SlowRig rig;
  for (const bool stream : {false, true}) {
    const std::string text = generate_request(stream);
    for (std::size_t cut = 1; cut < text.size(); cut += 7) {
      HttpClient client = rig.client();
      client.send(std::string_view(text).substr(0, cut));
    }
    for (int how = 0; how < 6; ++how) {
      HttpClient client = rig.client();
      client.send(text);
      if (stream && how % 2 == 1) {
        EXPECT_TRUE(client.receive_until("data: "));
      } else if (how % 2 == 1) {
        const std::int64_t before = rig.server().loop().stats().num_tokens;
        EXPECT_TRUE(
            ServerRig::wait_for([&] { return rig.server().loop().stats().num_tokens > before; }));
      }
      if (how < 2) {
        client.close();
      } else if (how < 4) {
        client.reset();
      } else {
        client.half_close();
        EXPECT_TRUE(client.is_closed_by_server());
      }
    }
  }
  rig.expect_idle();
  // Nothing went on to its 200 tokens.
  EXPECT_LT(rig.server().loop().stats().num_tokens, 1000);
  EXPECT_EQ(
      rig.post("/generate", {{"text", "a"}, {"sampling_params", {{"max_new_tokens", 3}}}}).status,
      200);
}

TEST(Disconnect, StoppingTheServerAnswersWhatIsOpen) {
  auto rig = std::make_unique<SlowRig>();
  HttpClient whole = rig->client();
  whole.send(generate_request(false));
  HttpClient stream = rig->client();
  stream.send(generate_request(true));
  EXPECT_TRUE(stream.receive_until("data: "));
  rig->server().stop();
  const Reply answer = whole.read_reply();
  EXPECT_TRUE(answer.status == 500 || answer.status == 503 || answer.status == 0) << answer.status;
  EXPECT_TRUE(stream.is_closed_by_server());
}

TEST(Drain, RequestsFinishAndNewOnesAreRefused) {
  SlowRig rig;
  HttpClient busy = rig.client();
  busy.send(generate_request(false));
  HttpClient kept = rig.client();
  kept.send(
      "POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n");
  ASSERT_TRUE(ServerRig::wait_for([&] { return rig.server().loop().stats().num_unfinished == 1; }));
  rig.server().begin_drain();
  kept.send("{\"text\":\"a\"}");
  const Reply refused = kept.read_reply();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.json()["error"]["code"], "shutting_down");
  EXPECT_EQ(busy.read_reply().json()["output_ids"].size(), 200U);
  EXPECT_TRUE(ServerRig::wait_for([&] { return rig.server().is_drained(); }));
}

TEST(Load, ManyStreamsAtOnceLoseNothing) {
  server::ServerOptions options = test_options();
  options.engine.max_running_seqs = 64;
  ServerRig rig(options);
  constexpr int kStreams = 100;
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < kStreams; ++i) {
    const std::string body =
        json{{"text", std::string(1 + static_cast<std::size_t>(i) % 20, 'a')},
             {"stream", true},
             {"sampling_params", {{"max_new_tokens", 20}, {"ignore_eos", true}, {"seed", i}}}}
            .dump();
    clients.push_back(std::make_unique<HttpClient>(rig.port()));
    clients.back()->send(
        "POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  int refused = 0;
  for (const auto& client : clients) {
    const Reply reply = client->read_reply();
    if (reply.status == 429) {
      ++refused;
      continue;
    }
    ASSERT_EQ(reply.status, 200) << reply.body;
    const std::vector<std::string> events = reply.events();
    ASSERT_EQ(events.size(), 21U) << "one event a token, and [DONE]";
    EXPECT_EQ(json::parse(events[19])["output_ids"].size(), 20U);
  }
  EXPECT_LT(refused, kStreams);
  clients.clear();
  rig.expect_idle();
}

TEST(Soak, RandomAndBrokenRequestsNeverEndTheServer) {
  ServerRig rig;
  Rng rng(17);
  const std::vector<std::string> seeds{
      generate_request(false), generate_request(true), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
      "POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: "
      "application/json\r\n\r\n5\r\n{\"a\":\r\n2\r\n1}\r\n0\r\n\r\n"};
  for (int i = 0; i < 400; ++i) {
    std::string text = seeds[rng.below(seeds.size())];
    for (std::uint64_t flips = rng.below(4); flips > 0; --flips) {
      const std::size_t at = rng.below(text.size());
      switch (rng.below(3)) {
        case 0:
          text[at] = static_cast<char>(rng.below(256));
          break;
        case 1:
          text.erase(at, 1 + rng.below(8));
          break;
        default:
          text.insert(at, text.substr(rng.below(text.size()), rng.below(16)));
      }
      text += text.empty() ? "x" : "";
    }
    HttpClient client = rig.client();
    client.send(text);
    if (rng.below(2) == 0) {
      client.half_close();
      (void)client.is_closed_by_server();
    }
  }
  EXPECT_EQ(rig.get("/health").status, 200);
  rig.expect_idle();
}

}  // namespace
}  // namespace tandem::test

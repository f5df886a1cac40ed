// A server that starts again knows what its predecessor knew, or starts without.
#include "server/prefix_cache_file.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "server/server_rig.h"
#include "support/temp_dir.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PrefixCacheFileTest : public ::testing::Test {
 protected:
  [[nodiscard]] server::ServerOptions options(const std::string& weights = "1") const {
    server::ServerOptions options = test_options();
    options.prefix_cache_file = {dir(), {{"weights", weights}}};
    return options;
  }
  [[nodiscard]] std::string dir() const { return root_.path() + "/a/cache"; }
  [[nodiscard]] std::string file() const { return dir() + "/prefix_cache.bin"; }

  /// The last multiple of 16 below the prompt's 160 tokens.
  static constexpr std::int64_t kCached = 144;

  /// One answer: its text, and how much of the prompt was there.
  static std::pair<json, std::int64_t> ask(ServerRig& rig, const std::string& salt = "") {
    const json answer =
        rig.post("/generate",
                 {{"text", std::string(100, 'a') + std::string(60, 'b')},
                  {"cache_salt", salt},
                  {"sampling_params", {{"max_new_tokens", 12}, {"seed", 3}, {"ignore_eos", true}}}})
            .json();
    return {answer["output_ids"], answer["meta_info"]["cached_tokens"].get<std::int64_t>()};
  }

  /// A server that answered once and stopped; the answer.
  json leave_a_file() {
    ServerRig rig(options());
    const auto [ids, cached] = ask(rig);
    EXPECT_EQ(cached, 0);
    rig.server().stop();
    return ids;
  }

  void expect_cold_with_warning(server::ServerOptions with, const std::string& reason) {
    ::testing::internal::CaptureStderr();
    ServerRig rig(std::move(with));
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log,
                AllOf(HasSubstr("prefix_cache.refused"), HasSubstr(file()), HasSubstr(reason)));
    EXPECT_EQ(std::ranges::count(log, '\n'), 1) << log;
    EXPECT_EQ(rig.server().loop().stats().engine.num_cached_pages, 0);
    EXPECT_EQ(ask(rig).second, 0);
    rig.expect_idle();
  }

  TempDir root_;
};

TEST_F(PrefixCacheFileTest, TheNextServerResumesWhatThisOneComputed) {
  const json ids = leave_a_file();
  for (int start = 0; start < 2; ++start) {
    ServerRig rig(options());
    const server::LoopStats stats = rig.server().loop().stats();
    EXPECT_GT(stats.engine.num_checkpoints, 0) << "before the first request";
    const auto [again, cached] = ask(rig);
    EXPECT_EQ(again, ids);
    EXPECT_EQ(cached, kCached);
    const auto [salted, others] = ask(rig, "another tenant");
    EXPECT_EQ(salted, ids);
    EXPECT_EQ(others, start == 0 ? 0 : kCached) << "salts are kept apart, and kept";
    rig.expect_idle();
  }
}

TEST_F(PrefixCacheFileTest, WhatIsUnderWayAtTheEndIsKept) {
  {
    server::ServerOptions with = options();
    auto script = std::make_shared<Script>();
    script->step_time = std::chrono::milliseconds(2);
    ServerRig rig(with, std::make_unique<ScriptedModel>(FakeModel::kVocab, script));
    HttpClient client = rig.client();
    const std::string body =
        json{{"text", std::string(140, 'a')}, {"sampling_params", {{"max_new_tokens", 100}}}}
            .dump();
    client.send("POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n\r\n" + body);
    ASSERT_TRUE(ServerRig::wait_for([&] { return rig.server().loop().stats().num_tokens > 0; }));
    rig.server().stop();
  }
  auto script = std::make_shared<Script>();
  ServerRig rig(options(), std::make_unique<ScriptedModel>(FakeModel::kVocab, script));
  const json answer = rig.post("/generate", {{"text", std::string(140, 'a')},
                                             {"sampling_params", {{"max_new_tokens", 2}}}})
                          .json();
  EXPECT_EQ(answer["meta_info"]["cached_tokens"], 128);
}

TEST_F(PrefixCacheFileTest, AFileThatDoesNotFitIsNamedWithTheReason) {
  leave_a_file();
  std::string good;
  {
    std::ifstream in(file(), std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(in), {});
  }
  ASSERT_GT(good.size(), 1000U);
  const auto put = [&](const std::string& bytes) {
    std::ofstream(file(), std::ios::binary | std::ios::trunc) << bytes;
  };
  expect_cold_with_warning(options("2"), "'weights 1': expected 'weights 2'");
  put(good);
  server::ServerOptions other_pages = options();
  other_pages.engine.page_size = 16;
  expect_cold_with_warning(other_pages, "expected 'page_size 16'");
  put(good.substr(0, good.size() / 2));
  expect_cold_with_warning(options(), std::to_string(good.size()));
  std::string flipped = good;
  flipped[good.size() - 100] ^= 1;
  put(flipped);
  expect_cold_with_warning(options(), "checksum");
  put("");
  expect_cold_with_warning(options(), "cut off after 0 bytes");
  std::filesystem::remove(file());
  std::filesystem::create_directory(file());
  expect_cold_with_warning(options(), "not a regular file");
}

TEST_F(PrefixCacheFileTest, NothingIsSavedUnderWeightsThatWereReplaced) {
  const json ids = leave_a_file();
  std::filesystem::create_directories(root_.path() + "/models/next");
  server::ServerOptions with = options();
  with.service.model_root = root_.path() + "/models";
  {
    ServerRig rig(with, std::make_unique<FakeModel>(), letters_tokenizer(),
                  [](const std::string&) -> Expected<std::unique_ptr<Model>> {
                    auto model = std::make_unique<FakeModel>();
                    model->weights = 2;
                    return std::unique_ptr<Model>(std::move(model));
                  });
    EXPECT_EQ(
        rig.post("/update_weights_from_disk", {{"model_path", with.service.model_root + "/next"}})
            .status,
        200);
    const auto [other, cached] = ask(rig);
    EXPECT_NE(other, ids);
    EXPECT_EQ(cached, 0);
    ::testing::internal::CaptureStderr();
    rig.server().stop();
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("prefix_cache.not_saved"), HasSubstr("weights were updated")));
  }
  ServerRig rig(options());
  const auto [again, cached] = ask(rig);
  EXPECT_EQ(again, ids) << "the older file is still right for the older weights";
  EXPECT_EQ(cached, kCached);
}

TEST_F(PrefixCacheFileTest, AFolderBelongsToOneServerAndItsOwner) {
  std::filesystem::create_directories(dir());
  std::ofstream(file() + ".tmp-123") << "of one that was killed";
  {
    ServerRig rig(options());
    EXPECT_FALSE(std::filesystem::exists(file() + ".tmp-123"));
    try {
      ServerRig second(options());
      FAIL() << "two servers in one folder";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(dir()), HasSubstr("another server uses it")));
    }
    ask(rig);
  }
  struct stat status {};
  ASSERT_EQ(::stat(file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 077, 0U) << "prompts are nobody else's";
  server::ServerOptions bad = options();
  bad.prefix_cache_file.dir = file() + "/below";
  EXPECT_THROW(ServerRig{bad}, Error);
}

TEST_F(PrefixCacheFileTest, AFailedSaveIsOneWarning) {
  ServerRig rig(options());
  ask(rig);
  std::filesystem::remove_all(dir());
  ::testing::internal::CaptureStderr();
  rig.server().stop();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("prefix_cache.not_saved"), HasSubstr(file())));
}

TEST_F(PrefixCacheFileTest, ProgressEndsWithEverything) {
  std::vector<std::string> lines;
  const auto start = [&] {
    server::ServerOptions with = options();
    with.prefix_cache_file.progress = [&](std::string_view label, std::int64_t done,
                                          std::int64_t total) {
      EXPECT_LE(done, total);
      if (done == total) {
        lines.emplace_back(label);
      }
    };
    ServerRig rig(with);
    ask(rig);
  };
  start();
  EXPECT_THAT(lines, ::testing::ElementsAre("saving the prefix cache"));
  start();
  EXPECT_THAT(lines, ::testing::ElementsAre("saving the prefix cache", "reading the prefix cache",
                                            "saving the prefix cache"));
}

}  // namespace
}  // namespace tandem::test

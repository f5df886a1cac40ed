// server_rig.h — a whole server on a free port, with a tiny tokenizer and a fake or scripted model.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/timing.h"
#include "server/http_client.h"
#include "server/scripted_model.h"
#include "server/server.h"
#include "server/tiny_server.h"
#include "support/backend_under_test.h"
#include "support/fake_model.h"
#include "text/char_tokenizer.h"

namespace tandem::test {

using nlohmann::json;

class ServerRig {
 public:
  explicit ServerRig(server::ServerOptions options = test_options(),
                     std::unique_ptr<Model> model = std::make_unique<FakeModel>(),
                     std::unique_ptr<CharTokenizer> tokenizer = letters_tokenizer(),
                     server::ModelLoader loader = {})
      : tokenizer_(std::move(tokenizer)) {
    options.engine.eos_ids.assign(tokenizer_->stop_ids().begin(), tokenizer_->stop_ids().end());
    const ExecCtx ctx{&ops_under_test(), &pool_, &arena_, nullptr, &device_under_test()};
    server_ = std::make_unique<server::Server>(std::move(model), ctx, *tokenizer_,
                                               std::move(loader), std::move(options));
  }

  [[nodiscard]] server::Server& server() { return *server_; }
  [[nodiscard]] const CharTokenizer& tokenizer() const { return *tokenizer_; }
  [[nodiscard]] std::uint16_t port() const { return server_->port(); }
  [[nodiscard]] HttpClient client() const { return HttpClient(port()); }
  Reply post(std::string_view target, const json& body) const {
    return client().post(target, body);
  }
  Reply get(std::string_view target) const { return client().get(target); }

  int request_continue() const { return client().request("POST", "/continue_generation").status; }

  /// Nothing unfinished, and all cache memory free or kept for reuse.
  void expect_idle() {
    const auto is_idle = [&] {
      const server::LoopStats stats = server_->loop().stats();
      return stats.num_unfinished == 0 && server_->http().num_open_requests() == 0;
    };
    EXPECT_TRUE(wait_for(is_idle));
    server_->loop().check_integrity();
    const server::LoopStats stats = server_->loop().stats();
    EXPECT_EQ(stats.engine.num_running, 0);
    EXPECT_EQ(stats.engine.num_waiting, 0);
    EXPECT_EQ(stats.engine.num_free_pages + stats.engine.num_cached_pages, stats.plan.num_pages);
    EXPECT_EQ(stats.engine.num_free_slots, stats.plan.num_slots);
  }

  /// Whether `condition` comes true within 20 s.
  static bool wait_for(const std::function<bool()>& condition) {
    const Clock::time_point start = Clock::now();
    while (!condition()) {
      if (seconds_since(start) > 20) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  std::unique_ptr<CharTokenizer> tokenizer_;
  ThreadPool pool_{1};
  Arena arena_ = arena_under_test();
  std::unique_ptr<server::Server> server_;
};

}  // namespace tandem::test

// server_target.h — what the server's fuzzer runs on one input: a whole server in this process is
// sent the bytes by a client that then half-closes. The unit suite replays seeds through it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "backends/cpu/cpu_backend.h"
#include "core/check.h"
#include "server/http_client.h"
#include "server/tiny_server.h"

namespace tandem::fuzz {

class ServerUnderFuzz {
 public:
  ServerUnderFuzz() {
    server::ServerOptions options = test::test_options();
    options.engine.max_seq_len = 64;
    options.http.linger_s = 0.05;
    options.engine.eos_ids.assign(tokenizer_->stop_ids().begin(), tokenizer_->stop_ids().end());
    const ExecCtx ctx{&cpu_backend(), &pool_, &arena_, nullptr, &host_device()};
    server_ = std::make_unique<server::Server>(std::make_unique<test::FakeModel>(), ctx,
                                               *tokenizer_, server::ModelLoader(), options);
  }

  /// First byte: 0 = the rest is what a client sends; n = the rest is the body of a request to the
  /// n-th endpoint. Every answer to a body is whole, and what is not 200 is an error object.
  void run(std::string_view input) {
    if (input.empty()) {
      return;
    }
    const auto mode = static_cast<unsigned char>(input[0]);
    input.remove_prefix(1);
    test::HttpClient client(server_->port());
    if (mode == 0) {
      client.send(input);
      client.half_close();
      (void)client.is_closed_by_server();
      return;
    }
    constexpr std::array<std::string_view, 5> kPaths{"/v1/chat/completions", "/v1/completions",
                                                     "/generate", "/tokenize", "/detokenize"};
    const test::Reply reply = client.request("POST", kPaths[mode % kPaths.size()], input);
    TDM_CHECK(reply.status != 0 && reply.status != 500, reply.status, reply.body);
    if (reply.status != 200) {
      TDM_CHECK(reply.json()["error"]["message"].is_string(), reply.body);
    }
  }

 private:
  std::unique_ptr<CharTokenizer> tokenizer_ = test::letters_tokenizer();
  ThreadPool pool_{1};
  Arena arena_;
  std::unique_ptr<server::Server> server_;
};

}  // namespace tandem::fuzz

// tiny_server.h — a tokenizer, a model and limits for servers in tests and fuzzers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/server.h"
#include "support/fake_model.h"
#include "text/char_tokenizer.h"

namespace tandem::test {

/// 26 letters, a few signs and characters of two and three bytes; <unk> and <eos>. As wide as
/// FakeModel.
inline std::unique_ptr<CharTokenizer> letters_tokenizer() {
  std::vector<std::string> tokens;
  for (char c = 'a'; c <= 'z'; ++c) {
    tokens.emplace_back(1, c);
  }
  for (const char* more : {" ", "\n", ".", "é", "日", "\"", "{", "}", "0"}) {
    tokens.emplace_back(more);
  }
  return CharTokenizer::create({tokens, {"<unk>", "<eos>"}, {"<eos>"}}).value_or_throw();
}

/// All of ASCII that can be seen, and the markers of Kimi K3.
inline std::unique_ptr<CharTokenizer> kimi_like_tokenizer() {
  std::vector<std::string> tokens{"\n"};
  for (char c = ' '; c <= '~'; ++c) {
    tokens.emplace_back(1, c);
  }
  return CharTokenizer::create({tokens,
                                {"<unk>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"},
                                {"<|end_of_msg|>"}})
      .value_or_throw();
}

/// Short times, small caches.
inline server::ServerOptions test_options() {
  server::ServerOptions options;
  options.http.port = 0;
  options.service.served_name = "org/test-model";
  options.service.version = "0";
  options.service.model_path = "test";
  options.engine.max_seq_len = 256;
  options.engine.max_running_seqs = 8;
  options.engine.page_size = 8;
  options.engine.max_queued = 64;
  return options;
}

}  // namespace tandem::test

// scripted_server.h — answers every connection with bytes that a test gives, then closes it: what
// servers that are broken, or not ours, may send.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"

namespace tandem::test {

class ScriptedServer {
 public:
  /// The n-th connection gets the n-th answer, the last one all further. An empty answer is sent
  /// never: the connection stays open until the client closes it.
  explicit ScriptedServer(std::vector<std::string> answers) : answers_(std::move(answers)) {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    TDM_CHECK(fd_ >= 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TDM_CHECK(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    TDM_CHECK(::listen(fd_, 64) == 0);
    socklen_t size = sizeof(address);
    TDM_CHECK(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~ScriptedServer() {
    ::shutdown(fd_, SHUT_RDWR);
    thread_.join();
    ::close(fd_);
  }
  ScriptedServer(const ScriptedServer&) = delete;
  ScriptedServer& operator=(const ScriptedServer&) = delete;

  [[nodiscard]] std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  [[nodiscard]] int num_connections() const { return num_connections_; }

 private:
  void run() {
    for (;;) {
      const int client = ::accept(fd_, nullptr, nullptr);
      if (client < 0) {
        return;
      }
      const auto n = static_cast<std::size_t>(num_connections_++);
      serve(client, answers_[std::min(n, answers_.size() - 1)]);
      ::close(client);
    }
  }

  static void serve(int client, const std::string& answer) {
    // Requests of these tests are small and end with their JSON: read until "}" stands last.
    char bytes[4096];
    std::string request;
    while (!request.ends_with("}")) {
      const ssize_t n = ::recv(client, bytes, sizeof(bytes), 0);
      if (n <= 0) {
        return;
      }
      request.append(bytes, static_cast<std::size_t>(n));
    }
    static_cast<void>(::send(client, answer.data(), answer.size(), MSG_NOSIGNAL));
    if (answer.empty()) {
      static_cast<void>(::recv(client, bytes, sizeof(bytes), 0));
    }
  }

  std::vector<std::string> answers_;
  int fd_ = -1;
  std::uint16_t port_ = 0;
  std::atomic<int> num_connections_{0};
  std::thread thread_;
};

}  // namespace tandem::test

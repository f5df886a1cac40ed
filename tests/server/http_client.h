// http_client.h — a small blocking HTTP client for tests, with its hands on every byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"

namespace tandem::test {

struct Reply {
  int status = 0;  // 0: the connection ended before a whole answer
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;

  [[nodiscard]] std::string header(std::string_view name) const {
    for (const auto& [key, value] : headers) {
      if (std::ranges::equal(key, name,
                             [](char a, char b) { return std::tolower(a) == std::tolower(b); })) {
        return value;
      }
    }
    return {};
  }
  [[nodiscard]] nlohmann::json json() const { return nlohmann::json::parse(body); }
  /// The data of every event of the body.
  [[nodiscard]] std::vector<std::string> events() const {
    std::vector<std::string> all;
    for (std::size_t at = 0; at < body.size();) {
      const std::size_t end = std::min(body.find("\n\n", at), body.size());
      const std::string_view event = std::string_view(body).substr(at, end - at);
      if (event.starts_with("data: ")) {
        all.emplace_back(event.substr(6));
      }
      at = end + 2;
    }
    return all;
  }
};

class HttpClient {
 public:
  explicit HttpClient(std::uint16_t port, int receive_buffer = 0) {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    TDM_CHECK(fd_ >= 0);
    if (receive_buffer > 0) {
      ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TDM_CHECK(::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;
  ~HttpClient() { close(); }

  void close() {
    if (fd_ >= 0) {
      ::close(std::exchange(fd_, -1));
    }
  }
  /// Ends with RST instead of FIN.
  void reset() {
    const linger now{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close();
  }
  void half_close() { ::shutdown(fd_, SHUT_WR); }

  /// False when the server has closed the connection.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }

  /// More bytes into the buffer; false at the end of the connection, or after 20 s without any.
  bool receive() {
    pollfd waited{fd_, POLLIN, 0};
    if (::poll(&waited, 1, 20000) != 1) {
      return false;
    }
    char bytes[65536];
    const ssize_t count = ::recv(fd_, bytes, sizeof(bytes), 0);
    if (count <= 0) {
      return false;
    }
    buffer_.append(bytes, static_cast<std::size_t>(count));
    return true;
  }
  /// Until the buffer holds `text`.
  bool receive_until(std::string_view text) {
    while (buffer_.find(text) == std::string::npos) {
      if (!receive()) {
        return false;
      }
    }
    return true;
  }
  [[nodiscard]] const std::string& buffer() const { return buffer_; }
  /// Whether the server closes the connection (after whatever it still sends).
  bool is_closed_by_server() {
    while (receive()) {
    }
    pollfd waited{fd_, POLLIN, 0};
    char byte = 0;
    return ::poll(&waited, 1, 0) == 1 && ::recv(fd_, &byte, 1, MSG_PEEK) <= 0;
  }

  /// The next answer. `has_body` false: of a HEAD request.
  Reply read_reply(bool has_body = true) {
    Reply reply;
    if (!receive_until("\r\n\r\n")) {
      return reply;
    }
    const std::size_t end = buffer_.find("\r\n\r\n");
    const std::string head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    const int status = std::atoi(head.c_str() + 9);
    for (std::size_t at = head.find("\r\n") + 2; at < head.size();) {
      const std::size_t line_end = head.find("\r\n", at);
      const std::size_t colon = head.find(": ", at);
      reply.headers.emplace_back(head.substr(at, colon - at),
                                 head.substr(colon + 2, line_end - colon - 2));
      at = line_end + 2;
    }
    if (status == 100) {
      return read_reply(has_body);
    }
    const bool whole =
        !has_body || (reply.header("transfer-encoding") == "chunked" ? read_chunks(reply.body)
                                                                     : read_sized(reply));
    reply.status = whole ? status : 0;
    return reply;
  }

  Reply request(std::string_view method, std::string_view target, std::string_view body = {},
                std::string_view headers = {}) {
    std::string text = std::string(method) + " " + std::string(target) +
                       " HTTP/1.1\r\nHost: x\r\n" + std::string(headers);
    if (!body.empty()) {
      text += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
              "\r\n";
    }
    send(text + "\r\n" + std::string(body));
    return read_reply(method != "HEAD");
  }
  Reply post(std::string_view target, const nlohmann::json& body) {
    return request("POST", target, body.dump());
  }
  Reply get(std::string_view target) { return request("GET", target); }

 private:
  bool read_sized(Reply& reply) {
    const std::string length = reply.header("content-length");
    if (length.empty()) {  // until the end of the connection
      while (receive()) {
      }
      reply.body = std::exchange(buffer_, {});
      return true;
    }
    const auto size = static_cast<std::size_t>(std::atoll(length.c_str()));
    while (buffer_.size() < size) {
      if (!receive()) {
        return false;
      }
    }
    reply.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
    return true;
  }
  bool read_chunks(std::string& body) {
    for (;;) {
      if (!receive_until("\r\n")) {
        return false;
      }
      const std::size_t line_end = buffer_.find("\r\n");
      const std::size_t size = std::strtoul(buffer_.c_str(), nullptr, 16);
      while (buffer_.size() < line_end + 2 + size + 2) {
        if (!receive()) {
          return false;
        }
      }
      body += buffer_.substr(line_end + 2, size);
      buffer_.erase(0, line_end + 2 + size + 2);
      if (size == 0) {
        return true;
      }
    }
  }

  int fd_ = -1;
  std::string buffer_;
};

}  // namespace tandem::test

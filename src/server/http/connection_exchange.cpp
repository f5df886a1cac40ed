#include "server/http/connection_exchange.h"

#include <chrono>

#include <boost/asio/post.hpp>
#include <boost/beast/http/status.hpp>
#include <fmt/format.h>

namespace tandem::server {

ConnectionExchange::ConnectionExchange(std::shared_ptr<Connection> connection, HttpRequest request,
                                       bool is_head)
    : connection_(std::move(connection)), request_(std::move(request)), is_head_(is_head) {}

bool ConnectionExchange::is_live() const {
  return state_ != State::kDone && connection_->is_current(this);
}

std::string ConnectionExchange::head(int status, std::string_view content_type,
                                     const std::vector<HttpHeader>& headers) const {
  namespace http = boost::beast::http;
  const auto reason = http::obsolete_reason(static_cast<http::status>(status));
  std::string text = fmt::format(
      "HTTP/1.1 {} {}\r\nServer: tandem\r\nx-request-id: {}\r\nContent-Type: {}\r\n", status,
      std::string_view(reason.data(), reason.size()), request_.id, content_type);
  for (const HttpHeader& header : headers) {
    text += header.name + ": " + header.value + "\r\n";
  }
  if (!connection_->keeps_alive()) {
    text += "Connection: close\r\n";
  } else if (connection_->is_http_1_0()) {
    text += "Connection: keep-alive\r\n";
  }
  return text;
}

void ConnectionExchange::respond(HttpResponse response) {
  if (state_ != State::kWaiting || !is_live()) {
    return;
  }
  std::string bytes = head(response.status, response.content_type, response.headers);
  bytes += fmt::format("Content-Length: {}\r\n\r\n", response.body.size());
  if (!is_head_) {
    bytes += response.body;
  }
  connection_->send(bytes);
  finish();
}

void ConnectionExchange::start_events(std::vector<HttpHeader> headers) {
  if (state_ != State::kWaiting || !is_live()) {
    return;
  }
  if (connection_->is_http_1_0()) {
    connection_->close_after_answer();  // without chunks, that is the end of the answer
  }
  headers.push_back({"Cache-Control", "no-cache"});
  headers.push_back({"X-Accel-Buffering", "no"});
  std::string bytes = head(200, "text/event-stream; charset=utf-8", headers);
  bytes += connection_->is_http_1_0() ? "\r\n" : "Transfer-Encoding: chunked\r\n\r\n";
  state_ = State::kEvents;
  connection_->send(bytes);
  connection_->start_comments();
}

void ConnectionExchange::send_chunk(std::string_view bytes) {
  connection_->send(connection_->is_http_1_0()
                        ? std::string(bytes)
                        : fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes));
}

void ConnectionExchange::send_event(std::string_view data) {
  if (state_ == State::kEvents && is_live()) {
    send_chunk(fmt::format("data: {}\n\n", data));
  }
}

void ConnectionExchange::send_comment() {
  if (state_ == State::kEvents && is_live()) {
    send_chunk(": keep-alive\n\n");
  }
}

void ConnectionExchange::end_events() {
  if (state_ != State::kEvents || !is_live()) {
    return;
  }
  if (!connection_->is_http_1_0()) {
    connection_->send("0\r\n\r\n");
  }
  finish();
}

void ConnectionExchange::finish() {
  state_ = State::kDone;
  on_closed_ = nullptr;
  connection_->end_answer();
}

void ConnectionExchange::closed() {
  if (state_ == State::kDone) {
    return;
  }
  state_ = State::kDone;
  if (const auto callback = std::exchange(on_closed_, nullptr)) {
    callback();
  }
}

void ConnectionExchange::post(std::function<void()> task) {
  boost::asio::post(connection_->executor(), std::move(task));
}

void ConnectionExchange::post_after(double seconds, std::function<void()> task) {
  const auto timer = std::make_shared<boost::asio::steady_timer>(connection_->executor());
  timer->expires_after(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds)));
  timer->async_wait([self = shared_from_this(), timer, task = std::move(task)](auto error) {
    if (!error && self->is_live()) {
      task();
    }
  });
}

}  // namespace tandem::server

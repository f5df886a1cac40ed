#include "server/load/client_connection.h"

#include <chrono>
#include <cstdint>
#include <limits>
#include <utility>

#include <boost/asio/connect.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/write.hpp>

namespace tandem::load {

namespace asio = boost::asio;
namespace http = boost::beast::http;

Expected<Server> resolve(const Target& target) {
  asio::io_context context;
  asio::ip::tcp::resolver resolver(context);
  boost::system::error_code error;
  const auto found = resolver.resolve(target.host, target.port, error);
  if (error || found.empty()) {
    return fail("{}: no address for '{}': {}", target.url(), target.host, error.message());
  }
  Server server{target, {}};
  for (const auto& entry : found) {
    server.addresses.push_back(entry.endpoint());
  }
  return server;
}

ClientConnection::ClientConnection(asio::io_context& context, const Server& server,
                                   double timeout_s)
    : socket_(context), timer_(context), server_(server), timeout_s_(timeout_s) {}

void ClientConnection::send(HttpCall call, OnBody on_body, OnEnd on_end) {
  request_ = Request(http::string_to_verb(call.method), server_.target.base_path + call.path, 11);
  request_.set(http::field::host, server_.target.authority());
  request_.set(http::field::user_agent, "tandem-bench");
  request_.set(http::field::accept, "application/json, text/event-stream");
  if (!call.api_key.empty()) {
    request_.set(http::field::authorization, "Bearer " + call.api_key);
  }
  if (!call.body.empty()) {
    request_.set(http::field::content_type, "application/json");
  }
  request_.body() = std::move(call.body);
  request_.prepare_payload();
  on_body_ = std::move(on_body);
  on_end_ = std::move(on_end);
  head_ = {};
  has_bytes_ = false;
  is_reused_ = socket_.is_open();
  start_timer();
  if (is_reused_) {
    write();
  } else {
    connect();
  }
}

void ClientConnection::cancel() {
  fail_with("cancelled", "the run was stopped");
}

void ClientConnection::connect() {
  asio::async_connect(socket_, server_.addresses,
                      [self = shared_from_this()](Error error, const asio::ip::tcp::endpoint&) {
                        if (!self->on_end_) {
                          return;
                        }
                        if (error) {
                          self->fail_with("connect_failed",
                                          fmt::format("cannot connect to {}: {}",
                                                      self->server_.target.url(), error.message()));
                          return;
                        }
                        self->socket_.set_option(asio::ip::tcp::no_delay(true), error);
                        self->write();
                      });
}

void ClientConnection::write() {
  http::async_write(socket_, request_, [self = shared_from_this()](Error error, std::size_t) {
    if (!self->on_end_) {
      return;
    }
    if (error) {
      self->on_io_error("sending to", error);
      return;
    }
    self->buffer_.clear();
    self->parser_.emplace();
    self->parser_->body_limit(std::numeric_limits<std::uint64_t>::max());
    // Eager would wait for the header of the chunk after the one that is here.
    self->parser_->eager(false);
    self->read();
  });
}

void ClientConnection::read() {
  start_timer();
  http::async_read_some(
      socket_, buffer_, *parser_,
      [self = shared_from_this()](Error error, std::size_t) { self->on_read(error); });
}

void ClientConnection::on_read(Error error) {
  if (!on_end_) {
    return;
  }
  has_bytes_ = has_bytes_ || !error || parser_->got_some();
  if (!error || parser_->is_header_done()) {
    give_body();
  }
  if (!on_end_) {
    return;  // the receiver cancelled
  }
  if (error && !(error == http::error::end_of_stream && parser_->is_done())) {
    on_io_error("reading from", error);
  } else if (!parser_->is_done()) {
    read();
  } else {
    if (!parser_->keep_alive()) {
      close();
    }
    finish(std::nullopt);
  }
}

void ClientConnection::give_body() {
  if (!parser_->is_header_done()) {
    return;
  }
  if (head_.status == 0) {
    const auto type = parser_->get()[http::field::content_type];
    head_ = {static_cast<int>(parser_->get().result_int()), std::string(type.data(), type.size())};
  }
  std::string bytes;
  bytes.swap(parser_->get().body());
  if (!bytes.empty() && on_body_) {
    on_body_(head_, bytes);
  }
}

void ClientConnection::on_io_error(std::string_view action, Error error) {
  close();
  if (is_reused_ && !has_bytes_) {
    is_reused_ = false;
    connect();
    return;
  }
  fail_with("connection_lost",
            fmt::format("{} {}: {}", action, server_.target.url(),
                        error == http::error::end_of_stream || error == http::error::partial_message
                            ? "the server closed the connection"
                            : error.message()));
}

void ClientConnection::fail_with(std::string kind, std::string text) {
  close();
  finish(AnswerProblem{std::move(kind), std::move(text)});
}

void ClientConnection::finish(std::optional<AnswerProblem> problem) {
  timer_.cancel();
  on_body_ = nullptr;
  // The receiver may send the next call from inside.
  if (const OnEnd on_end = std::exchange(on_end_, nullptr)) {
    on_end(HttpHead(head_), problem);
  }
}

void ClientConnection::start_timer() {
  timer_.expires_after(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(timeout_s_)));
  timer_.async_wait([self = shared_from_this()](Error error) {
    const bool is_late = self->timer_.expiry() <= std::chrono::steady_clock::now();
    if (!error && is_late && self->on_end_) {
      self->fail_with("timeout", fmt::format("{}: nothing came for {:g} s",
                                             self->server_.target.url(), self->timeout_s_));
    }
  });
}

void ClientConnection::close() {
  Error ignored;
  socket_.close(ignored);
}

Expected<HttpReply> call(const Server& server, const HttpCall& call, double timeout_s) {
  asio::io_context context;
  HttpReply reply;
  std::optional<AnswerProblem> problem;
  const auto connection = std::make_shared<ClientConnection>(context, server, timeout_s);
  connection->send(
      call, [&](const HttpHead&, std::string_view bytes) { reply.body += bytes; },
      [&](const HttpHead& head, const std::optional<AnswerProblem>& end) {
        reply.status = head.status;
        problem = end;
      });
  context.run();
  if (problem) {
    return Failure{problem->text};
  }
  return reply;
}

}  // namespace tandem::load

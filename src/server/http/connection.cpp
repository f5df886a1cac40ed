#include "server/http/connection.h"

#include <algorithm>
#include <array>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <fmt/format.h>

#include "core/rng.h"
#include "server/http/connection_exchange.h"

namespace tandem::server {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr std::size_t kReadBytes = std::size_t{64} << 10;
// Input kept beyond the present request; a client that sends more waits for its answers first.
constexpr std::size_t kMaxAhead = std::size_t{64} << 10;

std::chrono::steady_clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

bool is_sane_id(std::string_view id) {
  const auto is_printable = [](char c) { return c > ' ' && c < 127; };
  return !id.empty() && id.size() <= 128 && std::ranges::all_of(id, is_printable);
}

HttpRequest to_request(http::request<http::string_body>&& message) {
  HttpRequest request;
  const auto method = message.method_string();
  request.method.assign(method.data(), method.size());
  std::string_view target(message.target().data(), message.target().size());
  const std::size_t question = std::min(target.find('?'), target.size());
  request.path = percent_decoded(target.substr(0, question), false);
  request.query = std::string(target.substr(std::min(question + 1, target.size())));
  for (const auto& field : message) {
    request.headers.push_back({std::string(field.name_string().data(), field.name_string().size()),
                               std::string(field.value().data(), field.value().size())});
  }
  request.body = std::move(message.body());
  return request;
}

}  // namespace

Connection::Connection(Socket socket, const HttpOptions& options, const Router& router,
                       std::shared_ptr<ConnectionCounters> counters)
    : socket_(std::move(socket)),
      options_(options),
      router_(router),
      counters_(std::move(counters)),
      timer_(socket_.get_executor()) {
  ++counters_->connections;
}

Connection::~Connection() {
  if (phase_ != Phase::kClosed) {
    --counters_->connections;
  }
}

void Connection::start() {
  asio::post(executor(), [self = shared_from_this()] {
    error_code ignored;
    self->socket_.non_blocking(true, ignored);
    self->socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
    self->set_read_limit(self->options_.idle_timeout_s);
    self->wait_for_input();
  });
}

void Connection::drain() {
  asio::post(executor(), [self = shared_from_this()] {
    self->is_draining_ = true;
    self->keep_alive_ = false;
    if (self->phase_ == Phase::kIdle) {
      self->close();
    }
  });
}

void Connection::abort() {
  asio::post(executor(), [self = shared_from_this()] { self->close(); });
}

bool Connection::is_current(const ConnectionExchange* exchange) const {
  return exchange_.get() == exchange;
}

void Connection::wait_for_input() {
  if (is_waiting_for_input_ || input_ended_ || phase_ == Phase::kClosed || in_.size() > kMaxAhead) {
    return;
  }
  is_waiting_for_input_ = true;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](error_code error) {
    self->is_waiting_for_input_ = false;
    if (self->phase_ == Phase::kClosed) {
      return;
    }
    if (error) {
      self->close();
      return;
    }
    self->read_input();
  });
}

void Connection::read_input() {
  std::array<char, kReadBytes> bytes;  // NOLINT: written by the read
  error_code error;
  const std::size_t count = socket_.read_some(asio::buffer(bytes), error);
  if (error == asio::error::would_block || error == asio::error::try_again) {
    wait_for_input();
    return;
  }
  if (error) {
    if (error == asio::error::eof) {
      on_end_of_input();
    } else {
      close();
    }
    return;
  }
  if (phase_ == Phase::kLingering) {
    wait_for_input();  // what comes after a refusal is not read
    return;
  }
  in_.append(bytes.data(), count);
  if (phase_ == Phase::kBody) {
    set_read_limit(options_.body_timeout_s);
  }
  parse();
  wait_for_input();
}

void Connection::on_end_of_input() {
  input_ended_ = true;
  const bool is_unanswered = phase_ == Phase::kAnswering;
  // Half-closed counts as gone: nobody waits for an answer that takes long. What is already
  // written still goes out.
  if (is_unanswered || phase_ == Phase::kLingering || out_.empty()) {
    close();
  } else {
    keep_alive_ = false;
    phase_ = Phase::kLingering;
    flush();
  }
}

void Connection::parse() {
  while (phase_ == Phase::kIdle || phase_ == Phase::kHeaders || phase_ == Phase::kBody) {
    if (phase_ == Phase::kIdle) {
      while (in_.starts_with("\r\n")) {  // tolerated before a request line
        in_.erase(0, 2);
      }
      if (in_.empty()) {
        return;
      }
      parser_.emplace();
      parser_->header_limit(options_.max_header_bytes);
      parser_->body_limit(options_.max_body_bytes);
      headers_done_ = false;
      phase_ = Phase::kHeaders;
      set_read_limit(options_.header_timeout_s);
    }
    if (!parse_some()) {
      return;
    }
  }
}

bool Connection::parse_some() {
  error_code error;
  const std::size_t used = parser_->put(asio::buffer(in_.data(), in_.size()), error);
  in_.erase(0, used);
  if (error && error != http::error::need_more) {
    if (error == http::error::header_limit) {
      refuse(431, "header_too_large",
             fmt::format("the headers are longer than {} bytes", options_.max_header_bytes));
    } else if (error == http::error::body_limit) {
      refuse(413, "body_too_large",
             fmt::format("the body is longer than {} bytes", options_.max_body_bytes));
    } else {
      refuse(400, "bad_http", "this is not an HTTP request: " + error.message());
    }
    return false;
  }
  if (!headers_done_ && parser_->is_header_done()) {
    headers_done_ = true;
    if (!accept_headers()) {
      return false;
    }
  }
  if (parser_->is_done()) {
    dispatch();
    return phase_ != Phase::kAnswering;
  }
  return used > 0 && !error && !in_.empty();
}

bool Connection::accept_headers() {
  const auto& message = parser_->get();
  const auto count = static_cast<std::uint32_t>(std::distance(message.begin(), message.end()));
  if (count > options_.max_headers) {
    refuse(431, "too_many_headers",
           fmt::format("{} headers, expected at most {}", count, options_.max_headers));
    return false;
  }
  is_http_1_0_ = message.version() < 11;
  keep_alive_ = parser_->keep_alive() && !is_draining_;
  const auto length = parser_->content_length();
  if (length && *length > options_.max_body_bytes) {
    refuse(413, "body_too_large",
           fmt::format("the body has {} bytes, expected at most {}", *length,
                       options_.max_body_bytes));
    return false;
  }
  phase_ = Phase::kBody;
  set_read_limit(options_.body_timeout_s);
  parser_->eager(true);
  if (!parser_->is_done() && in_.empty() && !is_http_1_0_ &&
      boost::beast::iequals(message[http::field::expect], "100-continue")) {
    send("HTTP/1.1 100 Continue\r\n\r\n");
  }
  return true;
}

void Connection::dispatch() {
  read_limit_ = Clock::time_point::max();
  HttpRequest request = to_request(parser_->release());
  const bool is_head = request.method == "HEAD";
  if (is_head) {
    request.method = "GET";
  }
  begin_answer(std::move(request), is_head);
  router_.dispatch(exchange_);
}

void Connection::begin_answer(HttpRequest request, bool is_head) {
  phase_ = Phase::kAnswering;
  parser_.reset();
  const std::string* id = request.header("x-request-id");
  request.id = id != nullptr && is_sane_id(*id) ? *id : new_request_id();
  exchange_ = std::make_shared<ConnectionExchange>(shared_from_this(), std::move(request), is_head);
  ++counters_->open_requests;
}

std::string Connection::new_request_id() {
  return fmt::format("req-{:016x}", mix_key({counters_->salt, counters_->requests.fetch_add(1)}));
}

void Connection::refuse(int status, std::string code, std::string message) {
  keep_alive_ = false;
  begin_answer({}, false);
  exchange_->respond(error_response({status, std::move(code), std::move(message)}));
}

void Connection::send(std::string_view bytes) {
  if (phase_ == Phase::kClosed) {
    return;
  }
  comment_at_ = comment_at_ == Clock::time_point::max()
                    ? comment_at_
                    : Clock::now() + to_duration(options_.event_comment_s);
  out_ += bytes;
  flush();
}

void Connection::flush() {
  if (is_waiting_for_output_) {
    return;
  }
  while (out_sent_ < out_.size()) {
    error_code error;
    out_sent_ +=
        socket_.write_some(asio::buffer(out_.data() + out_sent_, out_.size() - out_sent_), error);
    if (error == asio::error::would_block || error == asio::error::try_again) {
      out_.erase(0, std::exchange(out_sent_, 0));
      is_waiting_for_output_ = true;
      write_limit_ = Clock::now() + to_duration(options_.write_timeout_s);
      arm_timer();
      socket_.async_wait(Socket::wait_write, [self = shared_from_this()](error_code wait_error) {
        self->is_waiting_for_output_ = false;
        if (self->phase_ == Phase::kClosed) {
          return;
        }
        if (wait_error) {
          self->close();
          return;
        }
        self->flush();
      });
      return;
    }
    if (error) {
      // Not from within send(): its caller is in the middle of an answer.
      asio::post(executor(), [self = shared_from_this()] { self->close(); });
      return;
    }
  }
  out_.clear();
  out_sent_ = 0;
  write_limit_ = Clock::time_point::max();
  if (phase_ == Phase::kLingering) {
    linger();
  }
}

void Connection::start_comments() {
  comment_at_ = Clock::now() + to_duration(options_.event_comment_s);
  arm_timer();
}

void Connection::end_answer() {
  comment_at_ = Clock::time_point::max();
  --counters_->open_requests;
  exchange_.reset();
  if (phase_ != Phase::kAnswering) {
    return;
  }
  if (!keep_alive_ || is_draining_) {
    phase_ = Phase::kLingering;
    flush();
    return;
  }
  phase_ = Phase::kIdle;
  set_read_limit(options_.idle_timeout_s);
  if (!in_.empty()) {  // the next request is here already; not from within the last one's handler
    asio::post(executor(), [self = shared_from_this()] {
      self->parse();
      self->wait_for_input();
    });
  }
}

void Connection::linger() {
  // Closing with unread input would reset the connection and could take the answer with it.
  error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  if (input_ended_) {
    close();
    return;
  }
  set_read_limit(options_.linger_s);
  in_.clear();
  wait_for_input();
}

void Connection::close() {
  if (phase_ == Phase::kClosed) {
    return;
  }
  phase_ = Phase::kClosed;
  --counters_->connections;
  error_code ignored;
  socket_.shutdown(Socket::shutdown_both, ignored);
  socket_.close(ignored);
  timer_.cancel();
  if (const auto exchange = std::exchange(exchange_, nullptr)) {
    --counters_->open_requests;
    exchange->closed();
  }
}

void Connection::set_read_limit(double seconds) {
  read_limit_ = Clock::now() + to_duration(seconds);
  arm_timer();
}

// One timer for all limits. It is moved forward only: a limit that was put off is looked at when
// the timer fires, so that a token does not cost a timer operation.
void Connection::arm_timer() {
  const Clock::time_point next = std::min({read_limit_, write_limit_, comment_at_});
  if (next >= timer_at_ || phase_ == Phase::kClosed) {
    return;
  }
  timer_at_ = next;
  timer_.expires_at(next);
  timer_.async_wait([weak = weak_from_this()](error_code error) {
    const auto self = weak.lock();
    if (!error && self && self->phase_ != Phase::kClosed) {
      self->on_timer();
    }
  });
}

void Connection::on_timer() {
  timer_at_ = Clock::time_point::max();
  const Clock::time_point now = Clock::now();
  if (now >= write_limit_) {
    close();
    return;
  }
  if (now >= read_limit_) {
    read_limit_ = Clock::time_point::max();
    if (phase_ == Phase::kHeaders || phase_ == Phase::kBody) {
      refuse(408, "request_timeout",
             phase_ == Phase::kHeaders
                 ? fmt::format("no complete headers within {} s", options_.header_timeout_s)
                 : fmt::format("no more of the body within {} s", options_.body_timeout_s));
    } else {
      close();
      return;
    }
  }
  if (now >= comment_at_ && exchange_) {
    comment_at_ = now + to_duration(options_.event_comment_s);
    exchange_->send_comment();
  }
  arm_timer();
}

}  // namespace tandem::server

// connection.h — one client: reads requests, writes answers, watches the clock and whether the
// client is still there. Internal to http/: the only header here that shows Boost.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/http/http_server.h"

namespace tandem::server {

class ConnectionExchange;

/// What all connections of a server share.
struct ConnectionCounters {
  std::uint64_t salt = 0;  // of this server's request ids
  std::atomic<std::uint64_t> requests{0};
  std::atomic<int> connections{0};
  std::atomic<int> open_requests{0};
};

/// Everything runs on the socket's executor, a strand. Always has a wait for input pending, also
/// while a request is answered: that is how a client that goes is noticed.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::ip::tcp::socket;

  Connection(Socket socket, const HttpOptions& options, const Router& router,
             std::shared_ptr<ConnectionCounters> counters);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  // From any thread.
  void start();
  void drain();
  void abort();

  // For the exchange, on the strand.
  [[nodiscard]] bool is_current(const ConnectionExchange* exchange) const;
  void send(std::string_view bytes);
  /// The present answer is complete.
  void end_answer();
  /// False when the connection is closed after the present answer.
  [[nodiscard]] bool keeps_alive() const { return keep_alive_; }
  void close_after_answer() { keep_alive_ = false; }
  [[nodiscard]] bool is_http_1_0() const { return is_http_1_0_; }
  void start_comments();
  [[nodiscard]] boost::asio::any_io_executor executor() { return socket_.get_executor(); }

 private:
  using Clock = std::chrono::steady_clock;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  enum class Phase { kIdle, kHeaders, kBody, kAnswering, kLingering, kClosed };

  void wait_for_input();
  void read_input();
  void on_end_of_input();
  void parse();
  bool parse_some();
  /// False when the headers were refused.
  bool accept_headers();
  void dispatch();
  void begin_answer(HttpRequest request, bool is_head);
  [[nodiscard]] std::string new_request_id();
  void refuse(int status, std::string code, std::string message);
  void flush();
  void close();
  void linger();
  void set_read_limit(double seconds);
  void arm_timer();
  void on_timer();

  Socket socket_;
  const HttpOptions& options_;
  const Router& router_;
  std::shared_ptr<ConnectionCounters> counters_;
  boost::asio::steady_timer timer_;
  Clock::time_point timer_at_ = Clock::time_point::max();
  Clock::time_point read_limit_ = Clock::time_point::max();
  Clock::time_point write_limit_ = Clock::time_point::max();
  Clock::time_point comment_at_ = Clock::time_point::max();

  Phase phase_ = Phase::kIdle;
  std::string in_;
  std::optional<Parser> parser_;
  bool headers_done_ = false;
  bool is_waiting_for_input_ = false;
  std::string out_;
  std::size_t out_sent_ = 0;
  bool is_waiting_for_output_ = false;
  bool keep_alive_ = true;
  bool is_http_1_0_ = false;
  bool is_draining_ = false;
  bool input_ended_ = false;
  std::shared_ptr<ConnectionExchange> exchange_;
};

}  // namespace tandem::server

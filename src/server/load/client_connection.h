// client_connection.h — one HTTP/1.1 connection to a server, kept alive between calls; bodies are
// handed on as they arrive. Internal to load/: the only header here that shows Boost.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "core/error.h"
#include "server/load/endpoint.h"
#include "server/load/target.h"

namespace tandem::load {

/// A target with the addresses of its name.
struct Server {
  Target target;
  std::vector<boost::asio::ip::tcp::endpoint> addresses;
};
/// Errors: a Failure that names the URL when the name has no address.
[[nodiscard]] Expected<Server> resolve(const Target& target);

struct HttpCall {
  std::string method = "POST";
  std::string path;  // behind the target's base path
  std::string body;  // JSON; empty: none
  std::string api_key;
};

struct HttpHead {
  int status = 0;
  std::string content_type;
};

/// Runs on the thread of its context; `server` outlives it. One call at a time.
class ClientConnection : public std::enable_shared_from_this<ClientConnection> {
 public:
  using OnBody = std::function<void(const HttpHead& head, std::string_view bytes)>;
  /// `problem` is empty when the whole answer arrived; `head.status` is 0 when none of it did.
  using OnEnd =
      std::function<void(const HttpHead& head, const std::optional<AnswerProblem>& problem)>;

  /// `timeout_s` without a byte ends a call.
  ClientConnection(boost::asio::io_context& context, const Server& server, double timeout_s);
  ClientConnection(const ClientConnection&) = delete;
  ClientConnection& operator=(const ClientConnection&) = delete;

  /// Connects first if need be. A connection that the server closed while it was idle is opened
  /// again once.
  void send(HttpCall call, OnBody on_body, OnEnd on_end);
  /// Ends the call that is under way with the problem "cancelled".
  void cancel();

 private:
  using Error = boost::system::error_code;
  using Request = boost::beast::http::request<boost::beast::http::string_body>;
  using Parser = boost::beast::http::response_parser<boost::beast::http::string_body>;

  void connect();
  void write();
  void read();
  void on_read(Error error);
  void give_body();
  void fail_with(std::string kind, std::string text);
  void on_io_error(std::string_view action, Error error);
  void finish(std::optional<AnswerProblem> problem);
  void start_timer();
  void close();

  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  const Server& server_;
  double timeout_s_;
  Request request_;
  std::optional<Parser> parser_;
  boost::beast::flat_buffer buffer_;
  HttpHead head_;
  OnBody on_body_;
  OnEnd on_end_;  // set while a call is under way
  bool is_reused_ = false;
  bool has_bytes_ = false;
};

struct HttpReply {
  int status = 0;
  std::string body;
};
/// A whole answer at once, on a context of its own. Errors: a Failure that names the URL when none
/// arrives.
[[nodiscard]] Expected<HttpReply> call(const Server& server, const HttpCall& call,
                                       double timeout_s);

}  // namespace tandem::load

// connection_exchange.h — the answer to one request as bytes on its connection. Internal to http/.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "server/http/connection.h"

namespace tandem::server {

class ConnectionExchange final : public Exchange,
                                 public std::enable_shared_from_this<ConnectionExchange> {
 public:
  ConnectionExchange(std::shared_ptr<Connection> connection, HttpRequest request, bool is_head);

  [[nodiscard]] const HttpRequest& request() const override { return request_; }
  void respond(HttpResponse response) override;
  void start_events(std::vector<HttpHeader> headers) override;
  void send_event(std::string_view data) override;
  void end_events() override;
  void on_closed(std::function<void()> callback) override { on_closed_ = std::move(callback); }
  void post(std::function<void()> task) override;
  void post_after(double seconds, std::function<void()> task) override;

  // For the connection.
  [[nodiscard]] bool has_begun() const { return state_ != State::kWaiting; }
  /// A comment, which clients skip.
  void send_comment();
  /// The client went. The exchange does nothing from here on.
  void closed();

 private:
  enum class State { kWaiting, kEvents, kDone };
  [[nodiscard]] bool is_live() const;
  void send_chunk(std::string_view bytes);
  void finish();
  [[nodiscard]] std::string head(int status, std::string_view content_type,
                                 const std::vector<HttpHeader>& headers) const;

  std::shared_ptr<Connection> connection_;
  HttpRequest request_;
  bool is_head_;
  State state_ = State::kWaiting;
  std::function<void()> on_closed_;
};

}  // namespace tandem::server

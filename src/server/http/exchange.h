// exchange.h — one request and the answer to it, as a handler sees them: at once, or piece by piece
// as server-sent events.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "server/http/message.h"

namespace tandem::server {

/// All but post() and post_after() is to be called on the connection's strand: that is where a
/// handler, what was posted and on_closed() run, one at a time. After the client has gone every
/// call is ignored. None may outlive the HttpServer.
class Exchange {
 public:
  virtual ~Exchange() = default;

  [[nodiscard]] virtual const HttpRequest& request() const = 0;
  /// The whole answer; or nothing else but this before start_events().
  virtual void respond(HttpResponse response) = 0;

  /// Begins a 200 answer of events. A comment is sent whenever nothing else was for a while.
  virtual void start_events(std::vector<HttpHeader> headers) = 0;
  /// One event; `data` is a single line.
  virtual void send_event(std::string_view data) = 0;
  virtual void end_events() = 0;

  /// `callback` runs once when the client goes before it has the whole answer.
  virtual void on_closed(std::function<void()> callback) = 0;
  /// Runs `task` on the strand soon. From any thread.
  virtual void post(std::function<void()> task) = 0;
  /// The same, later. The task is dropped when the client has gone by then.
  virtual void post_after(double seconds, std::function<void()> task) = 0;
};

using Handler = std::function<void(const std::shared_ptr<Exchange>&)>;

}  // namespace tandem::server

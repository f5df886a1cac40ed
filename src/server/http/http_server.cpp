#include "server/http/http_server.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>

#include "core/error.h"
#include "core/log.h"
#include "server/http/connection.h"

namespace tandem::server {

namespace asio = boost::asio;
using boost::system::error_code;

// Handlers use `this`: the threads that run them end before it does.
class HttpServer::Impl {
 public:
  Impl(HttpOptions options, const Router& router)
      : options_(std::move(options)),
        router_(router),
        accept_strand_(asio::make_strand(context_)),
        acceptor_(accept_strand_),
        accept_timer_(accept_strand_),
        work_(asio::make_work_guard(context_)) {
    counters_->salt =
        static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
    listen();
  }

  void start() {
    asio::post(accept_strand_, [this] { accept(); });
    for (int i = 0; i < options_.num_threads; ++i) {
      threads_.emplace_back([this] { run(); });
    }
  }

  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] const ConnectionCounters& counters() const { return *counters_; }

  void drain() {
    asio::post(accept_strand_, [this] {
      is_draining_ = true;
      error_code ignored;
      acceptor_.close(ignored);
    });
    for (const auto& connection : live_connections()) {
      connection->drain();
    }
  }

  void stop() {
    drain();
    for (const auto& connection : live_connections()) {
      connection->abort();
    }
    work_.reset();
    // Handlers that are queued run before the threads end, so every connection is closed properly;
    // timers of exchanges that still wait must not keep the context alive.
    asio::post(context_, [this] { stop_when_closed(); });
    for (std::thread& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }

 private:
  void run() {
    for (;;) {
      try {
        context_.run();
        return;
      } catch (const std::exception& error) {  // of one task; its client sees a timeout at worst
        log_warn("http.task_failed", "error={}", error.what());
      }
    }
  }

  void stop_when_closed() {
    constexpr int kMaxRounds = 2000;  // of a millisecond: a handler that hangs must not hold us up
    if (counters_->connections == 0 || ++num_stop_rounds_ > kMaxRounds) {
      context_.stop();
      return;
    }
    for (const auto& connection : live_connections()) {
      connection->abort();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    asio::post(context_, [this] { stop_when_closed(); });
  }

  void listen() {
    error_code error;
    asio::ip::tcp::endpoint endpoint;
    const auto address = asio::ip::make_address(options_.host, error);
    if (error) {
      asio::ip::tcp::resolver resolver(context_);
      const auto found = resolver.resolve(options_.host, std::to_string(options_.port), error);
      if (error || found.empty()) {
        throw_error("--host {}: expected an address or a name of this machine: {}", options_.host,
                    error.message());
      }
      endpoint = found.begin()->endpoint();
    } else {
      endpoint = {address, options_.port};
    }
    acceptor_.open(endpoint.protocol(), error);
    if (!error) {
      acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    }
    if (!error) {
      acceptor_.bind(endpoint, error);
    }
    if (!error) {
      acceptor_.listen(1024, error);
    }
    if (error) {
      throw_error("cannot listen on {} port {}: {}", options_.host, options_.port, error.message());
    }
    port_ = acceptor_.local_endpoint().port();
  }

  void accept() {
    if (is_draining_) {
      return;
    }
    acceptor_.async_accept(asio::make_strand(context_),
                           [this](error_code error, Connection::Socket socket) {
                             on_accepted(error, std::move(socket));
                           });
  }

  void on_accepted(error_code error, Connection::Socket socket) {
    if (is_draining_ || error == asio::error::operation_aborted) {
      return;
    }
    if (error) {  // most likely out of file descriptors: some will be closed
      log_warn("http.accept_failed", "error={}", error.message());
      accept_timer_.expires_after(std::chrono::milliseconds(100));
      accept_timer_.async_wait([this](error_code) { accept(); });
      return;
    }
    if (counters_->connections < options_.max_connections) {
      add(std::make_shared<Connection>(std::move(socket), options_, router_, counters_));
    }
    accept();
  }

  void add(const std::shared_ptr<Connection>& connection) {
    {
      const std::lock_guard lock(mutex_);
      if (connections_.size() >= 2 * num_live_ + 64) {
        std::erase_if(connections_, [](const auto& weak) { return weak.expired(); });
        num_live_ = connections_.size();
      }
      connections_.push_back(connection);
    }
    connection->start();
  }

  [[nodiscard]] std::vector<std::shared_ptr<Connection>> live_connections() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Connection>> live;
    for (const auto& weak : connections_) {
      if (auto connection = weak.lock()) {
        live.push_back(std::move(connection));
      }
    }
    return live;
  }

  HttpOptions options_;
  const Router& router_;
  std::shared_ptr<ConnectionCounters> counters_ = std::make_shared<ConnectionCounters>();
  asio::io_context context_;
  asio::strand<asio::io_context::executor_type> accept_strand_;
  asio::ip::tcp::acceptor acceptor_;
  asio::steady_timer accept_timer_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::uint16_t port_ = 0;
  std::atomic<bool> is_draining_{false};
  int num_stop_rounds_ = 0;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // guards the two below
  std::vector<std::weak_ptr<Connection>> connections_;
  std::size_t num_live_ = 0;
};

HttpServer::HttpServer(HttpOptions options, const Router& router)
    : impl_(std::make_unique<Impl>(std::move(options), router)) {}

HttpServer::~HttpServer() {
  impl_->stop();
}

void HttpServer::start() {
  impl_->start();
}
std::uint16_t HttpServer::port() const {
  return impl_->port();
}
int HttpServer::num_connections() const {
  return impl_->counters().connections;
}
int HttpServer::num_open_requests() const {
  return impl_->counters().open_requests;
}
void HttpServer::drain() {
  impl_->drain();
}
void HttpServer::stop() {
  impl_->stop();
}

}  // namespace tandem::server

// The HTTP layer alone, with handlers of the test.
#include <atomic>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/http/http_server.h"
#include "server/http_client.h"
#include "server/server_rig.h"

namespace tandem::test {
namespace {

using server::Access;
using server::Exchange;
using server::HttpOptions;
using server::HttpServer;
using server::Router;
using ::testing::HasSubstr;

class HttpTest : public ::testing::Test {
 protected:
  using ExchangePtr = std::shared_ptr<Exchange>;

  HttpTest() {
    options_.port = 0;
    options_.linger_s = 0.05;
    router_.add("GET", "/hello", Access::kOpen, [](const ExchangePtr& e) {
      e->respond({200, "\"hello\""});
    });
    router_.add("POST", "/echo", Access::kUser, [](const ExchangePtr& e) {
      e->respond({200, e->request().body});
    });
    router_.add("GET", "/never", Access::kUser, [this](const ExchangePtr& e) {
      e->on_closed([this] { ++num_gone_; });
      const std::lock_guard lock(mutex_);
      waiting_.push_back(e);
    });
    router_.add("GET", "/events", Access::kUser, [this](const ExchangePtr& e) {
      e->on_closed([this] { ++num_gone_; });
      e->start_events({});
      const std::lock_guard lock(mutex_);
      waiting_.push_back(e);
    });
    router_.add("GET", "/throws", Access::kUser,
                [](const ExchangePtr&) { throw std::runtime_error("secret detail"); });
    router_.add("GET", "/tree/", Access::kAdmin, [](const ExchangePtr& e) {
      e->respond({200, e->request().path});
    });
  }
  ~HttpTest() override {
    if (server_) {
      server_->stop();
    }
    waiting_.clear();  // an exchange may not outlive its server
  }
  void start() {
    server_ = std::make_unique<HttpServer>(options_, router_);
    server_->start();
  }
  HttpClient client() { return HttpClient(server_->port()); }
  ExchangePtr last_waiting() {
    EXPECT_TRUE(ServerRig::wait_for([&] {
      const std::lock_guard lock(mutex_);
      return !waiting_.empty();
    }));
    const std::lock_guard lock(mutex_);
    return waiting_.back();
  }

  HttpOptions options_;
  Router router_{server::AccessKeys{}};
  std::atomic<int> num_gone_{0};
  std::mutex mutex_;  // guards waiting_
  std::vector<ExchangePtr> waiting_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpTest, KeepsConnectionsAndAnswersPipelinedRequestsInOrder) {
  start();
  HttpClient one = client();
  EXPECT_EQ(one.get("/hello").body, "\"hello\"");
  EXPECT_EQ(one.get("/hello").status, 200);
  one.send(
      "POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\noneGET /hello HTTP/1.1\r\n\r\n"
      "POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nthree");
  EXPECT_EQ(one.read_reply().body, "one");
  EXPECT_EQ(one.read_reply().body, "\"hello\"");
  EXPECT_EQ(one.read_reply().body, "three");
  EXPECT_EQ(server_->num_connections(), 1);
}

TEST_F(HttpTest, BodiesMayComeInChunksByteByByteAndAfterAContinue) {
  start();
  HttpClient one = client();
  const std::string chunked =
      "POST /echo HTTP/1.1\r\nTransfer-Encoding: "
      "chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n\r\n";
  for (const char c : chunked) {
    ASSERT_TRUE(one.send(std::string_view(&c, 1)));
  }
  EXPECT_EQ(one.read_reply().body, "abcdefg");
  one.send("POST /echo HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  ASSERT_TRUE(one.receive_until("100 Continue\r\n\r\n"));
  one.send("ok");
  EXPECT_EQ(one.read_reply().body, "ok");
}

TEST_F(HttpTest, HeadHasNoBodyAndHttp10Closes) {
  start();
  HttpClient one = client();
  const Reply head = one.request("HEAD", "/hello");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.header("content-length"), "7");
  EXPECT_EQ(one.get("/hello").body, "\"hello\"") << "nothing of the body came before";
  HttpClient old = client();
  old.send("GET /hello HTTP/1.0\r\n\r\n");
  EXPECT_EQ(old.read_reply().body, "\"hello\"");
  EXPECT_TRUE(old.is_closed_by_server());
  HttpClient closing = client();
  EXPECT_EQ(closing.request("GET", "/hello", "", "Connection: close\r\n").header("connection"),
            "close");
  EXPECT_TRUE(closing.is_closed_by_server());
}

TEST_F(HttpTest, RequestIdsAreTheClientsWhenSane) {
  start();
  HttpClient one = client();
  EXPECT_EQ(one.request("GET", "/hello", "", "X-Request-Id: my-id\r\n").header("x-request-id"),
            "my-id");
  const std::string first = one.get("/hello").header("x-request-id");
  EXPECT_THAT(first, ::testing::StartsWith("req-"));
  EXPECT_NE(first, one.get("/hello").header("x-request-id"));
  const std::string too_long(129, 'x');
  EXPECT_NE(
      one.request("GET", "/hello", "", "X-Request-Id: " + too_long + "\r\n").header("x-request-id"),
      too_long);
}

TEST_F(HttpTest, WhatIsNotThereOrNotAllowed) {
  router_ = Router(server::AccessKeys{"user-key", "admin-key"});
  router_.add("GET", "/open", Access::kOpen, [](const auto& e) { e->respond({200, "1"}); });
  router_.add("GET", "/user", Access::kUser, [](const auto& e) { e->respond({200, "2"}); });
  router_.add("GET", "/admin", Access::kAdmin, [](const auto& e) { e->respond({200, "3"}); });
  start();
  HttpClient one = client();
  const auto status = [&](const std::string& path, const std::string& key) {
    return one.request("GET", path, "", key.empty() ? "" : "Authorization: Bearer " + key + "\r\n")
        .status;
  };
  EXPECT_EQ(status("/open", ""), 200);
  EXPECT_EQ(status("/user", ""), 401);
  EXPECT_EQ(status("/user", "user-ke"), 401);
  EXPECT_EQ(status("/user", "user-key2"), 401);
  EXPECT_EQ(status("/user", "user-key"), 200);
  EXPECT_EQ(status("/admin", "user-key"), 401);
  EXPECT_EQ(status("/admin", "admin-key"), 200);
  EXPECT_EQ(one.request("GET", "/user", "", "Authorization: user-key\r\n").status, 401);
  EXPECT_EQ(one.get("/nothing").status, 404);
  const Reply wrong = one.request("DELETE", "/open");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.header("allow"), "GET");
  EXPECT_EQ(wrong.json()["error"]["code"], "method_not_allowed");
}

TEST_F(HttpTest, HandlersThatThrowBecomeErrorsWithTheRequestsId) {
  start();
  HttpClient one = client();
  const Reply reply = one.request("GET", "/throws", "", "X-Request-Id: abc\r\n");
  EXPECT_EQ(reply.status, 500);
  EXPECT_THAT(reply.body, HasSubstr("abc"));
  EXPECT_THAT(reply.body, ::testing::Not(HasSubstr("secret")));
  EXPECT_EQ(one.get("/hello").status, 200) << "and the connection goes on";
}

TEST_F(HttpTest, LimitsOfHeadersAndBodies) {
  options_.max_body_bytes = 100;
  start();
  const auto refused = [&](const std::string& text) {
    HttpClient one = client();
    one.send(text);
    const Reply reply = one.read_reply();
    EXPECT_TRUE(one.is_closed_by_server());
    return reply.status;
  };
  EXPECT_EQ(refused("POST /echo HTTP/1.1\r\nContent-Length: 101\r\n\r\n"), 413);
  EXPECT_EQ(refused("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" +
                    std::string(0x65, 'x') + "\r\n0\r\n\r\n"),
            413);
  std::string many = "GET /hello HTTP/1.1\r\n";
  for (int i = 0; i < 101; ++i) {
    many += "x-" + std::to_string(i) + ": 1\r\n";
  }
  EXPECT_EQ(refused(many + "\r\n"), 431);
  EXPECT_EQ(refused("GET /hello HTTP/1.1\r\nx: " + std::string(70000, 'y') + "\r\n\r\n"), 431);
  EXPECT_EQ(refused("nonsense\r\n\r\n"), 400);
  EXPECT_EQ(refused("GET / HTTP/3.0\r\n\r\n"), 400);
  EXPECT_EQ(refused("POST /echo HTTP/1.1\r\nContent-Length: 1x\r\n\r\n"), 400);
  HttpClient one = client();
  EXPECT_EQ(one.get("/hello").status, 200);
}

TEST_F(HttpTest, SlowClientsAreCut) {
  options_.header_timeout_s = 0.05;
  options_.body_timeout_s = 0.05;
  options_.idle_timeout_s = 0.2;
  options_.linger_s = 0.05;
  start();
  HttpClient slow_header = client();
  slow_header.send("GET /hello HTTP/1.1\r\nHos");
  EXPECT_EQ(slow_header.read_reply().status, 408);
  EXPECT_TRUE(slow_header.is_closed_by_server());
  HttpClient slow_body = client();
  slow_body.send("POST /echo HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc");
  EXPECT_EQ(slow_body.read_reply().status, 408);
  EXPECT_TRUE(slow_body.is_closed_by_server());
  HttpClient idle = client();
  EXPECT_EQ(idle.get("/hello").status, 200);
  EXPECT_TRUE(idle.is_closed_by_server());
  EXPECT_TRUE(ServerRig::wait_for([&] { return server_->num_connections() == 0; }));
}

TEST_F(HttpTest, AClientThatGoesIsNoticedAtOnce) {
  start();
  for (const char* path : {"/never", "/events"}) {
    for (int how = 0; how < 3; ++how) {
      const int before = num_gone_;
      HttpClient one = client();
      one.send(std::string("GET ") + path + " HTTP/1.1\r\n\r\n");
      last_waiting();
      {
        const std::lock_guard lock(mutex_);
        waiting_.clear();
      }
      if (how == 0) {
        one.close();
      } else if (how == 1) {
        one.reset();
      } else {
        one.half_close();
      }
      EXPECT_TRUE(ServerRig::wait_for([&] { return num_gone_ == before + 1; })) << path << how;
      EXPECT_TRUE(ServerRig::wait_for([&] { return server_->num_open_requests() == 0; }));
    }
  }
}

TEST_F(HttpTest, EventsAreFramedAndSilenceIsFilledWithComments) {
  options_.event_comment_s = 0.02;
  start();
  HttpClient one = client();
  one.send("GET /events HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(one.receive_until(": keep-alive\n\n"));
  const auto exchange = last_waiting();
  exchange->post([exchange] {
    exchange->send_event("{\"a\":1}");
    exchange->send_event("[DONE]");
    exchange->end_events();
    exchange->send_event("after the end");
    exchange->respond({500, "after the end"});
  });
  const Reply reply = one.read_reply();
  EXPECT_EQ(reply.header("content-type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(reply.header("cache-control"), "no-cache");
  EXPECT_THAT(reply.body, HasSubstr("data: {\"a\":1}\n\ndata: [DONE]\n\n"));
  EXPECT_EQ(reply.events(), (std::vector<std::string>{"{\"a\":1}", "[DONE]"}));
  EXPECT_EQ(num_gone_, 0);
  {
    const std::lock_guard lock(mutex_);
    waiting_.clear();
  }
  EXPECT_EQ(one.get("/hello").status, 200) << "the connection goes on after a stream";
}

TEST_F(HttpTest, AReaderThatDoesNotReadIsCutAndDelaysNobody) {
  options_.write_timeout_s = 0.1;
  start();
  HttpClient slow(server_->port(), 4096);
  slow.send("GET /events HTTP/1.1\r\n\r\n");
  const auto exchange = last_waiting();
  exchange->post([exchange] {
    for (int i = 0; i < 200; ++i) {
      exchange->send_event(std::string(100000, 'x'));
    }
  });
  HttpClient other = client();
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(other.get("/hello").status, 200);
  }
  EXPECT_TRUE(ServerRig::wait_for([&] { return num_gone_ == 1; }));
}

TEST_F(HttpTest, HoldsManyIdleConnections) {
  start();
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 300; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server_->port()));
  }
  for (const auto& one : clients) {
    EXPECT_EQ(one->get("/hello").status, 200);
  }
  EXPECT_EQ(server_->num_connections(), 300);
  clients.clear();
  EXPECT_TRUE(ServerRig::wait_for([&] { return server_->num_connections() == 0; }));
}

TEST_F(HttpTest, DrainFinishesWhatIsUnderWayAndTakesNothingNew) {
  start();
  HttpClient idle = client();
  EXPECT_EQ(idle.get("/hello").status, 200);
  HttpClient busy = client();
  busy.send("GET /never HTTP/1.1\r\n\r\n");
  const auto exchange = last_waiting();
  server_->drain();
  EXPECT_TRUE(idle.is_closed_by_server());
  EXPECT_EQ(server_->num_open_requests(), 1);
  exchange->post([exchange] { exchange->respond({200, "late"}); });
  EXPECT_EQ(busy.read_reply().body, "late");
  EXPECT_TRUE(busy.is_closed_by_server());
  EXPECT_TRUE(ServerRig::wait_for([&] { return server_->num_connections() == 0; }));
}

TEST_F(HttpTest, AddressesThatCannotBeHadAreNamed) {
  start();
  HttpOptions taken;
  taken.port = server_->port();
  EXPECT_THROW(HttpServer(taken, router_), Error);
  HttpOptions nonsense;
  nonsense.host = "no.such.host.invalid";
  EXPECT_THROW(HttpServer(nonsense, router_), Error);
}

}  // namespace
}  // namespace tandem::test

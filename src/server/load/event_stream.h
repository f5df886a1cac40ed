// event_stream.h — splits a body of server-sent events into the data of its events.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace tandem::load {

class EventStream {
 public:
  /// Bytes as they arrive, cut anywhere; calls `on_data` for each event that is complete. Comments
  /// and fields other than data are skipped; data of several lines is joined by newlines.
  void push(std::string_view bytes, const std::function<void(std::string_view data)>& on_data);

 private:
  void take_line(std::string_view line, const std::function<void(std::string_view data)>& on_data);

  std::string line_;  // begun, without its end
  std::string data_;
  bool has_data_ = false;
};

}  // namespace tandem::load

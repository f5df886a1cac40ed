#include "server/load/event_stream.h"

namespace tandem::load {

void EventStream::push(std::string_view bytes,
                       const std::function<void(std::string_view data)>& on_data) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    if (end == std::string_view::npos) {
      line_ += bytes;
      return;
    }
    line_ += bytes.substr(0, end);
    bytes.remove_prefix(end + 1);
    if (line_.ends_with('\r')) {
      line_.pop_back();
    }
    take_line(line_, on_data);
    line_.clear();
  }
}

void EventStream::take_line(std::string_view line,
                            const std::function<void(std::string_view data)>& on_data) {
  if (line.empty()) {
    if (has_data_) {
      on_data(data_);
    }
    data_.clear();
    has_data_ = false;
    return;
  }
  constexpr std::string_view kField = "data:";
  if (!line.starts_with(kField)) {
    return;
  }
  line.remove_prefix(kField.size());
  if (line.starts_with(' ')) {
    line.remove_prefix(1);
  }
  data_ += has_data_ ? "\n" : "";
  data_ += line;
  has_data_ = true;
}

}  // namespace tandem::load

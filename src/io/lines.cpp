#include "io/lines.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

#include "core/checked_cast.h"
#include "core/error.h"
#include "io/atomic_file.h"

namespace tandem {

void append_line(const std::string& path, std::string_view line) {
  const int fd = ::open(path.c_str(), O_APPEND | O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) {
    throw_error("{}: cannot open: {}", path, std::strerror(errno));
  }
  const std::string text = std::string(line) + "\n";
  const ssize_t written = ::write(fd, text.data(), text.size());
  const int error = errno;
  ::close(fd);
  if (written != isize(text)) {
    throw_error("{}: cannot write: {}", path, written < 0 ? std::strerror(error) : "disk full");
  }
}

void rewrite_lines(const std::string& path, std::span<const std::string> lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line;
    text += '\n';
  }
  write_file_atomic(path, text);
}

}  // namespace tandem

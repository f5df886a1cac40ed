// io_support.h — temporary folders and small helpers of the io tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <stdlib.h>

#include "core/error.h"
#include "io/safetensors.h"

namespace tandem::test {

/// A fresh folder, removed with everything in it at the end of the scope.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "tandem_io_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw_error("cannot create a temporary folder at {}", name);
    }
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
  /// Names of the entries, for "nothing is left behind".
  [[nodiscard]] std::vector<std::string> list() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

 private:
  std::string path_;
};

inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_text(const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
}

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

/// A file image with an honest length field.
inline std::string image_of(std::string_view header, std::string_view data = {}) {
  const std::uint64_t length = header.size();
  std::string image(sizeof(length), '\0');
  std::memcpy(image.data(), &length, sizeof(length));
  return image.append(header).append(data);
}

inline Expected<SafetensorsContents> parse(const std::string& image) {
  return parse_safetensors("test.safetensors", std::as_bytes(std::span(image)));
}

}  // namespace tandem::test

#include "engine/cache/prefix_snapshot_format.h"

#include <vector>

#include "core/checked_cast.h"
#include "core/hash.h"
#include "core/rng.h"

namespace tandem::snapshot {
namespace {

/// "3*576 1*64": equal neighbours together.
std::string run_lengths(std::span<const std::string> items) {
  std::string text;
  for (std::size_t i = 0; i < items.size();) {
    std::size_t end = i;
    while (end < items.size() && items[end] == items[i]) {
      ++end;
    }
    text += fmt::format("{}{}*{}", text.empty() ? "" : " ", end - i, items[i]);
    i = end;
  }
  return text;
}

}  // namespace

std::string key_text(const PrefixParts& parts, const SnapshotKey& key) {
  std::vector<std::string> widths;
  for (const LatentRows& layer : parts.pages.layers()) {
    widths.push_back(fmt::format("{}-{}", layer.width, latent_format_name(layer.format)));
  }
  std::vector<std::string> states;
  for (const StateSpec& spec : parts.slots.specs()) {
    states.push_back(fmt::format("{}x{}x{}+{}x{}", spec.num_heads, spec.key_dim, spec.value_dim,
                                 spec.conv_rows, spec.conv_channels));
  }
  std::string text;
  for (const auto& [name, value] : key) {
    text += fmt::format("{} {}\n", name, value);
  }
  text += fmt::format("page_size {}\nblock_tokens {}\nlatent_rows {}\nstates {}\n",
                      parts.pages.page_size(), parts.tree.limits().block_tokens,
                      run_lengths(widths), run_lengths(states));
  TDM_CHECK(text.size() <= kMaxKeyBytes, text.size());
  return text;
}

std::uint64_t header_checksum(Header header, std::string_view key) {
  header.checksum = 0;
  return hash_bytes(std::as_bytes(std::span(key)),
                    hash_bytes(std::as_bytes(std::span(&header, 1))));
}

std::uint64_t record_checksum(std::uint64_t stream, std::int64_t offset,
                              std::span<const std::byte> bytes) {
  return hash_bytes(bytes, mix_key({stream, static_cast<std::uint64_t>(offset)}));
}

RecordSizes::RecordSizes(const PrefixParts& parts)
    : block(parts.tree.limits().block_tokens / parts.pages.page_size() * parts.pages.page_bytes() +
            kChecksumBytes) {
  for (std::size_t layer = 0; layer < parts.slots.specs().size(); ++layer) {
    checkpoint += parts.slots.record_bytes(layer) + kChecksumBytes;
  }
}

}  // namespace tandem::snapshot

#include "engine/scorer.h"

#include <algorithm>

#include "ops/loss.h"
#include "ops/sample.h"

namespace tandem {
namespace {

constexpr std::int64_t kMost = kMaxTopLogprobs;
constexpr std::int64_t kInputBytes = 4 * (2 + kMost);
constexpr std::int64_t kResultBytes = 4 * (1 + 2 * kMost);

}  // namespace

std::int64_t Scorer::bytes(std::int64_t max_rows) {
  return max_rows * (kInputBytes + kResultBytes);
}

Scorer::Scorer(std::int64_t max_rows, Device& device)
    : device_(device),
      max_rows_(max_rows),
      host_inputs_(max_rows * kInputBytes, device.host_visible() ? device : host_device()),
      host_results_(max_rows * kResultBytes, device.host_visible() ? device : host_device()),
      logprobs_(usize(max_rows)),
      top_(usize(max_rows * kMost)),
      num_top_(usize(max_rows)) {
  if (!device.host_visible()) {
    device_inputs_ = Storage(max_rows * kInputBytes, device);
    device_results_ = Storage(max_rows * kResultBytes, device);
  }
}

Scorer::Inputs Scorer::inputs(std::byte* base) const {
  auto* const tokens = reinterpret_cast<std::int32_t*>(base);
  auto* const temperatures = reinterpret_cast<float*>(tokens + max_rows_);
  return {{tokens, usize(max_rows_)},
          {temperatures, usize(max_rows_)},
          {temperatures + max_rows_, usize(max_rows_ * kMost)}};
}

Scorer::Results Scorer::results(std::byte* base) const {
  auto* const logprobs = reinterpret_cast<float*>(base);
  auto* const top_ids = reinterpret_cast<std::int32_t*>(logprobs + max_rows_);
  auto* const top_logprobs = reinterpret_cast<float*>(top_ids + max_rows_ * kMost);
  return {{logprobs, usize(max_rows_)},
          {top_ids, usize(max_rows_ * kMost)},
          {top_logprobs, usize(max_rows_ * kMost)}};
}

void Scorer::run(const ExecCtx& ctx, ConstF32Mat logits, std::span<const ScoreRow> rows) {
  const std::int64_t n = isize(rows);
  TDM_CHECK(n == logits.size(0) && n <= max_rows_, n, logits.size(0), max_rows_);
  const bool shared = device_.host_visible();
  const Inputs given = inputs(host_inputs_.data());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ScoreRow& row = rows[i];
    given.tokens[i] = row.token;
    given.temperatures[i] = row.temperature;
    std::ranges::fill(given.top_temperatures.subspan(i * usize(kMost), usize(kMost)),
                      row.temperature);
    num_top_[i] = std::min(row.num_top, logits.size(1));
  }
  if (!shared) {
    device_.upload(device_inputs_.data(), host_inputs_.data(), usize(max_rows_ * kInputBytes));
  }
  const Inputs in = inputs(shared ? host_inputs_.data() : device_inputs_.data());
  const Results out = results(shared ? host_results_.data() : device_results_.data());
  if (std::ranges::any_of(rows, [](const ScoreRow& row) { return row.token >= 0; })) {
    ops::log_prob(ctx, {out.logprobs.data(), {n}}, {}, logits, {in.tokens.data(), {n}},
                  {in.temperatures.data(), {n}});
  }
  for (std::int64_t i = 0; i < n; ++i) {
    if (num_top_[usize(i)] > 0) {
      score_top(ctx, logits.rows(i, 1), i, num_top_[usize(i)]);
    }
  }
  if (!shared) {
    device_.download(host_results_.data(), device_results_.data(), usize(max_rows_ * kResultBytes));
  }
  const Results found = results(host_results_.data());
  std::ranges::copy(found.logprobs.first(usize(n)), logprobs_.begin());
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t at = i * kMost; at < i * kMost + num_top_[usize(i)]; ++at) {
      top_[usize(at)] = {found.top_ids[usize(at)], found.top_logprobs[usize(at)]};
    }
  }
}

void Scorer::score_top(const ExecCtx& ctx, ConstF32Mat row, std::int64_t i, std::int64_t count) {
  const bool shared = device_.host_visible();
  const Inputs in = inputs(shared ? host_inputs_.data() : device_inputs_.data());
  const Results out = results(shared ? host_results_.data() : device_results_.data());
  std::int32_t* const ids = out.top_ids.data() + i * kMost;
  ops::top_tokens(ctx, {ids, {1, count}}, row);
  // The same row for each of its alternatives.
  const ConstF32Mat repeated(row.data(), {count, row.size(1)}, {0, 1});
  ops::log_prob(ctx, {out.top_logprobs.data() + i * kMost, {count}}, {}, repeated, {ids, {count}},
                {in.top_temperatures.data() + i * kMost, {count}});
}

std::span<const TokenLogprob> Scorer::top(std::int64_t i) const {
  return std::span(top_).subspan(usize(i * kMost), usize(num_top_[usize(i)]));
}

}  // namespace tandem

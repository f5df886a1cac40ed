#include "rl/mismatch.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace tandem {

double clamped_exp(double log_ratio) {
  return std::exp(std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio));
}

void mismatch_weights(std::span<const double> log_ratios, std::span<const std::uint8_t> mask,
                      const MismatchOptions& options, std::span<double> out) {
  TDM_CHECK(log_ratios.size() == mask.size() && out.size() == mask.size(), out.size());
  double sum = 0.0;
  double count = 0.0;
  for (std::size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] != 0) {
      sum += log_ratios[t];
      count += 1.0;
    }
  }
  const auto weight = [&](double log_ratio) {
    const double ratio = clamped_exp(log_ratio);
    switch (options.correction) {
      case MismatchCorrection::kNone:
        return 1.0;
      case MismatchCorrection::kTis:
        return std::clamp(ratio, options.low, options.high);
      case MismatchCorrection::kIcePop:
        return ratio >= options.low && ratio <= options.high ? ratio : 0.0;
      case MismatchCorrection::kSequence:
        return std::clamp(clamped_exp(sum), options.low, options.high);
      case MismatchCorrection::kGeometric:
        return std::clamp(clamped_exp(sum / count), options.low, options.high);
    }
    return 1.0;
  };
  for (std::size_t t = 0; t < mask.size(); ++t) {
    out[t] = mask[t] != 0 ? weight(log_ratios[t]) : 0.0;
  }
}

double mismatch_k3(double log_ratio) {
  const double x = std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio);
  return std::min(std::expm1(x) - x, 10.0);
}

double effective_sample_size(double sum, double sum_of_squares, double count) {
  return sum_of_squares > 0.0 ? sum * sum / (count * sum_of_squares) : 0.0;
}

}  // namespace tandem

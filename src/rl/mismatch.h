// mismatch.h — weights that correct for the gap between the rollout engine's log-probs and the
// trainer's, and the figures that watch it. With equal arithmetic on both sides every weight is
// exactly 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

/// kTis: clamp a token's ratio. kIcePop: the ratio inside the bounds, else 0. kSequence: clamp
/// exp(sum) of the sample. kGeometric: exp(mean) of the sample.
enum class MismatchCorrection { kNone, kTis, kIcePop, kSequence, kGeometric };

struct MismatchOptions {
  MismatchCorrection correction = MismatchCorrection::kNone;
  double low = 0.0;   ///< tis_clip_low
  double high = 2.0;  ///< tis_clip
};

/// The largest |log-ratio| that enters an exp: keeps inf * 0 out of the loss.
inline constexpr double kMaxLogRatio = 20.0;

/// exp of a log-ratio clamped to +-kMaxLogRatio.
[[nodiscard]] double clamped_exp(double log_ratio);

/// The weights of one sample, constants for the gradient. Shapes: log_ratios = old - rollout
/// log-prob, mask, out [T]; out is 0 where masked.
void mismatch_weights(std::span<const double> log_ratios, std::span<const std::uint8_t> mask,
                      const MismatchOptions& options, std::span<double> out);

/// k3 of the engine-to-trainer gap at one token, x = old - rollout log-prob: e^x - 1 - x, at
/// most 10.
[[nodiscard]] double mismatch_k3(double log_ratio);

/// (sum w)^2 / (N * sum w^2); 1 when all weights are equal.
[[nodiscard]] double effective_sample_size(double sum, double sum_of_squares, double count);

}  // namespace tandem

// cuda_kda_bench — KDA between its projections, at decode and over a prompt of 4,096 tokens.
//   cuda_kda_bench [heads]     default: the shapes of the anchors
// recurrence: that op alone. step: ops::kda_decode, the decay's second projection included; parts:
// the ops it stands for. States are rotated so that they come from memory; GB/s is of states, read
// and written. us is the best of several replays of a graph of many calls, divided by the calls.
// differ: outputs and state elements of a step that are not its parts' bit for bit (0 is right; -1:
// no fused step for the shape).
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "backends/cuda/gemm/layout.h"
#include "cuda_bench.cuh"
#include "ops/conv1d.h"
#include "ops/kda.h"
#include "ops/norm.h"
#include "tensor/arena_views.h"

namespace tandem::cuda::bench {
namespace {

constexpr std::int64_t kDim = 128;
constexpr std::int64_t kTaps = 4;
/// A mixer's weights, projections of `rows` rows, and states for `sets` batches of `seqs`.
class Mixer {
 public:
  Mixer(Bench& b, std::int64_t seqs, std::int64_t rows, std::int64_t heads, int sets)
      : b_(b), seqs_(seqs), rows_(rows), heads_(heads), num_slots_(seqs * sets) {
    f_b_.format = WeightFormat::kBF16;
    f_b_.out = width();
    f_b_.in = kDim;
    f_b_.data = Storage(scale_2_offset(WeightFormat::kBF16, width(), kDim) + 4, b.device);
    b_.fill(f_b_.data, Fill::kBf16, 1);
    for (Storage* values : {&qkv_, &f_a_, &raw_b_, &gate_out_, &filters_, &heads_weights_}) {
      const std::int64_t count = values == &qkv_        ? rows * 3 * width()
                                 : values == &f_a_      ? rows * kDim
                                 : values == &raw_b_    ? rows * heads
                                 : values == &gate_out_ ? rows * width()
                                 : values == &filters_  ? 3 * width() * kTaps
                                                        : heads + width() + kDim;
      *values = Storage(count * 4, b.device);
      b_.fill(*values, Fill::kActivations, 2);
    }
    states_ = Storage(num_slots_ * width() * kDim * 4, b.device);
    windows_ = Storage(num_slots_ * (kTaps - 1) * 3 * width() * 4, b.device);
    reset();
    std::vector<std::int32_t> ints;
    for (std::int64_t i = 0; i <= seqs; ++i) {
      ints.push_back(static_cast<std::int32_t>(i * (rows / seqs)));
    }
    for (std::int64_t i = 0; i < num_slots_; ++i) {
      ints.push_back(static_cast<std::int32_t>(i));
    }
    ints_ = Storage(static_cast<std::int64_t>(ints.size()) * 4, b.device);
    b.device.upload(ints_.data(), ints.data(), ints.size() * 4);
    for (Storage* scratch : {&conv_, &qk_, &f_, &g_, &beta_, &o_, &y_}) {
      *scratch = Storage(rows * 3 * width() * 4, b.device);
    }
  }

  [[nodiscard]] std::int64_t width() const { return heads_ * kDim; }
  [[nodiscard]] double state_bytes() const {
    return 8.0 * static_cast<double>(seqs_ * width()) * kDim;
  }
  [[nodiscard]] const Storage& y() const { return y_; }
  [[nodiscard]] const Storage& states() const { return states_; }
  void reset() {
    b_.fill(states_, Fill::kActivations, 3);
    b_.fill(windows_, Fill::kActivations, 4);
  }

  [[nodiscard]] bool step(int set) {
    return ops::kda_decode(b_.ctx, cube(y_), inputs(), pool(), windows(), seqs(set));
  }
  void before_recurrence(int set) {
    const KdaDecode in = inputs();
    ops::conv1d(b_.ctx, mat(conv_, 3 * width()), in.qkv, in.filters, windows(), seqs(set));
    ops::l2_norm(b_.ctx, {qk_.as<float>().data(), {rows_, 2 * heads_, kDim}},
                 {conv_.as<float>().data(), {rows_, 2 * heads_, kDim}, {3 * width(), kDim, 1}},
                 std::array{in.q_scale, 1.0F}, in.l2_eps);
    ops::linear(b_.ctx, mat(f_, width()), in.f_a, *in.f_b);
    ops::kda_gate(b_.ctx, cube(g_), mat(beta_, heads_), cube(f_), in.b, in.a_log, in.dt_bias,
                  in.gate);
  }
  void recurrence(int set) {
    const auto heads_of = [&](Storage& from, std::int64_t at, std::int64_t stride) {
      return ConstF32Cube(from.as<float>().data() + at, {rows_, heads_, kDim}, {stride, kDim, 1});
    };
    ops::kda_recurrent(b_.ctx, cube(o_),
                       {heads_of(qk_, 0, 2 * width()), heads_of(qk_, width(), 2 * width()),
                        heads_of(conv_, 2 * width(), 3 * width()), cube(g_), mat(beta_, heads_)},
                       pool(), seqs(set));
  }
  void parts(int set) {
    before_recurrence(set);
    recurrence(set);
    const KdaDecode in = inputs();
    ops::rms_norm_gated(b_.ctx, cube(y_), cube(o_), in.gate_out, in.o_norm, in.norm_eps);
  }

 private:
  [[nodiscard]] F32Mat mat(Storage& of, std::int64_t cols) const {
    return {of.as<float>().data(), {rows_, cols}};
  }
  [[nodiscard]] F32Cube cube(Storage& of) const {
    return {of.as<float>().data(), {rows_, heads_, kDim}};
  }
  [[nodiscard]] KdaStatePool pool() {
    return {states_.as<float>().data(), num_slots_, heads_, kDim, kDim};
  }
  [[nodiscard]] F32Cube windows() {
    return {windows_.as<float>().data(), {num_slots_, kTaps - 1, 3 * width()}};
  }
  [[nodiscard]] SeqBatch seqs(int set) {
    const std::int32_t* const ints = ints_.as<std::int32_t>().data();
    return {{ints, {seqs_ + 1}}, {ints + seqs_ + 1 + set * seqs_, {seqs_}}, seqs_ == rows_};
  }
  [[nodiscard]] KdaDecode inputs() {
    float* const filters = filters_.as<float>().data();
    float* const weights = heads_weights_.as<float>().data();
    const auto filter = [&](int i) {
      return ConstF32Mat(filters + i * width() * kTaps, {width(), kTaps});
    };
    return {.qkv = mat(qkv_, 3 * width()),
            .f_a = mat(f_a_, kDim),
            .f_b = &f_b_,
            .b = mat(raw_b_, heads_),
            .gate_out = cube(gate_out_),
            .filters = {filter(0), filter(1), filter(2)},
            .a_log = {weights + width() + kDim, {heads_}},
            .dt_bias = {weights, {width()}},
            .o_norm = {weights + width(), {kDim}},
            .gate = {},
            .q_scale = 0.08838835F,
            .l2_eps = 1e-6F,
            .norm_eps = 1e-5F};
  }

  Bench& b_;
  std::int64_t seqs_, rows_, heads_, num_slots_;
  PackedWeight f_b_;
  Storage qkv_, f_a_, raw_b_, gate_out_, filters_, heads_weights_;
  Storage states_, windows_, ints_;
  Storage conv_, qk_, f_, g_, beta_, o_, y_;
};

unsigned count_different(Bench& b, const Storage& x, const Storage& other, std::int64_t floats) {
  Storage count(4, b.device);
  differ_kernel<<<256, kThreads, 0, b.device.stream()>>>(
      reinterpret_cast<const std::uint32_t*>(x.data()),
      reinterpret_cast<const std::uint32_t*>(other.data()), floats, count.as<unsigned>().data());
  b.device.launched("differ");
  unsigned value = 0;
  b.device.download(&value, count.data(), sizeof(value));
  return value;
}

/// One step from the same states by the fused op and by its parts.
long long compare(Bench& b, Mixer& mixer, std::int64_t seqs) {
  mixer.reset();
  if (!mixer.step(0)) {
    return -1;
  }
  const Storage y = mixer.y().clone();
  const Storage states = mixer.states().clone();
  mixer.reset();
  mixer.parts(0);
  const std::int64_t floats = seqs * mixer.width();
  return static_cast<long long>(count_different(b, y, mixer.y(), floats)) +
         count_different(b, states, mixer.states(), floats * kDim);
}

void bench_decode(Bench& b, std::int64_t seqs, std::int64_t heads) {
  const std::int64_t bytes = seqs * heads * kDim * kDim * 4;
  const int sets = static_cast<int>(std::clamp<std::int64_t>(kRotatedBytes / bytes, 2, 512));
  Mixer mixer(b, seqs, seqs, heads, sets);
  mixer.parts(0);  // so that the recurrence has inputs
  const int calls = std::max(sets, 16);
  const auto set = [&](int i) { return i % sets; };
  const double recurrence = time_us(b, calls, [&](int i) { mixer.recurrence(set(i)); });
  const bool fused = mixer.step(0);
  const double step =
      fused ? time_us(b, calls, [&](int i) { static_cast<void>(mixer.step(set(i))); }) : 0.0;
  const double parts = time_us(b, calls, [&](int i) { mixer.parts(set(i)); });
  const double gb = mixer.state_bytes() * 1e-3;
  std::printf("%5lld x %-3lld %10.2f %7.0f %10.2f %7.0f %10.2f %8lld\n",
              static_cast<long long>(seqs), static_cast<long long>(heads), recurrence,
              gb / recurrence, step, fused ? gb / step : 0.0, parts, compare(b, mixer, seqs));
  std::fflush(stdout);
}

void bench_prompt(Bench& b, std::int64_t rows, std::int64_t heads) {
  Mixer mixer(b, 1, rows, heads, 1);
  mixer.parts(0);
  const double recurrence = time_us(b, 4, [&](int) { mixer.recurrence(0); });
  const double parts = time_us(b, 4, [&](int) { mixer.parts(0); });
  std::printf("%5lld tokens, %2lld heads: recurrence %8.1f us, %6.4f a token; all parts %8.1f us\n",
              static_cast<long long>(rows), static_cast<long long>(heads), recurrence,
              recurrence / static_cast<double>(rows), parts);
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  Bench b;
  std::printf("%s, %d SMs, L2 %lld MiB\n", b.device.info().name.c_str(), b.device.info().num_sms,
              static_cast<long long>(b.device.info().l2_bytes >> 20));
  std::printf("%5s   %-3s %10s %7s %10s %7s %10s %8s\n", "seqs", "h", "recurrence", "GB/s", "step",
              "GB/s", "parts", "differ");
  const std::vector<std::int64_t> all =
      argc > 1 ? std::vector<std::int64_t>{std::atoll(argv[1])} : std::vector<std::int64_t>{12, 96};
  for (const std::int64_t seqs : {1, 4, 16, 64}) {
    for (const std::int64_t heads : all) {
      bench_decode(b, seqs, heads);
    }
  }
  for (const std::int64_t heads : {8, 12, 96}) {
    bench_prompt(b, 4096, heads);
  }
  return 0;
}

}  // namespace
}  // namespace tandem::cuda::bench

int main(int argc, char** argv) {
  using namespace tandem::cuda::bench;
  return run_bench("cuda_kda_bench", [&] { return run(argc, argv); });
}

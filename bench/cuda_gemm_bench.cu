// cuda_gemm_bench — linear layers and routed experts of K3's shapes on the tensor cores.
//   cuda_gemm_bench [linear] [experts] [FORMAT ...] [SHAPE ...]
// formats: bf16 fp8 mxfp4 nvfp4; shapes of experts: k3 mid mini
// Random weights, made on the GPU in the packed layout and rotated so that they come from memory;
// us is the best of several replays of a graph of many calls, divided by the calls. Beside each
// time: err    the largest |y - fp64 reference| / sum of |products| over sampled outputs (1e-6 is
// good) differ outputs that are not bit for bit those of the first rows count, on the same rows (0
// is right)
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backends/cuda/experts/tensor.h"
#include "backends/cuda/gemm/packed_weight.h"
#include "backends/cuda/gemm/tensor.h"
#include "cuda_gemm_bench.cuh"

namespace tandem::cuda::bench {
namespace {

struct GemmBench : Bench {
  Storage words{64, device};  // results of checks

  [[nodiscard]] unsigned* word() { return words.as<unsigned>().data(); }
  [[nodiscard]] unsigned read_word() {
    unsigned value = 0;
    device.download(&value, word(), sizeof(value));
    return value;
  }
};

PackedWeight random_weight(GemmBench& b, WeightFormat format, std::int64_t out, std::int64_t in,
                           std::uint32_t seed) {
  const std::int64_t scales = scales_offset(format, out, in);
  const std::int64_t scale_2 = scale_2_offset(format, out, in);
  PackedWeight w;
  w.format = format;
  w.out = out;
  w.in = in;
  w.scale_2 = format == WeightFormat::kNvFp4 ? 0.0078F : 1.0F;
  w.data = Storage(scale_2 + 4, b.device);
  const Fill elements = format == WeightFormat::kBF16       ? Fill::kBf16
                        : format == WeightFormat::kFp8Block ? Fill::kE4m3
                                                            : Fill::kFp4;
  const Fill scale_fill = format == WeightFormat::kNvFp4   ? Fill::kE4m3Scales
                          : format == WeightFormat::kMxFp4 ? Fill::kE8m0Scales
                                                           : Fill::kFp32Scales;
  b.fill(w.data.data(), scales, elements, seed);
  b.fill(w.data.data() + scales, scale_2 - scales, scale_fill, seed + 1);
  set_kernel<<<1, 1, 0, b.device.stream()>>>(reinterpret_cast<float*>(w.data.data() + scale_2),
                                             w.scale_2);
  b.device.launched("set");
  return w;
}

unsigned count_different(GemmBench& b, const float* a, const float* other, std::int64_t count) {
  b.device.zero(b.word(), 4);
  differ_kernel<<<256, kThreads, 0, b.device.stream()>>>(
      reinterpret_cast<const std::uint32_t*>(a), reinterpret_cast<const std::uint32_t*>(other),
      count, b.word());
  b.device.launched("differ");
  return b.read_word();
}

float as_float(unsigned bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

const char* name_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBF16:
      return "bf16";
    case WeightFormat::kFp8Block:
      return "fp8";
    case WeightFormat::kMxFp4:
      return "mxfp4";
    case WeightFormat::kNvFp4:
      return "nvfp4";
    case WeightFormat::kF32:
      break;
  }
  return "f32";
}

void print_head() {
  std::printf("%-28s %6s %10s %8s %9s %9s %7s\n", "shape", "rows", "us", "GB/s", "TFLOP/s", "err",
              "differ");
}

struct Row {
  std::string shape;
  std::int64_t rows;
  double us;
  double bytes;
  double flops;
  float error;
  unsigned differ;
};
void print_row(const Row& r) {
  std::printf("%-28s %6lld %10.2f %8.0f %9.2f %9.1e %7u\n", r.shape.c_str(),
              static_cast<long long>(r.rows), r.us, r.bytes / r.us * 1e-3, r.flops / r.us * 1e-6,
              r.error, r.differ);
  std::fflush(stdout);
}

struct Shape {
  const char* name;
  std::int64_t out, in;
};

void bench_linear(GemmBench& b, WeightFormat format, const Shape& s) {
  const std::int64_t bytes = scale_2_offset(format, s.out, s.in) + 4;
  const int copies = static_cast<int>(std::clamp<std::int64_t>(kRotatedBytes / bytes, 2, 64));
  std::vector<PackedWeight> weights;
  for (int i = 0; i < copies; ++i) {
    weights.push_back(random_weight(b, format, s.out, s.in, 10 + 2 * static_cast<unsigned>(i)));
  }
  constexpr std::int64_t kMostRows = 4096;
  Storage x(kMostRows * s.in * 4, b.device);
  Storage y(kMostRows * s.out * 4, b.device);
  Storage first(s.out * 4, b.device);
  b.fill(x.data(), x.size_bytes(), Fill::kActivations, 1);
  for (const std::int64_t rows : {1, 2, 8, 16, 32, 64, 128, 512, 4096}) {
    const ConstF32Mat xs(x.as<float>().data(), {rows, s.in});
    const F32Mat ys(y.as<float>().data(), {rows, s.out});
    const int calls = rows <= 64 ? std::max(24, copies) : rows <= 512 ? 12 : 4;
    const double us = time_us(b, calls, [&](int i) {
      tensor_linear(b.ctx, ys, xs, weights[static_cast<std::size_t>(i % copies)], false);
    });
    tensor_linear(b.ctx, ys, xs, weights[0], false);
    b.device.zero(b.word(), 4);
    check_kernel<<<512, kThreads, 0, b.device.stream()>>>(
        Sample{format, packed_data(weights[0]), tensor_shape(format, s.out, s.in), xs.data(),
               ys.data(), rows, b.word()});
    b.device.launched("check");
    const float error = as_float(b.read_word());
    if (rows == 1) {
      b.device.copy(first.data(), y.data(), static_cast<std::size_t>(s.out) * 4);
    }
    const unsigned differ = count_different(b, first.as<float>().data(), ys.data(), s.out);
    print_row({std::string(name_of(format)) + " " + s.name + " " + std::to_string(s.out) + "x" +
                   std::to_string(s.in),
               rows, us, static_cast<double>(bytes),
               2.0 * static_cast<double>(rows * s.out) * static_cast<double>(s.in), error, differ});
  }
}

void bench_heads(GemmBench& b, const Shape& s) {
  constexpr std::int64_t kHeads = 96;
  constexpr std::int64_t kMostRows = 512;
  constexpr int kCopies = 24;
  std::vector<std::vector<PackedWeight>> weights(kCopies);
  for (int c = 0; c < kCopies; ++c) {
    for (int h = 0; h < kHeads; ++h) {
      weights[static_cast<std::size_t>(c)].push_back(random_weight(
          b, WeightFormat::kBF16, s.out, s.in, static_cast<unsigned>(c * 1000 + 2 * h)));
    }
  }
  Storage x(kMostRows * kHeads * s.in * 4, b.device);
  Storage y(kMostRows * kHeads * s.out * 4, b.device);
  Storage first(kHeads * s.out * 4, b.device);
  b.fill(x.data(), x.size_bytes(), Fill::kActivations, 1);
  for (const std::int64_t rows : {1, 8, 64, 512}) {
    const ConstF32Cube xs(x.as<float>().data(), {rows, kHeads, s.in});
    const F32Cube ys(y.as<float>().data(), {rows, kHeads, s.out});
    const double us = time_us(b, kCopies, [&](int i) {
      tensor_linear_heads(b.ctx, ys, xs, weights[static_cast<std::size_t>(i % kCopies)], false);
    });
    tensor_linear_heads(b.ctx, ys, xs, weights[0], false);
    if (rows == 1) {
      b.device.copy(first.data(), y.data(), static_cast<std::size_t>(kHeads * s.out) * 4);
    }
    const unsigned differ = count_different(b, first.as<float>().data(), ys.data(), kHeads * s.out);
    const double elements = static_cast<double>(kHeads * s.out) * static_cast<double>(s.in);
    print_row({"bf16 96 heads " + std::to_string(s.out) + "x" + std::to_string(s.in), rows, us,
               2 * elements, 2 * elements * static_cast<double>(rows), 0, differ});
  }
}

struct ExpertShape {
  const char* name;
  std::int64_t experts, slots, dim, width;
};
constexpr ExpertShape kExpertShapes[] = {
    {"k3", 896, 16, 3584, 3072}, {"mid", 128, 8, 1024, 1024}, {"mini", 64, 8, 512, 512}};
constexpr int kRoutings = 24;

/// Distinct experts a token, as a router gives them.
std::vector<std::int32_t> random_ids(const ExpertShape& s, std::int64_t tokens,
                                     std::uint64_t seed) {
  std::vector<std::int32_t> ids;
  std::uint64_t state = seed * 2654435761ULL + 12345;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::set<std::int32_t> chosen;
    while (std::ssize(chosen) < s.slots) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const auto id =
          static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(s.experts));
      if (chosen.insert(id).second) {
        ids.push_back(id);
      }
    }
  }
  return ids;
}

struct Layer {
  const ExpertShape& shape;
  std::vector<PackedWeight> w1, w3, w2;
  Storage pointers;  // of w1, then w3, then w2, in device memory

  Layer(GemmBench& b, WeightFormat format, const ExpertShape& s)
      : shape(s), pointers(3 * s.experts * 8, b.device) {
    std::vector<const std::uint8_t*> host;
    for (std::uint32_t e = 0; e < static_cast<std::uint32_t>(s.experts); ++e) {
      w1.push_back(random_weight(b, format, s.width, s.dim, 6 * e + 10));
      w3.push_back(random_weight(b, format, s.width, s.dim, 6 * e + 12));
      w2.push_back(random_weight(b, format, s.dim, s.width, 6 * e + 14));
    }
    for (const auto* list : {&w1, &w3, &w2}) {
      for (const PackedWeight& w : *list) {
        host.push_back(packed_data(w));
      }
    }
    b.device.upload(pointers.data(), host.data(), host.size() * 8);
  }
  [[nodiscard]] const std::uint8_t* const* list(int number) const {
    return pointers.as<const std::uint8_t*>().data() + number * shape.experts;
  }
};

/// The first token's output against the reference.
float check_experts(GemmBench& b, const Layer& layer, const float* x, const std::int32_t* ids,
                    const float* weights, const float* out) {
  const ExpertShape& s = layer.shape;
  const WeightFormat format = layer.w1[0].format;
  Storage hidden(s.slots * s.width * 4, b.device);
  b.device.zero(b.word(), 4);
  hidden_kernel<<<dim3(static_cast<unsigned>(s.width), static_cast<unsigned>(s.slots)), kThreads, 0,
                  b.device.stream()>>>(HiddenSample{format, layer.list(0), layer.list(1),
                                                    tensor_shape(format, s.width, s.dim), ids, x,
                                                    hidden.as<float>().data(), SituParams{}});
  b.device.launched("hidden");
  check_out_kernel<<<static_cast<unsigned>(s.dim), kThreads, 0, b.device.stream()>>>(
      OutSample{format, layer.list(2), tensor_shape(format, s.dim, s.width), ids, weights,
                static_cast<int>(s.slots), hidden.as<float>().data(), out, b.word()});
  b.device.launched("check");
  return as_float(b.read_word());
}

void bench_experts(GemmBench& b, WeightFormat format, const ExpertShape& s) {
  const Layer layer(b, format, s);
  const ExpertWeights experts{layer.w1, layer.w3, layer.w2};
  const double expert_bytes = 2.0 * static_cast<double>(layer.w1[0].data.size_bytes()) +
                              static_cast<double>(layer.w2[0].data.size_bytes());
  constexpr std::int64_t kMostRows = 4096;
  Storage x(kMostRows * s.dim * 4, b.device);
  Storage out(kMostRows * s.dim * 4, b.device);
  Storage first(s.dim * 4, b.device);
  Storage weights(kMostRows * s.slots * 4, b.device);
  b.fill(x.data(), x.size_bytes(), Fill::kActivations, 1);
  b.fill(weights.data(), weights.size_bytes(), Fill::kActivations, 2);
  for (const std::int64_t rows : {1, 2, 4, 8, 16, 64, 128, 256, 512, 2048, 4096}) {
    const int routings = rows <= 64 ? kRoutings : 4;
    std::vector<Storage> ids;
    double distinct = 0;
    for (int i = 0; i < routings; ++i) {
      const std::vector<std::int32_t> host = random_ids(s, rows, static_cast<std::uint64_t>(i));
      distinct += static_cast<double>(std::set(host.begin(), host.end()).size()) / routings;
      ids.emplace_back(rows * s.slots * 4, b.device);
      b.device.upload(ids.back().data(), host.data(), host.size() * 4);
    }
    const F32Mat outs(out.as<float>().data(), {rows, s.dim});
    const auto call = [&](int i) {
      const Storage& routing = ids[static_cast<std::size_t>(i % routings)];
      tensor_experts(b.ctx, outs, {}, ConstF32Mat(x.as<float>().data(), {rows, s.dim}),
                     ConstI32Mat(routing.as<std::int32_t>().data(), {rows, s.slots}),
                     ConstF32Mat(weights.as<float>().data(), {rows, s.slots}), experts,
                     SituParams{});
    };
    const double us = time_us(b, routings, call);
    call(0);
    const float error =
        check_experts(b, layer, x.as<float>().data(), ids[0].as<std::int32_t>().data(),
                      weights.as<float>().data(), outs.data());
    if (rows == 1) {
      b.device.copy(first.data(), out.data(), static_cast<std::size_t>(s.dim) * 4);
    }
    const unsigned differ = count_different(b, first.as<float>().data(), outs.data(), s.dim);
    print_row({std::string(name_of(format)) + " experts " + s.name, rows, us,
               distinct * expert_bytes,
               2.0 * 3 * static_cast<double>(rows * s.slots * s.dim) * static_cast<double>(s.width),
               error, differ});
  }
}

int run(const std::vector<std::string>& args) {
  const auto has = [&](const char* word) {
    return std::find(args.begin(), args.end(), word) != args.end();
  };
  constexpr WeightFormat kFormats[] = {WeightFormat::kBF16, WeightFormat::kFp8Block,
                                       WeightFormat::kMxFp4, WeightFormat::kNvFp4};
  constexpr Shape kShapes[] = {
      {"qkv", 12288, 7168}, {"o", 7168, 12288},     {"router", 896, 7168}, {"shared", 6144, 7168},
      {"down", 7168, 6144}, {"latent", 3584, 7168}, {"up", 7168, 3584},    {"q_a", 1536, 7168},
      {"f_a", 128, 7168},   {"b", 96, 7168},        {"head", 163840, 7168}};
  const bool any_format = std::none_of(std::begin(kFormats), std::end(kFormats),
                                       [&](WeightFormat f) { return has(name_of(f)); });
  GemmBench b;
  std::printf("%s, %d SMs, L2 %lld MiB\n", b.device.info().name.c_str(), b.device.info().num_sms,
              static_cast<long long>(b.device.info().l2_bytes >> 20));
  print_head();
  for (const WeightFormat format : kFormats) {
    // Left alone: all linear layers in bf16, some in other formats, experts in NVFP4.
    const bool wanted = has(name_of(format));
    if (has("linear") || !has("experts")) {
      for (const Shape& s : kShapes) {
        const bool usual =
            format == WeightFormat::kBF16 || (s.in == 7168 && (s.out == 12288 || s.out == 896));
        if (wanted || (any_format && usual)) {
          bench_linear(b, format, s);
        }
      }
      if (format == WeightFormat::kBF16 && (wanted || any_format)) {
        bench_heads(b, {"W_uk", 512, 128});
        bench_heads(b, {"W_uv", 128, 512});
      }
    }
    if ((has("experts") || !has("linear")) &&
        (wanted || (any_format && format == WeightFormat::kNvFp4))) {
      for (const ExpertShape& shape : kExpertShapes) {
        const bool named = std::any_of(std::begin(kExpertShapes), std::end(kExpertShapes),
                                       [&](const ExpertShape& s) { return has(s.name); });
        if (named ? has(shape.name) : std::string(shape.name) == "k3") {
          bench_experts(b, format, shape);
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace tandem::cuda::bench

int main(int argc, char** argv) {
  using namespace tandem::cuda::bench;
  return run_bench("cuda_gemm_bench", [&] { return run({argv + 1, argv + argc}); });
}

#include "ops/conv1d.h"

#include <array>

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/conv1d_ref.h"

namespace tandem::test {
namespace {

/// Owns the integers of a SeqBatch.
struct Batch {
  std::vector<std::int32_t> cu_seqlens;
  std::vector<std::int32_t> slots;

  [[nodiscard]] SeqBatch view() const {
    return {{cu_seqlens.data(), {isize(cu_seqlens)}}, {slots.data(), {isize(slots)}}};
  }
  [[nodiscard]] std::int64_t rows() const { return cu_seqlens.back(); }
};

// Made when they are first asked for, by then in memory that any backend can read.
const Batch& training() {
  static const Batch batch{{0, 5, 5, 6, 8, 20}, {}};  // lengths 5, 0, 1, 2, 12
  return batch;
}
const Batch& serving() {
  static const Batch batch{{0, 5, 5, 6, 8, 11, 20}, {3, 1, 0, 5, -1, 2}};  // one padding sequence
  return batch;
}
constexpr std::int64_t kSlots = 6;

/// With one filter.
void conv1d(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, ConstF32Mat w, F32Cube state,
            const SeqBatch& seqs) {
  ops::conv1d(ctx, y, x, {&w, 1}, state, seqs);
}

/// W products and additions, then SiLU (<= 3 ulp and at most 1.1 |z| of slope): `magnitude` bounds
/// sum_j |w x|.
double tolerance(std::int64_t taps, double magnitude) {
  return sum_tolerance(2 * taps + 8, 1.1 * magnitude);
}

double sum_magnitude(std::int64_t taps, const RefTensor& w, const RefTensor& x,
                     const RefTensor& state) {
  return static_cast<double>(taps) * max_abs(w.values()) *
         std::max(max_abs(x.values()), max_abs(state.values()));
}

TEST(Conv1d, MatchesTheOracleAndLeavesTheState) {
  const PoisonedContext ctx;
  for (const Batch* batch : {&training(), &serving()}) {
    for (const std::int64_t taps : {1, 2, 4, 7}) {
      for (const std::int64_t dim : kWidths) {
        SCOPED_TRACE(testing::Message() << "W " << taps << " C " << dim);
        const std::int64_t rows = batch->rows();
        Rows x = Rows::normal(rows, dim, 1, 1.0, 3);
        Tensor w = Tensor::normal(dim * taps, 2);
        Rows state = Rows::normal(kSlots * (taps - 1), dim, 3, 1.0, 2);
        const F32Cube state_view(state.row(0), {kSlots, taps - 1, dim},
                                 {(taps - 1) * (dim + 2), dim + 2, 1});
        RefTensor x_ref(x.values<double>());
        RefTensor w_ref(w.as_double());
        RefTensor state_ref(state.values<double>());
        RefTensor expected = RefTensor::zeros(rows * dim);
        const double magnitude = sum_magnitude(taps, w_ref, x_ref, state_ref);
        const TensorView<double, 3> ref_state(state_ref.values().data(), {kSlots, taps - 1, dim});
        ref::conv1d<double>(expected.mat(dim), x_ref.mat(dim), w_ref.mat(taps), ref_state,
                            batch->view());
        Rows y(rows, dim, 3);
        conv1d(*ctx, y.mat(), x.mat(), w.mat(dim, taps), state_view, batch->view());
        EXPECT_TRUE(close(y.values().data(), expected.values(), tolerance(taps, magnitude)));
        EXPECT_TRUE(y.poison_intact() && state.poison_intact());
        // States are copies of inputs: exact. Slot 4 and the padding sequence's rows are untouched.
        EXPECT_EQ(state.values<double>(), state_ref.values());
        if (taps > 1) {  // planted bug: the kernel flipped
          RefTensor flipped = w_ref;
          for (std::int64_t c = 0; c < dim; ++c) {
            std::reverse(&flipped.mat(taps)(c, 0), &flipped.mat(taps)(c, 0) + taps);
          }
          RefTensor wrong = RefTensor::zeros(rows * dim);
          ref::conv1d<double>(wrong.mat(dim), x_ref.mat(dim), flipped.mat(taps), ref_state,
                              training().view());
          EXPECT_FALSE(close(y.values().data(), wrong.values(), tolerance(taps, magnitude)));
        }
      }
    }
  }
}

TEST(Conv1d, SeveralFiltersEqualOneCallEach) {
  const PoisonedContext ctx;
  for (const std::int64_t taps : {4, 3}) {
    for (const std::int64_t dim : {5, 300}) {
      for (const std::int64_t count : {2, 3, 4}) {
        Rows x = Rows::normal(serving().rows(), count * dim, 1, 1.0, 3);
        Rows state = Rows::normal(kSlots * (taps - 1), count * dim, 3, 1.0);
        Rows one_state = state;
        Rows y(serving().rows(), count * dim, 1);
        Rows one_y(serving().rows(), count * dim, 1);
        const auto view = [&](Rows& rows) {
          return F32Cube{rows.row(0), {kSlots, taps - 1, count * dim}};
        };
        std::vector<Tensor> weights;
        for (std::int64_t i = 0; i < count; ++i) {
          weights.push_back(Tensor::normal(dim * taps, 2 + usize(i)));
        }
        std::vector<ConstF32Mat> filters;
        for (std::int64_t i = 0; i < count; ++i) {
          filters.push_back(weights[usize(i)].mat(dim, taps));
          conv1d(*ctx, one_y.mat().cols(i * dim, dim), x.mat().cols(i * dim, dim), filters.back(),
                 view(one_state).cols(i * dim, dim), serving().view());
        }
        ops::conv1d(*ctx, y.mat(), x.mat(), filters, view(state), serving().view());
        EXPECT_TRUE(y.poison_intact());
        EXPECT_EQ(y.values(), one_y.values());
        EXPECT_EQ(state.values(), one_state.values());
      }
    }
  }
}

TEST(Conv1d, PaddingSequencesGiveZeros) {
  const PoisonedContext ctx;
  Rows x = Rows::normal(serving().rows(), 33, 1);
  Tensor w = Tensor::normal(33 * 4, 2);
  Rows state = Rows::filled(kSlots * 3, 33, 0.0F);
  Rows y(serving().rows(), 33);
  conv1d(*ctx, y.mat(), x.mat(), w.mat(33, 4), {state.row(0), {kSlots, 3, 33}}, serving().view());
  for (std::int64_t t = 8; t < 11; ++t) {
    for (std::int64_t c = 0; c < 33; ++c) {
      EXPECT_EQ(y.row(t)[c], 0.0F);
    }
  }
}

TEST(Conv1d, AnySplitOfASequenceGivesTheSameBits) {
  const PoisonedContext ctx;
  const std::int64_t n = 9;
  const std::int64_t dim = 33;
  for (const std::int64_t taps : {1, 2, 4, 7}) {
    Rows x = Rows::normal(n, dim, 1);
    Tensor w = Tensor::normal(dim * taps, 2);
    const auto run = [&](const std::vector<std::int64_t>& cuts) {
      Rows y(n, dim);
      Rows state = Rows::filled(taps - 1, dim, 0.0F);
      std::int64_t begin = 0;
      for (const std::int64_t end : cuts) {
        const Batch batch{{0, checked_cast<std::int32_t>(end - begin)}, {0}};
        conv1d(*ctx, y.mat().rows(begin, end - begin), x.mat().rows(begin, end - begin),
               w.mat(dim, taps), {state.row(0), {1, taps - 1, dim}}, batch.view());
        begin = end;
      }
      std::vector<float> all = y.values();
      append(all, state.values());
      return all;
    };
    const std::vector<float> whole = run({n});
    for (std::int64_t cut = 0; cut <= n; ++cut) {
      EXPECT_EQ(run({cut, n}), whole) << "W " << taps << " cut " << cut;
    }
    EXPECT_EQ(run({1, 2, 3, 4, 5, 6, 7, 8, 9}), whole) << "W " << taps << " token by token";
    // Without a state: the same outputs.
    Rows y(n, dim);
    conv1d(*ctx, y.mat(), x.mat(), w.mat(dim, taps), {}, Batch{{0, 9}, {}}.view());
    EXPECT_TRUE(same_bits(y.row(0), whole.data(), n * dim)) << "W " << taps;
  }
}

TEST(Conv1d, PackedSequencesEqualSeparateOnes) {
  const PoisonedContext ctx;
  const std::int64_t dim = 17;
  Rows x = Rows::normal(training().rows(), dim, 1);
  Tensor w = Tensor::normal(dim * 4, 2);
  Rows packed(training().rows(), dim);
  conv1d(*ctx, packed.mat(), x.mat(), w.mat(dim, 4), {}, training().view());
  for (std::int64_t b = 0; b < training().view().num_seqs(); ++b) {
    const std::int64_t begin = training().view().begin(b);
    const std::int64_t n = training().view().length(b);
    Rows alone(n, dim);
    const Batch one{{0, checked_cast<std::int32_t>(n)}, {}};
    conv1d(*ctx, alone.mat(), x.mat().rows(begin, n), w.mat(dim, 4), {}, one.view());
    EXPECT_TRUE(same_bits(alone.row(0), packed.row(begin), n * dim)) << b;
  }
}

TEST(Conv1d, BackwardMatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::int64_t taps : {1, 2, 4, 7}) {
    for (const std::int64_t dim : kWidths) {
      SCOPED_TRACE(testing::Message() << "W " << taps << " C " << dim);
      const std::int64_t rows = training().rows();
      Rows x = Rows::normal(rows, dim, 1, 1.0, 3);
      Rows d_y = Rows::normal(rows, dim, 4, 1.0, 3);
      Tensor w = Tensor::normal(dim * taps, 2);
      Rows d_x(rows, dim, 3);
      Tensor d_w = Tensor::filled(dim * taps, 0.5F);
      ops::conv1d_bwd(*ctx, d_x.mat(), d_w.mat(dim, taps), d_y.mat(), x.mat(), w.mat(dim, taps),
                      training().view());
      RefTensor x_ref(x.values<double>());
      RefTensor d_y_ref(d_y.values<double>());
      RefTensor w_ref(w.as_double());
      RefTensor e_x = RefTensor::zeros(rows * dim);
      RefTensor e_w(std::vector<double>(usize(dim * taps), 0.5));
      ref::conv1d_bwd<double>(e_x.mat(dim), e_w.mat(taps), d_y_ref.mat(dim), x_ref.mat(dim),
                              w_ref.mat(taps), training().view());
      // |silu'| <= 1.1 and |silu''| <= 0.5: an error of z scales by 0.5; sums of W and of T terms.
      const double z = sum_magnitude(taps, w_ref, x_ref, x_ref);
      const double d_z = max_abs(d_y_ref.values()) * std::max(1.1, 0.5 * z);
      const double d_x_bound =
          sum_tolerance(4 * taps + 8, static_cast<double>(taps) * d_z * max_abs(w_ref.values()));
      EXPECT_TRUE(close(d_x.values().data(), e_x.values(), d_x_bound));
      EXPECT_TRUE(close(d_w.data(), e_w.values(),
                        sum_tolerance(rows + 2 * taps + 8,
                                      static_cast<double>(rows) * d_z * max_abs(x_ref.values()))));
      EXPECT_TRUE(d_x.poison_intact() && d_w.guards_intact());
      if (taps > 1) {  // planted bug: gradients leak across sequence boundaries
        const Batch merged{{0, 20}, {}};
        ref::conv1d_bwd<double>(e_x.mat(dim), e_w.mat(taps), d_y_ref.mat(dim), x_ref.mat(dim),
                                w_ref.mat(taps), merged.view());
        EXPECT_FALSE(close(d_x.values().data(), e_x.values(), d_x_bound));
      }
    }
  }
}

TEST(Conv1d, OracleGradientIsTheDerivative) {
  const std::int64_t dim = 3;
  const Batch batch{{0, 1, 7}, {}};
  RefTensor x = RefTensor::normal(7 * dim, 1);
  RefTensor w = RefTensor::normal(dim * 4, 2);
  RefTensor d_y = RefTensor::normal(7 * dim, 3);
  RefTensor d_x = RefTensor::zeros(7 * dim);
  RefTensor d_w = RefTensor::zeros(dim * 4);
  ref::conv1d_bwd<double>(d_x.mat(dim), d_w.mat(4), d_y.mat(dim), x.mat(dim), w.mat(4),
                          batch.view());
  const auto loss = [&] {
    RefTensor y = RefTensor::zeros(7 * dim);
    ref::conv1d<double>(y.mat(dim), x.mat(dim), w.mat(4), {}, batch.view());
    return dot(y.values(), d_y.values());
  };
  expect_central_differences(loss, x, d_x, "d_x");
  expect_central_differences(loss, w, d_w, "d_w");
}

TEST(Conv1d, SameBitsForAnyThreadCount) {
  for (const std::int32_t rows : {0, 400}) {
    const Batch batch{{0, rows / 3, rows / 3, rows}, {}};
    const Batch kept{batch.cu_seqlens, {2, 0, 1}};
    expect_same_for_any_thread_count([&](const ExecCtx& ctx) {
      const std::int64_t dim = 129;  // several blocks
      Rows x = Rows::normal(rows, dim, 1);
      Rows d_y = Rows::normal(rows, dim, 4);
      Tensor w = Tensor::normal(dim * 4, 2);
      Rows y(rows, dim);
      Rows state = Rows::normal(9, dim, 5);
      Tensor d_w = Tensor::filled(dim * 4, 0.0F);
      conv1d(ctx, y.mat(), x.mat(), w.mat(dim, 4), {state.row(0), {3, 3, dim}}, kept.view());
      std::vector<float> all = y.values();
      append(all, state.values());
      ops::conv1d_bwd(ctx, y.mat(), d_w.mat(dim, 4), d_y.mat(), x.mat(), w.mat(dim, 4),
                      batch.view());
      append(all, y.values());
      append(all, {d_w.begin(), d_w.end()});
      return all;
    });
  }
}

TEST(Conv1d, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  const std::int64_t dim = 33;
  Rows x = Rows::normal(training().rows(), dim, 1);
  Tensor w = Tensor::normal(dim * 4, 2);
  RefTensor x_ref(x.values<double>());
  RefTensor w_ref(w.as_double());
  RefTensor expected = RefTensor::zeros(training().rows() * dim);
  ref::conv1d<double>(expected.mat(dim), x_ref.mat(dim), w_ref.mat(4), {}, training().view());
  for_each_simd_target([&](const char* target) {
    Rows y(training().rows(), dim);
    cpu_conv_ops().conv1d(*ctx, y.mat(), x.mat(), std::array<ConstF32Mat, 1>{w.mat(dim, 4)}, {},
                          training().view());
    EXPECT_TRUE(close(y.values().data(), expected.values(),
                      tolerance(4, sum_magnitude(4, w_ref, x_ref, x_ref))))
        << target;
  });
}

}  // namespace
}  // namespace tandem::test

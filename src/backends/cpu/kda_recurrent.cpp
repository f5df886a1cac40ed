// kda_recurrent.cpp — the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
//
// Work items are (sequence, head), cut further by state columns only when there are few of them; no
// sum crosses an item, so the cut never shows in a result. Tokens are taken in tiles: exp(g) of the
// tile once, then each block of state columns runs over the tile with the state in L1.
// Traffic, FLOPs and measurements: docs/kernels/kda.md.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/kda_recurrent.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <type_traits>

#include "backends/cpu/kda-inl.h"
#include "backends/cpu/kda.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

// Rows between reloads of a state block; a multiple of kKdaCheckpointRows.
constexpr std::int64_t kTileRows = 64;

struct RecurrentCall {
  F32Cube o;
  const KdaInputs& in;
  const KdaStatePool& pool;
  const SeqBatch& seqs;
  float* checkpoints;
  const std::int64_t* first_checkpoint;  // [B]

  [[nodiscard]] std::int64_t heads() const { return o.size(1); }
  [[nodiscard]] std::int64_t keys() const { return in.q.size(2); }
  [[nodiscard]] std::int64_t values() const { return o.size(2); }
  [[nodiscard]] std::int64_t tile_rows() const {
    return checkpoints != nullptr ? kKdaCheckpointRows : kTileRows;
  }
};

struct WorkItem {
  std::int64_t seq, head;
  std::int64_t col_begin, col_end;  // state columns
};

struct Scratch {
  float* e;      // [tile_rows, round_up(K)]
  float* state;  // blocks of [K, round_up(columns of the block)]
};

std::int64_t scratch_floats(const RecurrentCall& call) {
  return call.tile_rows() * round_up(call.keys(), kLanes) +
         call.keys() * round_up(call.values(), kLanes);
}

void copy_state(const float* from, std::int64_t from_stride, float* to, std::int64_t to_stride,
                std::int64_t keys, std::int64_t cols) {
  for (std::int64_t k = 0; k < keys; ++k) {
    copy_row(from + k * from_stride, cols, to + k * to_stride);
  }
}

void zero_rows(const RecurrentCall& call, const WorkItem& item) {
  for (std::int64_t t = call.seqs.begin(item.seq); t < call.seqs.begin(item.seq + 1); ++t) {
    float* row = &call.o(t, item.head, 0);
    std::fill(row + item.col_begin, row + item.col_end, 0.0F);
  }
}

TokenRows token_rows(const RecurrentCall& call, const WorkItem& item, std::int64_t begin,
                     std::int64_t count, const float* e) {
  const std::int64_t t = call.seqs.begin(item.seq) + begin;
  return {.q = head_rows(call.in.q, t, item.head),
          .k = head_rows(call.in.k, t, item.head),
          .v = head_rows(call.in.v, t, item.head),
          .e = {e, round_up(call.keys(), kLanes)},
          .beta = head_rows(call.in.beta, t, item.head),
          .count = count,
          .keys = call.keys()};
}

/// Runs the tile on columns [col, col + cols) of the item's head.
void run_block(const RecurrentCall& call, const WorkItem& item, TokenRows x, std::int64_t begin,
               StateBlock s, std::int64_t col, std::int64_t cols) {
  x.v = x.v.from(0, col);
  float* o = &call.o(call.seqs.begin(item.seq) + begin, item.head, 0) + col;
  with_vec_count(cols, [&](auto nv) HWY_ATTR {
    recur_block<decltype(nv)::value>(s, x, o, call.o.stride(0), cols);
  });
}

void exp_tile(const RecurrentCall& call, const WorkItem& item, std::int64_t begin,
              std::int64_t count, float* e) {
  const std::int64_t t = call.seqs.begin(item.seq) + begin;
  exp_rows(head_rows(call.in.g, t, item.head), count, call.keys(), e);
}

/// One token on a pooled state, without a copy of the state.
void run_in_place(const RecurrentCall& call, const WorkItem& item, float* state,
                  const Scratch& scratch) {
  exp_tile(call, item, 0, 1, scratch.e);
  const TokenRows x = token_rows(call, item, 0, 1, scratch.e);
  for (std::int64_t col = item.col_begin; col < item.col_end; col += kStateCols) {
    const std::int64_t cols = std::min(kStateCols, item.col_end - col);
    run_block(call, item, x, 0, {state + col, call.values()}, col, cols);
  }
}

void run_item(const RecurrentCall& call, const WorkItem& item, const Scratch& scratch) {
  const std::int64_t length = call.seqs.length(item.seq);
  const bool keeps = call.seqs.keeps_state();
  if (length == 0) {
    return;
  }
  if (keeps && call.seqs.state_slots(item.seq) < 0) {
    zero_rows(call, item);
    return;
  }
  const std::int64_t keys = call.keys();
  const std::int64_t values = call.values();
  float* state = keeps ? call.pool.state(call.seqs.state_slots(item.seq), item.head) : nullptr;
  if (keeps && length == 1 && values % kLanes == 0) {
    run_in_place(call, item, state, scratch);
    return;
  }
  std::fill(scratch.state, scratch.state + keys * round_up(values, kLanes), 0.0F);
  const auto for_blocks = [&](const auto& fn) HWY_ATTR {
    float* block = scratch.state;
    for (std::int64_t col = item.col_begin; col < item.col_end; col += kStateCols) {
      const std::int64_t cols = std::min(kStateCols, item.col_end - col);
      const std::int64_t stride = round_up(cols, kLanes);
      fn(StateBlock{block, stride}, col, cols);
      block += keys * stride;
    }
  };
  if (keeps) {
    for_blocks([&](StateBlock s, std::int64_t col, std::int64_t cols)
                   HWY_ATTR { copy_state(state + col, values, s.data, s.stride, keys, cols); });
  }
  for (std::int64_t begin = 0; begin < length; begin += call.tile_rows()) {
    const std::int64_t count = std::min(call.tile_rows(), length - begin);
    exp_tile(call, item, begin, count, scratch.e);
    const TokenRows x = token_rows(call, item, begin, count, scratch.e);
    for_blocks([&](StateBlock s, std::int64_t col, std::int64_t cols) HWY_ATTR {
      if (call.checkpoints != nullptr) {
        const std::int64_t index = call.first_checkpoint[item.seq] + begin / kKdaCheckpointRows;
        float* saved = call.checkpoints + (index * call.heads() + item.head) * keys * values;
        copy_state(s.data, s.stride, saved + col, values, keys, cols);
      }
      run_block(call, item, x, begin, s, col, cols);
    });
  }
  if (keeps) {
    for_blocks([&](StateBlock s, std::int64_t col, std::int64_t cols)
                   HWY_ATTR { copy_state(s.data, s.stride, state + col, values, keys, cols); });
  }
}

void recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
               const SeqBatch& seqs, float* checkpoints) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t num_seqs = seqs.num_seqs();
  std::int64_t* first = ctx.workspace->take<std::int64_t>(num_seqs + 1).data();
  first[0] = 0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    first[b + 1] = first[b] + (seqs.length(b) + kKdaCheckpointRows - 1) / kKdaCheckpointRows;
  }
  const RecurrentCall call{o, in, pool, seqs, checkpoints, first};
  const std::int64_t per_thread = round_up(scratch_floats(call), kLanes);
  float* scratch = ctx.workspace->take<float>(per_thread * ctx.pool->num_threads()).data();

  const std::int64_t heads = num_seqs * call.heads();
  const std::int64_t col_blocks = (call.values() + kStateCols - 1) / kStateCols;
  const std::int64_t splits = heads < 2 * ctx.pool->num_threads() ? col_blocks : 1;
  const std::int64_t split_cols = splits == 1 ? call.values() : kStateCols;
  const std::int64_t items = heads * splits;
  // Short decode items in groups: about 16 claims a thread keep the counter cold and the load even.
  const std::int64_t group = std::max<std::int64_t>(1, items / (16 * ctx.pool->num_threads()));
  ctx.pool->parallel_for((items + group - 1) / group, [&](std::int64_t g, int thread) HWY_ATTR {
    float* mine = scratch + thread * per_thread;
    const Scratch parts{mine, mine + call.tile_rows() * round_up(call.keys(), kLanes)};
    for (std::int64_t i = g * group; i < std::min(items, (g + 1) * group); ++i) {
      const std::int64_t begin = i % splits * split_cols;
      run_item(call,
               {.seq = i / splits / call.heads(),
                .head = i / splits % call.heads(),
                .col_begin = begin,
                .col_end = std::min(call.values(), begin + split_cols)},
               parts);
    }
  });
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(recurrent);

void cpu::kda_recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in,
                        const KdaStatePool& pool, const SeqBatch& seqs, float* checkpoints) {
  HWY_DYNAMIC_DISPATCH(recurrent)(ctx, o, in, pool, seqs, checkpoints);
}

}  // namespace tandem
#endif

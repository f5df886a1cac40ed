// op_table.h — a backend: one function pointer per op, grouped by family. A null entry means "not
// supported".
#pragma once

#include "ops/act.h"
#include "ops/attn_res.h"
#include "ops/conv1d.h"
#include "ops/embed.h"
#include "ops/gemm.h"
#include "ops/kda.h"
#include "ops/loss.h"
#include "ops/mla.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/optim.h"
#include "ops/sample.h"

namespace tandem {

struct OpTable {
  const char* name = "";
  GemmOps gemm{};
  NormOps norm{};
  ActOps act{};
  EmbedOps embed{};
  ConvOps conv{};
  KdaOps kda{};
  MlaOps mla{};
  AttnResOps attn_res{};
  MoeOps moe{};
  LossOps loss{};
  SampleOps sample{};
  OptimOps optim{};
};

}  // namespace tandem

// warm_up.h — the memory that serving takes on a device with memory of its own, known before the
// caches are there: what a pass needs besides is what passes over padding needed.
#pragma once

#include "engine/options.h"
#include "models/model.h"
#include "ops/exec_ctx.h"

namespace tandem {

/// plan_memory(); on a device with memory of its own also the workspace, and no more pages than fit
/// into what is free. Runs the model there, on padding, in the shapes of every size of batch.
/// Errors: those of plan_memory(); what does not fit, with what would.
[[nodiscard]] Expected<MemoryPlan> plan_serving(const Model& model, const ExecCtx& ctx,
                                                const EngineOptions& options);

}  // namespace tandem

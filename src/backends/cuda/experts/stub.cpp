#include "backends/cuda/experts/tensor.h"
#include "core/error.h"
namespace tandem::cuda {
void tensor_experts(const ExecCtx&, F32Mat, ConstF32Mat, ConstI32Mat, ConstF32Mat,
                    const ExpertWeights&, SituParams) { throw_error("no tensor experts yet"); }
}

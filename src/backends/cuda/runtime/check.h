// check.h — CUDA errors become Error: what was done, and what CUDA says of it.
#pragma once

#include <cuda_runtime_api.h>

namespace tandem::cuda {

/// Errors: throws Error when `status` is not cudaSuccess. `what` is a phrase: "allocating 4096
/// bytes". The message says when the GPU is lost to this process.
void check(cudaError_t status, const char* what);

}  // namespace tandem::cuda

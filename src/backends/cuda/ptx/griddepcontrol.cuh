// griddepcontrol.cuh — a kernel and its predecessor and successor in the stream, when launched with
// programmatic stream serialisation; without it neither has an effect.   PTX ISA 7.8, sm_90.
#pragma once

namespace tandem::cuda::ptx {

/// Waits until the kernel before has ended and what it wrote is visible.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
}

/// Lets the kernel after start once every CTA has called this or has ended.
__device__ __forceinline__ void let_successor_start() {
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

}  // namespace tandem::cuda::ptx

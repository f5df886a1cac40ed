// Names of kernels as a trace shows them.
#include "backends/cuda/runtime/kernel_trace.h"

#include <gtest/gtest.h>

namespace tandem::cuda {
namespace {

TEST(KernelName, IsWithoutNamespacesAndParameters) {
  EXPECT_EQ(
      short_kernel_name("_ZN6tandem4cuda12_GLOBAL__N_113stream_linearILi8EEEvNS0_10StreamArgsE"),
      "stream_linear<8>");
  EXPECT_EQ(short_kernel_name("void tandem::cuda::(anonymous namespace)::route<(int)16, "
                              "tandem::cuda::Rows>(tandem::cuda::RouteArgs)"),
            "route<(int)16, Rows>");
  EXPECT_EQ(short_kernel_name("plain"), "plain");
  EXPECT_EQ(short_kernel_name(nullptr), "unknown kernel");
}

}  // namespace
}  // namespace tandem::cuda

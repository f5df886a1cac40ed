// exec_ctx.h — everything an op needs besides its arguments. Passed, never global.
#pragma once

#include "core/arena.h"
#include "core/device.h"
#include "core/thread_pool.h"
#include "ops/profiler.h"

namespace tandem {

struct OpTable;

struct ExecCtx {
  const OpTable* ops = nullptr;     // the backend; filled by cli/ or a test
  ThreadPool* pool = nullptr;       // where ops run their blocks
  Arena* workspace = nullptr;       // scratch inside one op or layer; rewound by an ArenaScope
  Profiler* profiler = nullptr;     // optional: time per op
  Device* device = &host_device();  // where every view of a call lives

  /// Whether an op's wrapper may look into its arguments: shapes are always checked, contents then.
  [[nodiscard]] bool host_reads() const { return device->host_visible(); }
};

}  // namespace tandem

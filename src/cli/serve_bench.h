// serve_bench.h — tandem bench serve: loads a running server, tandem or not, and measures it.
#pragma once

#include "cli/common.h"

namespace tandem::cli {

/// Adds the subcommand to `bench`.
void add_serve_bench(CommandLine& line, CLI::App& bench);

}  // namespace tandem::cli

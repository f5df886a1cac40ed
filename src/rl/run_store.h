// run_store.h — the memory of a run: every step and every sampled trajectory in <run>/run.sqlite,
// with metrics.jsonl beside it. The database is the truth and metrics.jsonl its projection: a step
// is committed first, its line written after, and opening a run for writing makes the file match
// the database again.
//
// SQLite runs with a rollback journal and synchronous=FULL, one transaction a step: a kill at any
// moment loses at most the step in flight, and the run is always the one file. (A write-ahead log
// would keep recent steps in a second file, lost when somebody copies only run.sqlite; one fsync
// pair a step costs nothing here.)
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"

namespace tandem {

/// What made the run; all texts are stored as they are.
struct RunInfo {
  std::string name;
  std::string config;    ///< the resolved config, TOML
  std::string seeds;     ///< JSON object
  std::string versions;  ///< JSON object
};

/// One sampled trajectory. Invariant, checked when written:
/// loss_mask.size() == logprobs.size() == number of response tokens <= tokens.size().
struct SampleRecord {
  /// "train", or the name of an evaluation whose transcripts are kept.
  std::string split = "train";
  std::int64_t group_index = 0;
  std::int64_t sample_index = 0;
  std::string prompt;
  std::string response;
  std::string label;
  std::vector<std::int32_t> tokens;  ///< prompt + response
  std::vector<float> logprobs;       ///< of the response tokens, by the engine that sampled them
  std::vector<std::uint8_t> loss_mask;
  std::optional<double> reward;  ///< nullopt: removed, not graded
  std::string status;            ///< completed, truncated, aborted, failed
  std::string grade;             ///< correct, wrong, no_answer, malformed, truncated
  std::int64_t weight_version = 0;
};

struct EvalRecord {
  std::string name;  ///< e.g. "sampled", "greedy"
  double accuracy = 0.0;
  std::int64_t num_samples = 0;
};

struct StepRecord {
  std::int64_t step = 0;
  std::string metrics_json;  ///< the line of metrics.jsonl, to_json_line()
  std::vector<SampleRecord> samples;
  std::vector<EvalRecord> evals;
};

struct StepEval {
  std::int64_t step = 0;
  EvalRecord eval;
};

/// One run on disk. Move-only; a writer holds the run's lock until destroyed, so two processes
/// cannot write one run. Errors: create/open return a Failure (missing, foreign, damaged, already
/// in use); later failures of the disk throw Error, with everything up to the last committed step
/// intact.
class RunStore {
 public:
  /// A new run in `dir`, which is created. Refuses a folder that already holds a run.
  [[nodiscard]] static Expected<RunStore> create(const std::string& dir, const RunInfo& info);
  /// An existing run, to continue it. Repairs metrics.jsonl from the database.
  [[nodiscard]] static Expected<RunStore> open(const std::string& dir);
  /// An existing run, also one that is being written.
  [[nodiscard]] static Expected<RunStore> open_read_only(const std::string& dir);

  RunStore(RunStore&&) noexcept;
  RunStore& operator=(RunStore&&) noexcept;
  ~RunStore();

  [[nodiscard]] RunInfo info() const;

  /// All or nothing, durable on return; steps must grow. The metrics line follows.
  void commit_step(const StepRecord& record);

  /// Forgets every step after `step`, in the database and in metrics.jsonl.
  void truncate_after(std::int64_t step);

  [[nodiscard]] std::optional<std::int64_t> last_step() const;
  [[nodiscard]] std::vector<std::string> metrics_lines() const;
  [[nodiscard]] std::vector<StepEval> evals() const;
  /// Samples of a step and split in (group, sample) order; at most `limit`.
  [[nodiscard]] std::vector<SampleRecord> samples(std::int64_t step,
                                                  const std::string& split = "train",
                                                  std::int64_t limit = INT64_MAX) const;
  /// Steps that have samples of a split, ascending.
  [[nodiscard]] std::vector<std::int64_t> sampled_steps(const std::string& split = "train") const;

 private:
  class Impl;
  explicit RunStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem

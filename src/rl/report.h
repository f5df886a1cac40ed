// report.h — report.html: one self-contained page for one or several runs, with no link to anything
// outside itself.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "rl/metrics.h"
#include "rl/run_store.h"

namespace tandem {

/// What a report shows of one run.
struct ReportRun {
  std::string name;
  std::string config;  ///< TOML, as resolved
  std::vector<StepMetrics> steps;
  std::int64_t first_sampled_step = 0;
  std::int64_t last_sampled_step = 0;
  /// The transcripts "before" and "after", paired where they answer the same prompt.
  std::vector<SampleRecord> first_samples;
  std::vector<SampleRecord> last_samples;
};

struct ReportOptions {
  std::string title = "Run report";
  /// Plain text for people who do not know the field; an empty line starts a new paragraph.
  std::string explanation;
};

/// Reads a run's folder, also while the run is going on. Transcripts: those kept under `split` at
/// the first and last step that have any, else training samples; at most `max_transcripts` of each.
[[nodiscard]] Expected<ReportRun> load_report_run(const std::string& dir,
                                                  const std::string& split = "eval",
                                                  std::int64_t max_transcripts = 8);

/// The page. Text of models and configs is escaped; ill-formed UTF-8 becomes U+FFFD.
[[nodiscard]] std::string render_report(std::span<const ReportRun> runs,
                                        const ReportOptions& options);

/// Writes the page atomically. Errors: throws Error when the disk refuses.
void write_report(const std::string& path, std::span<const ReportRun> runs,
                  const ReportOptions& options);

}  // namespace tandem

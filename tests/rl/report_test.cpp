#include "rl/report.h"

#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temp_path.h"

namespace tandem {
namespace {

using testing::HasSubstr;
using testing::Not;

ReportRun sample_run(const std::string& name) {
  ReportRun run;
  run.name = name;
  run.config = "[run]\nname = \"" + name + "\"\n";
  for (int i = 0; i <= 20; ++i) {
    StepMetrics step;
    const double x = i / 20.0;
    step.step = i;
    step.reward_mean = 0.46 + 0.52 * x;
    step.entropy = 0.28 - 0.25 * x;
    step.response_tokens_mean = 8 + 7 * x;
    if (i % 5 == 0) {
      step.eval_accuracy = 0.47 + 0.5 * x;
    }
    if (i > 0) {
      step.extra["train/pg_clipfrac"] = 0.01 * x;
    }
    run.steps.push_back(step);
  }
  SampleRecord before;
  before.prompt = "Tom has 7 pens. How many?";
  before.response = "#### 8";
  before.grade = "wrong";
  before.reward = 0.0;
  SampleRecord after = before;
  after.response = "7+3=10\n10-4=6\n#### 6";
  after.grade = "correct";
  after.reward = 1.0;
  run.first_samples = {before};
  run.last_samples = {after};
  run.last_sampled_step = 20;
  return run;
}

/// The page without the body of Chart.js, whose licence text names its home page.
std::string without_chart_js(const std::string& page) {
  const std::size_t begin = page.find("<script>/*!");
  const std::size_t end = page.find("</script>", begin);
  EXPECT_NE(begin, std::string::npos);
  return page.substr(0, begin) + page.substr(end);
}

TEST(Report, IsOneFileThatLoadsNothing) {
  const std::string page = render_report(std::vector{sample_run("demo")}, {});
  EXPECT_THAT(page, HasSubstr("Chart.js v"));
  const std::string own = without_chart_js(page);
  for (const char* forbidden : {"http:", "https:", "//cdn", "src=", "href=", "@import", "url(",
                                "fetch(", "XMLHttpRequest", "import("}) {
    EXPECT_THAT(own, Not(HasSubstr(forbidden)));
  }
  for (const char* forbidden : {"fetch(", "XMLHttpRequest", "importScripts", "@import"}) {
    EXPECT_THAT(page, Not(HasSubstr(forbidden)));
  }
  for (const char* name : {"@TITLE@", "@CSS@", "@DATA@", "@CHART_JS@", "@SCRIPT@", "@TILES@"}) {
    EXPECT_THAT(own, Not(HasSubstr(name)));
  }
}

TEST(Report, ShowsExplanationFiguresTranscriptsAndConfig) {
  const std::string page = render_report(
      std::vector{sample_run("demo")},
      {"A title", "SFT taught the arithmetic, RL chose the habit.\n\nSecond paragraph."});
  EXPECT_THAT(page, HasSubstr("<title>A title</title>"));
  EXPECT_THAT(page,
              HasSubstr("<p class=\"lead\">SFT taught the arithmetic, RL chose the habit.</p>"));
  EXPECT_THAT(page, HasSubstr("<p class=\"lead\">Second paragraph.</p>"));
  EXPECT_THAT(page, HasSubstr("0.460"));  // reward, first
  EXPECT_THAT(page, HasSubstr("0.980"));  // reward, last
  EXPECT_THAT(page, HasSubstr("0.970"));  // accuracy, last measured
  EXPECT_THAT(page, HasSubstr("Before (step 0)"));
  EXPECT_THAT(page, HasSubstr("After (step 20)"));
  EXPECT_THAT(page, HasSubstr("7+3=10\n10-4=6"));
  EXPECT_THAT(page, HasSubstr("name = &quot;demo&quot;"));
  EXPECT_THAT(page, Not(HasSubstr("Truncated</td>")));  // never measured: no row
}

TEST(Report, MetricsThatBeginLaterStayAligned) {
  const std::string page = render_report(std::vector{sample_run("demo")}, {});
  EXPECT_THAT(page, HasSubstr("\"train/pg_clipfrac\":[null,0.0005,"));
  EXPECT_THAT(page, HasSubstr("\"eval_accuracy\":[0.47,null,null,null,null,0.595,"));
}

TEST(Report, TextOfModelsCannotBreakOut) {
  ReportRun run = sample_run("</script><script>alert(1)</script>");
  run.first_samples[0].response = "<img src=x onerror=alert(2)> & \"\xFF\xC3\" @DATA@";
  run.config = "</pre><b>";
  run.steps[0].extra["</script><b>"] = 1.0;
  const std::string own = without_chart_js(render_report(std::vector{run}, {"<i>", "<u>"}));
  for (const char* forbidden :
       {"<script>alert", "<img", "</pre><b>", "<i>", "<u>", "\xFF", "</script><b>"}) {
    EXPECT_THAT(own, Not(HasSubstr(forbidden)));
  }
  EXPECT_THAT(own, HasSubstr("&lt;img src=x onerror=alert(2)&gt; &amp; &quot;\xEF\xBF\xBD"));
  EXPECT_THAT(own, HasSubstr("@DATA@"));  // the model's text, left as it is
  EXPECT_THAT(own, HasSubstr("\\u003c/script>"));
}

TEST(Report, ComparesRuns) {
  const std::string page = render_report(std::vector{sample_run("one"), sample_run("two")}, {});
  EXPECT_THAT(page, HasSubstr("one: first"));
  EXPECT_THAT(page, HasSubstr("two: last"));
  EXPECT_THAT(page, Not(HasSubstr("class=\"tile\"")));
}

TEST(Report, ReadsARunFromDisk) {
  const std::string dir = temp_path("run");
  const ReportRun wanted = sample_run("demo");
  {
    RunStore store = RunStore::create(dir, {"demo", "[run]\n", "{}", "{}"}).value_or_throw();
    for (const StepMetrics& step : wanted.steps) {
      StepRecord record{step.step, to_json_line(step), {}, {}};
      if (step.step == 0 || step.step == 20) {
        SampleRecord s = step.step == 0 ? wanted.first_samples[0] : wanted.last_samples[0];
        s.split = "eval";
        record.samples = {s};
      }
      store.commit_step(record);
    }
  }
  const auto run = load_report_run(dir);
  ASSERT_TRUE(run.ok()) << run.message();
  EXPECT_EQ(run->steps.size(), 21U);
  EXPECT_EQ(run->last_sampled_step, 20);
  const std::string path = temp_path("report.html");
  write_report(path, std::vector{*run}, {"Demo", "SFT taught the arithmetic, RL chose the habit."});
  std::ifstream file(path);
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}), HasSubstr("#### 8"));
  EXPECT_FALSE(load_report_run(dir + "/none").ok());
}

}  // namespace
}  // namespace tandem

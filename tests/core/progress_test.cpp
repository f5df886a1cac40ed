#include "core/progress.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(FormatDuration, ShowsHoursOnlyWhenThereAreAny) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(7.4), "0:07");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(754), "12:34");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(-1), "-:--");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::quiet_NaN()), "-:--");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "-:--");
}

/// A bar whose clock is a variable and whose text is kept.
struct Fixture {
  explicit Fixture(ProgressStyle style)
      : bar(std::make_unique<ProgressBar>(
            style, [this](std::string_view text) { shown += text; }, [this] { return now; })) {}
  double now = 100;
  std::string shown;
  std::unique_ptr<ProgressBar> bar;
};

TEST(ProgressBar, TimeLeftIsTheMeanSpeedOfThisPhase) {
  Fixture f(ProgressStyle::kLines);
  f.bar->start("sft", 100);
  f.bar->update(0);
  EXPECT_TRUE(std::isnan(f.bar->seconds_left()));
  f.bar->start("sft", 100, 40);  // resumed: 40 were done before
  f.now += 20;
  f.bar->update(50);
  EXPECT_DOUBLE_EQ(f.bar->seconds_left(), 100.0);  // 10 in 20 s, 50 to go
}

TEST(ProgressBar, LinesComeEveryFewSecondsAndAtTheEnd) {
  Fixture f(ProgressStyle::kLines);
  f.bar->start("sft", 10);
  f.now += 1;
  f.bar->update(1);
  EXPECT_EQ(f.shown, "");
  f.now += 4;
  f.bar->update(5, "loss 0.5");
  EXPECT_EQ(f.shown, "sft 5/10 50%  0:05 left  loss 0.5\n");
  f.now += 1;
  f.bar->update(10, "loss 0.4");
  f.bar->finish();
  EXPECT_THAT(f.shown, EndsWith("\nsft 10/10 100%  0:06 in all  loss 0.4\n"));
}

TEST(ProgressBar, ShortPhasesWriteNoLine) {
  Fixture f(ProgressStyle::kLines);
  f.bar->start("init", 10);
  f.now += 1;
  f.bar->update(10);
  f.bar->finish();
  EXPECT_EQ(f.shown, "");
}

TEST(ProgressBar, TerminalIsRedrawnInPlaceAndLeftClean) {
  Fixture f(ProgressStyle::kTerminal);
  f.bar->start("sft", 4);
  f.now += 1;
  f.bar->update(1);
  EXPECT_THAT(f.shown, HasSubstr("\r\x1b[Ksft [######..................] 1/4 25%  0:03 left"));
  EXPECT_THAT(f.shown, Not(HasSubstr("\n")));
  const std::size_t before = f.shown.size();
  f.now += 0.01;
  f.bar->update(2);
  EXPECT_EQ(f.shown.size(), before) << "redrawn too soon";
  f.bar->clear();
  EXPECT_THAT(f.shown, EndsWith("\r\x1b[K"));
  f.bar->update(2);
  EXPECT_THAT(f.shown, HasSubstr("2/4 50%"));
  f.bar.reset();
  EXPECT_THAT(f.shown, EndsWith("\r\x1b[K"));
}

TEST(ProgressBar, LongNotesAreCutToOneLine) {
  Fixture f(ProgressStyle::kTerminal);
  f.bar->start("rl", 4);
  f.shown.clear();
  f.now += 1;
  f.bar->update(1, std::string(500, 'x'));
  EXPECT_LE(f.shown.size(), 120U);
}

TEST(ProgressBar, OffShowsNothingAndKnowsTheTimeLeft) {
  Fixture f(ProgressStyle::kOff);
  f.bar->start("rl", 4);
  f.now += 60;
  f.bar->update(3);
  EXPECT_DOUBLE_EQ(f.bar->seconds_left(), 20.0);
  f.bar->finish();
  EXPECT_EQ(f.shown, "");
}

}  // namespace
}  // namespace tandem

// The command line itself: help, version, usage errors.
#include <cstdio>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/cli_support.h"

namespace tandem {
namespace {

using test::Outcome;
using test::run_tandem;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Subcommand : public ::testing::TestWithParam<const char*> {};

TEST_P(Subcommand, HasHelpAndTheGlobalOptions) {
  const Outcome outcome = run_tandem({GetParam(), "--help"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr(std::string("Usage: tandem ") + GetParam()));
  for (const char* option : {"--threads", "--log-level", "--profile"}) {
    EXPECT_THAT(outcome.out, HasSubstr(option));
  }
}

TEST_P(Subcommand, WithoutArgumentsIsAUsageError) {
  const Outcome outcome = run_tandem({GetParam()});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, StartsWith("tandem: "));
  EXPECT_THAT(outcome.err, HasSubstr(std::string("Try: tandem ") + GetParam() + " --help"));
}

INSTANTIATE_TEST_SUITE_P(All, Subcommand,
                         ::testing::Values("init", "inspect", "generate", "chat", "sft", "rl",
                                           "report", "demo-data", "serve"),
                         [](const auto& chosen) {
                           std::string name = chosen.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST(CommandLine, HelpListsEverySubcommand) {
  const Outcome outcome = run_tandem({"--help"});
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* name :
       {"init", "inspect", "generate", "chat", "sft", "rl", "report", "demo-data", "serve"}) {
    EXPECT_THAT(outcome.out, HasSubstr(std::string("\n  ") + name + " "));
  }
}

TEST(CommandLine, HelpOfEveryBench) {
  const Outcome all = run_tandem({"bench", "--help"});
  EXPECT_EQ(all.exit_code, 0);
  for (const char* name : {"decode", "prefill", "kernels", "engine"}) {
    EXPECT_THAT(all.out, HasSubstr(std::string("\n  ") + name + " "));
    const Outcome one = run_tandem({"bench", name, "--help"});
    EXPECT_EQ(one.exit_code, 0);
    for (const char* option : {"MODEL", "--load-format", "--num-layers", "--json", "--device"}) {
      EXPECT_THAT(one.out, HasSubstr(option)) << name;
    }
  }
}

TEST(CommandLine, Version) {
  const Outcome outcome = run_tandem({"--version"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.out, ::testing::MatchesRegex("tandem [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

/// CUDA's runtime is linked in where it is used at all, and CUPTI is loaded when asked for.
TEST(CommandLine, TheProgramNeedsNoCudaToStart) {
  FILE* const pipe = ::popen("ldd " TDM_BINARY, "r");
  ASSERT_NE(pipe, nullptr);
  std::string libraries;
  char text[256];
  while (std::fgets(text, sizeof text, pipe) != nullptr) {
    libraries += text;
  }
  ASSERT_EQ(::pclose(pipe), 0);
  EXPECT_THAT(libraries, HasSubstr("libc.so"));
  for (const char* name : {"libcuda", "libcupti", "libnvrtc", "libcublas"}) {
    EXPECT_THAT(libraries, ::testing::Not(HasSubstr(name)));
  }
}

TEST(CommandLine, UsageErrorsExitWith2) {
  EXPECT_EQ(run_tandem({}).exit_code, 2);
  EXPECT_EQ(run_tandem({"fly"}).exit_code, 2);
  const Outcome unknown = run_tandem({"init", "k3-nano", "x", "--sed", "1"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("--sed"));
  const Outcome wrong = run_tandem({"generate", "x", "--prompt", "a", "--temperature", "-1"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--temperature"));
  const Outcome no_prompt = run_tandem({"generate", "x"});
  EXPECT_EQ(no_prompt.exit_code, 2);
  EXPECT_THAT(no_prompt.err, HasSubstr("--prompt"));
}

TEST(CommandLine, HelpConfigListsTheKeys) {
  for (const char* name : {"sft", "rl"}) {
    const Outcome outcome = run_tandem({name, "--help-config"});
    EXPECT_EQ(outcome.exit_code, 0);
    for (const char* key : {"[model]", "prompt_data (", "lr (", "max_tokens_per_microbatch ("}) {
      EXPECT_THAT(outcome.out, HasSubstr(key));
    }
  }
}

}  // namespace
}  // namespace tandem

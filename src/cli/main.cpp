// main.cpp — the program: registers the subcommands, runs the chosen one, turns failures into
// messages and exit codes.
#include <exception>
#include <filesystem>
#include <new>

#include "cli/common.h"
#include "core/mmap_file.h"

#ifndef TDM_VERSION
#error "TDM_VERSION comes from CMake"
#endif

namespace tandem::cli {
namespace {

constexpr int kExitPipe = 141;  // 128 + SIGPIPE: what a program that did not ignore it would give

void print_problem(std::string_view message) {
  write_err(fmt::format("tandem: {}\n", message));
}

int run(const Action& action) {
  try {
    const Expected<ExitCode> code = action();
    if (!code) {
      print_problem(code.message());
      return kExitBadInput;
    }
    return *code;
  } catch (const OutputClosed&) {
    return kExitPipe;
  } catch (const Error& error) {
    print_problem(error.what());
  } catch (const std::bad_alloc&) {
    print_problem(
        "out of memory; take a smaller model, fewer sequences (--max-running-seqs) or a shorter "
        "context");
  } catch (const std::filesystem::filesystem_error& error) {
    print_problem(fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::exception& error) {
    print_problem(fmt::format("unexpected failure: {}", error.what()));
  }
  return kExitEnvironment;
}

int parse_and_run(int argc, char** argv) {
  explain_unreadable_pages(kExitEnvironment);
  Interrupts interrupts;
  CLI::App app{"tandem serves and trains models of the Kimi K3 family", "tandem"};
  app.set_version_flag("--version", std::string("tandem ") + TDM_VERSION);
  app.require_subcommand(1);
  app.footer("tandem COMMAND --help explains a command.");
  GlobalOptions global;
  add_global_options(app, global);
  Action action;
  CommandLine line{app, global, interrupts, action};
  add_init(line);
  add_inspect(line);
  add_generate(line);
  add_chat(line);
  add_sft(line);
  add_rl(line);
  add_bench(line);
  add_report(line);
  add_demo_data(line);
  add_serve(line);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    print_problem(error.what());
    write_err(fmt::format("Try: tandem {}--help\n",
                          chosen.empty() ? "" : chosen.front()->get_name() + " "));
    return kExitUsage;
  }
  set_log_level(global.log_level);
  return run(action);
}

}  // namespace
}  // namespace tandem::cli

int main(int argc, char** argv) {
  return tandem::cli::parse_and_run(argc, argv);
}

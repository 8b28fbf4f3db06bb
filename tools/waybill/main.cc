// SPDX-License-Identifier: Apache-2.0
// waybill: train, generate, bench, inspect, simulate, doctor. Exit codes: 0 success, 1 a failed self-test, 2 bad input or a failure of the
// environment, standard output included (one line says what), 3 our bug, 130/143 stopped by Ctrl-C/SIGTERM after a checkpoint was saved.
#include <fmt/format.h>
#include <spdlog/cfg/env.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <system_error>

#include "arguments.h"
#include "commands.h"
#include "waybill/error.h"
#include "waybill/log.h"
#include "waybill/version.h"
#if defined(WAYBILL_WITH_GPU_BENCH)
#include "bench/cuda/moe/module_bench.h"
#include "bench_moe_gpu.h"
#endif
#if defined(WAYBILL_WITH_CUDA)
#include "ops/router/cuda/router_cuda.h"
#include "train/cuda/device_trainer.h"
#endif

namespace {

using waybill::cli::unknown_command;
constexpr int kExitBadInput = 2, kExitBug = 3;

void register_commands(CLI::App& app) {
  using namespace waybill::cli;
  register_train_command(app);
  register_generate_command(app);
#if defined(WAYBILL_WITH_BENCH_COMMAND)
  register_bench_command(app);
#endif
#if defined(WAYBILL_WITH_INSPECT_COMMAND)
  register_inspect_command(app);
#endif
#if defined(WAYBILL_WITH_SIMULATE_COMMAND)
  register_simulate_command(app);
#endif
#if defined(WAYBILL_WITH_DOCTOR_COMMAND)
  register_doctor_command(app);
#endif
}

// What the library has to say goes to stderr, so that stdout holds results only. SPDLOG_LEVEL=debug shows more. A choice of an
// implementation (WB_LOG=select) is said once: every call makes it again.
void wire_log() {
  const auto logger = spdlog::stderr_color_mt("waybill");
  logger->set_pattern("waybill: %^%l%$: %v");
  spdlog::cfg::load_env_levels();
  const auto choices = std::make_shared<std::set<std::string>>();
  waybill::set_log_callback([logger, choices](waybill::LogLevel level, const std::string& text) {
    if (text.rfind("select ", 0) == 0 && !choices->insert(text).second) return;
    logger->log(level == waybill::LogLevel::kDebug  ? spdlog::level::debug
                : level == waybill::LogLevel::kInfo ? spdlog::level::info
                                                    : spdlog::level::warn,
                text);
  });
}

// One line, whatever the names in it hold: control characters are shown as '?'.
std::string refusal(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return "waybill: " + text + "\n";
}

std::string parse_failure(const CLI::App*, const CLI::Error& error) { return refusal(fmt::format("{} (--help lists the options)", error.what())); }

void refuse(const std::string& text) { fmt::print(stderr, "{}", refusal(text)); }

// Runs the command that the arguments name; its exit code.
int run(CLI::App& app, int argc, char** argv) {
  try {
    if (const std::string unknown = unknown_command(app, argc, argv); !unknown.empty()) {
      refuse(unknown + " (--help lists the commands)");
      return kExitBadInput;
    }
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::RuntimeError& end) {
    return end.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitBadInput;
  } catch (const waybill::Error& error) {
    refuse(error.what());
    return error.code() == waybill::ErrorCode::kInternal ? kExitBug : kExitBadInput;
  } catch (const std::filesystem::filesystem_error& error) {
    refuse(error.what());
    return kExitBadInput;
  } catch (const std::system_error& error) {  // of a write to standard output says main()
    if (std::ferror(stdout) == 0) refuse(error.what());
    return kExitBadInput;
  } catch (const std::bad_alloc&) {
    refuse("out of memory");
    return kExitBadInput;
  } catch (const std::exception& error) {
    refuse(fmt::format("unexpected: {}", error.what()));
    return kExitBug;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Waybill: dropless mixture-of-experts training", "waybill"};
  app.set_version_flag("--version", waybill::version());
  app.require_subcommand(1);
  app.failure_message(parse_failure);
  wire_log();
#if defined(WAYBILL_WITH_CUDA)
  waybill::cuda::register_router();
  waybill::cuda::register_training();
#endif
#if defined(WAYBILL_WITH_GPU_BENCH)
  waybill::cli::set_gpu_moe_bench(waybill::cuda::moe_bench::run_module_bench);
#endif
  register_commands(app);
  const int code = run(app, argc, argv);
  // What did not reach its reader is no success, though the command itself was one.
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  const int reason = errno;
  if (flushed && std::ferror(stdout) == 0 && std::cout.good()) return code;
  fmt::print(stderr, "waybill: cannot write to standard output{}\n", flushed ? "" : fmt::format(": {}", std::strerror(reason)));
  return code == 0 ? kExitBadInput : code;
}

// SPDX-License-Identifier: Apache-2.0
// waybill train CONFIG: reads the config, trains, and says how the held-out loss compares with the text's entropies.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "terminal.h"
#include "train/collective_error.h"
#include "train_display.h"
#include "waybill/error.h"
#include "waybill/log.h"
#include "waybill/mpi_fabric.h"
#include "waybill/trainer.h"

namespace waybill::cli {
namespace {

namespace fs = std::filesystem;

struct TrainArguments {
  std::string config, text, resume, run_dir;
  std::vector<std::string> overrides;
  std::int64_t record_routes_every = 0;
  bool reshard = false, quiet = false, list_keys = false;
};

std::atomic<bool> g_stop{false};
std::atomic<int> g_signal{0};

void request_stop(int signal) {
  g_signal = signal;
  g_stop = true;
}

// The first Ctrl-C or SIGTERM ends the run after the step in work; a second one ends the process at once.
void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then a failed write, which says what happened
}

std::string default_run_dir(const std::string& name) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &parts);
  const std::string base = fmt::format("runs/{}-{}", name, stamp);
  std::string path = base;
  for (int i = 2; fs::exists(path); ++i) path = fmt::format("{}-{}", base, i);
  return path;
}

void list_keys() {
  for (const ConfigKeyInfo& key : config_keys()) fmt::print("{:<29} {:<14} {} ({})\n", key.name, key.default_value, key.help, key.allowed);
}

void print_result(const TrainResult& result, const std::string& run_dir) {
  const std::string bigram = result.entropy.pairs_known ? fmt::format("{:.4f}", result.entropy.bigram) : "not computed";
  fmt::print("\nheld-out loss   {:.4f} nats a token\nunigram entropy {:.4f}\nbigram entropy  {}\n", result.held_out_loss, result.entropy.unigram, bigram);
  if (result.entropy.pairs_known) {
    fmt::print("goal (below the bigram entropy and at least {} nat below the unigram entropy): {}\n", kGoalBelowUnigram, result.goal_met ? "met" : "not met");
  }
  if (!result.sample.empty()) fmt::print("\n--- sample ---\n{}\n--------------\n", result.sample);
  if (result.reruns > 0) fmt::print("receive overflows: {} computation(s) repeated with a larger budget\n", result.reruns);
  if (result.skipped > 0) fmt::print("updates skipped because the gradient was not finite: {}\n", result.skipped);
  fmt::print("\ntrained {} steps in {}\nrun folder: {}\n", result.step, format_duration(result.seconds), run_dir);
}

// The name must be one name on all ranks.
std::string agree_on_run_dir(const std::string& mine, Fabric* world) {
  if (world == nullptr) return mine;
  auto size = static_cast<std::int64_t>(mine.size());
  world->broadcast(&size, sizeof size, 0, "train.run_dir_size");
  std::string name = mine;
  name.resize(static_cast<std::size_t>(size));
  world->broadcast(name.data(), name.size(), 0, "train.run_dir");
  return name;
}

// Bad input is refused on every rank together (run_together); every other failure is one rank's.
bool is_refusal(const Error& error) { return error.code() == ErrorCode::kInvalidArgument || error.code() == ErrorCode::kIo; }

// Peers hear of this rank's failure at once instead of waiting for it.
TrainResult run_world(const RunConfig& config, const TrainOptions& options, TrainObserver* observer) {
  try {
    return train(config, options, observer);
  } catch (const Error& error) {
    if (options.world != nullptr && !is_refusal(error)) options.world->abort(error.what());
    throw;
  }
}

// start: the world of processes, or null. The run uses a world of its own, with the config's timeout and node boundary.
void run_train(const TrainArguments& arguments, Fabric* start) {
  const bool resume = !arguments.resume.empty();
  WB_CHECK(resume || !arguments.config.empty(), "train: give a config file, for example configs/demo.toml, or --resume RUN");
  WB_CHECK(!resume || arguments.run_dir.empty() || arguments.run_dir == arguments.resume, "train: --resume {} and --run-dir {} name two folders",
           arguments.resume, arguments.run_dir);
  RunConfig config;
  const auto load = [&] {
    if (std::filesystem::is_directory(arguments.config))
      WB_FAIL(ErrorCode::kIo, "config {} is a folder; give a TOML file, or --resume {} to continue the run in it", arguments.config, arguments.config);
    config = load_run_config(arguments.config.empty() ? arguments.resume + "/config.toml" : arguments.config, arguments.overrides);
  };
  if (start != nullptr)
    run_together(*start, "train.config", load);
  else
    load();
  if (!arguments.text.empty()) {
    const auto sets_bin = [](const std::string& item) { return item.starts_with("data.bin="); };
    const auto bin = std::find_if(arguments.overrides.begin(), arguments.overrides.end(), sets_bin);
    WB_CHECK(bin == arguments.overrides.end(), "train: --text {} and --set {} name two sources of tokens", arguments.text, *bin);
    if (!config.data.bin.empty()) log(LogLevel::kWarning, fmt::format("--text {} takes the place of data.bin = {}", arguments.text, config.data.bin));
    config.data.text = arguments.text;
    config.data.bin.clear();
  }
  // Absolute, so that the run folder's config works from any directory.
  for (std::string* path : {&config.data.text, &config.data.bin}) {
    if (!path->empty()) *path = fs::absolute(*path).lexically_normal().string();
  }
  TrainOptions options;
  options.run_dir = agree_on_run_dir(resume ? arguments.resume : arguments.run_dir.empty() ? default_run_dir(config.name) : arguments.run_dir, start);
  std::unique_ptr<Fabric> world;
  if (start != nullptr) {
    MpiOptions mpi;
    mpi.fabric.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.train.timeout_s * 1000));
    mpi.fabric.ranks_per_node = config.parallel.ranks_per_node;
    world = make_mpi_fabric(mpi);
  }
  const bool is_root = start == nullptr || start->rank() == 0;
  options.world = world.get();
  options.resume = resume;
  options.reshard = arguments.reshard;
  WB_CHECK(arguments.record_routes_every >= 0, "train: --record-routes={} must not be negative", arguments.record_routes_every);
  options.record_routes_every = arguments.record_routes_every;
  options.stop = &g_stop;
  install_signal_handlers();
  TrainDisplay display(arguments.quiet || !is_root);
  const TrainResult result = run_world(config, options, is_root ? &display : nullptr);
  if (!is_root) {
    if (result.stopped) throw CLI::RuntimeError(128 + std::max(g_signal.load(), 1));
    return;
  }
  if (result.stopped) {
    display.on_note(fmt::format("stopped by signal {} after step {}; continue with: waybill train --resume {}", g_signal.load(), result.step, options.run_dir));
    throw CLI::RuntimeError(128 + g_signal.load());
  }
  display.finish();
  print_result(result, options.run_dir);
}

// Under an MPI launcher this process is one rank: rank 0 prints; the others speak of failures only, with their rank's number. What
// every rank refuses alike (a bad config) is said once.
void run_train_command(const TrainArguments& arguments) {
  if (arguments.list_keys) return list_keys();
  if (!mpi_launched()) return run_train(arguments, nullptr);
  const std::unique_ptr<Fabric> start = make_mpi_fabric();
  if (start->rank() != 0) set_log_callback({});
  try {
    run_train(arguments, start.get());
  } catch (const Error& error) {
    if (!is_refusal(error)) {
      start->abort(error.what());
      WB_FAIL(error.code(), "rank {}: {}", start->rank(), error.what());
    }
    if (start->rank() != 0) throw CLI::RuntimeError(2);
    throw;
  }
}

}  // namespace

void register_train_command(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a model as a TOML config says");
  const auto arguments = std::make_shared<TrainArguments>();
  command->add_option("config", arguments->config, "Config file; not needed with --resume");
  command->add_option("--text", arguments->text, "Text file or folder to train on (data.text)");
  command->add_option("--set", arguments->overrides, "Change a key: section.key=value (may be repeated)")->allow_extra_args(false);
  command->add_option("--resume", arguments->resume, "Continue the run in this folder from its newest checkpoint");
  command->add_flag("--reshard", arguments->reshard, "Allow --resume at another P or D than the checkpoint's");
  command->add_option("--run-dir", arguments->run_dir, "Folder of the run; default runs/NAME-TIME");
  command->add_flag("--record-routes{100}", arguments->record_routes_every,
                    "Save every MoE layer's routes at step 1 and every 100 steps (--record-routes=N: every N) in RUN/routes, for bench and inspect");
  command->add_flag("--quiet", arguments->quiet, "Only the result");
  command->add_flag("--list-keys", arguments->list_keys, "Print every config key, its default and meaning");
  command->callback([arguments] { run_train_command(*arguments); });
}

}  // namespace waybill::cli

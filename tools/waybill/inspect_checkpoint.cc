// SPDX-License-Identifier: Apache-2.0
// A checkpoint: its run's state and sizes, and whether every byte is the one that was saved.
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "inspect_verbs.h"
#include "table.h"
#include "waybill/checkpoint.h"

namespace waybill::cli {
namespace {

// A run folder, its checkpoints folder, or one step.
std::string checkpoint_of(const std::string& path) {
  namespace fs = std::filesystem;
  if (fs::exists(path + "/index.json")) return path;
  if (fs::exists(path + "/checkpoints")) return latest_checkpoint(path + "/checkpoints");
  return latest_checkpoint(path);
}

void run(const std::string& path, bool json) {
  const std::string checkpoint = checkpoint_of(path);
  const CheckpointContents contents = verify_checkpoint(checkpoint);
  const CheckpointInfo& info = contents.info;
  if (json) {
    const nlohmann::json out = {{"path", checkpoint},
                                {"step", info.step},
                                {"tokens", info.tokens},
                                {"seed", info.seed},
                                {"W", info.W},
                                {"P", info.P},
                                {"updates", info.updates},
                                {"skipped", info.skipped},
                                {"reruns", info.reruns},
                                {"receive_factor", info.receive_factor},
                                {"tensors", contents.num_tensors},
                                {"files", contents.num_files},
                                {"bytes", contents.bytes},
                                {"verified", true}};
    fmt::print("{}\n", out.dump(2));
    return;
  }
  fmt::print("{}: step {}, {} tokens, seed {}, saved by {} rank(s) with P = {}\n", checkpoint, info.step, info.tokens, info.seed, info.W, info.P);
  fmt::print("{} updates, {} skipped, {} receive overflows, receive factor {}\n", info.updates, info.skipped, info.reruns, info.receive_factor);
  fmt::print("{} tensors, {} in {} file(s); every checksum is right\n", contents.num_tensors, format_bytes(static_cast<double>(contents.bytes)),
             contents.num_files);
}

}  // namespace

void register_inspect_checkpoint(CLI::App& inspect) {
  CLI::App* command = inspect.add_subcommand("checkpoint", "State and sizes of a checkpoint; verifies every byte");
  struct Options {
    std::string path;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("path", options->path, "run folder (its newest checkpoint) or the folder of one step")->required();
  command->add_flag("--json", options->json, "as JSON");
  command->callback([options] { run(options->path, options->json); });
}

}  // namespace waybill::cli

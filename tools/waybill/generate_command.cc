// SPDX-License-Identifier: Apache-2.0
// waybill generate RUN: text from the newest checkpoint of a run.
#include <fmt/format.h>

#include <memory>

#include "arguments.h"
#include "commands.h"
#include "waybill/trainer.h"

namespace waybill::cli {

void register_generate_command(CLI::App& app) {
  struct Arguments {
    std::string run_dir;
    GenerateOptions options;
  };
  auto* command = app.add_subcommand("generate", "Continue a prompt with a trained model");
  const auto arguments = std::make_shared<Arguments>();
  GenerateOptions& options = arguments->options;
  command->add_option("run", arguments->run_dir, "Run folder")->required();
  command->add_option("--prompt", options.prompt, "Start of the text")->capture_default_str();
  command->add_option("--tokens", options.tokens, "Tokens to generate")->capture_default_str()->check(CLI::Range(0, 1000000));
  command->add_option("--temperature", options.temperature, "0 = the likeliest token")->capture_default_str()->check(CLI::Range(0.0, 100.0));
  command->add_option("--seed", options.seed, "Of the sampling")->capture_default_str()->check(at_least(0));
  command->callback([arguments] { fmt::print("{}\n", generate(arguments->run_dir, arguments->options)); });
}

}  // namespace waybill::cli

// SPDX-License-Identifier: Apache-2.0
// waybill inspect model|memory|run|load|route|checkpoint: looks at configs, run folders, route files and checkpoints without changing them.
#include "commands.h"
#include "inspect_verbs.h"

namespace waybill::cli {

void register_inspect_command(CLI::App& app) {
  CLI::App* inspect = app.add_subcommand("inspect", "Look at a config, a run folder, a route file or a checkpoint");
  inspect->require_subcommand(1);
  register_inspect_model(*inspect);
  register_inspect_memory(*inspect);
  register_inspect_run(*inspect);
  register_inspect_load(*inspect);
  register_inspect_route(*inspect);
  register_inspect_checkpoint(*inspect);
}

}  // namespace waybill::cli

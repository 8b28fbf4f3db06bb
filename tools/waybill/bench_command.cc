// SPDX-License-Identifier: Apache-2.0
// waybill bench router|gemm|exchange|moe: verifies an operation against its reference, then times it.
#include "bench_verbs.h"
#include "commands.h"

namespace waybill::cli {

void register_bench_command(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Verify an operation against its reference, then time it");
  bench->require_subcommand(1);
  register_bench_router(*bench);
  register_bench_gemm(*bench);
  register_bench_exchange(*bench);
  register_bench_moe(*bench);
}

}  // namespace waybill::cli

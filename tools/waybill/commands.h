// SPDX-License-Identifier: Apache-2.0
// The verbs of the command line tool. Each register function adds one verb; its callback does the work.
// A callback that ends without success throws CLI::RuntimeError(code) after it has said why; a waybill::Error that escapes is
// printed as one line on stderr and ends the program with code 2 (3 for our own bugs). Results go to stdout, notes to stderr.
#pragma once

#include <CLI/CLI.hpp>

namespace waybill::cli {

void register_train_command(CLI::App& app);
void register_generate_command(CLI::App& app);
void register_bench_command(CLI::App& app);
void register_inspect_command(CLI::App& app);
void register_doctor_command(CLI::App& app);
void register_simulate_command(CLI::App& app);

}  // namespace waybill::cli

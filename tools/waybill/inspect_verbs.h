// SPDX-License-Identifier: Apache-2.0
// The parts of `waybill inspect`, one file each.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace waybill::cli {

void register_inspect_model(CLI::App& inspect);
void register_inspect_memory(CLI::App& inspect);
void register_inspect_run(CLI::App& inspect);
void register_inspect_load(CLI::App& inspect);
void register_inspect_route(CLI::App& inspect);
void register_inspect_checkpoint(CLI::App& inspect);

// Records of a run folder's metrics.jsonl, oldest first; kind "" = all. A torn last line is left out, anything else that is not JSON
// is refused with file and line, and so is a header of a schema that this build does not know.
std::vector<nlohmann::json> read_metrics(const std::string& run_folder, const std::string& kind);
// Runs body(), which takes such records apart; a record whose fields are not what they should be is refused with the folder.
void read_fields(const std::string& run_folder, const std::function<void()>& body);

}  // namespace waybill::cli

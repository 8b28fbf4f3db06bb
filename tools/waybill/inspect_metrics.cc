// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <sstream>

#include "inspect_verbs.h"
#include "waybill/error.h"
#include "waybill/metrics.h"

namespace waybill::cli {

std::vector<nlohmann::json> read_metrics(const std::string& run_folder, const std::string& kind) {
  if (!std::filesystem::is_directory(run_folder)) WB_FAIL(ErrorCode::kIo, "no such run folder: {}", run_folder);
  const std::string path = (std::filesystem::path(run_folder) / "metrics.jsonl").string();
  std::ifstream file(path);
  if (!file) WB_FAIL(ErrorCode::kIo, "{} is not a run folder: metrics.jsonl is missing", run_folder);
  std::vector<nlohmann::json> records;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
    const bool is_torn = record.is_discarded() && file.peek() == std::char_traits<char>::eof();
    if (is_torn) break;
    if (record.is_discarded() || !record.is_object() || !record.contains("kind")) {
      WB_FAIL(ErrorCode::kIo, "{}:{}: not a metrics record (JSON object with a \"kind\")", path, number);
    }
    if (record["kind"] == "header" && record.contains("schema") && record["schema"] != kMetricsSchema) {
      WB_FAIL(ErrorCode::kIo, "{}:{}: schema {} of the metrics, this build reads {}", path, number, record["schema"].dump(), kMetricsSchema);
    }
    if (kind.empty() || record["kind"] == kind) records.push_back(std::move(record));
  }
  return records;
}

void read_fields(const std::string& run_folder, const std::function<void()>& body) {
  try {
    body();
  } catch (const nlohmann::json::exception& error) {
    WB_FAIL(ErrorCode::kIo, "{}/metrics.jsonl is damaged: {}", run_folder, error.what());
  }
}

}  // namespace waybill::cli

// SPDX-License-Identifier: Apache-2.0
// Any bytes as a config, what follows a zero byte as `--set` overrides: either an Error with a text, or a config that survives being
// written and read again, and whose checks and sizes end in an answer.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "waybill/error.h"
#include "waybill/train_config.h"

namespace {

using namespace waybill;

void check_sizes(const RunConfig& config) {
  try {
    validate(config);
    const ArchitectureConfig shape = architecture_of(config);
    if (!std::isfinite(memory_per_rank(shape, {}).weights)) std::abort();
  } catch (const Error& error) {
    if (error.what()[0] == '\0') std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> parts(1);
  for (std::size_t i = 0; i < size; ++i) {
    if (data[i] == 0)
      parts.emplace_back();
    else
      parts.back().push_back(static_cast<char>(data[i]));
  }
  const std::string toml = parts[0];
  parts.erase(parts.begin());
  try {
    const RunConfig config = parse_run_config(toml, "fuzz", parts);
    const std::string text = to_toml(config);
    const RunConfig again = parse_run_config(text, "again");
    if (to_toml(again) != text || model_toml(again) != model_toml(config)) std::abort();
    check_sizes(config);
  } catch (const Error& error) {
    if (error.what()[0] == '\0') std::abort();
  }
  return 0;
}

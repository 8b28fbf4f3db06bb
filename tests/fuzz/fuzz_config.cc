// SPDX-License-Identifier: Apache-2.0
// Any bytes as a config: either an Error with a text, or a config that survives being written and read again.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "waybill/error.h"
#include "waybill/train_config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace waybill;
  try {
    const RunConfig config = parse_run_config(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
    const std::string text = to_toml(config);
    if (to_toml(parse_run_config(text, "again")) != text) std::abort();
  } catch (const Error& error) {
    if (error.what()[0] == '\0') std::abort();
  }
  return 0;
}

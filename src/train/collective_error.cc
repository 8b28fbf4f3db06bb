// SPDX-License-Identifier: Apache-2.0
#include "collective_error.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "waybill/error.h"

namespace waybill {
namespace {

struct Outcome {
  int code = 0;  // 0 = fine
  char message[1020] = {};
};

Outcome run_local(const std::function<void()>& body) {
  Outcome outcome;
  const auto record = [&outcome](ErrorCode code, const char* text) {
    outcome.code = static_cast<int>(code);
    std::strncpy(outcome.message, text, sizeof(outcome.message) - 1);
  };
  try {
    body();
  } catch (const Error& error) {
    record(error.code(), error.what());
  } catch (const std::exception& error) {
    record(ErrorCode::kInternal, error.what());
  }
  return outcome;
}

}  // namespace

void run_together(Fabric& world, const char* phase, const std::function<void()>& body, const std::function<void()>& on_failure) {
  const Outcome mine = run_local(body);
  std::vector<Outcome> all(static_cast<std::size_t>(world.size()));
  world.all_gather(&mine, all.data(), sizeof(Outcome), phase);
  const auto first = std::find_if(all.begin(), all.end(), [](const Outcome& outcome) { return outcome.code != 0; });
  if (first == all.end()) return;
  if (on_failure && world.rank() == 0) on_failure();
  world.barrier(phase);
  const bool everywhere = std::all_of(all.begin(), all.end(), [&first](const Outcome& o) { return std::strcmp(o.message, first->message) == 0; });
  throw Error(static_cast<ErrorCode>(first->code), everywhere ? first->message : fmt::format("rank {}: {}", first - all.begin(), first->message));
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// How an operation picks its implementation: one ordered list, each entry accepts a call or refuses it with a reason, the first that
// accepts runs, the plain reference stands last. Selection is a function of the call alone, so it is the same on every rank.
//
//   WB_FORCE=<op>:<name>[,<op>:<name>...]  takes one entry of an op's list; it must accept the call
//   WB_LOG=select                          logs (kInfo) what was chosen and why the entries before it refused
#pragma once

#include <cstddef>
#include <string>

#include "waybill/error.h"

namespace waybill {

template <class Arguments, class Result = void>
struct Implementation {
  const char* name;
  std::string (*refuse)(const Arguments&);  // why it cannot take the call; empty = it can
  Result (*run)(const Arguments&);
};

// The name WB_FORCE gives for `op`; empty when it gives none. kInvalidArgument where WB_FORCE is malformed or names an op that does
// not exist, whichever op asks.
std::string forced_implementation(const char* op);
bool selection_is_logged();
void log_selection(const char* op, const char* name, const std::string& refusals);

// The first entry that accepts. kUnsupported listing every refusal when none does, kInvalidArgument for an unknown forced name.
template <class Arguments, class Result, std::size_t kCount>
const Implementation<Arguments, Result>& select_implementation(const char* op, const Implementation<Arguments, Result> (&list)[kCount],
                                                               const Arguments& arguments) {
  const std::string forced = forced_implementation(op);
  std::string refusals, names;
  bool is_known = forced.empty();
  for (const auto& entry : list) {
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
    if (!forced.empty() && forced != entry.name) continue;
    is_known = true;
    const std::string reason = entry.refuse(arguments);
    if (reason.empty()) {
      if (selection_is_logged()) log_selection(op, entry.name, refusals);
      return entry;
    }
    refusals += (refusals.empty() ? "" : "; ") + std::string(entry.name) + ": " + reason;
  }
  WB_CHECK(is_known, "WB_FORCE asks for {}:{}, known are {}", op, forced, names);
  WB_FAIL(ErrorCode::kUnsupported, "no implementation of {} accepts this call ({})", op, refusals);
}

}  // namespace waybill

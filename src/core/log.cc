// SPDX-License-Identifier: Apache-2.0
#include "waybill/log.h"

#include <mutex>
#include <set>
#include <utility>

namespace waybill {
namespace {

struct State {
  std::recursive_mutex mutex;  // a callback may log or replace itself
  LogCallback callback;
  std::set<std::string> given;
};

State& state() {
  static State instance;
  return instance;
}

}  // namespace

void set_log_callback(LogCallback callback) {
  const std::lock_guard lock(state().mutex);
  state().callback = std::move(callback);
}

void log(LogLevel level, const std::string& text) {
  const std::lock_guard lock(state().mutex);
  const LogCallback callback = state().callback;  // a copy: the callback may replace itself
  if (callback) callback(level, text);
}

void warn_once(const std::string& key, const std::string& text) {
  const std::lock_guard lock(state().mutex);
  if (state().callback && state().given.insert(key).second) log(LogLevel::kWarning, text);
}

void forget_warnings() {
  const std::lock_guard lock(state().mutex);
  state().given.clear();
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// The library never prints. What it has to say goes to a callback that the program sets (the command line wires it to its logger).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "waybill/export.h"

namespace waybill {

enum class LogLevel : std::uint8_t { kDebug = 0, kInfo = 1, kWarning = 2 };

// Called from any thread, one call at a time, never while a lock of the library other than the log's own is held. Must not throw.
using LogCallback = std::function<void(LogLevel level, const std::string& text)>;

// Process-wide; an empty callback (the default) discards everything.
WB_API void set_log_callback(LogCallback callback);
WB_API void log(LogLevel level, const std::string& text);

// A warning that is given once per process and key. It does not count as given while no callback is set.
WB_API void warn_once(const std::string& key, const std::string& text);
// Makes every warn_once() speak again; for tests.
WB_API void forget_warnings();

}  // namespace waybill

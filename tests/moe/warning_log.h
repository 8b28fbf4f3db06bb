// SPDX-License-Identifier: Apache-2.0
// What the layer warns of.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "waybill/log.h"

namespace waybill::test {

// Warnings that hold `part`, between construction and destruction, made on any thread.
class WarningLog {
 public:
  explicit WarningLog(std::string part = "dense-map path") {
    forget_warnings();
    set_log_callback([this, part = std::move(part)](LogLevel level, const std::string& text) {
      const std::lock_guard lock(mutex_);
      if (level == LogLevel::kWarning && text.find(part) != std::string::npos) lines_.push_back(text);
    });
  }
  ~WarningLog() { set_log_callback({}); }
  std::vector<std::string> lines() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace waybill::test

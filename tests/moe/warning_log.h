// SPDX-License-Identifier: Apache-2.0
// What the layer warns of when it takes the dense-map path.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "waybill/log.h"

namespace waybill::test {

// Warnings about the path between construction and destruction, made on any thread.
class WarningLog {
 public:
  WarningLog() {
    forget_warnings();
    set_log_callback([this](LogLevel level, const std::string& text) {
      const std::lock_guard lock(mutex_);
      if (level == LogLevel::kWarning && text.find("dense-map path") != std::string::npos) lines_.push_back(text);
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

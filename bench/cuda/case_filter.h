// SPDX-License-Identifier: Apache-2.0
// --filter of a CUDA benchmark.
#pragma once

#include <string>
#include <utility>

#include "waybill/error.h"

namespace waybill::cuda {

// Takes the cases whose names contain a text; an empty text takes all.
class CaseFilter {
 public:
  CaseFilter() = default;
  explicit CaseFilter(std::string text) : text_(std::move(text)) {}

  bool takes(const std::string& name) {
    const bool is_taken = name.find(text_) != std::string::npos;
    has_taken_ |= is_taken;
    return is_taken;
  }
  // After the cases: a text that no name contains is a mistake and no empty result.
  void check_used() const { WB_CHECK(has_taken_, "no case contains '{}'", text_); }

 private:
  std::string text_;
  bool has_taken_ = false;
};

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "waybill/workspace.h"

namespace waybill {

std::size_t WorkspacePlan::book(std::string name, std::size_t bytes) {
  const std::size_t offset = total_;
  entries_.push_back(Entry{std::move(name), offset, bytes});
  total_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

}  // namespace waybill

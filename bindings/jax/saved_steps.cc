// SPDX-License-Identifier: Apache-2.0
#include "saved_steps.h"

namespace waybill::jax {

SavedSteps& SavedSteps::instance() {
  static SavedSteps* const store = new SavedSteps;  // never destroyed: XLA's threads may outlive static destructors
  return *store;
}

wb_status SavedSteps::take_spare(wb_moe_step** step) {
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      *step = spare_.back();
      spare_.pop_back();
      return WB_OK;
    }
  }
  return wb_moe_step_create(step);
}

void SavedSteps::give_back(wb_moe_step* step) {
  if (step == nullptr) return;
  const std::lock_guard lock(mutex_);
  spare_.push_back(step);
}

std::uint64_t SavedSteps::keep(wb_moe_step* step, std::size_t limit) {
  const std::lock_guard lock(mutex_);
  if (limit == 0) {
    spare_.push_back(step);
    return 0;
  }
  while (order_.size() >= limit) {
    const auto oldest = steps_.find(order_.front());
    spare_.push_back(oldest->second.step);
    steps_.erase(oldest);
    order_.pop_front();
  }
  const std::uint64_t token = next_token_++;
  order_.push_back(token);
  steps_.emplace(token, Entry{step, std::prev(order_.end())});
  return token;
}

wb_moe_step* SavedSteps::take(std::uint64_t token) {
  const std::lock_guard lock(mutex_);
  const auto found = steps_.find(token);
  if (found == steps_.end()) return nullptr;
  wb_moe_step* const step = found->second.step;
  order_.erase(found->second.place);
  steps_.erase(found);
  return step;
}

std::size_t SavedSteps::size() {
  const std::lock_guard lock(mutex_);
  return steps_.size();
}

void SavedSteps::clear() {
  const std::lock_guard lock(mutex_);
  for (const auto& [token, entry] : steps_) wb_moe_step_destroy(entry.step);
  for (wb_moe_step* step : spare_) wb_moe_step_destroy(step);
  steps_.clear();
  order_.clear();
  spare_.clear();
}

}  // namespace waybill::jax

// For Python (ctypes): how many steps wait for their backward, and freeing them.
extern "C" __attribute__((visibility("default"))) std::int64_t wbx_num_saved_steps() {
  return static_cast<std::int64_t>(waybill::jax::SavedSteps::instance().size());
}
extern "C" __attribute__((visibility("default"))) void wbx_clear_saved_steps() { waybill::jax::SavedSteps::instance().clear(); }

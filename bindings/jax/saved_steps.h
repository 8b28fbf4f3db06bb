// SPDX-License-Identifier: Apache-2.0
// What forwards keep for their backward, outside of XLA's arrays: a bounded store of wb_moe_step, by token. A backward whose step is gone
// (the store was full, the residual was offloaded and the program restarted, the backward runs twice) computes the forward again with the same
// routes, so that the store changes speed, never results.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "waybill/waybill.h"

namespace waybill::jax {

class SavedSteps {
 public:
  static SavedSteps& instance();

  // A step to run a forward in: a spare one (its memory is used again) or a new one.
  wb_status take_spare(wb_moe_step** step);
  void give_back(wb_moe_step* step);
  // Keeps at most `limit` steps: the oldest make room. limit 0 keeps none and returns token 0.
  std::uint64_t keep(wb_moe_step* step, std::size_t limit);
  // The step of a token, once; null when it is gone.
  wb_moe_step* take(std::uint64_t token);
  std::size_t size();
  void clear();  // frees everything, spare steps included

 private:
  std::mutex mutex_;
  std::uint64_t next_token_ = 1;
  std::list<std::uint64_t> order_;  // oldest first
  struct Entry {
    wb_moe_step* step;
    std::list<std::uint64_t>::iterator place;
  };
  std::unordered_map<std::uint64_t, Entry> steps_;
  std::vector<wb_moe_step*> spare_;
};

}  // namespace waybill::jax

// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one collective call meet. XLA runs the devices of one process on threads of its own, one call a device; the calls of one
// execution that belong together share its run id, the call site and the group, and come in the same order on every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "waybill/waybill.h"

namespace waybill::jax {

// What names a call site: its config, the direction and a number given when it was traced.
struct CallSite {
  std::int64_t run_id = 0;
  std::string key;
  std::int32_t group = 0;  // index among the groups of the mesh axis
  std::int32_t rank = 0, P = 1;
};

// The P ranks of a group and what they keep from call to call (a layer, an exchange). Serves one call at a time.
class Team;

// One rank's place in a meeting; leaving it ends the call. A rank that fails must say so (abort), then its team is not used again.
class Seat {
 public:
  // Blocks for nobody: the first rank opens the meeting.
  static wb_status take(const CallSite& site, std::unique_ptr<Seat>& seat);
  ~Seat();
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  wb_fabric* fabric() const { return fabric_; }
  int rank() const { return site_.rank; }
  int size() const { return site_.P; }
  // The rank's layer or exchange, created by its first call (collective).
  wb_status layer(const wb_moe_config& config, wb_moe_layer** layer);
  wb_status exchange(const wb_exchange_config& config, wb_exchange** exchange);
  // Passes `status` on; a failure wakes the other ranks with the library's text.
  wb_status done(wb_status status);

 private:
  Seat(CallSite site, std::shared_ptr<Team> team, std::uint64_t number) : site_(std::move(site)), team_(std::move(team)), number_(number) {}

  CallSite site_;
  std::shared_ptr<Team> team_;
  std::uint64_t number_;
  wb_fabric* fabric_ = nullptr;
};

}  // namespace waybill::jax

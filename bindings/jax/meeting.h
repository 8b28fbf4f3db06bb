// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one collective call meet. Each execution of a call has a ticket: a number that the first rank's process gave it and the
// program passed on to the others (jax/_ffi.py, place). So the ranks of one call find each other in whatever order devices, threads and
// processes come to the calls of a program, and two calls of one traced function never share state.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi_support.h"

namespace waybill::jax {

struct Ticket {
  std::uint32_t process = 0;  // that gave it
  std::uint64_t number = 0;   // different for each one of a process
  auto operator<=>(const Ticket&) const = default;
};

// What a rank knows of a call: its key (op and config, the same on every rank), the rank itself, and the tickets of all ranks. The first
// rank's names the call; the others tell which process a rank is in.
struct Invitation {
  std::string key;
  int rank = 0, P = 1;
  std::vector<Ticket> tickets;  // [P]

  // `place` is uint32 [1 + 3 P]: rank, then process, low and high half of the number of each ticket.
  static Invitation read(std::string key, const ffi::Buffer<ffi::U32>& place, std::int64_t P);
  bool alone() const { return P == 1; }
};

// What a rank has in a group of ranks, kept from call to call.
struct Belongings {
  wb_fabric* fabric = nullptr;
  wb_moe_layer* layer = nullptr;
  wb_exchange* exchange = nullptr;
};

// One rank's place in a meeting; leaving it ends the call for this rank. A group in which a rank has failed is not used again.
class Seat {
 public:
  virtual ~Seat() = default;
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;
  static ffi::Error take(const Invitation& invitation, std::unique_ptr<Seat>& seat);

  wb_fabric* fabric() const { return has_->fabric; }
  int size() const { return P_; }
  // The rank's layer or exchange, created by its first call (collective).
  wb_status layer(const wb_moe_config& config, wb_moe_layer** layer);
  wb_status exchange(const wb_exchange_config& config, wb_exchange** exchange);
  // Passes `status` on as an error; a failure wakes the other ranks with the library's text.
  ffi::Error done(wb_status status);

 protected:
  Seat(int P, Belongings* has) : P_(P), has_(has) {}
  virtual void fail(const std::string& reason) = 0;

 private:
  int P_;
  Belongings* has_;
};

// meeting.cc: all ranks in this process (ranks as threads). far_meeting.cc: ranks in several processes, over ProcessMesh.
ffi::Error take_near_seat(const Invitation& invitation, std::unique_ptr<Seat>& seat);
ffi::Error take_far_seat(const Invitation& invitation, std::unique_ptr<Seat>& seat);

void destroy(Belongings& belongings);  // but not the fabric

}  // namespace waybill::jax

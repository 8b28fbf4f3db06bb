// SPDX-License-Identifier: Apache-2.0
#include "meeting.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "process_mesh.h"

namespace waybill::jax {
namespace {

// The P ranks of a group of this process.
class Team {
 public:
  static wb_status create(int P, std::shared_ptr<Team>& team) {
    team = std::shared_ptr<Team>(new Team(P));
    if (const wb_status status = wb_group_create(P, 0, 0, &team->group_); status != WB_OK) return status;
    for (int rank = 0; rank < P; ++rank) {
      if (const wb_status status = wb_group_fabric(team->group_, rank, &team->member(rank).fabric); status != WB_OK) return status;
    }
    return WB_OK;
  }
  ~Team() {
    for (Belongings& member : members_) destroy(member);
    wb_group_destroy(group_);
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  Belongings& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  void fail() { failed_ = true; }
  bool failed() const { return failed_; }

 private:
  explicit Team(int P) : members_(static_cast<std::size_t>(P)) {}
  wb_group* group_ = nullptr;
  std::vector<Belongings> members_;
  std::atomic<bool> failed_{false};
};

struct Meeting {
  std::shared_ptr<Team> team;
  int left = 0;
};

// The calls of one ticket: rank r's next one is number next[r]. More than one where XLA has moved the ticket out of a loop, which it may do only
// where all calls of the loop are equal.
struct Calls {
  std::string key;
  std::vector<std::uint64_t> next;
  std::map<std::uint64_t, Meeting> open;
};

struct Registry {
  std::mutex mutex;
  std::map<Ticket, Calls> calls;
  std::map<std::string, std::vector<std::shared_ptr<Team>>> spare;  // by key and size

  // A team that no call uses. The mutex is held.
  wb_status find_team(const Invitation& invitation, std::shared_ptr<Team>& team) {
    std::vector<std::shared_ptr<Team>>& free = spare[spare_key(invitation)];
    if (free.empty()) return Team::create(invitation.P, team);
    team = std::move(free.back());
    free.pop_back();
    return WB_OK;
  }
  static std::string spare_key(const Invitation& invitation) { return invitation.key + '#' + std::to_string(invitation.P); }
};

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: XLA's threads may outlive static destructors
  return *instance;
}

class NearSeat final : public Seat {
 public:
  NearSeat(const Invitation& invitation, std::shared_ptr<Team> team, std::uint64_t number)
      : Seat(invitation.P, &team->member(invitation.rank)),
        spare_key_(Registry::spare_key(invitation)),
        ticket_(invitation.alone() ? Ticket{} : invitation.tickets.front()),
        team_(std::move(team)),
        number_(number) {}
  ~NearSeat() override {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (size() > 1) {
      const auto calls = all.calls.find(ticket_);
      const auto meeting = calls->second.open.find(number_);
      if (++meeting->second.left < size()) return;
      calls->second.open.erase(meeting);
      if (calls->second.open.empty()) all.calls.erase(calls);  // all ranks have made the same number of calls
    }
    if (!team_->failed()) all.spare[spare_key_].push_back(team_);
  }

 private:
  void fail(const std::string& reason) override {
    team_->fail();
    (void)wb_fabric_abort(fabric(), reason.c_str());
  }

  std::string spare_key_;
  Ticket ticket_;
  std::shared_ptr<Team> team_;
  std::uint64_t number_;
};

}  // namespace

void destroy(Belongings& belongings) {
  wb_moe_layer_destroy(belongings.layer);
  wb_exchange_destroy(belongings.exchange);
}

Invitation Invitation::read(std::string key, const ffi::Buffer<ffi::U32>& place, std::int64_t P) {
  Invitation invitation;
  const std::uint32_t* words = place.typed_data();
  invitation.key = std::move(key);
  invitation.rank = static_cast<int>(words[0]);
  invitation.P = static_cast<int>(P);
  for (std::int64_t rank = 0; rank < P && P > 1; ++rank, words += 3) {
    invitation.tickets.push_back({words[1], words[2] | static_cast<std::uint64_t>(words[3]) << 32});
  }
  return invitation;
}

ffi::Error take_near_seat(const Invitation& invitation, std::unique_ptr<Seat>& seat) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::shared_ptr<Team> team;
  if (invitation.alone()) {
    WB_FFI_TRY(all.find_team(invitation, team));
    seat = std::make_unique<NearSeat>(invitation, std::move(team), 0);
    return ffi::Error::Success();
  }
  const auto rank = static_cast<std::size_t>(invitation.rank);
  Calls& calls = all.calls[invitation.tickets.front()];
  if (calls.key.empty()) calls.key = invitation.key;
  if (calls.key != invitation.key) return ffi::Error(ffi::ErrorCode::kInternal, "waybill: ranks of one call came with different configs");
  calls.next.resize(static_cast<std::size_t>(invitation.P));
  Meeting& meeting = calls.open[calls.next[rank]];
  if (meeting.team == nullptr) {
    if (const wb_status status = all.find_team(invitation, meeting.team); status != WB_OK) {
      calls.open.erase(calls.next[rank]);
      return to_error(status);
    }
  }
  seat = std::make_unique<NearSeat>(invitation, meeting.team, calls.next[rank]++);
  return ffi::Error::Success();
}

ffi::Error Seat::take(const Invitation& invitation, std::unique_ptr<Seat>& seat) {
  const auto here = [](const Ticket& ticket) { return ticket.process == ProcessMesh::instance().my_index(); };
  const bool near = std::all_of(invitation.tickets.begin(), invitation.tickets.end(), here);
  return near ? take_near_seat(invitation, seat) : take_far_seat(invitation, seat);
}

wb_status Seat::layer(const wb_moe_config& config, wb_moe_layer** layer) {
  if (has_->layer == nullptr) {
    if (const wb_status status = wb_moe_layer_create(&config, has_->fabric, has_->fabric, nullptr, &has_->layer); status != WB_OK) return status;
  }
  *layer = has_->layer;
  return WB_OK;
}

wb_status Seat::exchange(const wb_exchange_config& config, wb_exchange** exchange) {
  if (has_->exchange == nullptr) {
    if (const wb_status status = wb_exchange_create(&config, has_->fabric, &has_->exchange); status != WB_OK) return status;
  }
  *exchange = has_->exchange;
  return WB_OK;
}

ffi::Error Seat::done(wb_status status) {
  if (status == WB_OK) return ffi::Error::Success();
  ffi::Error error = to_error(status);  // before fail: it may overwrite the library's text
  const std::string reason = wb_last_error();
  fail(reason);
  return error;
}

}  // namespace waybill::jax

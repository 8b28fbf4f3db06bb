// SPDX-License-Identifier: Apache-2.0
#include "meeting.h"

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace waybill::jax {

class Team {
 public:
  static wb_status create(int P, std::shared_ptr<Team>& team) {
    team = std::shared_ptr<Team>(new Team(P));
    return wb_group_create(P, 0, 0, &team->group_);
  }
  ~Team() {
    for (const Member& member : members_) {
      wb_moe_layer_destroy(member.layer);
      wb_exchange_destroy(member.exchange);
    }
    wb_group_destroy(group_);
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  struct Member {
    wb_moe_layer* layer = nullptr;
    wb_exchange* exchange = nullptr;
  };
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  wb_group* group() const { return group_; }
  void fail() { failed_ = true; }
  bool failed() const { return failed_; }

 private:
  explicit Team(int P) : members_(static_cast<std::size_t>(P)) {}
  wb_group* group_ = nullptr;
  std::vector<Member> members_;
  std::atomic<bool> failed_{false};
};

namespace {

struct Meeting {
  std::shared_ptr<Team> team;
  int left = 0;
};

// The calls of one site in one execution: rank r's next one is number next[r].
struct Calls {
  std::vector<std::uint64_t> next;
  std::map<std::uint64_t, Meeting> open;
};

struct Registry {
  std::mutex mutex;
  std::map<std::tuple<std::int64_t, std::string, std::int32_t>, Calls> calls;
  std::map<std::string, std::vector<std::shared_ptr<Team>>> spare;  // by call site and size
};

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: XLA's threads may outlive static destructors
  return *instance;
}

std::string spare_key(const CallSite& site) { return site.key + '#' + std::to_string(site.P); }

}  // namespace

wb_status Seat::take(const CallSite& site, std::unique_ptr<Seat>& seat) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  Calls& calls = all.calls[{site.run_id, site.key, site.group}];
  calls.next.resize(static_cast<std::size_t>(site.P));
  const std::uint64_t number = calls.next[static_cast<std::size_t>(site.rank)];
  Meeting& meeting = calls.open[number];
  if (meeting.team == nullptr) {
    std::vector<std::shared_ptr<Team>>& spare = all.spare[spare_key(site)];
    if (!spare.empty()) {
      meeting.team = std::move(spare.back());
      spare.pop_back();
    } else if (const wb_status status = Team::create(site.P, meeting.team); status != WB_OK) {
      calls.open.erase(number);
      return status;
    }
  }
  ++calls.next[static_cast<std::size_t>(site.rank)];
  seat.reset(new Seat(site, meeting.team, number));
  return wb_group_fabric(meeting.team->group(), site.rank, &seat->fabric_);
}

Seat::~Seat() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto calls = all.calls.find({site_.run_id, site_.key, site_.group});
  if (calls == all.calls.end()) return;
  const auto meeting = calls->second.open.find(number_);
  if (meeting == calls->second.open.end() || ++meeting->second.left < site_.P) return;
  if (!team_->failed()) all.spare[spare_key(site_)].push_back(team_);
  calls->second.open.erase(meeting);
  if (calls->second.open.empty()) all.calls.erase(calls);  // all ranks have made the same number of calls
}

wb_status Seat::layer(const wb_moe_config& config, wb_moe_layer** layer) {
  wb_moe_layer*& kept = team_->member(site_.rank).layer;
  if (kept == nullptr) {
    if (const wb_status status = wb_moe_layer_create(&config, fabric_, fabric_, nullptr, &kept); status != WB_OK) return status;
  }
  *layer = kept;
  return WB_OK;
}

wb_status Seat::exchange(const wb_exchange_config& config, wb_exchange** exchange) {
  wb_exchange*& kept = team_->member(site_.rank).exchange;
  if (kept == nullptr) {
    if (const wb_status status = wb_exchange_create(&config, fabric_, &kept); status != WB_OK) return status;
  }
  *exchange = kept;
  return WB_OK;
}

wb_status Seat::done(wb_status status) {
  if (status != WB_OK) {
    team_->fail();
    const std::string reason = wb_last_error();  // abort may overwrite it
    (void)wb_fabric_abort(fabric_, reason.c_str());
  }
  return status;
}

}  // namespace waybill::jax

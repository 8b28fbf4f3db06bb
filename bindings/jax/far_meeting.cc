// SPDX-License-Identifier: Apache-2.0
// Meetings of ranks in several processes. The first rank's process chooses the group's channel, one that no call uses, and announces it to the
// ranks of the ticket; each rank has its own fabric on that channel.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <semaphore>
#include <vector>

#include "meeting.h"
#include "process_mesh.h"

namespace waybill::jax {
namespace {

constexpr std::uint64_t kAnnouncement = 1ull << 63;  // of the channel that announces a ticket's group; ordinary channels lack the bit

// One rank's end of a group; a transport of the library. Kept from call to call, never destroyed after a success.
class FarRank {
 public:
  FarRank(const Invitation& invitation, std::uint64_t channel) : key(invitation.key), channel_(channel), rank_(static_cast<std::uint32_t>(invitation.rank)) {
    for (const Ticket& ticket : invitation.tickets) processes_.push_back(ticket.process);
  }
  ~FarRank() {
    destroy(has);
    wb_fabric_destroy(has.fabric);
  }
  FarRank(const FarRank&) = delete;
  FarRank& operator=(const FarRank&) = delete;

  wb_status open() {
    wb_fabric_transport transport{};
    transport.struct_size = sizeof(transport);
    transport.user = this;
    transport.all_to_all = &FarRank::all_to_all;
    return wb_fabric_create(&transport, static_cast<std::int32_t>(processes_.size()), static_cast<std::int32_t>(rank_), 0, &has.fabric);
  }
  std::uint64_t channel() const { return channel_; }
  const std::vector<std::uint32_t>& processes() const { return processes_; }

  std::binary_semaphore free{1};  // the first rank may have given the group to the next call while another rank still leaves this one
  const std::string key;
  Belongings has;
  bool failed = false;

 private:
  static std::int32_t all_to_all(void* user, const void* send, const std::int64_t* send_bytes, void* receive, const std::int64_t* receive_bytes, char* error,
                                 std::int64_t error_bytes) {
    const ProcessMesh::Failure failure = static_cast<FarRank*>(user)->move(send, send_bytes, receive, receive_bytes);
    if (!failure) return 0;
    std::strncpy(error, failure->c_str(), static_cast<std::size_t>(error_bytes) - 1);
    return 1;
  }

  ProcessMesh::Failure move(const void* send, const std::int64_t* send_bytes, void* receive, const std::int64_t* receive_bytes) {
    ProcessMesh& mesh = ProcessMesh::instance();
    const auto P = static_cast<std::uint32_t>(processes_.size());
    const std::uint32_t round = round_++;
    const auto offsets = [P](const std::int64_t* bytes) {
      std::vector<std::size_t> result(P);
      for (std::uint32_t p = 1; p < P; ++p) result[p] = result[p - 1] + static_cast<std::size_t>(bytes[p - 1]);
      return result;
    };
    const std::vector<std::size_t> out = offsets(send_bytes), in = offsets(receive_bytes);
    for (std::uint32_t step = 1; step < P; ++step) {  // each rank begins with another peer
      const std::uint32_t to = (rank_ + step) % P;
      if (send_bytes[to] == 0) continue;
      const auto* from = static_cast<const std::byte*>(send) + out[to];
      if (auto failure = mesh.send(processes_[to], {channel_, round, rank_, to}, from, static_cast<std::size_t>(send_bytes[to]))) return failure;
    }
    std::vector<std::byte> data;
    for (std::uint32_t step = 1; step < P; ++step) {
      const std::uint32_t from = (rank_ + P - step) % P;
      if (receive_bytes[from] == 0) continue;
      if (auto failure = mesh.receive(processes_[from], {channel_, round, from, rank_}, data)) return failure;
      if (data.size() != static_cast<std::size_t>(receive_bytes[from])) {
        return "rank " + std::to_string(from) + " sent " + std::to_string(data.size()) + " bytes, " + std::to_string(receive_bytes[from]) + " were expected";
      }
      std::memcpy(static_cast<std::byte*>(receive) + in[from], data.data(), data.size());
    }
    return std::nullopt;
  }

  std::uint64_t channel_;
  std::uint32_t rank_, round_ = 0;
  std::vector<std::uint32_t> processes_;  // of the ranks
};

struct Registry {
  std::mutex mutex;
  std::uint64_t next_channel = 0;                                           // of this process
  std::map<std::string, std::vector<std::uint64_t>> spare;                  // channels that this process gives out, by key and processes
  std::map<std::pair<std::uint64_t, int>, std::shared_ptr<FarRank>> ranks;  // by channel and rank
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

std::string spare_key(const Invitation& invitation) {
  std::string key = invitation.key;
  for (const Ticket& ticket : invitation.tickets) key += '#' + std::to_string(ticket.process);
  return key;
}

std::uint64_t announcement_channel(const Ticket& ticket) { return kAnnouncement | static_cast<std::uint64_t>(ticket.process) << 44 | ticket.number; }

class FarSeat final : public Seat {
 public:
  FarSeat(const Invitation& invitation, std::shared_ptr<FarRank> rank)
      : Seat(invitation.P, &rank->has), spare_key_(invitation.rank == 0 ? spare_key(invitation) : ""), rank_(std::move(rank)) {
    rank_->free.acquire();
  }
  ~FarSeat() override {
    const bool failed = rank_->failed;
    rank_->free.release();
    if (spare_key_.empty() || failed) return;
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.spare[spare_key_].push_back(rank_->channel());
  }

 private:
  void fail(const std::string& reason) override {
    rank_->failed = true;
    ProcessMesh::instance().abort(rank_->channel(), rank_->processes(), reason);
  }

  std::string spare_key_;  // empty but for the first rank
  std::shared_ptr<FarRank> rank_;
};

// The first rank: a channel that no call uses, made known to the others.
ProcessMesh::Failure announce(const Invitation& invitation, std::uint64_t& channel) {
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    std::vector<std::uint64_t>& free = all.spare[spare_key(invitation)];
    if (free.empty()) {
      channel = static_cast<std::uint64_t>(ProcessMesh::instance().my_index()) << 40 | all.next_channel++;
    } else {
      channel = free.back();
      free.pop_back();
    }
  }
  for (int rank = 1; rank < invitation.P; ++rank) {
    const Letter letter{announcement_channel(invitation.tickets.front()), 0, 0, static_cast<std::uint32_t>(rank)};
    if (auto failure = ProcessMesh::instance().send(invitation.tickets[static_cast<std::size_t>(rank)].process, letter, &channel, sizeof(channel))) {
      return failure;
    }
  }
  return std::nullopt;
}

ProcessMesh::Failure hear(const Invitation& invitation, std::uint64_t& channel) {
  const Ticket& ticket = invitation.tickets.front();
  std::vector<std::byte> data;
  const Letter letter{announcement_channel(ticket), 0, 0, static_cast<std::uint32_t>(invitation.rank)};
  if (auto failure = ProcessMesh::instance().receive(ticket.process, letter, data)) return failure;
  if (data.size() != sizeof(channel)) return "an announcement of " + std::to_string(data.size()) + " bytes";
  std::memcpy(&channel, data.data(), sizeof(channel));
  return std::nullopt;
}

}  // namespace

ffi::Error take_far_seat(const Invitation& invitation, std::unique_ptr<Seat>& seat) {
  std::uint64_t channel = 0;
  const ProcessMesh::Failure failure = invitation.rank == 0 ? announce(invitation, channel) : hear(invitation, channel);
  if (failure) return ffi::Error(ffi::ErrorCode::kAborted, "waybill: " + *failure);
  std::shared_ptr<FarRank> rank;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    std::shared_ptr<FarRank>& kept = all.ranks[{channel, invitation.rank}];
    if (kept == nullptr) {
      kept = std::make_shared<FarRank>(invitation, channel);
      WB_FFI_TRY(kept->open());
    }
    rank = kept;
  }
  seat = std::make_unique<FarSeat>(invitation, rank);
  if (rank->key != invitation.key) {  // the first rank has come back to a group that this rank knows with another config
    const std::string text = "the ranks of one call have different configs: rank " + std::to_string(invitation.rank) + " differs from rank 0";
    ProcessMesh::instance().abort(channel, rank->processes(), text);
    return refuse(text);
  }
  return ffi::Error::Success();
}

}  // namespace waybill::jax

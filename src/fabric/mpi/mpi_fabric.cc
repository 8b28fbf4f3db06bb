// SPDX-License-Identifier: Apache-2.0
// One rank's end of a group of processes. Every collective is one pairwise operation of the transport (reductions: two a block).
#include "waybill/mpi_fabric.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "fabric/mpi/transport.h"
#include "fabric/rank_order.h"

namespace waybill {
namespace mpi {
namespace {

constexpr std::size_t kSmallBytes = 16 * 1024;     // per rank; below it a reduction gathers and sums locally
constexpr std::size_t kReduceElements = 1u << 20;  // block of a large all_reduce: bounds its scratch memory

class MpiRequest final : public ExchangeRequest {
 public:
  MpiRequest(std::shared_ptr<Transport> transport, std::shared_ptr<Operation> operation, std::chrono::milliseconds timeout)
      : transport_(std::move(transport)), operation_(std::move(operation)), timeout_(timeout) {}
  ~MpiRequest() override {
    if (operation_ == nullptr) return;
    if (std::uncaught_exceptions() > exceptions_) {
      transport_->fail(operation_->group(), ErrorCode::kPeerFailed,
                       fmt::format("rank {} gave up a pending {}", operation_->group().rank, operation_->describe()));
    }
    try {
      wait();
    } catch (...) {  // the group has failed; its next call says so
    }
  }
  MpiRequest(const MpiRequest&) = delete;
  MpiRequest& operator=(const MpiRequest&) = delete;

  void wait() override {
    if (operation_ == nullptr) return;
    const std::shared_ptr<Operation> operation = std::exchange(operation_, nullptr);
    transport_->wait(operation, timeout_);
  }

 private:
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<Operation> operation_;
  std::chrono::milliseconds timeout_;
  int exceptions_ = std::uncaught_exceptions();
};

class MpiFabric final : public Fabric {
 public:
  MpiFabric(std::shared_ptr<Transport> transport, Group group, std::chrono::milliseconds timeout)
      : transport_(std::move(transport)), group_(std::move(group)), timeout_(timeout) {}
  ~MpiFabric() override { transport_->leave(group_); }
  MpiFabric(const MpiFabric&) = delete;
  MpiFabric& operator=(const MpiFabric&) = delete;

  int rank() const override { return group_.rank; }
  int size() const override { return static_cast<int>(group_.world_ranks.size()); }
  const char* engine() const override { return "mpi"; }
  const Topology& topology() const override { return topology_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }

  void barrier(std::string_view phase) override { pairwise(Collective::kBarrier, phase, 0, 0, nothing(), nothing()); }

  void all_gather(const void* send, void* receive, std::size_t bytes_per_rank, std::string_view phase) override {
    gather(Collective::kAllGather, send, receive, bytes_per_rank, phase, 0);
  }

  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override {
    const auto P = static_cast<std::size_t>(size());
    WB_CHECK(send.size() == P && receive.size() == P, "all_to_all (phase '{}') of {} ranks got {} send and {} receive spans", phase, P, send.size(),
             receive.size());
    return start(Collective::kAllToAll, phase, 0, 0, send, receive);
  }

  void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) override { reduce(values, op, phase); }
  void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) override { reduce(values, op, phase); }
  void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) override { reduce(values, op, phase); }

  void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) override {
    WB_CHECK(root >= 0 && root < size(), "broadcast (phase '{}'): root {} is outside [0, {})", phase, root, size());
    std::vector<Span> send = nothing(), receive = nothing();
    if (rank() == root) std::fill(send.begin(), send.end(), Span{data, bytes});
    receive[static_cast<std::size_t>(root)] = Span{data, bytes};
    pairwise(Collective::kBroadcast, phase, bytes, root, send, receive);
  }

  std::unique_ptr<Fabric> split(int colour, int key, std::string_view name) override;

  void abort(const std::string& reason) noexcept override {
    try {
      transport_->fail(group_, ErrorCode::kPeerFailed, fmt::format("rank {} of group '{}' failed: {}", group_.rank, group_.name, reason));
    } catch (...) {
      transport_->fail(group_, ErrorCode::kPeerFailed, "a rank failed");
    }
  }

  void set_topology(Topology topology) { topology_ = std::move(topology); }

 private:
  std::vector<Span> nothing() const { return std::vector<Span>(static_cast<std::size_t>(size())); }

  std::unique_ptr<ExchangeRequest> start(Collective kind, std::string_view phase, std::size_t signature_bytes, int detail, std::span<const Span> send,
                                         std::span<const Span> receive) {
    Header header;
    header.sequence = sequence_++;
    header.kind = kind;
    header.detail = detail;
    header.signature_bytes = signature_bytes;
    std::memcpy(header.phase, phase.data(), std::min(phase.size(), Header::kPhaseBytes - 1));
    return std::make_unique<MpiRequest>(transport_, transport_->start(group_, header, send, receive), timeout_);
  }
  void pairwise(Collective kind, std::string_view phase, std::size_t signature_bytes, int detail, std::span<const Span> send, std::span<const Span> receive) {
    start(kind, phase, signature_bytes, detail, send, receive)->wait();
  }
  void gather(Collective kind, const void* send, void* receive, std::size_t bytes, std::string_view phase, int detail) {
    const auto P = static_cast<std::size_t>(size());
    const std::vector<Span> from(P, Span{const_cast<void*>(send), bytes});
    std::vector<Span> to(P);
    for (std::size_t p = 0; p < P; ++p) to[p] = Span{static_cast<std::byte*>(receive) + p * bytes, bytes};
    pairwise(kind, phase, bytes, detail, from, to);
  }

  template <class T>
  void reduce(std::span<T> values, ReduceOp op, std::string_view phase) {
    const int detail = rank_order::reduce_detail<T>(op);
    std::vector<T> scratch;
    if (values.size_bytes() <= kSmallBytes) {
      scratch.resize(values.size() * static_cast<std::size_t>(size()));
      gather(Collective::kAllReduce, values.data(), scratch.data(), values.size_bytes(), phase, detail);
      std::copy_n(scratch.begin(), values.size(), values.begin());
      for (int p = 1; p < size(); ++p) rank_order::accumulate(values.data(), scratch.data() + static_cast<std::size_t>(p) * values.size(), values.size(), op);
      return;
    }
    for (std::size_t i = 0; i < values.size(); i += kReduceElements) {
      const std::span<T> block = values.subspan(i, std::min(kReduceElements, values.size() - i));
      rank_order::reduce_block(block, scratch, op, size(), rank(), [&](std::span<const Span> send, std::span<const Span> receive) {
        pairwise(Collective::kAllReduce, phase, block.size_bytes(), detail, send, receive);
      });
    }
  }

  std::shared_ptr<Transport> transport_;
  Group group_;
  std::chrono::milliseconds timeout_;
  Topology topology_;
  std::uint64_t sequence_ = 0;
};

// The members agree on an id that is new to all of them; no MPI communicator is made, so nothing here can hang without a timeout.
std::unique_ptr<Fabric> MpiFabric::split(int colour, int key, std::string_view name) {
  struct Choice {
    int colour, key, next_id;
  };
  const auto P = static_cast<std::size_t>(size());
  const Choice mine{colour, key, transport_->next_group_id()};
  std::vector<Choice> choices(P);
  gather(Collective::kSplit, &mine, choices.data(), sizeof(Choice), name, 0);
  std::set<int> colours;
  int first_id = 0;
  for (const Choice& choice : choices) {
    first_id = std::max(first_id, choice.next_id);
    if (choice.colour >= 0) colours.insert(choice.colour);
  }
  transport_->reserve_group_ids(first_id + static_cast<int>(colours.size()));
  if (colour < 0) return nullptr;

  std::vector<int> members;
  for (std::size_t p = 0; p < P; ++p) {
    if (choices[p].colour == colour) members.push_back(static_cast<int>(p));
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return choices[static_cast<std::size_t>(a)].key < choices[static_cast<std::size_t>(b)].key; });
  Group group;
  group.id = first_id + static_cast<int>(std::distance(colours.begin(), colours.find(colour)));
  group.name = fmt::format("{}/{}:{}", group_.name, name, colour);
  group.ancestors = group_.ancestors;
  group.ancestors.push_back(group_.id);
  Topology topology;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto member = static_cast<std::size_t>(members[i]);
    group.world_ranks.push_back(group_.world_ranks[member]);
    if (members[i] == group_.rank) group.rank = static_cast<int>(i);
    topology.node_of.push_back(topology_.node_of[member]);
    topology.domain_of.push_back(static_cast<int>(i));
  }
  auto fabric = std::make_unique<MpiFabric>(transport_, std::move(group), timeout_);
  fabric->set_topology(std::move(topology));
  return fabric;
}

// Nodes numbered by the first rank that runs on them.
std::vector<int> nodes_by_host(Fabric& world) {
  char name[MPI_MAX_PROCESSOR_NAME] = {};
  int length = 0;
  MPI_Get_processor_name(name, &length);
  const auto P = static_cast<std::size_t>(world.size());
  std::vector<char> names(P * sizeof(name));
  world.all_gather(name, names.data(), sizeof(name), "host names");
  std::vector<std::string> seen;
  std::vector<int> nodes;
  for (std::size_t p = 0; p < P; ++p) {
    const std::string host(names.data() + p * sizeof(name));
    const auto found = std::find(seen.begin(), seen.end(), host);
    nodes.push_back(static_cast<int>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(host);
  }
  return nodes;
}

}  // namespace
}  // namespace mpi

bool mpi_available() { return true; }

bool mpi_launched() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"}) {
    const char* value = std::getenv(variable);
    if (value != nullptr && std::atoi(value) > 1) return true;
  }
  return false;
}

std::unique_ptr<Fabric> make_mpi_fabric(const MpiOptions& options) {
  const std::shared_ptr<mpi::Transport> transport = mpi::Transport::get();
  const int W = transport->world_size();
  const int ranks_per_node = options.fabric.ranks_per_node;
  WB_CHECK(ranks_per_node >= 0 && ranks_per_node <= W, "ranks_per_node = {} must be 0 (by host name) to {} (ranks)", ranks_per_node, W);
  mpi::Group group;
  group.id = transport->agree_on_group_id();
  transport->reserve_group_ids(group.id + 1);
  group.name = "world";
  group.rank = transport->world_rank();
  Topology topology;
  for (int r = 0; r < W; ++r) {
    group.world_ranks.push_back(r);
    topology.domain_of.push_back(r);
    if (ranks_per_node > 0) topology.node_of.push_back(r / ranks_per_node);
  }
  auto fabric = std::make_unique<mpi::MpiFabric>(transport, std::move(group), options.fabric.timeout);
  if (ranks_per_node == 0) topology.node_of = mpi::nodes_by_host(*fabric);
  fabric->set_topology(std::move(topology));
  return fabric;
}

}  // namespace waybill

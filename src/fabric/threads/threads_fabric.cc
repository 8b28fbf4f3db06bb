// SPDX-License-Identifier: Apache-2.0
#include "fabric/threads/threads_fabric.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "fabric/rank_order.h"

namespace waybill::threads {
namespace {

constexpr std::size_t kSmallBytes = 16 * 1024;     // per rank; below it a collective is one rendezvous through the hub's storage
constexpr std::size_t kReduceElements = 1u << 20;  // block of a large all_reduce: bounds its scratch memory

class PairwiseRequest final : public ExchangeRequest {
 public:
  PairwiseRequest(std::shared_ptr<Hub> hub, int rank, std::uint64_t sequence) : hub_(std::move(hub)), rank_(rank), sequence_(sequence) {}
  ~PairwiseRequest() override {
    if (done_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      hub_->withdraw(rank_, sequence_);
      return;
    }
    try {
      wait();
    } catch (...) {  // the group has failed; its next call says so
    }
  }
  PairwiseRequest(const PairwiseRequest&) = delete;
  PairwiseRequest& operator=(const PairwiseRequest&) = delete;

  void wait() override {
    if (done_) return;
    done_ = true;
    try {
      hub_->wait_pairwise(rank_, sequence_);
    } catch (...) {
      hub_->withdraw(rank_, sequence_);  // peers may still be copying from or to our buffers
      throw;
    }
  }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
  std::uint64_t sequence_;
  bool done_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace

void ThreadsFabric::pairwise(Signature signature, std::span<const Span> send, std::span<const Span> receive) {
  const std::uint64_t sequence = sequence_++;
  hub_->post_pairwise(rank_, sequence, std::move(signature), send, receive);
  PairwiseRequest(hub_, rank_, sequence).wait();
}

void ThreadsFabric::barrier(std::string_view phase) {
  hub_->gather_small(rank_, sequence_++, Signature{Collective::kBarrier, std::string(phase), 0, 0}, nullptr, 0, [](const std::byte*) {});
}

void ThreadsFabric::all_gather(const void* send, void* receive, std::size_t bytes_per_rank, std::string_view phase) {
  Signature signature{Collective::kAllGather, std::string(phase), bytes_per_rank, 0};
  const auto P = static_cast<std::size_t>(size());
  if (bytes_per_rank <= kSmallBytes) {
    hub_->gather_small(rank_, sequence_++, std::move(signature), send, bytes_per_rank, [&](const std::byte* all) {
      if (bytes_per_rank > 0) std::memcpy(receive, all, bytes_per_rank * P);
    });
    return;
  }
  const std::vector<Span> from(P, Span{const_cast<void*>(send), bytes_per_rank});
  std::vector<Span> to(P);
  for (std::size_t p = 0; p < P; ++p) to[p] = Span{static_cast<std::byte*>(receive) + p * bytes_per_rank, bytes_per_rank};
  pairwise(std::move(signature), from, to);
}

std::unique_ptr<ExchangeRequest> ThreadsFabric::all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) {
  const auto P = static_cast<std::size_t>(size());
  WB_CHECK(send.size() == P && receive.size() == P, "all_to_all (phase '{}') of {} ranks got {} send and {} receive spans", phase, P, send.size(),
           receive.size());
  const std::uint64_t sequence = sequence_++;
  hub_->post_pairwise(rank_, sequence, Signature{Collective::kAllToAll, std::string(phase), 0, 0}, send, receive);
  return std::make_unique<PairwiseRequest>(hub_, rank_, sequence);
}

template <class T>
void ThreadsFabric::reduce(std::span<T> values, ReduceOp op, std::string_view phase) {
  if (values.size_bytes() <= kSmallBytes) {
    hub_->gather_small(rank_, sequence_++, Signature{Collective::kAllReduce, std::string(phase), values.size_bytes(), rank_order::reduce_detail<T>(op)},
                       values.data(), values.size_bytes(), [&](const std::byte* all) {
                         const T* rows = reinterpret_cast<const T*>(all);  // storage of std::vector<std::byte>: aligned by operator new
                         std::copy(rows, rows + values.size(), values.begin());
                         for (int p = 1; p < size(); ++p)
                           rank_order::accumulate(values.data(), rows + static_cast<std::size_t>(p) * values.size(), values.size(), op);
                       });
    return;
  }
  std::vector<T> scratch;
  for (std::size_t i = 0; i < values.size(); i += kReduceElements) {
    const std::span<T> block = values.subspan(i, std::min(kReduceElements, values.size() - i));
    rank_order::reduce_block(block, scratch, op, size(), rank_, [&](std::span<const Span> send, std::span<const Span> receive) {
      pairwise(Signature{Collective::kAllReduce, std::string(phase), block.size_bytes(), rank_order::reduce_detail<T>(op)}, send, receive);
    });
  }
}

void ThreadsFabric::all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) { reduce(values, op, phase); }
void ThreadsFabric::all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) { reduce(values, op, phase); }
void ThreadsFabric::all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) { reduce(values, op, phase); }

void ThreadsFabric::broadcast(void* data, std::size_t bytes, int root, std::string_view phase) {
  WB_CHECK(root >= 0 && root < size(), "broadcast (phase '{}'): root {} is outside [0, {})", phase, root, size());
  Signature signature{Collective::kBroadcast, std::string(phase), bytes, root};
  if (bytes <= kSmallBytes) {
    hub_->gather_small(rank_, sequence_++, std::move(signature), data, bytes, [&](const std::byte* all) {
      if (bytes > 0 && rank_ != root) std::memcpy(data, all + bytes * static_cast<std::size_t>(root), bytes);
    });
    return;
  }
  const auto P = static_cast<std::size_t>(size());
  std::vector<Span> send(P), receive(P);
  if (rank_ == root) send.assign(P, Span{data, bytes});
  receive[static_cast<std::size_t>(root)] = Span{data, bytes};
  pairwise(std::move(signature), send, receive);
}

std::unique_ptr<Fabric> ThreadsFabric::split(int colour, int key, std::string_view name) {
  Hub::Membership membership = hub_->split(rank_, sequence_++, colour, key, name);
  if (membership.hub == nullptr) return nullptr;
  return std::make_unique<ThreadsFabric>(std::move(membership.hub), membership.rank);
}

void ThreadsFabric::abort(const std::string& reason) noexcept {
  try {
    hub_->fail(ErrorCode::kPeerFailed, fmt::format("rank {} of group '{}' failed: {}", rank_, hub_->name(), reason));
  } catch (...) {
    hub_->fail(ErrorCode::kPeerFailed, "a rank failed, and memory ran out while saying why");
  }
}

}  // namespace waybill::threads

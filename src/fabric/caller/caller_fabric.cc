// SPDX-License-Identifier: Apache-2.0
// A group over the caller's own transport. Every collective is two all-to-alls of the transport: envelopes, which say what a rank calls and
// how much it sends and expects, then the payload. A mismatch is therefore named on every rank, and no payload moves then.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "fabric/collective.h"
#include "fabric/rank_order.h"
#include "waybill/fabric.h"

namespace waybill {
namespace {

constexpr std::size_t kReduceElements = 1u << 20;  // block of an all_reduce: bounds its scratch memory

// Plain data; the sizes sent to each rank [P] and expected from each rank [P], u64, follow.
struct Envelope {
  static constexpr std::size_t kPhaseBytes = 40, kReasonBytes = 192;
  static constexpr std::uint64_t kMagic = 0x5742'6361'6c6c'0001ull;
  std::uint64_t magic = kMagic;
  std::uint64_t sequence = 0;
  Collective kind = Collective::kBarrier;
  std::int32_t detail = 0;
  std::uint64_t signature_bytes = 0;  // what every rank must agree on; 0 where sizes may differ
  char phase[kPhaseBytes] = {};
  char reason[kReasonBytes] = {};  // kLeave: why
};
static_assert(sizeof(Envelope) % sizeof(std::uint64_t) == 0);

template <std::size_t N>
void copy_text(char (&target)[N], std::string_view text) {
  std::memcpy(target, text.data(), std::min(text.size(), N - 1));
}

std::string describe(const Envelope& envelope) {
  return fmt::format("{} '{}' (collective {}, {} bytes, detail {})", to_string(envelope.kind), envelope.phase, envelope.sequence, envelope.signature_bytes,
                     envelope.detail);
}

class DoneRequest final : public ExchangeRequest {
 public:
  void wait() override {}
};

class CallerFabric final : public Fabric {
 public:
  CallerFabric(std::unique_ptr<FabricTransport> transport, int P, int rank, const FabricOptions& options)
      : transport_(std::move(transport)), P_(static_cast<std::size_t>(P)), rank_(rank), timeout_(options.timeout) {
    for (int r = 0; r < P; ++r) {
      topology_.node_of.push_back(options.ranks_per_node > 0 ? r / options.ranks_per_node : 0);
      topology_.domain_of.push_back(r);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(P_); }
  const char* engine() const override { return "caller"; }
  const Topology& topology() const override { return topology_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }

  void barrier(std::string_view phase) override { exchange_envelopes({Collective::kBarrier, phase, 0, 0}, nothing(), nothing()); }

  void all_gather(const void* send, void* receive, std::size_t bytes, std::string_view phase) override {
    gather({Collective::kAllGather, phase, bytes, 0}, send, receive, bytes);
  }

  // The transport has no pending form, so the rows have moved when this returns; wait() is free.
  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override {
    WB_CHECK(send.size() == P_ && receive.size() == P_, "all_to_all (phase '{}') of {} ranks got {} send and {} receive spans", phase, P_, send.size(),
             receive.size());
    pairwise({Collective::kAllToAll, phase, 0, 0}, send, receive);
    return std::make_unique<DoneRequest>();
  }

  void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) override { reduce(values, op, phase); }
  void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) override { reduce(values, op, phase); }
  void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) override { reduce(values, op, phase); }

  void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) override {
    WB_CHECK(root >= 0 && root < size(), "broadcast (phase '{}'): root {} is outside [0, {})", phase, root, size());
    std::vector<Span> send = nothing(), receive = nothing();
    if (rank_ == root) std::fill(send.begin(), send.end(), Span{data, bytes});
    receive[static_cast<std::size_t>(root)] = Span{data, bytes};
    pairwise({Collective::kBroadcast, phase, bytes, root}, send, receive);
  }

  std::unique_ptr<Fabric> split(int, int, std::string_view name) override {
    WB_FAIL(ErrorCode::kUnsupported, "split ('{}'): a group over the caller's transport cannot be split; create one for each group of the transport", name);
  }

  void abort(const std::string& reason) noexcept override;

 private:
  struct Call {
    Collective kind;
    std::string_view phase;
    std::size_t bytes;  // what every rank must give alike
    int detail;
  };

  std::vector<Span> nothing() const { return std::vector<Span>(P_); }
  std::size_t envelope_bytes() const { return sizeof(Envelope) + 2 * P_ * sizeof(std::uint64_t); }
  void move(std::span<const Span> send, std::span<const Span> receive);
  void exchange_envelopes(const Call& call, std::span<const Span> send, std::span<const Span> receive);
  void check_envelopes(const Envelope& mine);
  void pairwise(const Call& call, std::span<const Span> send, std::span<const Span> receive) {
    exchange_envelopes(call, send, receive);
    move(send, receive);
  }
  void gather(const Call& call, const void* send, void* receive, std::size_t bytes) {
    const std::vector<Span> from(P_, Span{const_cast<void*>(send), bytes});
    std::vector<Span> to(P_);
    for (std::size_t p = 0; p < P_; ++p) to[p] = Span{static_cast<std::byte*>(receive) + p * bytes, bytes};
    pairwise(call, from, to);
  }
  template <class T>
  void reduce(std::span<T> values, ReduceOp op, std::string_view phase) {
    std::vector<T> scratch;
    std::size_t begin = 0;
    do {  // an empty reduction is a collective too
      const std::span<T> block = values.subspan(begin, std::min(kReduceElements, values.size() - begin));
      rank_order::reduce_block(block, scratch, op, size(), rank_, [&](std::span<const Span> send, std::span<const Span> receive) {
        pairwise({Collective::kAllReduce, phase, values.size_bytes(), rank_order::reduce_detail<T>(op)}, send, receive);
      });
      begin += block.size();
    } while (begin < values.size());
  }
  [[noreturn]] void fail(ErrorCode code, std::string reason) {
    if (reason_.empty()) {
      code_ = code == ErrorCode::kInvalidArgument ? code : ErrorCode::kPeerFailed;
      reason_ = reason;
    }
    throw_error(code, std::move(reason));
  }

  std::unique_ptr<FabricTransport> transport_;
  std::size_t P_;
  int rank_;
  std::chrono::milliseconds timeout_;
  Topology topology_;
  std::uint64_t sequence_ = 0;
  bool broken_ = false;  // the transport has thrown: nothing more is sent
  std::string reason_;   // of the first failure; the group stays failed
  ErrorCode code_ = ErrorCode::kPeerFailed;
  std::vector<std::byte> envelope_, envelopes_, outgoing_, incoming_;
};

// One all-to-all of the transport. The own rank's part is copied here.
void CallerFabric::move(std::span<const Span> send, std::span<const Span> receive) {
  std::vector<std::int64_t> send_bytes(P_), receive_bytes(P_);
  std::size_t total_out = 0, total_in = 0;
  for (std::size_t p = 0; p < P_; ++p) {
    if (p == static_cast<std::size_t>(rank_)) continue;
    total_out += send[p].bytes;
    total_in += receive[p].bytes;
    send_bytes[p] = static_cast<std::int64_t>(send[p].bytes);
    receive_bytes[p] = static_cast<std::int64_t>(receive[p].bytes);
  }
  outgoing_.resize(total_out);
  incoming_.resize(total_in);
  std::size_t position = 0;
  for (std::size_t p = 0; p < P_; ++p) {
    if (send_bytes[p] > 0) std::memcpy(outgoing_.data() + position, send[p].data, send[p].bytes);
    position += static_cast<std::size_t>(send_bytes[p]);
  }
  try {
    transport_->all_to_all(outgoing_.data(), send_bytes, incoming_.data(), receive_bytes);
  } catch (const Error& error) {
    broken_ = true;
    fail(error.code(), fmt::format("rank {}: the caller's transport failed: {}", rank_, error.what()));
  }
  position = 0;
  for (std::size_t p = 0; p < P_; ++p) {
    if (receive_bytes[p] > 0) std::memcpy(receive[p].data, incoming_.data() + position, receive[p].bytes);
    position += static_cast<std::size_t>(receive_bytes[p]);
  }
  const Span& from = send[static_cast<std::size_t>(rank_)];
  const Span& to = receive[static_cast<std::size_t>(rank_)];
  if (to.bytes > 0 && from.data != to.data) std::memmove(to.data, from.data, to.bytes);
}

void CallerFabric::exchange_envelopes(const Call& call, std::span<const Span> send, std::span<const Span> receive) {
  if (!reason_.empty()) throw_error(code_, reason_);
  Envelope mine;
  mine.sequence = sequence_++;
  mine.kind = call.kind;
  mine.detail = call.detail;
  mine.signature_bytes = call.bytes;
  copy_text(mine.phase, call.phase);
  envelope_.resize(envelope_bytes());
  std::memcpy(envelope_.data(), &mine, sizeof(mine));
  auto* sizes = reinterpret_cast<std::uint64_t*>(envelope_.data() + sizeof(Envelope));
  for (std::size_t p = 0; p < P_; ++p) {
    sizes[p] = send[p].bytes;
    sizes[P_ + p] = receive[p].bytes;
  }
  envelopes_.resize(P_ * envelope_bytes());
  const std::vector<Span> to_all(P_, Span{envelope_.data(), envelope_.size()});
  std::vector<Span> from_all(P_);
  for (std::size_t p = 0; p < P_; ++p) from_all[p] = Span{envelopes_.data() + p * envelope_bytes(), envelope_bytes()};
  move(to_all, from_all);
  check_envelopes(mine);
}

// Every rank sees the same envelopes, so that all of them name the same fault.
void CallerFabric::check_envelopes(const Envelope& mine) {
  const auto at = [&](std::size_t p) {
    Envelope envelope;
    std::memcpy(&envelope, envelopes_.data() + p * envelope_bytes(), sizeof(envelope));
    return envelope;
  };
  const auto size_at = [&](std::size_t p, std::size_t index) {
    std::uint64_t value = 0;
    std::memcpy(&value, envelopes_.data() + p * envelope_bytes() + sizeof(Envelope) + index * sizeof(value), sizeof(value));
    return value;
  };
  const Envelope first = at(0);
  for (std::size_t p = 0; p < P_; ++p) {
    const Envelope other = at(p);
    if (other.magic != mine.magic) fail(ErrorCode::kInvalidArgument, fmt::format("rank {} runs another version of the library", p));
    if (other.kind == Collective::kLeave && p != static_cast<std::size_t>(rank_))
      fail(ErrorCode::kPeerFailed, fmt::format("rank {} failed: {}", p, other.reason));
  }
  for (std::size_t p = 1; p < P_; ++p) {
    const Envelope other = at(p);
    const bool same = other.kind == first.kind && other.detail == first.detail && other.signature_bytes == first.signature_bytes &&
                      other.sequence == first.sequence && std::strncmp(other.phase, first.phase, Envelope::kPhaseBytes) == 0;
    if (!same) fail(ErrorCode::kInvalidArgument, fmt::format("ranks call different collectives: rank 0 {}, rank {} {}", describe(first), p, describe(other)));
  }
  for (std::size_t p = 0; p < P_; ++p) {
    for (std::size_t q = 0; q < P_; ++q) {
      if (size_at(p, q) == size_at(q, P_ + p)) continue;
      fail(ErrorCode::kInvalidArgument,
           fmt::format("{}: rank {} sends {} bytes to rank {}, which expects {} bytes", describe(mine), p, size_at(p, q), q, size_at(q, P_ + p)));
    }
  }
}

// Peers that wait in their next collective receive this instead of its envelope. Blocks until they have come, or the transport gives up.
void CallerFabric::abort(const std::string& reason) noexcept {
  try {
    if (!reason_.empty() || broken_) return;
    reason_ = fmt::format("rank {} failed: {}", rank_, reason);
    Envelope mine;
    mine.sequence = sequence_++;
    mine.kind = Collective::kLeave;
    copy_text(mine.reason, reason);
    envelope_.assign(envelope_bytes(), std::byte{0});
    std::memcpy(envelope_.data(), &mine, sizeof(mine));
    envelopes_.resize(P_ * envelope_bytes());
    const std::vector<Span> to_all(P_, Span{envelope_.data(), envelope_.size()});
    std::vector<Span> from_all(P_);
    for (std::size_t p = 0; p < P_; ++p) from_all[p] = Span{envelopes_.data() + p * envelope_bytes(), envelope_bytes()};
    move(to_all, from_all);
  } catch (...) {  // the transport gave up as well; its peers learn from it
  }
}

}  // namespace

std::unique_ptr<Fabric> make_caller_fabric(std::unique_ptr<FabricTransport> transport, int P, int rank, const FabricOptions& options) {
  WB_CHECK(transport != nullptr, "the transport is null");
  WB_CHECK(P >= 1, "P is {}, it must be positive", P);
  WB_CHECK(rank >= 0 && rank < P, "rank is {}, a group of {} has ranks 0 to {}", rank, P, P - 1);
  WB_CHECK(options.ranks_per_node >= 0, "ranks_per_node is {}, it must not be negative (0 = one node)", options.ranks_per_node);
  return std::make_unique<CallerFabric>(std::move(transport), P, rank, options);
}

}  // namespace waybill

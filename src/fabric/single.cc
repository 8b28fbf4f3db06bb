// SPDX-License-Identifier: Apache-2.0
// A group of one rank.
#include <cstring>

#include "waybill/fabric.h"

namespace waybill {
namespace {

class DoneRequest final : public ExchangeRequest {
 public:
  void wait() override {}
};

class SingleFabric final : public Fabric {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const char* engine() const override { return "single"; }
  const Topology& topology() const override { return topology_; }
  std::chrono::milliseconds timeout() const override { return FabricOptions{}.timeout; }

  void barrier(std::string_view) override { check(); }
  void all_gather(const void* send, void* receive, std::size_t bytes_per_rank, std::string_view) override {
    check();
    if (bytes_per_rank > 0 && send != receive) std::memcpy(receive, send, bytes_per_rank);
  }
  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override {
    check();
    WB_CHECK(send.size() == 1 && receive.size() == 1, "all_to_all (phase '{}') of 1 rank got {} send and {} receive spans", phase, send.size(), receive.size());
    WB_CHECK(send[0].bytes == receive[0].bytes, "all_to_all (phase '{}'): rank 0 sends {} bytes to rank 0, which expects {} bytes", phase, send[0].bytes,
             receive[0].bytes);
    if (send[0].bytes > 0 && send[0].data != receive[0].data) std::memcpy(receive[0].data, send[0].data, send[0].bytes);
    return std::make_unique<DoneRequest>();
  }
  void all_reduce(std::span<float>, ReduceOp, std::string_view) override { check(); }
  void all_reduce(std::span<double>, ReduceOp, std::string_view) override { check(); }
  void all_reduce(std::span<std::int64_t>, ReduceOp, std::string_view) override { check(); }
  void broadcast(void*, std::size_t, int root, std::string_view phase) override {
    check();
    WB_CHECK(root == 0, "broadcast (phase '{}'): root {} is outside [0, 1)", phase, root);
  }
  std::unique_ptr<Fabric> split(int colour, int, std::string_view) override {
    check();
    return colour < 0 ? nullptr : make_single_fabric();
  }
  void abort(const std::string& reason) noexcept override {
    try {
      if (reason_.empty()) reason_ = "rank 0 failed: " + reason;
    } catch (...) {
      reason_ = "failed";
    }
  }

 private:
  void check() const {
    if (!reason_.empty()) throw_error(ErrorCode::kPeerFailed, reason_);
  }

  Topology topology_{{0}, {0}};
  std::string reason_;
};

}  // namespace

std::unique_ptr<Fabric> make_single_fabric() { return std::make_unique<SingleFabric>(); }

}  // namespace waybill

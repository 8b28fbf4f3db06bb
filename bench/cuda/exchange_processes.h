// SPDX-License-Identifier: Apache-2.0
// The exchange benchmark's ranks as two processes over NCCL windows. Builds without NCCL's headers refuse.
#pragma once

#include "bench/cuda/exchange_group.h"

#if __has_include(<nccl_device.h>)
#include "cuda/processes.h"

namespace waybill::cuda {

// The world's arena is made once and large: windows of earlier shapes are given back by starting at its beginning again.
class NcclArena final : public BenchArena {
 public:
  NcclArena(NcclWorld& world, std::size_t bytes) : world_(world) {
    WB_CHECK(bytes <= kBytes, "the benchmark's arena has {} bytes, {} are needed", kBytes, bytes);
    static const std::uint64_t start = world.window("benchmark", kBytes);
    start_ = used_ = start;
    world_.host_fabric().barrier("arena");  // no rank still works on the former shape
  }
  std::uint64_t window(const std::string&, std::size_t bytes) override {
    const std::uint64_t offset = used_;
    used_ += (bytes + 255) / 256 * 256;
    return offset;
  }
  void* at(int, std::uint64_t offset) const override { return world_.at<void>(offset); }
  LocalRanks ranks(int) const override { return world_.local_ranks(); }
  std::string first_error() const override { return world_.first_error(); }
  void line_up() const override { world_.host_fabric().barrier("line up"); }

  static constexpr std::size_t kBytes = std::size_t{1} << 30;

 private:
  NcclWorld& world_;
  std::uint64_t start_ = 0, used_ = 0;
};

// Exit code: the larger of both.
inline int run_two_processes(const std::function<int(NcclWorld&)>& body) {
  const std::vector<int> codes = run_processes(2, [&](int) {
    NcclWorld world(NcclOptions{NcclArena::kBytes + (std::size_t{4} << 20), std::chrono::milliseconds(20000)});
    return body(world);
  });
  return std::max(codes[0], codes[1]);
}

}  // namespace waybill::cuda
#else
namespace waybill::cuda {

class NcclWorld {
 public:
  int rank() const { return 0; }
  int device() const { return 0; }
  Fabric& host_fabric() { WB_FAIL(ErrorCode::kUnsupported, "built without NCCL's headers"); }
};
class NcclArena final : public BenchArena {
 public:
  NcclArena(NcclWorld&, std::size_t) {}
  std::uint64_t window(const std::string&, std::size_t) override { return 0; }
  void* at(int, std::uint64_t) const override { return nullptr; }
  LocalRanks ranks(int) const override { return {}; }
  std::string first_error() const override { return {}; }
};
inline int run_two_processes(const std::function<int(NcclWorld&)>&) { WB_FAIL(ErrorCode::kUnsupported, "built without NCCL's headers"); }

}  // namespace waybill::cuda
#endif

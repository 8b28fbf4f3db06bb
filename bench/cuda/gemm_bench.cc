// SPDX-License-Identifier: Apache-2.0
// Grouped matmul benchmark: checks a sample of what it times against sums in double, then times it beside cuBLASLt's dense 8192^3 of the
// same run; prints a table and writes records as JSON lines. Exit code 1 when a check fails: its record says "checked": false.
//   bench_cuda_gemm OUT.jsonl [--filter TEXT] [--op TEXT] [--loads] [--sweep] [--tile COLUMNS,STAGES,CLUSTER,BUFFERS] [--band B] [--slices S]
//     --loads   also the loads W0 to W9 of bench/shapes/loads.toml and softmax, hot90 and zipf (bench/loads.h)
//     --sweep   every tile and band instead of the policy's choice, briefly; no records
//     --tile, --band, --slices   in place of the policy's choice
// Method "burst": before each of 5 repetitions the device spins 15 ms, so that the host queues ahead; then 10 calls between two events; the
// median. Random normal data, clocks left alone, one set of buffers. TFLOP/s count valid rows.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/gemm_anchor.h"
#include "bench/cuda/matmul_harness.h"
#include "bench/cuda/run_main.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"
#include "cuda/gemm_reference.h"
#include "ops/gemm/cuda/grouped_run.h"

namespace waybill::cuda {
namespace {

constexpr double kTargetDense = 803;  // targets belong to a run whose dense product reaches this; they are scaled to this run's

enum Op : int { kForward = 0, kGather, kDgrad, kStore, kStoreGatherA, kStoreGatherB, kStoreF32, kAccumulate, kNumOps };
int num_sms() {
  int count = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

class Bench {
 public:
  static constexpr const char* kNames[] = {"gemm_fwd",        "gemm_fwd gather",          "gemm_dgrad",
                                           "gemm_wgrad bf16", "gemm_wgrad bf16 gather a", "gemm_wgrad bf16 gather b",
                                           "gemm_wgrad f32",  "gemm_wgrad f32 +="};
  static_assert(std::size(kNames) == kNumOps);
  static bool is_swept(int op) { return op == kForward || op == kDgrad || op == kStore || op == kAccumulate; }
  explicit Bench(const MatmulShape& s) : s_(s) {
    const std::vector<std::int64_t> counts = bench::load_counts(s.load, s.L, s.rows);
    const std::vector<std::int32_t> offsets = bench::load_offsets(s.load, s.L, s.rows);
    S_ = offsets.back();
    largest_ = *std::max_element(counts.begin(), counts.end());
    for (const std::int64_t c : counts) used_ += c > 0 ? 1 : 0;
    offsets_ = DeviceBuffer(offsets.size() * 4);
    offsets_.upload(offsets.data(), offsets_.bytes());
    std::vector<std::int32_t> list(static_cast<std::size_t>(S_));
    std::iota(list.begin(), list.end(), 0);
    std::shuffle(list.begin(), list.end(), std::mt19937(3));
    list_ = DeviceBuffer(list.size() * 4);
    list_.upload(list.data(), list_.bytes());
    a_ = random(S_ * s.C, 1), w_ = random(s.L * s.N * s.C, 2), dy_ = random(S_ * s.N, 3);
    const std::int64_t out = std::max({S_ * s.N * 2, S_ * s.C * 2, s.L * s.N * s.C * 4});
    d_ = DeviceBuffer(static_cast<std::size_t>(out));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  GroupedProblem problem(int op) const {
    GroupedProblem p{};
    p.form = op <= kGather ? GemmForm::kNT : (op == kDgrad ? GemmForm::kNN : GemmForm::kTN);
    p.output = op == kStoreF32 ? GemmOutput::kF32 : (op == kAccumulate ? GemmOutput::kAddF32 : GemmOutput::kBf16);
    p.groups = s_.L, p.rows = S_, p.offsets = offsets_.as<std::int32_t>(), p.d = d_.data();
    if (op == kGather || op == kStoreGatherA) p.a_list = list_.as<std::int32_t>(), p.a_rows = S_;
    if (op == kStoreGatherB) p.b_list = list_.as<std::int32_t>(), p.b_rows = S_;
    p.a = op <= kGather ? a_.data() : dy_.data();
    p.b = op <= kDgrad ? w_.data() : a_.data();
    p.m = op >= kStore ? s_.N : 0, p.n = op <= kGather ? s_.N : s_.C, p.k = op <= kGather ? s_.C : (op == kDgrad ? s_.N : 0);
    return p;
  }
  GemmTuning tuning(int op) const { return choose_tuning(problem(op), num_sms()); }
  std::vector<GemmTile> tiles(int op) const {
    std::vector<GemmTile> all;
    const GroupedProblem p = problem(op);
    for (const GemmKernel& kernel : grouped_kernels(p.form, p.output)) all.push_back(kernel.tile);
    return all;
  }
  bool check(int op, const GemmTuning& tuning) const {
    if (op == kAccumulate) {
      WB_TRY_CUDA(cudaMemsetAsync(d_.data(), 0, d_.bytes(), stream_));
    } else {
      d_.fill(0xcd, stream_);
    }
    const GroupedProblem p = problem(op);
    run_grouped(p, tuning, 0, stream_);
    const std::int64_t samples = op >= kStore ? std::min<std::int64_t>(20000, std::int64_t{1500000000} / std::max<std::int64_t>(largest_, 1)) : 20000;
    const GemmCheck got = check_grouped(p, nullptr, 0xcd, S_, samples, stream_);
    if (got.wrong != 0) fmt::print("{} {}: {}\n", kNames[op], describe(tuning), got.describe());
    return got.wrong == 0 && got.checked > 0;
  }
  Spread time(int op, const GemmTuning& tuning, int repetitions, int calls, double spin_ms) const {
    const GroupedProblem p = problem(op);
    return time_burst(stream_, repetitions, calls, spin_ms, [&] { run_grouped(p, tuning, 0, stream_); });
  }
  double flops() const { return 2.0 * static_cast<double>(S_) * static_cast<double>(s_.N) * static_cast<double>(s_.C); }
  // Operands read once, weights and their gradients of groups that have rows (a gradient of an empty group is zeros that must be written).
  double bytes(int op) const {
    const double weights = static_cast<double>(s_.N) * static_cast<double>(s_.C), rows = static_cast<double>(S_);
    const double wide = rows * static_cast<double>(s_.N + s_.C) * 2;
    if (op < kStore) return wide + static_cast<double>(used_) * weights * 2;
    const double size = op <= kStoreGatherB ? 2 : (op == kStoreF32 ? 4 : 8);
    return wide + static_cast<double>(op == kAccumulate ? used_ : s_.L) * weights * size;
  }
  double target(int op) const {
    return op == kForward ? s_.fwd : (op == kDgrad ? s_.dgrad : (op == kStore ? s_.store : (op == kAccumulate ? s_.accumulate : 0)));
  }

 private:
  static DeviceBuffer random(std::int64_t count, std::uint64_t seed) {
    DeviceBuffer buffer(static_cast<std::size_t>(std::max<std::int64_t>(count, 8)) * 2);
    fill_normal(buffer.data(), DType::kBF16, static_cast<std::size_t>(count), seed, 1.0f, nullptr);
    return buffer;
  }
  MatmulShape s_;
  std::int64_t S_ = 0, largest_ = 0, used_ = 0;
  CudaStream stream_;
  DeviceBuffer a_, w_, dy_, d_, offsets_, list_;
};

std::vector<MatmulShape> shapes(bool with_loads) {
  std::vector<MatmulShape> all = {
      {8, 4096, 4096, 7168, "even", 805, 810, 795, 740},  {8, 4096, 7168, 2048, "even", 810, 812, 780, 730},
      {32, 1024, 4096, 7168, "even", 785, 800, 745, 600}, {128, 2048, 1536, 2048, "even", 780, 788, 745, 680},
      {128, 2048, 2048, 768, "even", 745, 772, 735, 680}, {32, 288, 512, 1024, "even", 380, 380, 280, 200},
      {32, 9216, 1024, 512, "even", 670, 700, 750, 650},  {256, 320, 1024, 2048, "even", 560, 560, 560, 480},
      {256, 320, 2048, 512, "even", 480, 540, 530, 440},  {1152, 256, 1024, 512, "even", 0, 0, 0, 0},
  };
  if (with_loads) add_loads(all, {32, 9216, 1024, 512, "", 650, 680, 715, 620}, {32, 1024, 4096, 7168, "", 740, 750, 700, 560});
  return all;
}

int main_checked(int argc, char** argv) {
  const MatmulOptions options = matmul_options(argc, argv, "gemm.jsonl");
  Anchor anchor;
  return run_matmul_bench<Bench>(options, shapes(options.with_loads), kTargetDense, anchor, "dense", "cuBLASLt bf16 8192^3");
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_gemm", waybill::cuda::main_checked, argc, argv); }

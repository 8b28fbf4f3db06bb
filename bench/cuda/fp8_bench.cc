// SPDX-License-Identifier: Apache-2.0
// 8-bit grouped matmul benchmark: checks a sample of what it times against sums in double, then times it beside cuBLASLt's dense E4M3 8192^3 of
// the same run; prints a table and writes records as JSON lines. Exit code 1 when a check fails.
//   bench_cuda_fp8 OUT.jsonl [--filter TEXT] [--op TEXT] [--loads] [--sweep] [--tile COLUMNS,STAGES,CLUSTER,BUFFERS] [--band B] [--slices S]
//     --loads   also the loads W0 to W9 of bench/shapes/loads.toml and softmax, hot90 and zipf (bench/loads.h)
//     --sweep   every tile and band instead of the policy's choice, briefly; no records
//     --tile, --band, --slices   in place of the policy's choice
// Operands are normal values quantised by the GPU quantisers (1 x 128, 128 x 128, 128 x 1, scales powers of two) before the clock starts.
// Method "burst": before each of 5 repetitions the device spins 15 ms; then 10 calls between two events; the median. TFLOP/s count valid rows.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/cuda/device_inputs.h"
#include "bench/cuda/gemm_dense.h"
#include "bench/cuda/matmul_harness.h"
#include "bench/cuda/run_main.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"
#include "cuda/fp8_reference.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "waybill/quantize.h"

namespace waybill::cuda {
namespace {

constexpr double kTargetDense = 1528;
constexpr std::int64_t kDense = 8192;

DeviceBuffer normal(std::int64_t count, std::uint64_t seed) {
  DeviceBuffer x(static_cast<std::size_t>(count) * 2 + 16);
  fill_normal(x.data(), DType::kBF16, static_cast<std::size_t>(count), seed, 1.0f, nullptr);
  return x;
}

// Codes of one tensor, as rows (or tiles) and turned, with the scales of each.
struct Coded {
  DeviceBuffer codes, scales, turned, turned_scales;

  // rows of a ragged tensor: 1 x 128, and 128 x 1 turned
  static Coded rows(std::int64_t S, std::int64_t columns, const DeviceBuffer& offsets, std::int64_t L, std::uint64_t seed) {
    const std::int64_t blocks = max_block_rows(S, L, 128), k_blocks = (columns + 127) / 128;
    const DeviceBuffer x = normal(S * columns, seed);
    Coded c;
    c.codes = DeviceBuffer(size(S * columns)), c.scales = DeviceBuffer(size(S * k_blocks * 4));
    c.turned = DeviceBuffer(size(blocks * columns * 128)), c.turned_scales = DeviceBuffer(size(blocks * columns * 4));
    QuantizedView straight, turn;
    straight.codes = device_view(c.codes, DType::kU8, {S, columns}), straight.scales = device_view(c.scales, DType::kF32, {S, k_blocks});
    straight.scales.stride[0] = 1, straight.scales.stride[1] = S;  // those of adjacent rows adjacent
    turn.turned = device_view(c.turned, DType::kU8, {blocks, columns, 128}), turn.scales = device_view(c.turned_scales, DType::kF32, {blocks, columns});
    quantize_both(fp8_rows(), {ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1}, device_view(x, DType::kBF16, {S, columns}),
                  device_view(offsets, DType::kI32, {L + 1}), straight, turn, {kGpu, nullptr, nullptr});
    WB_TRY_CUDA(cudaDeviceSynchronize());
    return c;
  }
  static Coded tiles(std::int64_t L, std::int64_t N, std::int64_t C, std::uint64_t seed) {
    std::vector<std::int32_t> firsts;
    for (std::int64_t g = 0; g <= L; ++g) firsts.push_back(static_cast<std::int32_t>(g * N));
    const DeviceBuffer x = normal(L * N * C, seed), offsets = upload(firsts);
    const std::int64_t blocks = L * ((N + 127) / 128);
    Coded c;
    c.codes = DeviceBuffer(size(L * N * C)), c.turned = DeviceBuffer(size(blocks * C * 128)), c.scales = DeviceBuffer(size(blocks * ((C + 127) / 128) * 4));
    QuantizedView out;
    out.codes = device_view(c.codes, DType::kU8, {L * N, C}), out.turned = device_view(c.turned, DType::kU8, {blocks, C, 128});
    out.scales = device_view(c.scales, DType::kF32, {blocks, (C + 127) / 128});
    quantize(fp8_tiles(), device_view(x, DType::kBF16, {L * N, C}), device_view(offsets, DType::kI32, {L + 1}), out, {kGpu, nullptr, nullptr});
    WB_TRY_CUDA(cudaDeviceSynchronize());
    return c;
  }
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count) + 16; }
};

enum Op : int { kForward = 0, kDgrad, kStore, kAccumulate, kNumOps };
class Bench {
 public:
  static constexpr const char* kNames[] = {"fp8_fwd", "fp8_dgrad", "fp8_wgrad bf16", "fp8_wgrad f32 +="};
  static_assert(std::size(kNames) == kNumOps);
  static bool is_swept(int) { return true; }
  explicit Bench(const MatmulShape& s) : s_(s) {
    const std::vector<std::int64_t> counts = bench::load_counts(s.load, s.L, s.rows);
    const std::vector<std::int32_t> offsets = bench::load_offsets(s.load, s.L, s.rows);
    for (const std::int64_t c : counts) used_ += c > 0 ? 1 : 0;
    S_ = offsets.back(), largest_ = *std::max_element(counts.begin(), counts.end());
    offsets_ = upload(offsets);
    a_ = Coded::rows(S_, s.C, offsets_, s.L, 1), dy_ = Coded::rows(S_, s.N, offsets_, s.L, 3), w_ = Coded::tiles(s.L, s.N, s.C, 2);
    d_ = DeviceBuffer(static_cast<std::size_t>(std::max({S_ * s.N * 2, S_ * s.C * 2, s.L * s.N * s.C * 4})));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  Fp8Problem problem(int op) const {
    const std::int64_t n_blocks = (s_.N + 127) / 128, c_blocks = (s_.C + 127) / 128;
    Fp8Problem p{};
    p.form = op < kStore ? GemmForm::kNT : GemmForm::kTN, p.output = op == kAccumulate ? GemmOutput::kAddF32 : GemmOutput::kBf16;
    p.types = Fp8Types::kE4M3, p.groups = s_.L, p.rows = S_, p.offsets = offsets_.as<std::int32_t>(), p.d = d_.data();
    p.n = op == kForward ? s_.N : s_.C, p.k = op == kForward ? s_.C : (op == kDgrad ? s_.N : 0), p.m = op >= kStore ? s_.N : 0;
    const Coded& a = op == kForward ? a_ : dy_;
    const Coded& b = op < kStore ? w_ : a_;
    p.a = (op < kStore ? a.codes : a.turned).data(), p.b = (op == kForward ? b.codes : b.turned).data();
    p.a_scales = (op < kStore ? a.scales : a.turned_scales).as<float>(), p.b_scales = (op < kStore ? b.scales : b.turned_scales).as<float>();
    p.a_scale_stride = 1, p.a_scale_k = S_;
    p.b_scale_group = n_blocks * c_blocks, p.b_scale_column = op == kForward ? c_blocks : 1, p.b_scale_k = op == kForward ? 1 : c_blocks;
    p.b_is_turned = op == kDgrad, p.max_blocks = max_block_rows(S_, s_.L, 128);
    return p;
  }
  Fp8Tuning tuning(int op) const { return choose_fp8_tuning(problem(op), 132); }
  std::vector<GemmTile> tiles(int op) const {
    std::vector<GemmTile> all;
    const Fp8Problem p = problem(op);
    for (const Fp8Kernel& kernel : fp8_kernels(p.form, p.output, p.types)) all.push_back(kernel.tile);
    return all;
  }
  bool check(int op, const Fp8Tuning& tuning) const {
    if (op == kAccumulate) {
      WB_TRY_CUDA(cudaMemsetAsync(d_.data(), 0, d_.bytes(), stream_));
    } else {
      d_.fill(0xcd, stream_);
    }
    const Fp8Problem p = problem(op);
    run_fp8(p, tuning, 0, stream_);
    const std::int64_t samples = op >= kStore ? std::min<std::int64_t>(5000, std::int64_t{400000000} / std::max<std::int64_t>(largest_, 1)) : 5000;
    const GemmCheck got = check_fp8(p, nullptr, 0xcd, S_, samples, false, stream_);
    if (got.wrong != 0) fmt::print("{} {}: {}\n", kNames[op], describe(tuning), got.describe());
    return got.wrong == 0 && got.checked > 0;
  }
  Spread time(int op, const Fp8Tuning& tuning, int repetitions, int calls, double spin_ms) const {
    const Fp8Problem p = problem(op);
    return time_burst(stream_, repetitions, calls, spin_ms, [&] { run_fp8(p, tuning, 0, stream_); });
  }
  double flops() const { return 2.0 * static_cast<double>(S_) * static_cast<double>(s_.N) * static_cast<double>(s_.C); }
  // Codes read once, results written once; scales (1/32 of the codes at most) are left out.
  double bytes(int op) const {
    const double weights = static_cast<double>(s_.N) * static_cast<double>(s_.C), rows = static_cast<double>(S_);
    const auto in = static_cast<double>(op == kForward ? s_.C : s_.N), out = static_cast<double>(op == kForward ? s_.N : s_.C);
    if (op < kStore) return rows * (in + 2 * out) + static_cast<double>(used_) * weights;
    return rows * (in + out) + static_cast<double>(op == kAccumulate ? used_ : s_.L) * weights * (op == kStore ? 2 : 8);
  }
  double target(int op) const { return op == kForward ? s_.fwd : (op == kDgrad ? s_.dgrad : (op == kStore ? s_.store : s_.accumulate)); }

 private:
  MatmulShape s_;
  std::int64_t S_ = 0, largest_ = 0, used_ = 0;
  CudaStream stream_;
  Coded a_, dy_, w_;
  DeviceBuffer d_, offsets_;
};

class Anchor {
 public:
  Anchor() : gemm_(kDense, kDense, kDense, true), c_(static_cast<std::size_t>(kDense * kDense) * 2) {
    const DeviceBuffer offsets = upload({0, static_cast<std::int32_t>(kDense)});
    a_ = Coded::rows(kDense, kDense, offsets, 1, 11), b_ = Coded::rows(kDense, kDense, offsets, 1, 12);
  }
  double tflops() {
    const Spread t = time_burst(stream_, 5, 10, 15, [&] { gemm_.run(a_.codes.data(), b_.codes.data(), c_.data(), stream_); });
    return 2.0 * static_cast<double>(kDense * kDense * kDense) / t.us * 1e-6;
  }

 private:
  DenseGemm gemm_;
  CudaStream stream_;
  Coded a_, b_;
  DeviceBuffer c_;
};

std::vector<MatmulShape> shapes(bool with_loads) {
  std::vector<MatmulShape> all = {
      {8, 4096, 4096, 7168, "even", 1440, 1440, 1100, 1040},
      {8, 4096, 7168, 2048, "even", 1360, 1360, 1050, 1000},
      {32, 1024, 4096, 7168, "even", 1395, 1395, 1000, 780},
      {128, 2048, 1536, 2048, "even", 1355, 1300, 1000, 900},
      {128, 2048, 2048, 768, "even", 1095, 1095, 900, 850},
      {32, 288, 512, 1024, "even", 560, 560, 280, 220},
      {32, 9216, 1024, 512, "even", 0, 0, 0, 0},
      {256, 320, 1024, 2048, "even", 0, 0, 0, 0},
      {256, 320, 2048, 512, "even", 0, 0, 0, 0},
      {1152, 256, 1024, 512, "even", 0, 0, 0, 0},
  };
  if (with_loads) add_loads(all, {32, 9216, 1024, 512, "", 0, 0, 0, 0}, {32, 1024, 4096, 7168, "", 0, 0, 0, 0});
  return all;
}

int main_checked(int argc, char** argv) {
  const MatmulOptions options = matmul_options(argc, argv, "fp8.jsonl");
  register_quantize();
  Anchor anchor;
  return run_matmul_bench<Bench>(options, shapes(options.with_loads), kTargetDense, anchor, "dense_fp8", "cuBLASLt E4M3 8192^3, fast accumulation");
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_fp8", waybill::cuda::main_checked, argc, argv); }

// SPDX-License-Identifier: Apache-2.0
// quantized_gemm() and its siblings on the GPU. Wide formats: to the bit the bf16 products of dequantised operands, with the workspace that was
// booked and not a byte more. 8-bit products: close to the CPU's through fp32.
#include "waybill/quantized_gemm.h"

#include <cmath>

#include "core/cuda/graph.h"
#include "cuda/quantize_harness.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/gemm/cuda/widened_run.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t kL = 6, kN = 256, kC = 384;
const std::vector<int> kCounts = {130, 0, 1, 300, 64, 17};
const Stream kStream{kGpu, nullptr, nullptr};

class QuantizedGemmCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    WB_NEEDS_GPU();
    register_gemm(), register_quantize(), register_quantized_gemm();
  }
};

Pair offsets(const std::vector<std::int32_t>& values) {
  Pair o(DType::kI32, {static_cast<std::int64_t>(values.size())}, false);
  std::copy(values.begin(), values.end(), o.host.as<std::int32_t>());
  o.upload();
  return o;
}

Pair normal(std::int64_t rows, std::int64_t columns, unsigned seed) {
  Pair x(DType::kBF16, {rows, columns}, false);
  std::mt19937 random(seed);
  std::normal_distribution<float> values;
  for (std::int64_t i = 0; i < x.host.size(); ++i) x.host.as<bf16>()[i] = bf16(values(random));
  x.upload();
  return x;
}

CodedPair coded(const QuantConfig& config, const Pair& x, const Pair& offs, bool turned) {
  CodedPair q(config, x.host.dim(0), x.host.dim(1), offs.cpu(), turned, false);
  quantize(config, x.cpu(), offs.cpu(), q.cpu());
  WB_TRY_CUDA(cudaDeviceSynchronize());
  quantize(config, x.gpu(), offs.gpu(), q.gpu(), kStream);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  return q;
}

Pair widened(const CodedPair& q, const Pair& offs, std::int64_t rows, std::int64_t columns) {
  Pair wide(DType::kBF16, {rows, columns});
  dequantize(q.config, q.cpu(), offs.cpu(), wide.cpu());
  wide.upload();
  return wide;
}

std::vector<std::int32_t> firsts(std::int64_t outer) {
  std::vector<std::int32_t> values;
  for (std::int64_t g = 0; g <= kL; ++g) values.push_back(static_cast<std::int32_t>(g * outer));
  return values;
}

// Memory of the booked size between two guards.
struct Guarded {
  static constexpr std::size_t kGuard = 4096;
  std::size_t bytes;
  DeviceBuffer memory;
  explicit Guarded(std::size_t given) : bytes(given), memory(given + 2 * kGuard) { memory.fill(0x5a); }
  Workspace workspace() const { return {memory.as<std::byte>() + kGuard, bytes}; }
  void expect_whole() const {
    std::vector<unsigned char> all(bytes + 2 * kGuard);
    memory.download(all.data(), all.size());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < kGuard; ++i) ASSERT_TRUE(all[i] == 0x5a && all[all.size() - 1 - i] == 0x5a) << "the workspace was left at byte " << i;
  }
};

struct Wide {
  const char* name;
  QuantConfig rows, columns;
};
const Wide kWide[] = {{"mxfp8", mxfp8_rows(), mxfp8_columns()},
                      {"mxfp8 e5m2", mxfp8_rows(ElementFormat::kE5M2), mxfp8_columns(ElementFormat::kE5M2)},
                      {"nvfp4", nvfp4_rows(), {ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 16, 1}}};

TEST_F(QuantizedGemmCuda, WideFormatsAreTheProductsOfDequantisedOperands) {
  const std::int64_t S = offsets_of(kCounts).back() + 37;
  const Pair offs = offsets(offsets_of(kCounts));
  for (const Wide& format : kWide) {
    for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
      const bool lnc = layout == WeightLayout::kLNC;
      const std::int64_t outer = lnc ? kN : kC, inner = lnc ? kC : kN;
      const Pair w_offs = offsets(firsts(outer));
      const CodedPair a = coded(format.rows, normal(S, kC, 1), offs, false), dy = coded(format.rows, normal(S, kN, 2), offs, false);
      const CodedPair w = coded(format.rows, normal(kL * outer, inner, 3), w_offs, false);
      const Pair wide_a = widened(a, offs, S, kC), wide_dy = widened(dy, offs, S, kN), wide_w = widened(w, w_offs, kL * outer, inner);
      TensorView weights(wide_w.memory.data(), DType::kBF16, {kL, outer, inner});
      weights.device = kGpu;

      const Pair y(DType::kBF16, {S, kN}), want(DType::kBF16, {S, kN});
      QuantizedGemmArgs forward;
      forward.a = {a.config, a.gpu()}, forward.weights = {w.config, w.gpu()}, forward.offsets = offs.gpu(), forward.y = y.gpu(), forward.layout = layout;
      const Guarded room(quantized_gemm_workspace(forward));
      forward.workspace = room.workspace();
      quantized_gemm(forward, kStream);
      GroupedGemmArgs plain;
      plain.a = wide_a.gpu(), plain.weights = weights, plain.offsets = offs.gpu(), plain.y = want.gpu(), plain.layout = layout;
      grouped_gemm(plain, kStream);
      EXPECT_TRUE(y.downloaded() == want.downloaded()) << format.name << " forward";
      room.expect_whole();

      const Pair da(DType::kBF16, {S, kC}), want_da(DType::kBF16, {S, kC});
      QuantizedDgradArgs dgrad;
      dgrad.dy = {dy.config, dy.gpu()}, dgrad.weights = {w.config, w.gpu()}, dgrad.offsets = offs.gpu(), dgrad.da = da.gpu(), dgrad.layout = layout;
      const Guarded dgrad_room(quantized_gemm_workspace(dgrad));
      dgrad.workspace = dgrad_room.workspace();
      quantized_gemm_dgrad(dgrad, kStream);
      GroupedGemmDgradArgs plain_dgrad;
      plain_dgrad.dy = wide_dy.gpu(), plain_dgrad.weights = weights, plain_dgrad.offsets = offs.gpu(), plain_dgrad.da = want_da.gpu(),
      plain_dgrad.layout = layout;
      grouped_gemm_dgrad(plain_dgrad, kStream);
      EXPECT_TRUE(da.downloaded() == want_da.downloaded()) << format.name << " dgrad";
      dgrad_room.expect_whole();
    }
    const CodedPair a = coded(format.columns, normal(S, kC, 4), offs, false), dy = coded(format.columns, normal(S, kN, 5), offs, false);
    const Pair wide_a = widened(a, offs, S, kC), wide_dy = widened(dy, offs, S, kN), dw(DType::kF32, {kL, kN, kC}), want(DType::kF32, {kL, kN, kC});
    QuantizedWgradArgs args;
    args.a = {a.config, a.gpu()}, args.dy = {dy.config, dy.gpu()}, args.offsets = offs.gpu(), args.d_weights = dw.gpu();
    const Guarded room(quantized_gemm_workspace(args));
    args.workspace = room.workspace();
    quantized_gemm_wgrad(args, kStream);
    GroupedGemmWgradArgs plain;
    plain.a = wide_a.gpu(), plain.dy = wide_dy.gpu(), plain.offsets = offs.gpu(), plain.d_weights = want.gpu();
    grouped_gemm_wgrad(plain, kStream);
    EXPECT_TRUE(dw.downloaded() == want.downloaded()) << format.name << " wgrad";
    room.expect_whole();
  }
}

// A long group is cut into slices, whose partial sums meet in an order that the whole product decides.
TEST_F(QuantizedGemmCuda, WgradInPartsHasTheBitsOfTheWhole) {
  const std::vector<int> counts = {6000, 0, 100, 15};
  const std::int64_t S = offsets_of(counts).back(), L = 4, N = 256, C = 256;  // both in two parts
  const Pair offs = offsets(offsets_of(counts));
  const CodedPair a = coded(mxfp8_columns(), normal(S, C, 6), offs, false), dy = coded(mxfp8_columns(), normal(S, N, 7), offs, false);
  const Pair wide_a = widened(a, offs, S, C), wide_dy = widened(dy, offs, S, N);
  struct Case {
    DType dtype;
    bool accumulate;
  };
  for (const auto& [dtype, accumulate] : {Case{DType::kF32, false}, {DType::kF32, true}, {DType::kBF16, false}}) {
    for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
      const Pair dw(dtype, {L, N, C}, false), want(dtype, {L, N, C}, false);
      std::memset(dw.host.view().data, 0, dw.size()), std::memset(want.host.view().data, 0, want.size());
      dw.upload(), want.upload();
      QuantizedWgradArgs args;
      args.a = {a.config, a.gpu()}, args.dy = {dy.config, dy.gpu()}, args.offsets = offs.gpu(), args.d_weights = dw.gpu(), args.accumulate = accumulate;
      args.layout = layout;
      const Guarded room(quantized_gemm_workspace(args));
      EXPECT_LE(room.bytes, static_cast<std::size_t>(S * std::max(N, C)) * 2 + 512);
      args.workspace = room.workspace();
      quantized_gemm_wgrad(args, kStream);
      GroupedGemmWgradArgs plain;
      plain.a = wide_a.gpu(), plain.dy = wide_dy.gpu(), plain.offsets = offs.gpu(), plain.d_weights = want.gpu(), plain.accumulate = accumulate;
      plain.layout = layout;
      grouped_gemm_wgrad(plain, kStream);
      EXPECT_TRUE(dw.downloaded() == want.downloaded()) << to_string(dtype) << (accumulate ? " accumulated" : "");
      room.expect_whole();
    }
  }
}

// --- products that widen their operands beside themselves ---
// Random codes of every value and scales, 0 and 255 among the bytes; NaN codes in a few rows only.
struct RandomCodes {
  QuantConfig config;
  Pair codes, scales, group_scales;
  RandomCodes(const QuantConfig& format, std::int64_t rows, std::int64_t columns, std::int64_t L, unsigned seed) : config(format) {
    const bool is_e2m1 = format.element == ElementFormat::kE2M1;
    codes = Pair(DType::kU8, {rows, is_e2m1 ? columns / 2 : columns}, false);
    scales = Pair(DType::kU8, {max_block_rows(rows, L, format.block_rows), (columns + format.block_columns - 1) / format.block_columns}, false);
    group_scales = Pair(DType::kF32, {L}, false);
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < codes.host.size(); ++i) {
      auto& code = codes.host.as<std::uint8_t>()[i];
      code = static_cast<std::uint8_t>(random() >> 9);
      if (!is_e2m1 && (code & 0x7f) == 0x7f && i / columns % 97 != 5) code ^= 8;
    }
    for (std::int64_t i = 0; i < scales.host.size(); ++i) {
      const unsigned draw = random() >> 8;
      scales.host.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(is_e2m1 ? draw % 0x7f : (draw % 512 == 0 ? 0 : (draw % 4096 == 1 ? 255 : 118 + draw % 16)));
    }
    for (std::int64_t g = 0; g < L; ++g) group_scales.host.as<float>()[g] = 0.25f + static_cast<float>(random() % 1000);
    codes.upload(), scales.upload(), group_scales.upload();
  }
  QuantizedView q() const { return {codes.gpu(), scales.gpu(), config.scale == ScaleFormat::kE4M3 ? group_scales.gpu() : TensorView{}, {}, {}}; }
  Pair widened(const Pair& offs, std::int64_t columns) const {
    Pair wide(DType::kBF16, {codes.host.dim(0), columns}, false);
    wide.memory.fill(0);
    dequantize(config, q(), offs.gpu(), wide.gpu(), kStream);
    return wide;
  }
};

Pair group_starts(std::int64_t L, std::int64_t outer) {
  std::vector<std::int32_t> values;
  for (std::int64_t g = 0; g <= L; ++g) values.push_back(static_cast<std::int32_t>(g * outer));
  return offsets(values);
}

bool is_hopper() {
  int major = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == 9;
}

// elements: of both rings together, so that slots are used again; the second load goes through the graph of the first.
struct BesideCase {
  std::vector<int> counts, again;
  std::int64_t n, k, elements;
};
const BesideCase kBeside[] = {
    {{300}, {17}, 512, 512, 1 << 20},
    {{0, 1, 129, 256, 514, 0, 2100, 17, 1983}, {5000, 0, 0, 0, 0, 0, 0, 0, 0}, 1000, 1024, 16 << 20},
    {{1000, 8000, 100, 2900, 0, 8000, 1, 3999, 0, 0, 100, 1900},
     {0, 20000, 0, 0, 0, 0, 0, 0, 0, 6000, 0, 0},
     2048,
     256,
     4300000},  // 4 slots of weights, 32 of rows
    {{1000, 0, 0, 0, 1000, 0, 0, 0, 1000, 0, 0, 1000}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 2048, 256, 4300000},
    {{9000, 20000}, {29000, 0}, 256, 256, 3000000},  // one column of tiles: clusters are many blocks apart
};

TEST_F(QuantizedGemmCuda, WidensRowsAndWeightsBesideTheProduct) {
  if (!is_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  for (const QuantConfig& format : {mxfp8_rows(), nvfp4_rows()}) {
    for (const BesideCase& c : kBeside) {
      const auto L = static_cast<std::int64_t>(c.counts.size());
      const std::int64_t S = std::max(offsets_of(c.counts).back(), offsets_of(c.again).back()) + 3;
      const Pair offs = offsets(offsets_of(c.counts)), starts = group_starts(L, c.n);
      const RandomCodes rows(format, S, c.k, L, 1), weights(format, L * c.n, c.k, L, 2);
      const Pair wide_weights = weights.widened(starts, c.k);
      const Pair y(DType::kBF16, {S, c.n}), want(DType::kBF16, {S, c.n}), bias(DType::kF32, {L, c.n}, false);
      for (std::int64_t i = 0; i < L * c.n; ++i) bias.host.as<float>()[i] = static_cast<float>(i % 13) - 6.0f;
      bias.upload();
      const DeviceBuffer rings(static_cast<std::size_t>(c.elements) * 2), room(static_cast<std::size_t>(detail::widened_room(S, L, c.n).words) * 4);
      const DeviceStatus status;
      const WidenedProblem p{L,
                             S,
                             c.n,
                             c.k,
                             format,
                             format,
                             rows.q(),
                             weights.q(),
                             static_cast<const std::int32_t*>(offs.gpu().data),
                             bias.memory.as<float>(),
                             y.memory.data(),
                             status.device_ptr(),
                             rings.data(),
                             c.elements,
                             room.as<std::int32_t>()};
      ASSERT_EQ(refuse_widened(p, 0), "");
      const CudaStream stream;
      rings.fill(0xff), room.fill(0x7f);
      WB_TRY_CUDA(cudaDeviceSynchronize());
      run_widened(p, {}, 0, stream.get());  // what it keeps is made outside of a capture
      stream.synchronize();
      const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t s) { run_widened(p, {}, 0, s); });
      for (const std::vector<int>& counts : {c.counts, c.again}) {
        const std::vector<std::int32_t> values = offsets_of(counts);
        offs.memory.upload(values.data(), values.size() * 4);
        const Pair wide_rows = rows.widened(offs, c.k);
        TensorView w(wide_weights.memory.data(), DType::kBF16, {L, c.n, c.k});
        w.device = kGpu;
        GroupedGemmArgs plain;
        plain.a = wide_rows.gpu(), plain.weights = w, plain.offsets = offs.gpu(), plain.y = want.gpu(), plain.bias = bias.gpu();
        want.memory.fill(kPoison), y.memory.fill(kPoison);
        grouped_gemm(plain, kStream);
        WB_TRY_CUDA(cudaDeviceSynchronize());
        for (int turn = 0; turn < 2; ++turn) {
          graph.launch(stream), stream.synchronize();
          ASSERT_TRUE(y.downloaded() == want.downloaded())
              << (format.element == ElementFormat::kE2M1 ? "nvfp4" : "mxfp8") << " n " << c.n << " k " << c.k << " turn " << turn;
        }
      }
      EXPECT_EQ(status.read(stream).flags, 0u);
      const std::vector<std::int32_t> broken(static_cast<std::size_t>(L) + 1, static_cast<std::int32_t>(S + 5));
      offs.memory.upload(broken.data(), broken.size() * 4);
      graph.launch(stream), stream.synchronize();
      EXPECT_NE(status.read(stream).flags & kStatusBadOffsets, 0u);
    }
  }
}

// Largest difference over the largest magnitude.
double distance(const Pair& got, const Tensor& want) {
  const std::vector<unsigned char> raw = got.downloaded();
  double worst = 0, scale = 0;
  for (std::int64_t i = 0; i < want.size(); ++i) {
    float value;
    std::memcpy(&value, raw.data() + static_cast<std::size_t>(i) * 4, 4);
    worst = std::max(worst, std::fabs(static_cast<double>(value) - want.as<float>()[i])),
    scale = std::max(scale, std::fabs(static_cast<double>(want.as<float>()[i])));
  }
  return worst / scale;
}

TEST_F(QuantizedGemmCuda, EightBitProductsMatchTheCpu) {
  int major = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) GTEST_SKIP() << "needs compute capability 9.0, this GPU has " << major << ".x";
  const std::int64_t S = offsets_of(kCounts).back();
  const Pair offs = offsets(offsets_of(kCounts));
  for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
    const bool lnc = layout == WeightLayout::kLNC;
    const std::int64_t outer = lnc ? kN : kC, inner = lnc ? kC : kN;
    const Pair w_offs = offsets(firsts(outer));
    const CodedPair a = coded(fp8_rows(), normal(S, kC, 1), offs, false), dy = coded(fp8_rows(), normal(S, kN, 2), offs, false);
    const CodedPair w = coded(fp8_tiles(), normal(kL * outer, inner, 3), w_offs, true);
    const Pair y(DType::kF32, {S, kN}), da(DType::kF32, {S, kC});
    const Tensor want = Tensor::zeros(DType::kF32, {S, kN}), want_da = Tensor::zeros(DType::kF32, {S, kC});
    QuantizedGemmArgs forward, on_cpu;
    forward.a = {a.config, a.gpu()}, forward.weights = {w.config, w.gpu()}, forward.offsets = offs.gpu(), forward.y = y.gpu(), forward.layout = layout;
    on_cpu.a = {a.config, a.cpu()}, on_cpu.weights = {w.config, w.cpu()}, on_cpu.offsets = offs.cpu(), on_cpu.y = want, on_cpu.layout = layout;
    EXPECT_EQ(quantized_gemm_workspace(forward), 0u);
    quantized_gemm(forward, kStream), quantized_gemm(on_cpu);
    EXPECT_LT(distance(y, want), 1e-3) << "forward";
    QuantizedDgradArgs dgrad, dgrad_cpu;
    dgrad.dy = {dy.config, dy.gpu()}, dgrad.weights = {w.config, w.gpu()}, dgrad.offsets = offs.gpu(), dgrad.da = da.gpu(), dgrad.layout = layout;
    dgrad_cpu.dy = {dy.config, dy.cpu()}, dgrad_cpu.weights = {w.config, w.cpu()}, dgrad_cpu.offsets = offs.cpu(), dgrad_cpu.da = want_da,
    dgrad_cpu.layout = layout;
    quantized_gemm_dgrad(dgrad, kStream), quantized_gemm_dgrad(dgrad_cpu);
    EXPECT_LT(distance(da, want_da), 1e-3) << "dgrad";
    const QuantConfig columns{ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1};
    const CodedPair at = coded(columns, normal(S, kC, 4), offs, true), dyt = coded(columns, normal(S, kN, 5), offs, true);
    const Pair dw(DType::kF32, {kL, outer, inner});
    const Tensor want_dw = Tensor::zeros(DType::kF32, {kL, outer, inner});
    QuantizedWgradArgs wgrad, wgrad_cpu;
    wgrad.a = {columns, at.gpu()}, wgrad.dy = {columns, dyt.gpu()}, wgrad.offsets = offs.gpu(), wgrad.d_weights = dw.gpu(), wgrad.layout = layout;
    wgrad_cpu.a = {columns, at.cpu()}, wgrad_cpu.dy = {columns, dyt.cpu()}, wgrad_cpu.offsets = offs.cpu(), wgrad_cpu.d_weights = want_dw,
    wgrad_cpu.layout = layout;
    quantized_gemm_wgrad(wgrad, kStream), quantized_gemm_wgrad(wgrad_cpu);
    EXPECT_LT(distance(dw, want_dw), 1e-3) << "wgrad";
  }
}

}  // namespace
}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// Quantiser benchmark: bytes read and written a second beside a plain device copy of the same run; prints a table, writes JSON lines.
//   bench_cuda_quantize OUT.jsonl [--loads] [--part quantise|round|activated]     --loads: also the loads W0 to W9 of bench/shapes/loads.toml
// Method "burst": after 15 ms of spinning 20 calls between two events, median of 5, over rotating buffers of 480 MB together, so that nothing is
// read from the L2. Each result was checked before: codes and scales of 4,096 sampled elements against the CPU's conversions.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/cuda/run_main.h"
#include "bench/loads.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"
#include "cuda/gemm_spin.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/quantize/cuda/qdq.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "waybill/quantize_activated.h"
#include "waybill/recipe.h"

namespace waybill::cuda {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};
constexpr double kWanted = 0.85;  // of the copy's rate

TensorView view_of(const DeviceBuffer& buffer, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view(buffer.data(), dtype, shape);
  view.device = kGpu;
  return view;
}

struct Timed {
  double us = 0, spread = 0;
};

Timed time_burst(const CudaStream& stream, const std::function<void(int)>& body) {
  constexpr int kCalls = 20;
  const CudaEvent begin, end;
  for (int i = 0; i < 4; ++i) body(i);
  stream.synchronize();
  std::vector<double> us;
  for (int r = 0; r < 5; ++r) {
    spin(15, stream);
    begin.record(stream);
    for (int i = 0; i < kCalls; ++i) body(i);
    end.record(stream);
    end.synchronize();
    us.push_back(static_cast<double>(end.elapsed_us_since(begin)) / kCalls);
  }
  std::sort(us.begin(), us.end());
  return {us[2], us[4] - us[0]};
}

// One shape: x in several buffers, outputs of both directions.
class Case {
 public:
  Case(std::int64_t S, std::int64_t C, const std::vector<std::int32_t>& offsets) : S_(S), C_(C), L_(static_cast<std::int64_t>(offsets.size()) - 1) {
    copies_ = static_cast<int>(std::max<std::int64_t>(480000000 / (S * C * 4), 2));
    for (int i = 0; i < copies_; ++i) {
      x_.emplace_back(bytes(S * C * 2)), codes_.emplace_back(bytes(S * C)), turned_.emplace_back(bytes(blocks(128) * C * 128));
      fill_normal(x_.back().data(), DType::kBF16, bytes(S * C), static_cast<std::uint64_t>(i), 1.0f, nullptr);
    }
    scales_ = DeviceBuffer(bytes(S * C / 4)), column_scales_ = DeviceBuffer(bytes((S / 16 + L_ * 2) * C * 4)), group_scales_ = DeviceBuffer(bytes(L_ * 4));
    offsets_ = DeviceBuffer(offsets.size() * 4);
    offsets_.upload(offsets.data(), offsets_.bytes());
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  int copies() const { return copies_; }
  std::int64_t blocks(std::int64_t rows) const { return max_block_rows(S_, L_, rows); }
  TensorView x(int i) const { return view_of(x_[static_cast<std::size_t>(i % copies_)], DType::kBF16, {S_, C_}); }
  TensorView y(int i) const { return view_of(x_[static_cast<std::size_t>((i + 1) % copies_)], DType::kBF16, {S_, C_}); }
  TensorView offsets() const { return view_of(offsets_, DType::kI32, {L_ + 1}); }
  QuantizedView out(const QuantConfig& c, int i, bool turned, bool codes = true) const {
    const bool is_f32 = c.scale == ScaleFormat::kPowerOfTwo || c.scale == ScaleFormat::kF32;
    QuantizedView q;
    const auto n = static_cast<std::size_t>(i % copies_);
    if (codes) q.codes = view_of(codes_[n], DType::kU8, {S_, c.element == ElementFormat::kE2M1 ? C_ / 2 : C_});
    q.scales = view_of(c.block_rows == 1 ? scales_ : column_scales_, is_f32 ? DType::kF32 : DType::kU8,
                       {c.block_rows == 1 ? S_ : blocks(c.block_rows), (C_ + c.block_columns - 1) / c.block_columns});
    q.group_scales = view_of(group_scales_, DType::kF32, {L_});
    if (turned) q.turned = view_of(turned_[n], DType::kU8, {blocks(128), C_, 128});
    return q;
  }
  double elements() const { return static_cast<double>(S_) * static_cast<double>(C_); }
  // A sample of row-wise MXFP8 and FP8 codes against the host's.
  bool check(const QuantConfig& c, const QuantizedView& q) const {
    std::vector<std::uint16_t> row(static_cast<std::size_t>(C_));
    std::vector<std::uint8_t> codes(row.size());
    for (std::int64_t s = 1; s < S_; s += S_ / 3) {
      WB_TRY_CUDA(cudaMemcpy(row.data(), static_cast<const std::uint16_t*>(x_[0].data()) + s * C_, row.size() * 2, cudaMemcpyDeviceToHost));
      WB_TRY_CUDA(cudaMemcpy(codes.data(), static_cast<const std::uint8_t*>(q.codes.data) + s * C_, codes.size(), cudaMemcpyDeviceToHost));
      for (std::int64_t b = 0; b < C_; b += c.block_columns) {
        float amax = 0;
        const std::int64_t end = std::min(b + c.block_columns, C_);
        for (std::int64_t i = b; i < end; ++i) amax = std::max(amax, std::abs(bf16::to_float(row[static_cast<std::size_t>(i)])));
        const float scale = decode_e8m0(encode_e8m0(amax, c.element, c.rule));
        for (std::int64_t i = b; i < end; ++i) {
          const auto at = static_cast<std::size_t>(i);
          if (codes[at] != encode_element(c.element, bf16::to_float(row[at]) / scale)) return false;
        }
      }
    }
    return true;
  }

 private:
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count) + 64; }
  std::int64_t S_, C_, L_;
  int copies_ = 0;
  std::vector<DeviceBuffer> x_, codes_, turned_;
  DeviceBuffer scales_, column_scales_, group_scales_, offsets_;
};

std::FILE* g_out = nullptr;
bool g_all_match = true;

void record(const std::string& name, const std::string& variant, double bytes, const Timed& t, double copy_rate, bool wanted, bool checked) {
  const double rate = bytes / t.us * 1e-6, floor = bytes / copy_rate * 1e-6, target = floor / kWanted;
  g_all_match &= checked;
  fmt::print("{:<34} {:<30} {:8.1f} us {:6.2f} TB/s  {:.3f} of the copy{}{}\n", name, variant, t.us, rate, rate / copy_rate,
             wanted ? (rate >= kWanted * copy_rate ? "  met" : "  MISSED") : "", checked ? "" : "  WRONG");
  fmt::print(g_out,
             "{{\"op\":\"quantize\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{:.3f},\"floor\":{:.3f},"
             "\"target\":{},\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.3f},\"p99\":null,\"iterations\":100}}\n",
             name, variant, t.us, t.spread, floor, wanted ? fmt::format("{:.3f}", target) : "null", checked ? "true" : "false", t.us);
  std::fflush(g_out), std::fflush(stdout);
}

void measure(const std::string& name, std::int64_t S, std::int64_t C, const std::vector<std::int32_t>& offsets, const CudaStream& stream) {
  const Case c(S, C, offsets);
  const Stream s{kGpu, stream.get(), nullptr};
  const double n = c.elements();
  const Timed copied = time_burst(stream, [&](int i) {
    WB_TRY_CUDA(cudaMemcpyAsync(c.y(2 * i).data, c.x(2 * i).data, static_cast<std::size_t>(n) * 2, cudaMemcpyDeviceToDevice, stream.get()));
  });
  const double copy = 4 * n / copied.us * 1e-6;
  record(name, "device copy", 4 * n, copied, copy, false, true);
  for (const QuantConfig& config : {fp8_rows(), mxfp8_rows(), fp8_rows(ScaleFormat::kF32), nvfp4_rows()}) {
    const bool is_nvfp4 = config.element == ElementFormat::kE2M1;
    const double scale_bytes = n / static_cast<double>(config.block_columns) * (config.scale == ScaleFormat::kE8M0 || is_nvfp4 ? 1 : 4);
    const Timed t = time_burst(stream, [&](int i) { quantize(config, c.x(i), c.offsets(), c.out(config, i, false), s); });
    const bool checks = config.scale == ScaleFormat::kPowerOfTwo || config.scale == ScaleFormat::kE8M0;
    record(name, is_nvfp4 ? "rows, NVFP4 (x read twice)" : fmt::format("rows 1x{} {}", config.block_columns, checks ? "2^n" : "fp32"),
           n * (is_nvfp4 ? 4.5 : 3) + scale_bytes, t, copy, !is_nvfp4 && checks, !checks || c.check(config, c.out(config, 0, false)));
  }
  for (const ScaleFormat scale : {ScaleFormat::kPowerOfTwo, ScaleFormat::kF32}) {
    const QuantConfig rows = fp8_rows(scale), columns{ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 128, 1};
    const Timed t =
        time_burst(stream, [&](int i) { quantize_both(rows, columns, c.x(i), c.offsets(), c.out(rows, i, false), c.out(columns, i, true, false), s); });
    const bool is_2n = scale == ScaleFormat::kPowerOfTwo;
    record(name, fmt::format("rows and turned columns, 128 {}", is_2n ? "2^n" : "fp32"), n * (4 + 8.0 / 128), t, copy, is_2n,
           !is_2n || c.check(rows, c.out(rows, 0, false)));
    const Timed one = time_burst(stream, [&](int i) { quantize(columns, c.x(i), c.offsets(), c.out(columns, i, true, false), s); });
    record(name, fmt::format("turned columns, 128 {}", is_2n ? "2^n" : "fp32"), n * (3 + 4.0 / 128), one, copy, false, true);
  }
  const QuantConfig tiles = fp8_tiles(), mx = mxfp8_columns();
  const Timed tile = time_burst(stream, [&](int i) { quantize(tiles, c.x(i), c.offsets(), c.out(tiles, i, true), s); });
  record(name, "tiles 128x128, as is and turned", 4 * n, tile, copy, false, true);
  const Timed columns = time_burst(stream, [&](int i) { quantize(mx, c.x(i), c.offsets(), c.out(mx, i, false), s); });
  record(name, "columns 32x1", n * (3 + 1.0 / 32), columns, copy, false, true);
  for (const QuantConfig& config : {mxfp8_rows(), mxfp8_columns(), nvfp4_rows()}) {
    quantize(config, c.x(0), c.offsets(), c.out(config, 0, false), s);
    const Timed t = time_burst(stream, [&](int i) { dequantize(config, c.out(config, i, false), c.offsets(), c.y(i), s); });
    record(name, fmt::format("dequantise {} {}x{}", config.element == ElementFormat::kE2M1 ? "NVFP4" : "MXFP8", config.block_rows, config.block_columns),
           n * (config.element == ElementFormat::kE2M1 ? 2.5 + 1.0 / 16 : 3 + 1.0 / 32), t, copy, false, true);
  }
}

// Rounded to a format and widened again by one kernel, as the layer's operands under mxfp8 and nvfp4 are; without draws and rotation the bits are those of
// quantize() and dequantize().
void measure_rounding(const std::string& name, std::int64_t S, std::int64_t C, const std::vector<std::int32_t>& offsets, const CudaStream& stream) {
  const Case c(S, C, offsets);
  const Stream s{kGpu, stream.get(), nullptr};
  const auto L = static_cast<std::int64_t>(offsets.size()) - 1;
  const double n = static_cast<double>(offsets.back()) * static_cast<double>(C);
  const DeviceBuffer group_scales(static_cast<std::size_t>(L) * 4 + 16), firsts(static_cast<std::size_t>(L) * 4 + 16);
  const DeviceBuffer y(static_cast<std::size_t>((S + 15 * L) * C * 2)), again(static_cast<std::size_t>(S * C * 2));
  const Timed copied = time_burst(stream, [&](int i) {
    WB_TRY_CUDA(cudaMemcpyAsync(c.y(2 * i).data, c.x(2 * i).data, static_cast<std::size_t>(S * C) * 2, cudaMemcpyDeviceToDevice, stream.get()));
  });
  const double copy = 4 * static_cast<double>(S * C) / copied.us * 1e-6;
  for (const Recipe kind : {Recipe::kMXFP8, Recipe::kNVFP4}) {
    for (const auto& [operand, contraction] : {std::pair(Operand::kActivation, Contraction::kColumns), std::pair(Operand::kActivation, Contraction::kRows),
                                               std::pair(Operand::kWeight, Contraction::kColumns), std::pair(Operand::kGradient, Contraction::kColumns),
                                               std::pair(Operand::kGradient, Contraction::kRows)}) {
      const bool is_nvfp4 = kind == Recipe::kNVFP4, rotates = is_nvfp4 && operand == Operand::kGradient && contraction == Contraction::kRows;
      if (!is_nvfp4 && operand != Operand::kActivation) continue;
      RecipeConfig recipe;
      recipe.kind = kind;
      const QuantConfig f = operand_format(recipe, operand, contraction);
      const auto call = [&](int i) {
        QdqCall p{};
        p.x = {c.x(i).data, true, C, S, static_cast<int>(C), static_cast<const std::int32_t*>(c.offsets().data), static_cast<int>(L), nullptr};
        p.y = y.data(), p.element = f.element, p.scale = f.scale, p.rule = f.rule, p.stochastic = f.stochastic, p.hadamard = rotates;
        p.block_rows = static_cast<int>(f.block_rows), p.block_columns = static_cast<int>(f.block_columns);
        p.group_scales = group_scales.as<float>(), p.y_offsets = rotates ? firsts.as<std::int32_t>() : nullptr, p.seed.value = 7;
        launch_qdq(p, stream.get());
      };
      bool is_same = true;
      if (!f.stochastic) {
        const QuantizedView q = c.out(f, 0, false);
        const TensorView wide = view_of(again, DType::kBF16, {S, C});
        quantize(f, c.x(0), c.offsets(), q, s), dequantize(f, q, c.offsets(), wide, s);
        call(0);
        std::vector<std::uint16_t> want(static_cast<std::size_t>(offsets.back() * C)), got(want.size());
        stream.synchronize();
        WB_TRY_CUDA(cudaMemcpy(want.data(), again.data(), want.size() * 2, cudaMemcpyDeviceToHost));
        WB_TRY_CUDA(cudaMemcpy(got.data(), y.data(), got.size() * 2, cudaMemcpyDeviceToHost));
        is_same = want == got;
      }
      const Timed t = time_burst(stream, call);
      const std::string variant = fmt::format("round and widen {} {}x{}{}{}", is_nvfp4 ? "NVFP4" : "MXFP8", f.block_rows, f.block_columns,
                                              f.stochastic ? " stochastic" : "", rotates ? " rotated" : "");
      if (f.stochastic) {  // compared by the tests only: no record
        fmt::print("{:<34} {:<38} {:8.1f} us\n", name, variant, t.us);
      } else {
        record(name, variant, n * (is_nvfp4 ? 6 : 4), t, copy, false, is_same);
      }
    }
  }
}

// SwiGLU's result and gradient quantised without being written, beside the activation kernel and the quantiser one after the other. Checked: all codes and
// the gradient of the weights have the bits of the two.
class ActivatedCase {
 public:
  ActivatedCase(std::int64_t S, std::int64_t F, const std::vector<std::int32_t>& offsets, const CudaStream& stream)
      : S_(S),
        F_(F),
        stream_(stream),
        plain_(S, 2 * F, offsets),
        weight_(static_cast<std::size_t>(S) * 4),
        da_(static_cast<std::size_t>(S * F) * 2),
        wide_(static_cast<std::size_t>(S * F) * 4),
        d_weight_(static_cast<std::size_t>(S) * 4),
        sums_(static_cast<std::size_t>(S * ((F + 63) / 64)) * 4) {
    fill_normal(da_.data(), DType::kBF16, static_cast<std::size_t>(S * F), 11, 1.0f, nullptr);
    fill_normal(weight_.data(), DType::kF32, static_cast<std::size_t>(S), 12, 1.0f, nullptr);
    rows_ = offsets.back();
    for (std::size_t g = 0; g + 1 < offsets.size(); ++g) blocks_ += (offsets[g + 1] - offsets[g] + 127) / 128;
  }
  void measure(const std::string& name, double copy, bool is_gradient, bool has_both) {
    const QuantConfig rows = fp8_rows(), columns{ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1};
    const Stream s{kGpu, stream_.get(), nullptr};
    const std::int64_t C = is_gradient ? 2 * F_ : F_;
    const auto out = [&](const QuantConfig& c, int i, bool turned) {
      QuantizedView q = plain_.out(c, i, turned, !turned);
      if (q.codes) q.codes = TensorView(q.codes.data, q.codes.dtype, {S_, C}, kGpu);
      q.scales = TensorView(q.scales.data, DType::kF32, {q.scales.shape[0], turned ? C : (C + 127) / 128}, kGpu);
      if (turned) q.turned = TensorView(q.turned.data, DType::kU8, {q.turned.shape[0], C, 128}, kGpu);
      return q;
    };
    const auto fused = [&](int i) {
      const ActivatedRows x = source(i, is_gradient);
      if (!has_both) return quantize_activated(rows, x, plain_.offsets(), out(rows, i, false), s);
      quantize_both_activated(rows, columns, x, plain_.offsets(), out(rows, i, false), out(columns, i, true), s);
    };
    const auto in_turn = [&](int i) {
      const ActivatedRows x = source(i, is_gradient);
      const TensorView wide = view_of(wide_, DType::kBF16, {S_, C});
      const std::int32_t* num_rows = plain_.offsets().as<std::int32_t>() + plain_.offsets().shape[0] - 1;
      if (is_gradient) {
        activation_backward({}, x.h, weight_.as<float>(), x.da, wide, d_weight_.as<float>(), s, num_rows);
      } else {
        activation_forward({}, x.h, weight_.as<float>(), wide, s, num_rows);
      }
      if (!has_both) return quantize(rows, wide, plain_.offsets(), out(rows, i, false), s);
      quantize_both(rows, columns, wide, plain_.offsets(), out(rows, i, false), out(columns, i, true), s);
    };
    const auto results = [&] {
      std::vector<std::vector<unsigned char>> all;
      const auto take = [&](const TensorView& v) {
        if (!v) return;
        all.emplace_back(static_cast<std::size_t>(v.size()) * size_bytes(v.dtype));
        WB_TRY_CUDA(cudaMemcpy(all.back().data(), v.data, all.back().size(), cudaMemcpyDeviceToHost));
      };
      take(TensorView(out(rows, 0, false).codes.data, DType::kU8, {rows_, C}, kGpu)), take(valid_turned(out(columns, 0, true).turned));
      if (is_gradient) take(TensorView(d_weight_.data(), DType::kF32, {rows_}, kGpu));
      return all;
    };
    in_turn(0), stream_.synchronize();
    const auto want = results();
    for (const TensorView& v : {out(rows, 0, false).codes, out(columns, 0, true).turned}) {
      WB_TRY_CUDA(cudaMemset(v.data, 0xa5, static_cast<std::size_t>(has_both || v.rank == 2 ? v.size() : 0)));
    }
    WB_TRY_CUDA(cudaDeviceSynchronize());
    fused(0), stream_.synchronize();
    const bool is_same = want == results();
    const double n = static_cast<double>(rows_) * static_cast<double>(F_), codes = (has_both ? 2.0 + 8.0 / 128 : 1.0 + 4.0 / 128) * (is_gradient ? 2 : 1);
    const char* what = is_gradient ? "dSwiGLU" : "SwiGLU";
    const std::string variant = fmt::format("{} and {}, 128 2^n", what, has_both ? "both directions" : "rows");
    const Timed one = time_burst(stream_, fused), two = time_burst(stream_, in_turn);
    record(name, variant, n * ((is_gradient ? 6 : 4) + codes), one, copy, false, is_same);
    fmt::print("{:<34} {:<30} {:8.1f} us one after the other\n", name, variant, two.us);
  }

 private:
  TensorView valid_turned(TensorView turned) const {  // the blocks that the groups have
    turned.shape[0] = blocks_;
    return turned;
  }
  ActivatedRows source(int i, bool is_gradient) const {
    ActivatedRows x;
    x.h = plain_.x(i), x.weight = view_of(weight_, DType::kF32, {S_});
    if (!is_gradient) return x;
    x.da = view_of(da_, DType::kBF16, {S_, F_}), x.d_weight = view_of(d_weight_, DType::kF32, {S_});
    x.partial_sums = view_of(sums_, DType::kF32, {S_, (F_ + 63) / 64});
    return x;
  }
  std::int64_t S_, F_, rows_ = 0, blocks_ = 0;
  const CudaStream& stream_;
  Case plain_;
  DeviceBuffer weight_, da_, wide_, d_weight_, sums_;
};

void measure_activated(const std::string& name, std::int64_t S, std::int64_t F, const std::vector<std::int32_t>& offsets, const CudaStream& stream) {
  ActivatedCase c(S, F, offsets, stream);
  const DeviceBuffer from(static_cast<std::size_t>(S * F) * 4), to(static_cast<std::size_t>(S * F) * 4);
  const Timed copied =
      time_burst(stream, [&](int) { WB_TRY_CUDA(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDeviceToDevice, stream.get())); });
  const double copy = 2 * static_cast<double>(from.bytes()) / copied.us * 1e-6;
  for (const bool is_gradient : {false, true}) {
    for (const bool has_both : {false, true}) c.measure(name, copy, is_gradient, has_both);
  }
}

int main_checked(int argc, char** argv) {
  std::string path = "quantize.jsonl", part;
  bool with_loads = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--loads") {
      with_loads = true;
    } else if (argument == "--part" && i + 1 < argc) {
      part = argv[++i];
      WB_CHECK(part == "quantise" || part == "round" || part == "activated", "--part takes quantise, round or activated, got {}", part);
    } else {
      WB_CHECK(!argument.starts_with("-"), "unknown option {}", argument);
      path = argument;
    }
  }
  g_out = std::fopen(path.c_str(), "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", path);
  register_quantize(), register_activation();
  const CudaStream stream;
  const auto takes = [&](const char* name) { return part.empty() || part == name; };
  std::vector<std::int32_t> ragged(1, 0);
  for (int g = 0; g < 64; ++g) ragged.push_back(g == 63 ? 8192 : std::min(8192, ragged.back() + (g % 7 == 3 ? 0 : 61 + g * 37 % 173)));
  const std::vector<std::int32_t> even = bench::load_offsets("even", 64, 1024);
  if (takes("quantise")) {
    measure("8192x7168", 8192, 7168, {0, 8192}, stream);
    measure("8192x7168, 64 ragged groups", 8192, 7168, ragged, stream);
    measure("65536x2048, 64 groups", 65536, 2048, even, stream);
  }
  if (takes("round")) measure_rounding("8192x7168", 8192, 7168, {0, 8192}, stream), measure_rounding("65536x2048, 64 groups", 65536, 2048, even, stream);
  if (takes("activated")) {
    measure_activated("8192x7168", 8192, 7168, {0, 8192}, stream);
    measure_activated("8192x7168, 64 ragged groups", 8192, 7168, ragged, stream);
    measure_activated("65536x2048, 64 groups", 65536, 2048, even, stream);
  }
  for (const char* load : bench::kWorkloads) {
    if (!with_loads) break;
    const std::vector<std::int32_t> offsets = bench::load_offsets(load, 64, 128);
    measure(fmt::format("{}x2048, 64 groups {}", offsets.back(), load), offsets.back(), 2048, offsets, stream);
  }
  std::fclose(g_out);
  return g_all_match ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_quantize", waybill::cuda::main_checked, argc, argv); }

// SPDX-License-Identifier: Apache-2.0
// Products of MXFP8 and NVFP4 operands (waybill/quantized_gemm.h) with their dequantisation, beside the bf16 products of operands that are
// bf16 already, in the same run. Before it is timed, each result is compared with that product of dequantised operands, bit for bit.
//   bench_cuda_quantized OUT.jsonl [--filter TEXT] [--op TEXT] [--loads]
//     --loads   two more shapes, one of them with a skewed load, and the loads W0 to W9 of bench/shapes/loads.toml
// Target: 0.90 of the bf16 rate. Floor: the bf16 product's time. Method as bench_cuda_gemm. Exit code 1 when a comparison fails.
#include <functional>

#include "bench/cuda/device_inputs.h"
#include "bench/cuda/matmul_harness.h"
#include "bench/cuda/run_main.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "waybill/quantized_gemm.h"

namespace waybill::cuda {
namespace {

struct Format {
  const char* name;
  QuantConfig rows, columns;
};
const Format kFormats[] = {{"mxfp8", mxfp8_rows(), mxfp8_columns()},
                           {"nvfp4", nvfp4_rows(), {ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 16, 1}}};

// A random tensor [rows, columns] as codes, and what they stand for as bf16.
struct Coded {
  QuantConfig config;
  DeviceBuffer codes, scales, group_scales, wide;
  QuantizedView q;
  Coded(const QuantConfig& format, std::int64_t rows, std::int64_t columns, const DeviceBuffer& offsets, std::int64_t L, std::uint64_t seed, Stream stream)
      : config(format), wide(static_cast<std::size_t>(rows * columns) * 2) {
    const std::int64_t packed = format.element == ElementFormat::kE2M1 ? columns / 2 : columns, block_rows = max_block_rows(rows, L, format.block_rows);
    const std::int64_t scale_columns = (columns + format.block_columns - 1) / format.block_columns;
    codes = DeviceBuffer(static_cast<std::size_t>(rows * packed)), scales = DeviceBuffer(static_cast<std::size_t>(block_rows * scale_columns));
    group_scales = DeviceBuffer(static_cast<std::size_t>(L) * 4);
    q.codes = device_view(codes, DType::kU8, {rows, packed}), q.scales = device_view(scales, DType::kU8, {block_rows, scale_columns});
    if (format.scale == ScaleFormat::kE4M3) q.group_scales = device_view(group_scales, DType::kF32, {L});
    fill_normal(wide.data(), DType::kBF16, static_cast<std::size_t>(rows * columns), seed, 1.0f, nullptr);
    WB_TRY_CUDA(cudaDeviceSynchronize());
    const TensorView x = device_view(wide, DType::kBF16, {rows, columns}), o = device_view(offsets, DType::kI32, {L + 1});
    quantize(config, x, o, q, stream), dequantize(config, q, o, x, stream);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  QuantizedOperand operand() const { return {config, q}; }
};

// Both ways of one product, and the bytes of its result.
struct Product {
  std::function<void()> quantized, plain;
  DeviceBuffer workspace, got, want;
};

bool are_equal(const Product& p) {
  p.got.fill(0xcd), p.want.fill(0xab);
  p.quantized(), p.plain();
  WB_TRY_CUDA(cudaDeviceSynchronize());
  std::vector<unsigned char> got(p.got.bytes()), want(p.want.bytes());
  p.got.download(got.data(), got.size()), p.want.download(want.data(), want.size());
  WB_TRY_CUDA(cudaDeviceSynchronize());
  return got == want;
}

class Bench {
 public:
  Bench(const MatmulShape& s, const Format& format, MatmulReport& report) : s_(s), format_(format), report_(report) {
    const std::vector<std::int32_t> offsets = bench::load_offsets(s.load, s.L, s.rows);
    std::vector<std::int32_t> firsts;
    for (std::int64_t g = 0; g <= s.L; ++g) firsts.push_back(static_cast<std::int32_t>(g * s.N));
    S_ = offsets.back(), offsets_ = upload(offsets), firsts_ = upload(firsts);
    stream_ = Stream{kGpu, native_.get(), nullptr};
  }
  void forward(const std::string& only) {
    const std::string name = fmt::format("quantized_fwd {}", format_.name);
    if (name.find(only) == std::string::npos) return;
    const Coded a(format_.rows, S_, s_.C, offsets_, s_.L, 1, stream_), w(format_.rows, s_.L * s_.N, s_.C, firsts_, s_.L, 2, stream_);
    Product p;
    p.got = DeviceBuffer(size(S_ * s_.N)), p.want = DeviceBuffer(size(S_ * s_.N));
    QuantizedGemmArgs args;
    args.a = a.operand(), args.weights = w.operand(), args.offsets = offsets(), args.y = device_view(p.got, DType::kBF16, {S_, s_.N});
    p.workspace = DeviceBuffer(quantized_gemm_workspace(args)), args.workspace = room(p);
    GroupedGemmArgs plain;
    plain.a = device_view(a.wide, DType::kBF16, {S_, s_.C}), plain.weights = device_view(w.wide, DType::kBF16, {s_.L, s_.N, s_.C}), plain.offsets = offsets();
    plain.y = device_view(p.want, DType::kBF16, {S_, s_.N});
    p.quantized = [&] { quantized_gemm(args, stream_); }, p.plain = [&] { grouped_gemm(plain, stream_); };
    measure(p, name);
  }
  void wgrad(const std::string& only) {
    const std::string name = fmt::format("quantized_wgrad bf16 {}", format_.name);
    if (name.find(only) == std::string::npos) return;
    const Coded a(format_.columns, S_, s_.C, offsets_, s_.L, 3, stream_), dy(format_.columns, S_, s_.N, offsets_, s_.L, 4, stream_);
    Product p;
    p.got = DeviceBuffer(size(s_.L * s_.N * s_.C)), p.want = DeviceBuffer(size(s_.L * s_.N * s_.C));
    QuantizedWgradArgs args;
    args.a = a.operand(), args.dy = dy.operand(), args.offsets = offsets(), args.d_weights = device_view(p.got, DType::kBF16, {s_.L, s_.N, s_.C});
    p.workspace = DeviceBuffer(quantized_gemm_workspace(args)), args.workspace = room(p);
    GroupedGemmWgradArgs plain;
    plain.a = device_view(a.wide, DType::kBF16, {S_, s_.C}), plain.dy = device_view(dy.wide, DType::kBF16, {S_, s_.N}), plain.offsets = offsets();
    plain.d_weights = device_view(p.want, DType::kBF16, {s_.L, s_.N, s_.C});
    p.quantized = [&] { quantized_gemm_wgrad(args, stream_); }, p.plain = [&] { grouped_gemm_wgrad(plain, stream_); };
    measure(p, name);
  }

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count) * 2; }
  Workspace room(const Product& p) const { return {p.workspace.as<std::byte>(), p.workspace.bytes()}; }
  TensorView offsets() const { return device_view(offsets_, DType::kI32, {s_.L + 1}); }
  void measure(const Product& p, const std::string& name) {
    const bool checked = are_equal(p);
    const double flops = 2.0 * static_cast<double>(S_) * static_cast<double>(s_.N) * static_cast<double>(s_.C);
    const Spread plain = time_burst(native_, 5, 10, 15, p.plain), t = time_burst(native_, 5, 10, 15, p.quantized);
    report_.set_dense(flops / plain.us * 1e-6);
    report_.add(s_, name.c_str(), fmt::format("scratch {} MiB, {:.3f} of the bf16 rate", p.workspace.bytes() >> 20, plain.us / t.us), t, flops, 0, 0.90,
                checked);
  }

  MatmulShape s_;
  const Format& format_;
  MatmulReport& report_;
  std::int64_t S_ = 0;
  CudaStream native_;
  Stream stream_;
  DeviceBuffer offsets_, firsts_;
};

int main_checked(int argc, char** argv) {
  const MatmulOptions options = matmul_options(argc, argv, "quantized.jsonl");
  register_gemm(), register_quantize(), register_quantized_gemm();
  MatmulReport report(options.path, 1);
  std::vector<MatmulShape> shapes = {{8, 4096, 4096, 7168, "even", 0, 0, 0, 0}, {2, 16384, 7168, 7168, "even", 0, 0, 0, 0}};
  if (options.with_loads) shapes.insert(shapes.end(), {{8, 4096, 7168, 2048, "even", 0, 0, 0, 0}, {128, 2048, 1536, 2048, "softmax", 0, 0, 0, 0}});
  for (const char* load : bench::kWorkloads) {
    if (options.with_loads) shapes.push_back({64, 1024, 2048, 1024, load, 0, 0, 0, 0});
  }
  CaseFilter filter(options.filter);
  for (const MatmulShape& shape : shapes) {
    if (!filter.takes(shape.name())) continue;
    for (const Format& format : kFormats) {
      Bench bench(shape, format, report);
      bench.forward(options.op), bench.wgrad(options.op);
    }
  }
  filter.check_used();
  return report.all_match() ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_quantized", waybill::cuda::main_checked, argc, argv); }

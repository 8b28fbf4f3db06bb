// SPDX-License-Identifier: Apache-2.0
// Expert activations: their kernels alone, and beside the matmuls, fused into their epilogues and not. Checks that fused and unfused results have
// the same bits and that both match sums in double, then times. Exit code 1 when a check fails: its record says "checked": false.
//   bench_cuda_activation OUT.jsonl [--filter TEXT] [--loads] [--tiles]
//     --loads   also the loads W0 to W9 of bench/shapes/loads.toml
//     --tiles   also every compiled tile of the fused kernels; no records of them
// Method: as bench_cuda_gemm.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/gemm_anchor.h"
#include "bench/cuda/run_main.h"
#include "bench/loads.h"
#include "cuda/gemm_reference.h"
#include "ops/activation/cuda/activation_kernels.h"
#include "ops/gemm/cuda/grouped_run.h"

namespace waybill::cuda {
namespace {

constexpr unsigned char kPoison = 0xcd;

struct Shape {
  std::int64_t L, rows, H, F;  // rows: mean of a group
  const char* load = "even";
};
constexpr Shape kShapes[] = {{8, 4096, 7168, 2048}, {32, 1024, 7168, 2048}, {128, 2048, 2048, 768}, {256, 320, 2048, 512}, {32, 288, 1024, 256}};

std::string name_of(const Shape& s) {
  const std::string load = s.load;
  return fmt::format("{}x{} H{} F{}{}", s.L, s.rows, s.H, s.F, load == "even" ? "" : " " + load);
}

int num_sms() {
  int count = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// SwiGLU experts: h = x W1^T [S, 2F], a = weight * act(h) [S, F], and back from dy [S, H]: da = dy W2, dh, d_weight.
class Layer {
 public:
  explicit Layer(const Shape& s) : s_(s) {
    const std::vector<std::int32_t> offsets = bench::load_offsets(s.load, s.L, s.rows);
    S_ = offsets.back();
    for (std::size_t i = 1; i < offsets.size(); ++i) used_ += offsets[i] > offsets[i - 1] ? 1 : 0;
    offsets_ = DeviceBuffer(offsets.size() * 4);
    offsets_.upload(offsets.data(), offsets_.bytes());
    x_ = random(DType::kBF16, S_ * s.H, 1, 1), w1_ = random(DType::kBF16, s.L * 2 * s.F * s.H, 2, 1 / std::sqrt(static_cast<float>(s.H)));
    w2_ = random(DType::kBF16, s.L * s.H * s.F, 3, 1 / std::sqrt(static_cast<float>(s.H))), weight_ = random(DType::kF32, S_, 4, 1);
    h_ = DeviceBuffer(size(S_ * 2 * s.F) * 2), h2_ = DeviceBuffer(h_.bytes()), a_ = DeviceBuffer(size(S_ * s.F) * 2), a2_ = DeviceBuffer(a_.bytes());
    d_weight_ = DeviceBuffer(size(S_) * 4), d_weight2_ = DeviceBuffer(d_weight_.bytes());
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }

  // The product of the first matmul into `d`, or of the second one's dgrad.
  GroupedProblem product(bool is_forward, const DeviceBuffer& d) const {
    GroupedProblem p{is_forward ? GemmForm::kNT : GemmForm::kNN, GemmOutput::kBf16,           s_.L,    S_, 0, is_forward ? 2 * s_.F : s_.F, s_.H, x_.data(),
                     is_forward ? w1_.data() : w2_.data(),       offsets_.as<std::int32_t>(), d.data()};
    return p;
  }
  GroupedProblem fused(bool is_forward, bool with_h) const {
    GroupedProblem p = product(is_forward, is_forward ? a2_ : h2_);
    p.activation = {is_forward ? GemmEpilogue::kActivation : GemmEpilogue::kActivationGradient,
                    ActivationKind::kSwiGLU,
                    0,
                    0,
                    nullptr,
                    weight_.as<float>(),
                    is_forward ? nullptr : d_weight2_.as<float>()};
    p.activation.h = is_forward ? (with_h ? h2_.data() : nullptr) : h_.data();
    return p;
  }
  void run(const GroupedProblem& p) const { run_grouped(p, choose_tuning(p, num_sms()), 0, stream_); }
  ActivationCall call() const {
    ActivationCall c{0, 0, 0, S_, s_.F, offsets_.as<std::int32_t>() + s_.L, weight_.as<float>(), {}, {}, {}, nullptr};
    c.h = {h_.data(), 2 * s_.F, true}, c.a = {a_.data(), s_.F, true};
    return c;
  }
  void activate() const { launch_activation_forward(call(), num_sms(), stream_); }
  void activate_back(const DeviceBuffer& dh) const {
    ActivationCall c = call();
    c.dh = {dh.data(), 2 * s_.F, true}, c.d_weight = d_weight_.as<float>();
    launch_activation_backward(c, num_sms(), stream_);
  }

  // h_ and a_ from the unfused kernels against double and against the fused ones.
  bool check_forward() const {
    poison({&h_, &h2_, &a_, &a2_});
    const GroupedProblem p = product(true, h_);
    run(p), activate();
    const GemmCheck got = check_grouped(p, nullptr, kPoison, S_, 20000, stream_);
    run(fused(true, true));
    bool same = equal(h_, h2_) && equal(a_, a2_);
    poison({&a2_});
    run(fused(true, false));
    same &= equal(a_, a2_);
    if (got.wrong != 0 || !same) fmt::print("forward: {}, fused {}\n", got.describe(), same ? "equal" : "DIFFERENT");
    return got.wrong == 0 && got.checked > 0 && same && activation_is_right();
  }
  bool check_gradient() const {
    run(product(true, h_));
    poison({&a_, &h2_, &d_weight_, &d_weight2_});
    const GroupedProblem p = product(false, a_);
    const DeviceBuffer dh(h_.bytes());
    run(p), activate_back(dh);
    const GemmCheck got = check_grouped(p, nullptr, kPoison, S_, 20000, stream_);
    run(fused(false, true));
    const bool same = equal(dh, h2_) && equal(d_weight_, d_weight2_);
    if (got.wrong != 0 || !same) fmt::print("gradient: {}, fused {}\n", got.describe(), same ? "equal" : "DIFFERENT");
    return got.wrong == 0 && got.checked > 0 && same;
  }

  template <class Body>
  Spread time(const Body& body) const {
    return time_burst(stream_, 5, 10, 15, body);
  }
  double flops(bool is_forward) const { return (is_forward ? 4.0 : 2.0) * static_cast<double>(S_) * static_cast<double>(s_.H) * static_cast<double>(s_.F); }
  double elements() const { return static_cast<double>(S_) * static_cast<double>(s_.F); }
  double operand_bytes(bool is_forward) const {
    return 2.0 *
           (static_cast<double>(S_) * static_cast<double>(s_.H) + (is_forward ? 2.0 : 1.0) * static_cast<double>(used_ * s_.H) * static_cast<double>(s_.F));
  }
  std::string name() const { return name_of(s_); }
  const DeviceBuffer& h() const { return h_; }
  const DeviceBuffer& h2() const { return h2_; }
  const DeviceBuffer& a() const { return a_; }
  const CudaStream& stream() const { return stream_; }

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  static DeviceBuffer random(DType dtype, std::int64_t count, std::uint64_t seed, float scale) {
    DeviceBuffer buffer(size(count) * size_bytes(dtype));
    fill_normal(buffer.data(), dtype, size(count), seed, scale, nullptr);
    return buffer;
  }
  void poison(std::initializer_list<const DeviceBuffer*> buffers) const {
    for (const DeviceBuffer* buffer : buffers) buffer->fill(kPoison, stream_);
  }
  // 4 MiB at the beginning, in the middle and at the end.
  bool equal(const DeviceBuffer& a, const DeviceBuffer& b) const {
    const std::size_t part = std::min<std::size_t>(a.bytes(), 4u << 20);
    for (const std::size_t at : {std::size_t{0}, (a.bytes() - part) / 2 & ~std::size_t{15}, a.bytes() - part}) {
      if (part_of(a, at, part) != part_of(b, at, part)) return false;
    }
    return true;
  }
  std::vector<unsigned char> part_of(const DeviceBuffer& buffer, std::size_t at, std::size_t count) const {
    std::vector<unsigned char> host(count);
    WB_TRY_CUDA(cudaMemcpyAsync(host.data(), buffer.as<unsigned char>() + at, count, cudaMemcpyDeviceToHost, stream_));
    stream_.synchronize();
    return host;
  }
  // The last rows of a_ from h_, in double on the host.
  bool activation_is_right() const {
    const std::int64_t rows = std::min<std::int64_t>(S_, 64), first = S_ - rows;
    const auto h = part_of(h_, size(first * 2 * s_.F) * 2, size(rows * 2 * s_.F) * 2), a = part_of(a_, size(first * s_.F) * 2, size(rows * s_.F) * 2),
               w = part_of(weight_, size(first) * 4, size(rows) * 4);
    const auto value = [](const std::vector<unsigned char>& v, std::int64_t i) {
      std::uint32_t bits = 0;
      std::memcpy(reinterpret_cast<unsigned char*>(&bits) + 2, v.data() + 2 * i, 2);
      float f;
      std::memcpy(&f, &bits, 4);
      return static_cast<double>(f);
    };
    for (std::int64_t r = 0; r < rows; ++r) {
      float weight;
      std::memcpy(&weight, w.data() + 4 * r, 4);
      for (std::int64_t f = 0; f < s_.F; ++f) {
        const double gate = value(h, r * 2 * s_.F + f), up = value(h, r * 2 * s_.F + s_.F + f), want = weight * gate / (1 + std::exp(-gate)) * up;
        if (!(std::fabs(value(a, r * s_.F + f) - want) <= 0.004 * std::fabs(want) + 1e-30)) return false;
      }
    }
    return true;
  }

  Shape s_;
  std::int64_t S_ = 0, used_ = 0;  // used_: groups that have rows
  CudaStream stream_;
  DeviceBuffer x_, w1_, w2_, weight_, offsets_, h_, h2_, a_, a2_, d_weight_, d_weight2_;
};

std::FILE* g_out = nullptr;
bool g_all_match = true;

void record(const Layer& layer, const char* op, const std::string& variant, const Spread& t, double floor, bool checked) {
  g_all_match &= checked;
  fmt::print("{:<28} {:<24} {:<44} {:9.1f} us  floor x{:5.2f}{}\n", op, layer.name(), variant, t.us, t.us / floor, checked ? "" : "  WRONG");
  fmt::print(g_out,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{:.3f},\"floor\":{:.3f},"
             "\"target\":null,\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.3f},\"p99\":null,\"iterations\":50}}\n",
             op, layer.name(), variant, t.us, t.spread, floor, checked ? "true" : "false", t.us);
  std::fflush(g_out), std::fflush(stdout);
}

void sweep_tiles(const Layer& layer, const char* op, const GroupedProblem& p) {
  for (const GemmKernel& kernel : grouped_kernels(p.form, p.output, p.activation.epilogue)) {
    for (const int band : {4, 8}) {
      GemmTuning tuning{kernel.tile};
      tuning.band = band;
      const Spread t = layer.time([&] { run_grouped(p, tuning, 0, layer.stream()); });
      fmt::print("  {:<26} {:<24} {:<44} {:9.1f} us\n", op, layer.name(), describe(tuning), t.us);
    }
  }
}

void measure(const Shape& shape, double dense, bool with_tiles) {
  const Layer layer(shape);
  const double e = layer.elements();
  const auto floor_of = [&](bool is_forward, double bytes) {
    return std::max(layer.flops(is_forward) / dense * 1e-6, (layer.operand_bytes(is_forward) + bytes) / kBytesPerUs);
  };
  const bool forward = layer.check_forward();
  const GroupedProblem up = layer.product(true, layer.h()), saved = layer.fused(true, true), alone = layer.fused(true, false);
  record(layer, "activation_fwd swiglu", "", layer.time([&] { layer.activate(); }), 6 * e / kBytesPerUs, forward);
  record(layer, "gemm_fwd swiglu", "gemm, then activation", layer.time([&] { layer.run(up), layer.activate(); }), floor_of(true, 6 * e), forward);
  record(layer, "gemm_fwd swiglu", "fused, " + describe(choose_tuning(saved, num_sms())), layer.time([&] { layer.run(saved); }), floor_of(true, 6 * e),
         forward);
  record(layer, "gemm_fwd swiglu, h not kept", "fused, " + describe(choose_tuning(alone, num_sms())), layer.time([&] { layer.run(alone); }),
         floor_of(true, 2 * e), forward);
  if (with_tiles) sweep_tiles(layer, "swiglu", saved);
  const bool backward = layer.check_gradient();
  const GroupedProblem down = layer.product(false, layer.a()), gradient = layer.fused(false, true);
  record(layer, "activation_bwd swiglu", "", layer.time([&] { layer.activate_back(layer.h2()); }), 10 * e / kBytesPerUs, backward);
  record(layer, "gemm_dgrad dswiglu", "gemm, then activation", layer.time([&] { layer.run(down), layer.activate_back(layer.h2()); }), floor_of(false, 8 * e),
         backward);
  record(layer, "gemm_dgrad dswiglu", "fused, " + describe(choose_tuning(gradient, num_sms())), layer.time([&] { layer.run(gradient); }),
         floor_of(false, 8 * e), backward);
  if (with_tiles) sweep_tiles(layer, "dswiglu", gradient);
}

int main_checked(int argc, char** argv) {
  std::string path = "activation.jsonl", filter;
  bool with_tiles = false, with_loads = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tiles") {
      with_tiles = true;
    } else if (argument == "--loads") {
      with_loads = true;
    } else if (argument == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else {
      WB_CHECK(!argument.starts_with("-"), "unknown option {}, or its value is missing", argument);
      path = argument;
    }
  }
  g_out = std::fopen(path.c_str(), "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", path);
  Anchor anchor;
  const double dense = anchor.tflops();
  fmt::print("dense 8192^3, cuBLASLt: {:.1f} TFLOP/s\n", dense);
  std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
  if (with_loads) {
    for (const char* load : bench::kWorkloads) shapes.push_back({64, 1024, 2048, 768, load});
  }
  CaseFilter cases(filter);
  for (const Shape& shape : shapes) {
    if (cases.takes(name_of(shape))) measure(shape, dense, with_tiles);
  }
  std::fclose(g_out);
  cases.check_used();
  return g_all_match ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_activation", waybill::cuda::main_checked, argc, argv); }

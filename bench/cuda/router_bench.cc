// SPDX-License-Identifier: Apache-2.0
// Router benchmark: checks every case against the CPU, then times it; prints a table and writes records as JSON lines.
//   bench_cuda_router OUT.jsonl [filter]
// Floors: bytes of one read of the logits and one write of the outputs over 4.29 TB/s (the best row copy seen on this card).
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "bench/cuda/timing.h"
#include "core/cuda/status_device.h"
#include "cuda/device_random.h"
#include "ops/router/cuda/router_cuda.h"
#include "waybill/router.h"

namespace waybill::cuda {
namespace {

constexpr double kBytesPerUs = 4.29e6;

struct Case {
  const char* name;
  std::int64_t T, E, K;
  ScoreFunction score;
  bool renormalise;
  std::int64_t G, M;
  bool bias;
  double target_us;  // 0: none
};

// A case's buffers, several sets so that launches can rotate through more memory than the L2 holds.
class Bench {
 public:
  Bench(const Case& c, DType dtype, int sets) : c_(c), dtype_(dtype), sets_(sets) {
    config_.E = c.E, config_.K = c.K, config_.score = c.score, config_.renormalise = c.renormalise;
    config_.num_groups = c.G, config_.num_kept_groups = c.M, config_.scaling_factor = 1.0f;
    for (int s = 0; s < sets; ++s) {
      logits_.emplace_back(logits_bytes()), ids_.emplace_back(routes() * 2), weights_.emplace_back(routes() * 4), d_logits_.emplace_back(elements() * 4);
      d_weights_.emplace_back(routes() * 4);
      fill_normal(logits_.back().data(), dtype, elements(), 100u + static_cast<unsigned>(s), 1.0f, nullptr);
      fill_normal(d_weights_.back().data(), DType::kF32, routes(), 900u + static_cast<unsigned>(s), 1.0f, nullptr);
    }
    counts_ = DeviceBuffer(static_cast<std::size_t>(c.E) * 4), offsets_ = DeviceBuffer(static_cast<std::size_t>(c.E + 1) * 4), loss_ = DeviceBuffer(24);
    bias_ = DeviceBuffer(static_cast<std::size_t>(c.E) * 4);
    fill_normal(bias_.data(), DType::kF32, static_cast<std::size_t>(c.E), 5, 0.1f, nullptr);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }

  std::size_t elements() const { return static_cast<std::size_t>(c_.T * c_.E); }
  std::size_t routes() const { return static_cast<std::size_t>(c_.T * c_.K); }
  std::size_t logits_bytes() const { return elements() * size_bytes(dtype_); }
  Device device() const { return Device{DeviceType::kCuda, 0}; }

  RouterInputs inputs(int set) const {
    RouterInputs in;
    in.logits = TensorView(logits_[static_cast<std::size_t>(set)].data(), dtype_, {c_.T, c_.E}, device());
    if (c_.bias) in.expert_bias = TensorView(bias_.data(), DType::kF32, {c_.E}, device());
    return in;
  }
  RouteView route(int set) const {
    RouteView r;
    r.T = c_.T, r.K = c_.K, r.E = c_.E, r.device = device();
    r.ids = ids_[static_cast<std::size_t>(set)].data(), r.weights = weights_[static_cast<std::size_t>(set)].as<float>(), r.counts = counts_.as<std::int32_t>();
    return r;
  }
  void forward(int i, bool with_counts = true, bool portable = false) const {
    const int set = i % sets_;
    const RouterInputs in = inputs(set);
    RouterOutputs out;
    out.route = route(set), out.offsets = offsets_.as<std::int32_t>();
    if (!with_counts) out.route.counts = nullptr, out.offsets = nullptr;
    router_forward(router_impl::ForwardCall{config_, in, out, stream()}, portable);
  }
  RouterLossConfig loss_config() const {
    RouterLossConfig l;
    l.aux_coefficient = 1e-2f, l.z_coefficient = 1e-3f;
    return l;
  }
  RouterLossInputs loss_inputs() const {
    RouterLossInputs in;
    in.aux_counts = counts_.as<std::int32_t>();
    in.aux_tokens = in.loss_tokens = static_cast<double>(c_.T);
    return in;
  }
  void losses(int i) const {
    const RouterInputs in = inputs(i % sets_);
    const RouteView r = route(i % sets_);
    const RouterLossConfig l = loss_config();
    const RouterLossInputs li = loss_inputs();
    router_losses_device(router_impl::LossesCall{config_, l, in, r, li, stream()}, loss_.as<double>());
  }
  void backward(int i, bool with_losses) const {
    const int set = i % sets_;
    const RouterInputs in = inputs(set);
    const RouteView r = route(set);
    const RouterLossConfig l = with_losses ? loss_config() : RouterLossConfig{};
    const RouterLossInputs li = with_losses ? loss_inputs() : RouterLossInputs{};
    const TensorView d(d_logits_[static_cast<std::size_t>(set)].data(), DType::kF32, {c_.T, c_.E}, device());
    router_backward(router_impl::BackwardCall{config_, l, in, r, d_weights_[static_cast<std::size_t>(set)].as<float>(), li, 1.0f, d, stream()});
  }

  // Ids of 64 rows spread over the batch against the CPU, and the number of routes.
  bool check() const {
    forward(0);
    stream_.synchronize();
    std::vector<std::int32_t> counts(static_cast<std::size_t>(c_.E));
    counts_.download(counts.data(), counts.size() * 4);
    std::int64_t total = 0;
    for (const std::int32_t n : counts) total += n;
    if (total != c_.T * c_.K) return false;
    std::vector<std::byte> row(static_cast<std::size_t>(c_.E) * size_bytes(dtype_));
    std::vector<float> bias(static_cast<std::size_t>(c_.E));
    bias_.download(bias.data(), bias.size() * 4);
    for (int n = 0; n < 64; ++n) {
      const std::int64_t t = (c_.T - 1) * n / 63;
      WB_TRY_CUDA(cudaMemcpy(row.data(), logits_[0].as<std::byte>() + static_cast<std::size_t>(t) * row.size(), row.size(), cudaMemcpyDeviceToHost));
      RouterInputs in;
      in.logits = TensorView(row.data(), dtype_, {1, c_.E});
      if (c_.bias) in.expert_bias = TensorView(bias.data(), DType::kF32, {c_.E});
      std::vector<std::int16_t> want(static_cast<std::size_t>(c_.K)), got(want.size());
      std::vector<float> weights(want.size()), got_weights(want.size());
      RouterOutputs out;
      out.route.T = 1, out.route.K = c_.K, out.route.E = c_.E, out.route.ids = want.data(), out.route.weights = weights.data();
      router_impl::forward_ref(router_impl::ForwardCall{config_, in, out, Stream{}});
      WB_TRY_CUDA(cudaMemcpy(got.data(), ids_[0].as<std::int16_t>() + t * c_.K, got.size() * 2, cudaMemcpyDeviceToHost));
      WB_TRY_CUDA(cudaMemcpy(got_weights.data(), weights_[0].as<float>() + t * c_.K, got.size() * 4, cudaMemcpyDeviceToHost));
      if (want != got) return false;
      for (std::size_t k = 0; k < want.size(); ++k) {
        if (!(std::abs(got_weights[k] - weights[k]) <= 2e-6f * weights[k])) return false;
      }
    }
    return true;
  }
  Stream stream() const { return Stream{device(), stream_.get(), nullptr}; }
  const CudaStream& cuda_stream() const { return stream_; }

 private:
  Case c_;
  DType dtype_;
  int sets_;
  RouterConfig config_;
  CudaStream stream_;
  std::vector<DeviceBuffer> logits_, ids_, weights_, d_logits_, d_weights_;
  DeviceBuffer counts_, offsets_, loss_, bias_;
};

std::FILE* g_out = nullptr;

void record(const std::string& op, const std::string& name, const std::string& variant, const Timing& t, double floor_us, double target_us, bool checked) {
  fmt::print("{:<14} {:<44} {:<14} {:8.2f} us  spread {:6.2f}  floor {:6.2f}  x{:5.2f}  target {}{}{}\n", op, name, variant, t.p50, t.spread(), floor_us,
             t.p50 / floor_us, target_us > 0 ? fmt::format("{:g}", target_us) : "-", target_us > 0 ? (t.p50 <= target_us ? " met" : " MISSED") : "",
             checked ? "" : "  UNCHECKED");
  fmt::print(g_out,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{:.3f},\"floor\":{:.3f},"
             "\"target\":{},"
             "\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.3f},\"p99\":{:.3f},\"iterations\":{}}}\n",
             op, name, variant, t.p50, t.spread(), floor_us, target_us > 0 ? fmt::format("{}", target_us) : "null", checked ? "true" : "false", t.p50, t.p99,
             t.iterations * t.replays);
  std::fflush(g_out);
}

const char* name_of(DType d) { return d == DType::kF32 ? "f32" : (d == DType::kBF16 ? "bf16" : "f16"); }

void run(const Case& c, DType dtype, bool backward, double sparse_target, double dense_target) {
  const bool big = c.T * c.E > (1 << 23);
  const int sets = big ? 3 : 12;
  const Bench bench(c, dtype, sets);
  const std::string name = fmt::format("{} {}", c.name, name_of(dtype));
  const bool checked = bench.check();
  const int replays = big ? 30 : 60;
  const double read_us = static_cast<double>(bench.logits_bytes()) / kBytesPerUs, route_us = static_cast<double>(bench.routes() * 6) / kBytesPerUs;
  const double write_us = static_cast<double>(bench.elements() * 4) / kBytesPerUs;
  for (int i = 0; i < sets; ++i) bench.forward(i);
  const Timing cold = time_captured(bench.cuda_stream(), 12, replays, [&](int i) { bench.forward(i); });
  record("router_fwd", name, "cold", cold, read_us + route_us, dtype == DType::kF32 ? c.target_us : 0, checked);
  if (!big) record("router_fwd", name, "warm", time_captured(bench.cuda_stream(), 12, replays, [&](int) { bench.forward(0); }), read_us + route_us, 0, checked);
  if (dtype == DType::kF32) {
    record("router_fwd", name, "cold, no counts", time_captured(bench.cuda_stream(), 12, replays, [&](int i) { bench.forward(i, false); }), read_us + route_us,
           0, checked);
    if (c.E >= 2304 && c.G == 1 && !c.bias) {
      record("router_fwd", name, "portable", time_captured(bench.cuda_stream(), 12, 3, [&](int i) { bench.forward(i, true, true); }), read_us + route_us, 0,
             checked);
    }
  }
  if (!backward) return;
  const bool dense = c.score == ScoreFunction::kSoftmax && !c.renormalise;
  const double floor = write_us + (dense ? read_us : 0) + 14.0 / 6.0 * route_us;
  record("router_bwd", name, "cold", time_captured(bench.cuda_stream(), 12, replays, [&](int i) { bench.backward(i, false); }), floor,
         dtype == DType::kF32 ? (dense ? dense_target : sparse_target) : 0, checked);
  if (!big)
    record("router_bwd", name, "warm", time_captured(bench.cuda_stream(), 12, replays, [&](int) { bench.backward(0, false); }), floor,
           dtype == DType::kF32 && !dense && c.E == 256 ? 4.5 : 0, checked);
  if (c.E < 256) return;
  const Timing both = time_captured(bench.cuda_stream(), 12, replays, [&](int i) { bench.forward(i), bench.losses(i); });
  record("router_fwd+loss", name, "cold", both, read_us + route_us, 0, checked);
  Timing on_top = both;
  on_top.p50 = both.p50 - cold.p50;
  record("losses on fwd", name, "difference", on_top, read_us, dtype == DType::kF32 && c.E == 2304 ? 15 : 0, checked);
  const Timing plain_backward = time_captured(bench.cuda_stream(), 12, replays, [&](int i) { bench.backward(i, false); });
  const Timing loss_backward = time_captured(bench.cuda_stream(), 12, replays, [&](int i) { bench.backward(i, true); });
  record("router_bwd+loss", name, "cold", loss_backward, write_us + read_us, 0, checked);
  if (dense) return;
  Timing extra = loss_backward;
  extra.p50 = loss_backward.p50 - plain_backward.p50;
  record("losses on bwd", name, "difference", extra, read_us, dtype == DType::kF32 && c.E == 2304 ? 25 : 0, checked);
}

int main_checked(int argc, char** argv) {
  g_out = std::fopen(argc > 1 ? argv[1] : "router.jsonl", "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", argc > 1 ? argv[1] : "router.jsonl");
  const std::string filter = argc > 2 ? argv[2] : "";
  using S = ScoreFunction;
  const Case cases[] = {
      {"T8192 E2304 K36 softmax", 8192, 2304, 36, S::kSoftmax, false, 1, 1, false, 40},
      {"T8192 E2304 K36 sigmoid", 8192, 2304, 36, S::kSigmoid, true, 1, 1, false, 40},
      {"T8192 E2304 K36 softmax selected", 8192, 2304, 36, S::kSoftmaxSelected, true, 1, 1, false, 0},
      {"T8192 E2304 K36 sigmoid bias", 8192, 2304, 36, S::kSigmoid, true, 1, 1, true, 0},
      {"T8192 E256 K8 softmax", 8192, 256, 8, S::kSoftmax, false, 1, 1, false, 9},
      {"T8192 E256 K8 sigmoid", 8192, 256, 8, S::kSigmoid, true, 1, 1, false, 9},
      {"T8192 E256 K8 sigmoid 8 groups keep 4 bias", 8192, 256, 8, S::kSigmoid, true, 8, 4, true, 10},
      {"T8192 E512 K10 sigmoid", 8192, 512, 10, S::kSigmoid, true, 1, 1, false, 14},
      {"T8192 E512 K10 softmax", 8192, 512, 10, S::kSoftmax, false, 1, 1, false, 14},
      {"T8192 E512 K22 sigmoid", 8192, 512, 22, S::kSigmoid, true, 1, 1, false, 18},
      {"T16384 E128 K8 sigmoid", 16384, 128, 8, S::kSigmoid, true, 1, 1, false, 9},
      {"T16384 E128 K8 softmax", 16384, 128, 8, S::kSoftmax, false, 1, 1, false, 9},
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case& c : cases) {
      if (!filter.empty() && std::string(c.name).find(filter) == std::string::npos) continue;
      const bool backward = dtype == DType::kF32 && !c.bias;
      run(c, dtype, backward, c.E == 2304 ? 28 : (c.E == 256 ? 6 : 0), c.E == 2304 ? 50 : 0);
    }
  }
  std::fclose(g_out);
  return 0;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) {
  try {
    return waybill::cuda::main_checked(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cuda_router: %s\n", error.what());
    return 1;
  }
}

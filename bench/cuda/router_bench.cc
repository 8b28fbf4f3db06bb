// SPDX-License-Identifier: Apache-2.0
// Router benchmark: checks what it times against the CPU references (router_check.h), then times it; prints a table and writes records
// as JSON lines. Exit code 1 when a check fails: its records say "checked": false.
//   bench_cuda_router OUT.jsonl [filter] [--loads] [--variants]
//     --loads      also logits whose top K are the routes of W0 to W9 of bench/shapes/loads.toml
//     --variants   also without the parts of the policy table that can be switched off
// Floors: bytes of one read of the logits and one write of the outputs over 4.29 TB/s, a fixed figure (docs/perf/router.md says where it
// comes from). What this card copies is measured beside it: record "device_copy".
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/gate_bench.h"
#include "bench/cuda/router_check.h"
#include "bench/cuda/run_main.h"
#include "bench/cuda/timing.h"
#include "bench/loads.h"
#include "core/cuda/launch.h"
#include "core/cuda/status_device.h"
#include "cuda/device_random.h"
#include "ops/router/cuda/router_cuda.h"
#include "ops/router/cuda/tuning.h"
#include "waybill/router.h"

namespace waybill::cuda {
namespace {

constexpr double kBytesPerUs = 4.29e6;

struct Case {
  std::string name;
  std::int64_t T, E, K;
  ScoreFunction score;
  bool renormalise;
  std::int64_t G, M;
  bool bias;
  double target_us;       // 0: none
  std::string load = {};  // of bench/shapes/loads.toml; empty: normal logits
};

// A case's buffers, several sets so that launches can rotate through more memory than the L2 holds.
class Bench {
 public:
  Bench(const Case& c, DType dtype, int sets) : c_(c), dtype_(dtype), sets_(sets) {
    config_.E = c.E, config_.K = c.K, config_.score = c.score, config_.renormalise = c.renormalise;
    config_.num_groups = c.G, config_.num_kept_groups = c.M, config_.scaling_factor = 1.0f;
    for (int s = 0; s < sets; ++s) {
      logits_.emplace_back(logits_bytes()), ids_.emplace_back(routes() * 2), weights_.emplace_back(routes() * 4), d_logits_.emplace_back(elements() * 4);
      d_weights_.emplace_back(routes() * 4), factors_.emplace_back(static_cast<std::size_t>(c.T) * 4);
      fill_normal(logits_.back().data(), dtype, elements(), 100u + static_cast<unsigned>(s), 1.0f, nullptr);
      if (!c.load.empty()) give_routes(logits_.back(), s);
      fill_normal(d_weights_.back().data(), DType::kF32, routes(), 900u + static_cast<unsigned>(s), 1.0f, nullptr);
    }
    counts_ = DeviceBuffer(static_cast<std::size_t>(c.E) * 4), offsets_ = DeviceBuffer(static_cast<std::size_t>(c.E + 1) * 4), loss_ = DeviceBuffer(24);
    sums_ = DeviceBuffer(static_cast<std::size_t>(c.E + 1) * 8);
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
  void forward(int i, bool with_counts = true, bool portable = false, bool with_sums = false) const {
    const int set = i % sets_;
    const RouterInputs in = inputs(set);
    RouterOutputs out;
    out.route = route(set), out.offsets = offsets_.as<std::int32_t>();
    if (c_.score == ScoreFunction::kSigmoid) out.weight_factors = factors_[static_cast<std::size_t>(set)].as<float>();
    if (!with_counts) out.route.counts = nullptr, out.offsets = nullptr;
    if (with_sums) out.score_sums = sums_.as<double>();
    router_forward(router_impl::ForwardCall{config_, in, out, stream()}, portable);
  }
  RouterLossConfig loss_config() const {
    RouterLossConfig l;
    l.aux_coefficient = 1e-2f, l.z_coefficient = 1e-3f;
    return l;
  }
  // The forward kernel of long fp32 rows takes the sums of the losses; other rows are read again by the losses.
  bool sums_in_forward() const { return c_.E > 1024 && dtype_ == DType::kF32; }
  RouterLossInputs loss_inputs() const {
    RouterLossInputs in;
    in.aux_counts = counts_.as<std::int32_t>();
    in.aux_tokens = in.loss_tokens = static_cast<double>(c_.T);
    return in;
  }
  void losses(int i, bool from_sums) const {
    const RouterInputs in = inputs(i % sets_);
    const RouteView r = route(i % sets_);
    const RouterLossConfig l = loss_config();
    RouterLossInputs li = loss_inputs();
    if (from_sums) li.score_sums = sums_.as<double>();
    router_losses_device(router_impl::LossesCall{config_, l, in, r, li, stream()}, loss_.as<double>());
  }
  // with_factors: sigmoid's backward pass gets what the forward pass kept of each row.
  void backward(int i, bool with_losses, float loss_scale = 1.0f, bool with_factors = true) const {
    const int set = i % sets_;
    RouterInputs in = inputs(set);
    if (with_factors && c_.score == ScoreFunction::kSigmoid) {
      in.weight_factors = TensorView(factors_[static_cast<std::size_t>(set)].data(), DType::kF32, {c_.T}, device());
    }
    const RouteView r = route(set);
    const RouterLossConfig l = with_losses ? loss_config() : RouterLossConfig{};
    const RouterLossInputs li = with_losses ? loss_inputs() : RouterLossInputs{};
    const TensorView d(d_logits_[static_cast<std::size_t>(set)].data(), DType::kF32, {c_.T, c_.E}, device());
    router_backward(router_impl::BackwardCall{config_, l, in, r, d_weights_[static_cast<std::size_t>(set)].as<float>(), li, loss_scale, d, stream()});
  }

  // Each check spoils the outputs of buffer set 0, runs the launch that is timed and compares (router_check.h). Run them in this order:
  // losses and backward need the route and the counts of a forward pass.
  bool check_forward(bool with_counts, bool portable, bool with_sums = false) const {
    for (const DeviceBuffer* buffer : {&ids_[0], &weights_[0], &counts_, &offsets_}) buffer->fill(0xff, stream_);
    forward(0, with_counts, portable, with_sums);
    stream_.synchronize();
    const auto K = static_cast<std::size_t>(c_.K), E = static_cast<std::size_t>(c_.E);
    const SampleInputs in(*this);
    if (!route_matches(config_, in.inputs, sample_rows<std::int16_t>(ids_[0], c_.T, K), sample_rows<float>(weights_[0], c_.T, K))) return false;
    if (!with_counts) return true;
    const std::vector<std::int32_t> counts = whole<std::int32_t>(counts_, E);
    if (!c_.load.empty()) {
      const std::vector<std::int64_t> want = workload_counts(bench::workload_of(c_.load, c_.T, c_.K, c_.E));
      for (std::size_t e = 0; e < E; ++e) {
        if (counts[e] != want[e]) return differs("a count of the load", e, counts[e], static_cast<double>(want[e]));
      }
    }
    return counts_match(c_.E, whole<std::int16_t>(ids_[0], routes()), counts, whole<std::int32_t>(offsets_, E + 1));
  }
  // With losses their gradients are scaled until they are as large as the routes' part, so that the bound sees them.
  bool check_backward(bool with_losses, bool with_factors = true) const {
    const float loss_scale = with_losses ? static_cast<float>(elements()) : 1.0f;
    d_logits_[0].fill(0xff, stream_);
    backward(0, with_losses, loss_scale, with_factors);
    stream_.synchronize();
    const auto K = static_cast<std::size_t>(c_.K), E = static_cast<std::size_t>(c_.E);
    const SampleInputs in(*this);
    std::vector<std::int16_t> ids = sample_rows<std::int16_t>(ids_[0], c_.T, K);
    std::vector<float> weights = sample_rows<float>(weights_[0], c_.T, K);
    const std::vector<float> d_weights = sample_rows<float>(d_weights_[0], c_.T, K);
    const std::vector<std::int32_t> counts = whole<std::int32_t>(counts_, E);
    RouteView sample;
    sample.T = kSampleRows, sample.K = c_.K, sample.E = c_.E, sample.ids = ids.data(), sample.weights = weights.data();
    const RouterLossConfig l = with_losses ? loss_config() : RouterLossConfig{};
    RouterLossInputs li = loss_inputs();
    li.aux_counts = counts.data();
    std::vector<float> want(static_cast<std::size_t>(kSampleRows) * E);
    const TensorView d = TensorView::of(want.data(), {kSampleRows, c_.E});
    const router_impl::BackwardCall call{config_, l, in.inputs, sample, d_weights.data(), li, loss_scale, d, Stream{}};
    router_impl::backward_ref(call);
    return gradients_match(call, sample_rows<float>(d_logits_[0], c_.T, E));
  }
  // All rows; with the forward pass where it takes the sums.
  bool check_losses(bool from_sums) const {
    loss_.fill(0xff, stream_), sums_.fill(0xff, stream_);
    if (from_sums && !check_forward(true, false, true)) return false;
    losses(0, from_sums);
    stream_.synchronize();
    std::vector<std::byte> logits = whole<std::byte>(logits_[0], logits_bytes());
    const std::vector<std::int32_t> counts = whole<std::int32_t>(counts_, static_cast<std::size_t>(c_.E));
    RouterInputs in;
    in.logits = TensorView(logits.data(), dtype_, {c_.T, c_.E});
    RouteView r;
    r.T = c_.T, r.K = c_.K, r.E = c_.E;
    const RouterLossConfig l = loss_config();
    RouterLossInputs li = loss_inputs();
    li.aux_counts = counts.data();
    return losses_match(router_impl::LossesCall{config_, l, in, r, li, Stream{}}, whole<double>(loss_, 3));
  }
  Stream stream() const { return Stream{device(), stream_.get(), nullptr}; }
  const CudaStream& cuda_stream() const { return stream_; }

 private:
  // The sampled rows' logits, and the bias, on the host.
  struct SampleInputs {
    explicit SampleInputs(const Bench& bench)
        : logits(sample_rows<std::byte>(bench.logits_[0], bench.c_.T, static_cast<std::size_t>(bench.c_.E) * size_bytes(bench.dtype_))),
          bias(whole<float>(bench.bias_, static_cast<std::size_t>(bench.c_.E))) {
      inputs.logits = TensorView(logits.data(), bench.dtype_, {kSampleRows, bench.c_.E});
      if (bench.c_.bias) inputs.expert_bias = TensorView(bias.data(), DType::kF32, {bench.c_.E});
    }
    SampleInputs(const SampleInputs&) = delete;
    SampleInputs& operator=(const SampleInputs&) = delete;
    std::vector<std::byte> logits;
    std::vector<float> bias;
    RouterInputs inputs;
  };
  // The load's experts stand far above the others; fp32 logits.
  void give_routes(const DeviceBuffer& logits, std::int64_t step) const {
    std::vector<float> host = whole<float>(logits, elements());
    const std::vector<std::int32_t> ids = workload_ids(bench::workload_of(c_.load, c_.T, c_.K, c_.E, step));
    for (std::size_t i = 0; i < ids.size(); ++i)
      host[i / static_cast<std::size_t>(c_.K) * static_cast<std::size_t>(c_.E) + static_cast<std::size_t>(ids[i])] += 10.0f;
    logits.upload(host.data(), logits.bytes());
  }
  Case c_;
  DType dtype_;
  int sets_;
  RouterConfig config_;
  CudaStream stream_;
  std::vector<DeviceBuffer> logits_, ids_, weights_, d_logits_, d_weights_, factors_;
  DeviceBuffer counts_, offsets_, loss_, bias_, sums_;
};

std::FILE* g_out = nullptr;
bool g_all_match = true, g_variants = false;

struct Row {
  std::string op, name, variant;
  double us;
  const Timing* timing;  // null: a difference of two medians, which has no spread of its own
  double floor_us, target_us;
  bool checked;
};

std::string number_or_null(bool is_known, double value) { return is_known ? fmt::format("{:.3f}", value) : "null"; }

void write_record(const Row& r) {
  const Timing* t = r.timing;
  g_all_match &= r.checked;
  fmt::print("{:<14} {:<44} {:<14} {:8.2f} us  spread {:>6}  floor {:6.2f}  x{:5.2f}  target {}{}{}\n", r.op, r.name, r.variant, r.us,
             t != nullptr ? fmt::format("{:.2f}", t->spread()) : "-", r.floor_us, r.us / r.floor_us, r.target_us > 0 ? fmt::format("{:g}", r.target_us) : "-",
             r.target_us > 0 ? (r.us <= r.target_us ? " met" : " MISSED") : "", r.checked ? "" : "  UNCHECKED");
  fmt::print(g_out,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{},\"floor\":{:.3f},"
             "\"target\":{},\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.3f},\"p99\":{},\"iterations\":{}}}\n",
             r.op, r.name, r.variant, r.us, number_or_null(t != nullptr, t != nullptr ? t->spread() : 0), r.floor_us,
             r.target_us > 0 ? fmt::format("{}", r.target_us) : "null", r.checked ? "true" : "false", r.us,
             number_or_null(t != nullptr, t != nullptr ? t->p99 : 0), t != nullptr ? std::to_string(t->iterations * t->replays) : "null");
  std::fflush(g_out);
}

void record(const std::string& op, const std::string& name, const std::string& variant, const Timing& t, double floor_us, double target_us, bool checked) {
  write_record({op, name, variant, t.p50, &t, floor_us, target_us, checked});
}

void record_difference(const std::string& op, const std::string& name, const Timing& with, const Timing& without, double floor_us, double target_us,
                       bool checked) {
  write_record({op, name, "difference", with.p50 - without.p50, nullptr, floor_us, target_us, checked});
}

// What this card copies from device memory to device memory, bytes read and written counted; buffers larger than the L2.
void measure_device_copy() {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const DeviceBuffer from(kBytes), to(kBytes);
  const CudaStream stream;
  from.fill(0x5a, stream), to.fill(0, stream);
  const auto copy = [&](int) { WB_TRY_CUDA(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream.get())); };
  copy(0);
  stream.synchronize();
  const std::vector<std::uint8_t> copied = whole<std::uint8_t>(to, kBytes);
  const bool checked = std::all_of(copied.begin(), copied.end(), [](std::uint8_t b) { return b == 0x5a; });
  g_all_match &= checked;
  const Timing t = time_captured(stream, 12, 20, copy);
  const auto rate = [](double us) { return 2.0 * static_cast<double>(kBytes) / us * 1e-3; };
  fmt::print("device_copy 256 MiB, read + written: {:.0f} GB/s\n", rate(t.p50));
  fmt::print(g_out,
             "{{\"op\":\"device_copy\",\"case\":\"cudaMemcpyAsync 256 MiB, read + written\",\"variant\":\"cold\",\"metric\":\"rate\",\"unit\":\"GB/s\","
             "\"value\":{:.1f},\"spread\":{:.1f},\"floor\":null,\"target\":null,\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.1f},"
             "\"p99\":null,\"iterations\":{}}}\n",
             rate(t.p50), rate(t.p10) - rate(t.p90), checked ? "true" : "false", rate(t.p50), t.iterations * t.replays);
}

const char* name_of(DType d) { return d == DType::kF32 ? "f32" : (d == DType::kBF16 ? "bf16" : "f16"); }

struct Problem {
  const Bench& bench;
  std::string name;
  DType dtype;
  bool big;
  double read_us, route_us, write_us;

  Timing time(const std::function<void(int)>& body, int replays = 0) const {
    return time_captured(bench.cuda_stream(), 12, replays > 0 ? replays : (big ? 30 : 60), body);
  }
};

Timing run_forward(const Case& c, const Problem& p) {
  const Bench& bench = p.bench;
  const double floor = p.read_us + p.route_us;
  const bool is_f32 = p.dtype == DType::kF32, with_portable = is_f32 && c.E >= 2304 && c.G == 1 && !c.bias;
  const bool no_counts_checked = is_f32 && bench.check_forward(false, false), portable_checked = with_portable && bench.check_forward(true, true);
  const bool checked = bench.check_forward(true, false);
  const Timing cold = p.time([&](int i) { bench.forward(i); });
  record("router_fwd", p.name, "cold", cold, floor, is_f32 ? c.target_us : 0, checked);
  if (!p.big) record("router_fwd", p.name, "warm", p.time([&](int) { bench.forward(0); }), floor, 0, checked);
  if (is_f32) record("router_fwd", p.name, "cold, no counts", p.time([&](int i) { bench.forward(i, false); }), floor, 0, no_counts_checked);
  if (is_f32) {
    dependent_launches() = false;
    record("router_fwd", p.name, "cold, launches in turn", p.time([&](int i) { bench.forward(i); }), floor, 0, checked);
    dependent_launches() = true;
  }
  for (const int off : {1, 2, 3}) {
    if (!g_variants) break;
    router_tuning::policy().quads = (off & 1) == 0, router_tuning::policy().max_counts_by_sum = (off & 2) != 0 ? 0 : router_tuning::kMaxExperts;
    const bool same = bench.check_forward(true, false);
    record("router_fwd", p.name, fmt::format("cold{}{}", off & 1 ? ", no quads" : "", off & 2 ? ", ticket" : ""), p.time([&](int i) { bench.forward(i); }),
           floor, 0, same);
    router_tuning::policy() = {};
  }
  if (g_variants && c.E <= 256) {
    router_tuning::policy().early_counts = false;
    const bool same = bench.check_forward(true, false);
    record("router_fwd", p.name, "cold, counts by the CTA", p.time([&](int i) { bench.forward(i); }), floor, 0, same);
    router_tuning::policy() = {};
  }
  if (with_portable) record("router_fwd", p.name, "portable", p.time([&](int i) { bench.forward(i, true, true); }, 3), floor, 0, portable_checked);
  return cold;
}

void run(const Case& c, DType dtype, bool backward, double sparse_target, double dense_target) {
  const bool big = c.T * c.E > (1 << 23);
  const int sets = big ? 3 : 12;
  const Bench bench(c, dtype, sets);
  const Problem p{bench,
                  fmt::format("{} {}", c.name, name_of(dtype)),
                  dtype,
                  big,
                  static_cast<double>(bench.logits_bytes()) / kBytesPerUs,
                  static_cast<double>(bench.routes() * 6) / kBytesPerUs,
                  static_cast<double>(bench.elements() * 4) / kBytesPerUs};
  const Timing cold = run_forward(c, p);
  if (!backward) return;
  const bool dense = c.score == ScoreFunction::kSoftmax && !c.renormalise, is_f32 = dtype == DType::kF32;
  for (int i = sets - 1; i >= 0; --i) bench.forward(i);  // every set's route, and the counts of set 0
  const bool checked = bench.check_backward(false);
  const double floor = p.write_us + (dense ? p.read_us : 0) + 14.0 / 6.0 * p.route_us;
  record("router_bwd", p.name, "cold", p.time([&](int i) { bench.backward(i, false); }), floor, is_f32 ? (dense ? dense_target : sparse_target) : 0, checked);
  if (is_f32) {
    dependent_launches() = false;
    record("router_bwd", p.name, "cold, launches in turn", p.time([&](int i) { bench.backward(i, false); }), floor, 0, checked);
    dependent_launches() = true;
  }
  if (is_f32 && c.score == ScoreFunction::kSigmoid) {
    const bool read_checked = bench.check_backward(false, false);
    record("router_bwd", p.name, "cold, logits read", p.time([&](int i) { bench.backward(i, false, 1.0f, false); }), floor, 0, read_checked);
  }
  if (!big)
    record("router_bwd", p.name, "warm", p.time([&](int) { bench.backward(0, false); }), floor, is_f32 && !dense && c.E == 256 && c.load.empty() ? 4.5 : 0,
           checked);
  if (c.E < 256) return;
  const bool in_forward = bench.sums_in_forward(), losses_checked = bench.check_losses(in_forward), both_checked = bench.check_backward(true);
  const Timing both = p.time([&](int i) { bench.forward(i, true, false, in_forward), bench.losses(i, in_forward); });
  record("router_fwd+loss", p.name, "cold", both, p.read_us + p.route_us, 0, losses_checked);
  if (in_forward) {
    const bool apart_checked = bench.check_losses(false);
    record("router_fwd+loss", p.name, "cold, read twice", p.time([&](int i) { bench.forward(i), bench.losses(i, false); }), p.read_us + p.route_us, 0,
           apart_checked);
  }
  record_difference("losses on fwd", p.name, both, cold, p.read_us, is_f32 && c.E == 2304 ? 15 : 0, losses_checked);
  const Timing plain_backward = p.time([&](int i) { bench.backward(i, false); });
  const Timing loss_backward = p.time([&](int i) { bench.backward(i, true); });
  record("router_bwd+loss", p.name, "cold", loss_backward, p.write_us + p.read_us, 0, both_checked);
  if (!dense) record_difference("losses on bwd", p.name, loss_backward, plain_backward, p.read_us, is_f32 && c.E == 2304 ? 25 : 0, checked && both_checked);
}

void run_gate(const GateShape& s) {
  const GateBench bench(s);
  const std::string name = fmt::format("T{} H{} E{} {}", s.T, s.H, s.E, name_of(s.dtype));
  const bool checked = bench.check();
  record("gate_fwd", name, "cuBLASLt", time_captured(bench.stream(), 12, 20, [&](int) { bench.forward(); }), bench.forward_floor_us(), 0, checked);
  record("gate_bwd", name, "cuBLASLt", time_captured(bench.stream(), 12, 20, [&](int) { bench.backward(); }), bench.backward_floor_us(), 0, checked);
}

int main_checked(int argc, char** argv) {
  std::string path = "router.jsonl", filter;
  bool with_loads = false;
  for (int i = 1, place = 0; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--loads") {
      with_loads = true;
    } else if (argument == "--variants") {
      g_variants = true;
    } else {
      WB_CHECK(!argument.starts_with("-"), "unknown option {}", argument);
      (place++ == 0 ? path : filter) = argument;
    }
  }
  g_out = std::fopen(path.c_str(), "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", path);
  using S = ScoreFunction;
  std::vector<Case> cases = {
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
  for (const char* load : bench::kWorkloads) {
    if (!with_loads) break;
    const std::int64_t T = bench::workload_of(load, 8192, 8, 256).T;
    cases.push_back({fmt::format("T{} E256 K8 sigmoid {}", T, load), T, 256, 8, S::kSigmoid, true, 1, 1, false, 0, load});
  }
  measure_device_copy();
  CaseFilter taken(filter);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case& c : cases) {
      if (!taken.takes(c.name) || (dtype != DType::kF32 && !c.load.empty())) continue;
      const bool backward = dtype == DType::kF32 && !c.bias;
      run(c, dtype, backward, c.E == 2304 ? 28 : (c.E == 256 && c.load.empty() ? 6 : 0), c.E == 2304 ? 50 : 0);
    }
  }
  for (const GateShape& s : {GateShape{8192, 7168, 256, DType::kBF16}, GateShape{8192, 2048, 512, DType::kBF16}, GateShape{8192, 512, 2304, DType::kBF16},
                             GateShape{16384, 2048, 128, DType::kBF16}, GateShape{8192, 2048, 512, DType::kF32}}) {
    if ((filter.empty() || filter == "gate") && taken.takes("gate")) run_gate(s);
  }
  std::fclose(g_out);
  taken.check_used();
  return g_all_match ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_router", waybill::cuda::main_checked, argc, argv); }

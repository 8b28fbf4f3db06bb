// SPDX-License-Identifier: Apache-2.0
// Runs one router problem on the CPU reference and on the GPU, and compares.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/graph.h"
#include "core/cuda/status_device.h"
#include "cuda/needs_gpu.h"
#include "ops/router/cuda/router_cuda.h"
#include "waybill/router.h"

namespace waybill::cuda {

// A problem in host memory. Logits are kept in fp32 and rounded to `dtype` on both sides.
struct RouterProblem {
  RouterConfig config;
  std::int64_t T = 0;
  DType dtype = DType::kF32;
  std::int64_t row_stride = 0;  // 0 = E
  std::vector<float> logits;    // [T, E]
  std::vector<float> bias;
  std::vector<std::uint8_t> mask, padding;
  std::vector<std::int32_t> replay;
  std::int64_t token_offset = 0;
  bool want_unbiased = false;
};

struct RouterResult {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::int32_t> counts, offsets, aligned, unbiased;
  StatusWord status;
};

// The logits as stored: [T, stride] in the problem's type, gaps filled with NaN.
inline std::vector<std::byte> stored_logits(const RouterProblem& p) {
  const std::int64_t E = p.config.E, stride = p.row_stride == 0 ? E : p.row_stride;
  const std::size_t size = size_bytes(p.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(p.T * stride) * size, std::byte{0xff});
  for (std::int64_t t = 0; t < p.T; ++t) {
    for (std::int64_t e = 0; e < E; ++e) {
      const float x = p.logits[static_cast<std::size_t>(t * E + e)];
      std::byte* to = bytes.data() + static_cast<std::size_t>(t * stride + e) * size;
      if (p.dtype == DType::kF32) {
        std::memcpy(to, &x, 4);
      } else {
        const std::uint16_t bits = p.dtype == DType::kBF16 ? bf16::from_float(x) : f16::from_float(x);
        std::memcpy(to, &bits, 2);
      }
    }
  }
  return bytes;
}

inline RouterInputs inputs_of(const RouterProblem& p, void* logits, float* bias, std::uint8_t* mask, std::uint8_t* padding, std::int32_t* replay,
                              Device device) {
  RouterInputs in;
  const std::int64_t E = p.config.E;
  in.logits = TensorView(logits, p.dtype, {p.T, E}, device);
  in.logits.stride[0] = p.row_stride == 0 ? E : p.row_stride;
  if (!p.bias.empty()) in.expert_bias = TensorView(bias, DType::kF32, {E}, device);
  if (!p.mask.empty()) in.expert_mask = TensorView(mask, DType::kU8, {E}, device);
  if (!p.padding.empty()) in.padding_mask = TensorView(padding, DType::kU8, {p.T}, device);
  if (!p.replay.empty()) in.replay_ids = TensorView(replay, DType::kI32, {p.T, p.config.K}, device);
  in.token_offset = p.token_offset;
  return in;
}

inline RouterResult run_reference(const RouterProblem& p) {
  RouterProblem copy = p;  // views need mutable pointers
  std::vector<std::byte> logits = stored_logits(p);
  const RouterInputs in = inputs_of(p, logits.data(), copy.bias.data(), copy.mask.data(), copy.padding.data(), copy.replay.data(), Device{});
  const auto E = static_cast<std::size_t>(p.config.E), routes = static_cast<std::size_t>(p.T * p.config.K);
  RouterResult r;
  r.ids.resize(routes), r.weights.resize(routes), r.counts.resize(E), r.offsets.resize(E + 1), r.aligned.resize(E + 1), r.unbiased.resize(E);
  RouterOutputs out;
  out.route.T = p.T, out.route.K = p.config.K, out.route.E = p.config.E, out.route.id_dtype = DType::kI32;
  out.route.ids = r.ids.data(), out.route.weights = r.weights.data(), out.route.counts = r.counts.data();
  out.offsets = r.offsets.data(), out.aligned_offsets = r.aligned.data(), out.status = &r.status;
  if (p.want_unbiased) out.counts_unbiased = r.unbiased.data();
  router_impl::forward_ref(router_impl::ForwardCall{p.config, in, out, Stream{}});
  return r;
}

// Device copies of a problem and room for its results. Reused over launches.
class GpuRouter {
 public:
  explicit GpuRouter(const RouterProblem& p, DType id_dtype = DType::kI16)
      : p_(p),
        id_dtype_(id_dtype),
        logits_bytes_(stored_logits(p)),
        logits_(logits_bytes_.size() + 16),
        bias_(p.bias.size() * 4 + 4),
        mask_(p.mask.size() + 1),
        padding_(p.padding.size() + 1),
        replay_(p.replay.size() * 4 + 4),
        ids_(routes() * 4 + 4),
        weights_(routes() * 4 + 4),
        counts_(experts() * 4),
        offsets_(experts() * 4 + 4),
        aligned_(experts() * 4 + 4),
        unbiased_(experts() * 4) {
    upload(p);
  }

  void upload(const RouterProblem& p) {
    const std::vector<std::byte> bytes = stored_logits(p);
    logits_.upload(bytes.data(), bytes.size());
    bias_.upload(p.bias.data(), p.bias.size() * 4), mask_.upload(p.mask.data(), p.mask.size()), padding_.upload(p.padding.data(), p.padding.size());
    replay_.upload(p.replay.data(), p.replay.size() * 4);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  RouterInputs inputs() const {
    return inputs_of(p_, logits_.data(), bias_.as<float>(), mask_.as<std::uint8_t>(), padding_.as<std::uint8_t>(), replay_.as<std::int32_t>(),
                     logits_.device());
  }
  RouterOutputs outputs() const {
    RouterOutputs out;
    out.route.T = p_.T, out.route.K = p_.config.K, out.route.E = p_.config.E, out.route.id_dtype = id_dtype_, out.route.device = logits_.device();
    out.route.ids = ids_.data(), out.route.weights = weights_.as<float>(), out.route.counts = counts_.as<std::int32_t>();
    out.offsets = offsets_.as<std::int32_t>(), out.aligned_offsets = aligned_.as<std::int32_t>(), out.status = status_.device_ptr();
    if (p_.want_unbiased) out.counts_unbiased = unbiased_.as<std::int32_t>();
    return out;
  }
  void poison() const {
    for (const DeviceBuffer* b : {&ids_, &weights_, &counts_, &offsets_, &aligned_, &unbiased_}) b->fill(0xcd, stream_);
    status_.clear(stream_);
  }
  // Empty = the kernels take the problem.
  std::string refusal(bool portable) const {
    const RouterInputs in = inputs();
    const RouterOutputs out = outputs();
    return refuse_router_forward(router_impl::ForwardCall{p_.config, in, out, stream()}, portable);
  }
  void launch(bool portable) const {
    const RouterInputs in = inputs();
    const RouterOutputs out = outputs();
    router_forward(router_impl::ForwardCall{p_.config, in, out, stream()}, portable);
  }
  // The forward pass of the kernels that the problem gets, with the rows' factors [T].
  RouterResult run_with_factors(float* factors) const {
    poison();
    const RouterInputs in = inputs();
    RouterOutputs out = outputs();
    out.weight_factors = factors;
    const router_impl::ForwardCall call{p_.config, in, out, stream()};
    router_forward(call, !refuse_router_forward(call, false).empty());
    return download();
  }
  RouterResult run(bool portable, bool captured = false) const {
    poison();
    if (captured) {
      launch(portable);  // allocates scratch
      poison();
      const GraphExec graph = GraphExec::capture(stream_, [&](cudaStream_t) { launch(portable); });
      graph.launch(stream_);
      stream_.synchronize();
    } else {
      launch(portable);
    }
    return download();
  }
  RouterResult download() const {
    RouterResult r;
    r.ids.resize(routes()), r.weights.resize(routes()), r.counts.resize(experts()), r.offsets.resize(experts() + 1), r.aligned.resize(experts() + 1),
        r.unbiased.resize(experts());
    if (id_dtype_ == DType::kI16) {
      std::vector<std::int16_t> ids(routes());
      ids_.download(ids.data(), ids.size() * 2, stream_);
      stream_.synchronize();
      r.ids.assign(ids.begin(), ids.end());
    } else {
      ids_.download(r.ids.data(), routes() * 4, stream_);
    }
    weights_.download(r.weights.data(), routes() * 4, stream_);
    counts_.download(r.counts.data(), experts() * 4, stream_);
    offsets_.download(r.offsets.data(), experts() * 4 + 4, stream_);
    aligned_.download(r.aligned.data(), experts() * 4 + 4, stream_);
    if (p_.want_unbiased) unbiased_.download(r.unbiased.data(), experts() * 4, stream_);
    r.status = status_.read(stream_);
    return r;
  }
  Stream stream() const { return Stream{logits_.device(), stream_.get(), nullptr}; }
  const CudaStream& cuda_stream() const { return stream_; }
  const RouterProblem& problem() const { return p_; }

 private:
  std::size_t routes() const { return static_cast<std::size_t>(p_.T * p_.config.K); }
  std::size_t experts() const { return static_cast<std::size_t>(p_.config.E); }
  RouterProblem p_;
  DType id_dtype_;
  std::vector<std::byte> logits_bytes_;
  CudaStream stream_;
  DeviceStatus status_;
  DeviceBuffer logits_, bias_, mask_, padding_, replay_, ids_, weights_, counts_, offsets_, aligned_, unbiased_;
};

// Ids, counts, offsets and counters exact; weights within `tolerance` relative.
inline void expect_same(const RouterResult& expected, const RouterResult& got, const RouterProblem& p, const std::string& what, double tolerance = 2e-6) {
  const auto K = static_cast<std::size_t>(p.config.K);
  for (std::size_t i = 0; i < expected.ids.size(); ++i) {
    ASSERT_EQ(expected.ids[i], got.ids[i]) << what << ": id of row " << i / K << ", slot " << i % K;
    ASSERT_TRUE(std::isfinite(got.weights[i])) << what << ": weight of row " << i / K << ", slot " << i % K << " is " << got.weights[i];
    ASSERT_LE(std::abs(static_cast<double>(expected.weights[i]) - got.weights[i]), tolerance * std::abs(static_cast<double>(expected.weights[i])) + 1e-37)
        << what << ": weight of row " << i / K << ", slot " << i % K << ", expected " << expected.weights[i] << ", got " << got.weights[i];
  }
  ASSERT_EQ(expected.counts, got.counts) << what;
  ASSERT_EQ(expected.offsets, got.offsets) << what;
  ASSERT_EQ(expected.aligned, got.aligned) << what;
  if (p.want_unbiased) {
    ASSERT_EQ(expected.unbiased, got.unbiased) << what;
  }
  ASSERT_EQ(expected.status.num_nonfinite_rows, got.status.num_nonfinite_rows) << what;
  ASSERT_EQ(expected.status.num_short_rows, got.status.num_short_rows) << what;
  ASSERT_EQ(expected.status.num_bad_ids, got.status.num_bad_ids) << what;
}

inline void expect_identical(const RouterResult& a, const RouterResult& b, const std::string& what) {
  ASSERT_EQ(a.ids, b.ids) << what;
  ASSERT_EQ(0, std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * 4)) << what << ": weights differ in bits";
  ASSERT_EQ(a.counts, b.counts) << what;
}

// Both kernels, eager and captured, twice, against the reference.
inline void check_forward(const RouterProblem& p, const std::string& what) {
  const RouterResult expected = run_reference(p);
  const GpuRouter gpu(p, p.config.E > 4096 ? DType::kI32 : DType::kI16);
  for (const bool portable : {false, true}) {
    const std::string refused = gpu.refusal(portable);
    if (!refused.empty()) {
      ASSERT_FALSE(portable) << what << ": the portable kernel refuses: " << refused;
      continue;
    }
    const std::string name = what + (portable ? " [block]" : " [warp]");
    const RouterResult first = gpu.run(portable);
    expect_same(expected, first, p, name);
    if (::testing::Test::HasFatalFailure()) return;
    expect_identical(first, gpu.run(portable, true), name + " captured");
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Rows by name: what a router meets in practice and what breaks routers.
inline void fill_logits(RouterProblem& p, const std::string& kind, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto E = static_cast<std::size_t>(p.config.E);
  p.logits.resize(static_cast<std::size_t>(p.T) * E);
  for (std::size_t i = 0; i < p.logits.size(); ++i) {
    float x = normal(random);
    if (kind == "tied") x = std::round(x * 2) / 2;
    if (kind == "collided") x = bf16(x);
    if (kind == "constant") x = 0.25f;
    if (kind == "saturated") x = 20 + 10 * x;
    if (kind == "deep") x = -10000 + 50 * x;
    if (kind == "wide") x = 300 * x * x * x;
    if (kind == "ramp") x = static_cast<float>(i % E) * 0.001f;
    if (kind == "falling") x = -static_cast<float>(i % E) * 0.5f;
    if (kind == "special") {
      const unsigned u = random() % 64;
      if (u == 0) x = NAN;
      if (u == 1) x = INFINITY;
      if (u == 2 || (i / E) % 3 == 1) x = -INFINITY;
      if (i / E == 2) x = NAN;
      if (u == 3) x = -0.0f;
      if (u == 4) x = 0.0f;
    }
    p.logits[i] = x;
  }
}

}  // namespace waybill::cuda

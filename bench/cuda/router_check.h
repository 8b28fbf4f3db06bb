// SPDX-License-Identifier: Apache-2.0
// What bench_cuda_router compares with the CPU references before it times a case. Rows: 64, spread evenly over the batch.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/router/router_impl.h"

namespace waybill::cuda {

constexpr std::int64_t kSampleRows = 64;

// The sampled rows of a device array [rows, width], on the host.
template <class T>
std::vector<T> sample_rows(const DeviceBuffer& source, std::int64_t rows, std::size_t width) {
  std::vector<T> host(static_cast<std::size_t>(kSampleRows) * width);
  for (std::int64_t n = 0; n < kSampleRows; ++n) {
    const auto t = static_cast<std::size_t>((rows - 1) * n / (kSampleRows - 1));
    WB_TRY_CUDA(cudaMemcpy(host.data() + static_cast<std::size_t>(n) * width, source.as<T>() + t * width, width * sizeof(T), cudaMemcpyDeviceToHost));
  }
  return host;
}

template <class T>
std::vector<T> whole(const DeviceBuffer& source, std::size_t elements) {
  std::vector<T> host(elements);
  WB_TRY_CUDA(cudaMemcpy(host.data(), source.data(), elements * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

inline bool differs(const char* what, std::size_t index, double got, double want) {
  fmt::print(stderr, "{} differs at {}: {:.9g} where the reference has {:.9g}\n", what, index, got, want);
  return false;
}

// Ids equal, weights within 2e-6 of themselves. `in` holds the sampled rows.
inline bool route_matches(const RouterConfig& config, const RouterInputs& in, const std::vector<std::int16_t>& ids, const std::vector<float>& weights) {
  std::vector<std::int16_t> want(ids.size());
  std::vector<float> want_weights(weights.size());
  RouterOutputs out;
  out.route.T = kSampleRows, out.route.K = config.K, out.route.E = config.E, out.route.ids = want.data(), out.route.weights = want_weights.data();
  router_impl::forward_ref(router_impl::ForwardCall{config, in, out, Stream{}});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] != want[i]) return differs("an id", i, ids[i], want[i]);
    if (!(std::abs(weights[i] - want_weights[i]) <= 2e-6f * want_weights[i])) return differs("a weight", i, weights[i], want_weights[i]);
  }
  return true;
}

// Counts and offsets of the whole batch are those of its ids.
inline bool counts_match(std::int64_t E, const std::vector<std::int16_t>& ids, const std::vector<std::int32_t>& counts,
                         const std::vector<std::int32_t>& offsets) {
  std::vector<std::int32_t> want(static_cast<std::size_t>(E), 0);
  for (const std::int16_t id : ids) {
    if (id < 0 || id >= E) return differs("an id of the batch", 0, id, 0);
    ++want[static_cast<std::size_t>(id)];
  }
  std::int32_t offset = 0;
  for (std::size_t e = 0; e < want.size(); ++e) {
    if (counts[e] != want[e]) return differs("a count", e, counts[e], want[e]);
    if (offsets[e] != offset) return differs("an offset", e, offsets[e], offset);
    offset += want[e];
  }
  return offsets[want.size()] == offset || differs("the last offset", want.size(), offsets[want.size()], offset);
}

// Gradients [64, E] against backward_ref, within the bound of the tests: 4e-6 of the row's largest and 3e-7 of the largest seen, plus the rounding
// of terms that cancel (a: the aux loss's factor of an expert; g w: the routes').
inline bool gradients_match(const router_impl::BackwardCall& call, const std::vector<float>& got) {
  const std::vector<float> want(static_cast<const float*>(call.d_logits.data), static_cast<const float*>(call.d_logits.data) + got.size());
  const auto E = static_cast<std::size_t>(call.config.E), K = static_cast<std::size_t>(call.config.K);
  const auto larger = [](double a, float b) { return std::max(a, std::abs(static_cast<double>(b))); };
  double largest_of_all = 0, a_scale = 0;
  for (const float v : want) largest_of_all = larger(largest_of_all, v);
  if (call.losses.aux_coefficient != 0) {
    const double count = *std::max_element(call.loss_inputs.aux_counts, call.loss_inputs.aux_counts + E);
    a_scale =
        call.losses.aux_coefficient * static_cast<double>(E) / static_cast<double>(K) * count / (call.loss_inputs.aux_tokens * call.loss_inputs.loss_tokens);
  }
  for (std::size_t t = 0; t < static_cast<std::size_t>(kSampleRows); ++t) {
    double largest = 0, route_scale = 0;
    for (std::size_t k = t * K; k < (t + 1) * K; ++k) route_scale = larger(route_scale, call.d_weights[k] * call.route.weights[k]);
    for (std::size_t i = t * E; i < (t + 1) * E; ++i) largest = larger(largest, want[i]);
    const double bound = 4e-6 * largest + 3e-7 * largest_of_all + static_cast<double>(call.loss_scale) * 2e-7 * a_scale + 3e-7 * route_scale;
    for (std::size_t i = t * E; i < (t + 1) * E; ++i) {
      if (!(std::abs(static_cast<double>(got[i]) - want[i]) <= bound)) return differs("a gradient", i, got[i], want[i]);
    }
  }
  return true;
}

// losses_ref over all rows, in blocks on the host's threads: with counts and token totals given, the losses of blocks add up.
inline RouterLosses losses_of_blocks(const router_impl::LossesCall& call) {
  const std::int64_t T = call.route.T, num_blocks = std::max<std::int64_t>(1, std::min<std::int64_t>(T, std::thread::hardware_concurrency()));
  std::vector<RouterLosses> parts(static_cast<std::size_t>(num_blocks));
  std::vector<std::thread> threads;
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    threads.emplace_back([&, b] {
      const std::int64_t begin = T * b / num_blocks, rows = T * (b + 1) / num_blocks - begin;
      const DType dtype = call.inputs.logits.dtype;
      RouterInputs in;
      in.logits = TensorView(static_cast<std::byte*>(call.inputs.logits.data) + begin * call.config.E * static_cast<std::int64_t>(size_bytes(dtype)), dtype,
                             {rows, call.config.E});
      RouteView route = call.route;
      route.T = rows;
      parts[static_cast<std::size_t>(b)] = router_impl::losses_ref(router_impl::LossesCall{call.config, call.losses, in, route, call.loss_inputs, Stream{}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  RouterLosses sum;
  for (const RouterLosses& part : parts) sum.aux += part.aux, sum.z += part.z;
  return sum;
}

// Within 1e-5 of the reference. got: aux, sequence, z.
inline bool losses_match(const router_impl::LossesCall& call, const std::vector<double>& got) {
  const RouterLosses want = losses_of_blocks(call);
  if (!(std::abs(got[0] - want.aux) <= 1e-5 * std::abs(want.aux))) return differs("the aux loss", 0, got[0], want.aux);
  if (!(std::abs(got[2] - want.z) <= 1e-5 * std::abs(want.z))) return differs("the z loss", 2, got[2], want.z);
  return want.aux != 0 && want.z != 0;
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/check.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "bench/cuda/moe/norms.h"
#include "core/cuda/cuda_error.h"

namespace waybill::cuda::moe_bench {
namespace {

std::vector<TensorView> results_of(const RankTensors& t) {
  std::vector<TensorView> all{t.out, t.dx, t.gradients.gate, t.gradients.w1, t.gradients.w2};
  if (t.gradients.latent_down) all.push_back(t.gradients.latent_down), all.push_back(t.gradients.latent_up);
  return all;
}
constexpr const char* kNames[] = {"out", "dx", "d_gate", "dw1", "dw2", "d_latent_down", "d_latent_up"};
std::size_t bytes_of(const TensorView& view) { return static_cast<std::size_t>(view.size()) * size_bytes(view.dtype); }

// bf16 values [from, from + count) of a device tensor.
std::vector<double> doubles(const TensorView& view, std::int64_t from, std::int64_t count) {
  std::vector<std::uint16_t> raw(static_cast<std::size_t>(count));
  WB_TRY_CUDA(cudaMemcpy(raw.data(), static_cast<const std::uint16_t*>(view.data) + from, raw.size() * 2, cudaMemcpyDeviceToHost));
  std::vector<double> values(raw.size());
  std::transform(raw.begin(), raw.end(), values.begin(), [](std::uint16_t bits) { return static_cast<double>(bf16::to_float(bits)); });
  return values;
}

double dot(const double* a, const double* b, std::int64_t n) { return std::inner_product(a, a + n, b, 0.0); }

double relative(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) difference += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
  return std::sqrt(difference / size);
}

// matrix [rows, columns] times v, rounded to bf16 as the layer's rows are; transposed: v times it.
std::vector<double> rounded_product(const TensorView& matrix, const std::vector<double>& v, bool transposed) {
  const std::int64_t rows = matrix.shape[0], columns = matrix.shape[1];
  const std::vector<double> m = doubles(matrix, 0, rows * columns);
  std::vector<double> product(static_cast<std::size_t>(transposed ? columns : rows));
  for (std::int64_t r = 0; r < rows; ++r) {
    const double* row = &m[static_cast<std::size_t>(r * columns)];
    if (!transposed) product[static_cast<std::size_t>(r)] = dot(row, v.data(), columns);
    for (std::int64_t c = 0; transposed && c < columns; ++c) product[static_cast<std::size_t>(c)] += row[c] * v[static_cast<std::size_t>(r)];
  }
  for (double& value : product) value = static_cast<double>(bf16::to_float(bf16::from_float(static_cast<float>(value))));
  return product;
}

// One expert on one token: y = W2 a without the weight, and what the backward pass needs.
struct ExpertWork {
  std::int64_t expert = 0;
  double score = 0, weight = 0, d_weight = 0;
  std::vector<double> y, dx;
};

void run_expert(Problem& problem, ExpertWork& work, const std::vector<double>& x, const std::vector<double>& d_out) {
  const std::int64_t H = problem.shape().row_width(), F = problem.shape().F, L = problem.L(), local = work.expert % L;
  RankTensors& owner = problem.rank(static_cast<int>(work.expert / L));
  const std::vector<double> w1 = doubles(owner.weights.w1, local * 2 * F * H, 2 * F * H), w2 = doubles(owner.weights.w2, local * H * F, H * F);
  const auto n = [](std::int64_t v) { return static_cast<std::size_t>(v); };
  std::vector<double> gate(n(F)), up(n(F)), a(n(F)), da(n(F), 0.0);
  for (std::int64_t f = 0; f < F; ++f) {
    gate[n(f)] = dot(&w1[n(f * H)], x.data(), H), up[n(f)] = dot(&w1[n((F + f) * H)], x.data(), H);
    a[n(f)] = gate[n(f)] / (1 + std::exp(-gate[n(f)])) * up[n(f)];
  }
  work.y.assign(n(H), 0.0), work.dx.assign(n(H), 0.0);
  for (std::int64_t h = 0; h < H; ++h) {
    work.y[n(h)] = dot(&w2[n(h * F)], a.data(), F);
    for (std::int64_t f = 0; f < F; ++f) da[n(f)] += w2[n(h * F + f)] * d_out[n(h)];
  }
  work.d_weight = dot(work.y.data(), d_out.data(), H);
  for (std::int64_t f = 0; f < F; ++f) {
    const double s = 1 / (1 + std::exp(-gate[n(f)])), d = work.weight * da[n(f)];
    const double d_gate = d * up[n(f)] * s * (1 + gate[n(f)] * (1 - s)), d_up = d * gate[n(f)] * s;
    for (std::int64_t h = 0; h < H; ++h) work.dx[n(h)] += d_gate * w1[n(f * H + h)] + d_up * w1[n((F + f) * H + h)];
  }
}

// The token's experts with scores and weights: the load's, or the K largest logits.
std::vector<ExpertWork> choose(Problem& problem, RankTensors& t, std::int64_t token, const std::vector<double>& x, const std::vector<double>& gate) {
  const Shape& c = problem.shape();
  std::vector<double> logits(static_cast<std::size_t>(c.E));
  for (std::int64_t e = 0; e < c.E; ++e) logits[static_cast<std::size_t>(e)] = dot(&gate[static_cast<std::size_t>(e * c.H)], x.data(), c.H);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(c.E));
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  std::partial_sort(ids.begin(), ids.begin() + c.K, ids.end(),
                    [&](std::int64_t a, std::int64_t b) { return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)]; });
  ids.resize(static_cast<std::size_t>(c.K));
  if (t.ids) {
    std::vector<std::int16_t> given(ids.size());
    WB_TRY_CUDA(cudaMemcpy(given.data(), static_cast<const std::int16_t*>(t.ids.data) + token * c.K, given.size() * 2, cudaMemcpyDeviceToHost));
    std::copy(given.begin(), given.end(), ids.begin());
  }
  std::vector<ExpertWork> list(ids.size());
  double sum = 0;
  for (std::size_t k = 0; k < ids.size(); ++k) list[k].expert = ids[k], sum += list[k].score = 1 / (1 + std::exp(-logits[static_cast<std::size_t>(ids[k])]));
  for (ExpertWork& work : list) work.weight = work.score / sum;
  return list;
}

}  // namespace

double relative_difference(const TensorView& got, const TensorView& want, const std::int32_t* places, std::int64_t K) {
  const DeviceGuard guard(got.device.index);
  DeviceBuffer sums(16, got.device.index);
  WB_TRY_CUDA(cudaMemset(sums.data(), 0, 16));
  const std::int64_t rows = got.shape[0];
  launch_norms(got.data, got.dtype == DType::kBF16, want.data, want.dtype == DType::kBF16, rows, rows == 0 ? 0 : got.size() / rows, places, K,
               sums.as<double>(), nullptr);
  double host[2] = {};
  WB_TRY_CUDA(cudaMemcpy(host, sums.data(), 16, cudaMemcpyDeviceToHost));
  return host[1] == 0 ? std::sqrt(host[0]) : std::sqrt(host[0] / host[1]);
}

Results::Results(Problem& problem) {
  for (int r = 0; r < problem.P(); ++r) {
    std::vector<TensorView> views = results_of(problem.rank(r));
    for (TensorView& view : views) {
      memory_.emplace_back(std::max<std::size_t>(bytes_of(view), 16), problem.rank(r).device);
      view.data = memory_.back().data();
    }
    views_.push_back(views);
  }
}

void Results::keep(Problem& problem) {
  for (int r = 0; r < problem.P(); ++r) {
    const std::vector<TensorView> from = results_of(problem.rank(r));
    const DeviceGuard guard(problem.rank(r).device);
    for (std::size_t i = 0; i < from.size(); ++i)
      WB_TRY_CUDA(cudaMemcpy(views_[static_cast<std::size_t>(r)][i].data, from[i].data, bytes_of(from[i]), cudaMemcpyDeviceToDevice));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
}

std::string Results::compare(Problem& problem, const std::vector<const std::int32_t*>& places, double bound, double& largest) const {
  for (int r = 0; r < problem.P(); ++r) {
    const std::vector<TensorView> got = results_of(problem.rank(r));
    const std::int32_t* place = places.empty() ? nullptr : places[static_cast<std::size_t>(r)];
    for (std::size_t i = 0; i < (place != nullptr ? 2 : got.size()); ++i) {
      const double error = relative_difference(got[i], views_[static_cast<std::size_t>(r)][i], place, problem.shape().K);
      largest = std::max(largest, error);
      if (!(error < bound)) return fmt::format("{} of rank {} differs by a relative norm of {:.2e}, allowed {:.0e}", kNames[i], r, error, bound);
    }
  }
  return {};
}

void poison_results(Problem& problem) {
  for (int r = 0; r < problem.P(); ++r) {
    const DeviceGuard guard(problem.rank(r).device);
    for (const TensorView& view : results_of(problem.rank(r))) WB_TRY_CUDA(cudaMemset(view.data, 0xff, bytes_of(view)));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
}

TokenErrors check_token(Problem& problem, int r, std::int64_t t) {
  RankTensors& tensors = problem.rank(r);
  const std::int64_t H = problem.shape().H;
  const std::vector<double> x = doubles(tensors.x, t * H, H), d_out = doubles(tensors.d_out, t * H, H);
  const std::vector<double> gate = doubles(tensors.weights.gate, 0, problem.shape().E * H);
  std::vector<ExpertWork> experts = choose(problem, tensors, t, x, gate);
  const bool is_latent = problem.shape().latent > 0;
  const std::vector<double> row = is_latent ? rounded_product(tensors.weights.latent_down, x, false) : x;
  const std::vector<double> d_row = is_latent ? rounded_product(tensors.weights.latent_up, d_out, true) : d_out;
  std::vector<std::thread> threads;
  for (ExpertWork& work : experts) threads.emplace_back([&] { run_expert(problem, work, row, d_row); });
  for (std::thread& thread : threads) thread.join();
  std::vector<double> out(row.size()), dx(row.size());
  double mean = 0, sum = 0;
  for (const ExpertWork& work : experts) mean += work.weight * work.d_weight, sum += work.score;
  for (const ExpertWork& work : experts) {
    for (std::size_t i = 0; i < row.size(); ++i) out[i] += work.weight * work.y[i], dx[i] += work.dx[i];
  }
  if (is_latent) out = rounded_product(tensors.weights.latent_up, out, false), dx = rounded_product(tensors.weights.latent_down, dx, true);
  for (const ExpertWork& work : experts) {
    const double d_logit = (work.d_weight - mean) / sum * work.score * (1 - work.score);
    for (std::int64_t h = 0; h < H; ++h) dx[static_cast<std::size_t>(h)] += d_logit * gate[static_cast<std::size_t>(work.expert * H + h)];
  }
  return {relative(doubles(tensors.out, t * H, H), out), relative(doubles(tensors.dx, t * H, H), dx)};
}

}  // namespace waybill::cuda::moe_bench

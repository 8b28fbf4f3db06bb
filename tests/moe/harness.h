// SPDX-License-Identifier: Apache-2.0
// Runs one MoE layer on P ranks (threads) over a batch that is split by tokens, and collects the results as if there were one.
#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "moe/oracle.h"
#include "waybill/moe.h"
#include "waybill/random.h"

namespace waybill::test {

inline std::vector<float> random_values(std::size_t count, std::uint64_t key, float scale) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = scale * random_normal(key, i);
  return values;
}

inline Weights<float> random_weights(const MoeConfig& c, std::uint64_t seed, bool router_bias = false) {
  const auto size = [](std::int64_t a, std::int64_t b, std::int64_t d = 1) { return static_cast<std::size_t>(a * b * d); };
  const std::int64_t W = c.row_width(), inner = activation_input_width(c.activation, c.F);
  Weights<float> w;
  w.gate = random_values(size(c.E, c.H), seed + 1, 0.7f);
  if (router_bias) w.bias = random_values(size(c.E, 1), seed + 2, 0.3f);
  w.w1 = random_values(size(c.E, inner, W), seed + 3, 0.5f);
  w.w2 = random_values(size(c.E, W, c.F), seed + 4, 0.5f);
  if (c.expert_bias) w.b1 = random_values(size(c.E, inner), seed + 5, 0.4f);
  if (c.expert_bias) w.b2 = random_values(size(c.E, W), seed + 6, 0.4f);
  if (c.shared_F > 0) w.shared_w1 = random_values(size(c.shared_inner_width(), c.H), seed + 7, 0.5f);
  if (c.shared_F > 0) w.shared_w2 = random_values(size(c.H, c.shared_F), seed + 8, 0.5f);
  if (c.latent > 0) w.latent_down = random_values(size(c.latent, c.H), seed + 9, 0.5f);
  if (c.latent > 0) w.latent_up = random_values(size(c.H, c.latent), seed + 10, 0.5f);
  return w;
}

inline Weights<double> to_double(Weights<float> w) {
  Weights<double> d;
  const auto copy = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
  d.gate = copy(w.gate), d.bias = copy(w.bias), d.w1 = copy(w.w1), d.w2 = copy(w.w2), d.b1 = copy(w.b1), d.b2 = copy(w.b2);
  d.shared_w1 = copy(w.shared_w1), d.shared_w2 = copy(w.shared_w2), d.latent_down = copy(w.latent_down), d.latent_up = copy(w.latent_up);
  return d;
}

// One rank's tensors: experts (and, with ETP, the slice of F) of `rank`, everything else whole.
struct RankWeights {
  Weights<float> w;
  MoeTensors tensors;
  std::int64_t first_expert = 0;
};

// Copies rank `rank`'s part out of (or, with `add`, adds it back into) the whole tensors.
inline void exchange_slice(const MoeConfig& c, int P, int rank, Weights<float>& whole, Weights<float>& local, bool add) {
  const int t = c.expert_tensor_parallel, j = rank % t;
  const std::int64_t L = c.L(P), first = rank / t * L, W = c.row_width(), f = c.local_F();
  const std::int64_t blocks = activation_input_width(c.activation, c.F) / c.F;  // gate and up
  const auto move = [add](float& from, float& to) {
    if (add)
      from += to;
    else
      to = from;
  };
  for (std::int64_t e = 0; e < L; ++e) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      for (std::int64_t i = 0; i < f; ++i) {
        const std::int64_t whole_row = (first + e) * blocks * c.F + b * c.F + j * f + i, local_row = e * blocks * f + b * f + i;
        for (std::int64_t n = 0; n < W; ++n) move(whole.w1[static_cast<std::size_t>(whole_row * W + n)], local.w1[static_cast<std::size_t>(local_row * W + n)]);
        if (c.expert_bias) move(whole.b1[static_cast<std::size_t>(whole_row)], local.b1[static_cast<std::size_t>(local_row)]);
      }
    }
    for (std::int64_t n = 0; n < W; ++n) {
      for (std::int64_t i = 0; i < f; ++i) {
        move(whole.w2[static_cast<std::size_t>(((first + e) * W + n) * c.F + j * f + i)], local.w2[static_cast<std::size_t>((e * W + n) * f + i)]);
      }
      if (c.expert_bias) move(whole.b2[static_cast<std::size_t>((first + e) * W + n)], local.b2[static_cast<std::size_t>(e * W + n)]);
    }
  }
}

inline MoeTensors views(const MoeConfig& c, std::int64_t L, Weights<float>& w) {
  const auto view = [](std::vector<float>& v, std::initializer_list<std::int64_t> shape) { return v.empty() ? TensorView() : TensorView::of(v.data(), shape); };
  MoeTensors t;
  t.gate = view(w.gate, {c.E, c.H});
  t.router_bias = view(w.bias, {c.E});
  t.w1 = view(w.w1, {L, c.inner_width(), c.row_width()});
  t.w2 = view(w.w2, {L, c.row_width(), c.local_F()});
  t.b1 = view(w.b1, {L, c.inner_width()});
  t.b2 = view(w.b2, {L, c.row_width()});
  if (c.shared_F > 0) t.shared_w1 = view(w.shared_w1, {c.shared_inner_width(), c.H});
  if (c.shared_F > 0) t.shared_w2 = view(w.shared_w2, {c.H, c.shared_F});
  if (c.latent > 0) t.latent_down = view(w.latent_down, {c.latent, c.H});
  if (c.latent > 0) t.latent_up = view(w.latent_up, {c.H, c.latent});
  return t;
}

inline RankWeights slice(const MoeConfig& c, int P, int rank, const Weights<float>& whole) {
  RankWeights r;
  r.w = whole;
  const auto part = static_cast<std::size_t>(P);
  r.w.w1.resize(whole.w1.size() / part), r.w.w2.resize(whole.w2.size() / part);
  if (c.expert_bias) r.w.b1.resize(whole.b1.size() / part);
  if (c.expert_bias) r.w.b2.resize(static_cast<std::size_t>(c.L(P) * c.row_width()));
  Weights<float> source = whole;
  exchange_slice(c, P, rank, source, r.w, /*add=*/false);
  return r;
}

struct Batch {
  std::vector<float> x, d_out;       // [T, H]
  std::vector<std::int64_t> tokens;  // [P] tokens of each rank, consecutive
  std::vector<std::uint8_t> mask;    // [T] or empty
  std::vector<std::int32_t> replay;  // [T, K] or empty
  float loss_scale = 1.0f;
  std::int64_t T() const { return std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}); }
};

inline Batch random_batch(const MoeConfig& c, std::vector<std::int64_t> tokens, std::uint64_t seed) {
  Batch batch;
  batch.tokens = std::move(tokens);
  const auto size = static_cast<std::size_t>(batch.T() * c.H);
  batch.x = random_values(size, seed, 1.0f);
  batch.d_out = random_values(size, seed + 1, 1.0f);
  return batch;
}

struct Result {
  std::vector<float> out, dx;     // [T, H]
  Weights<float> gradients;       // whole; replicated tensors summed over ranks
  std::vector<std::int32_t> ids;  // [T, K]
  std::vector<float> weights;     // [T, K]
  std::vector<std::int64_t> counts;
  RouterLosses losses;  // summed over ranks
  double global_loss = 0, valid_tokens = 0;
  std::vector<std::int64_t> slots, rows;  // [P]
  std::vector<StatusWord> status;         // [P]
  std::vector<bool> valid;                // [P]
  double flops = 0;
  std::int64_t dense_forwards = 0, dropped = 0;
  ExchangeBytes bytes;
  std::size_t saved_bytes = 0;  // rank 0
};

struct RunOptions {
  int evaluations_before = 0;
  int pool_threads = 1;
  bool backward = true;
  MoeForwardOptions forward{};
};

namespace detail {

inline void add_to(std::vector<float>& sum, const std::vector<float>& part) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
}

}  // namespace detail

// One rank's share of a batch. `result` is filled under the caller's lock, in rank order.
struct RankRun {
  RankWeights weights, gradients;
  std::vector<float> x, d_out, out, dx;
  std::vector<std::uint8_t> mask;
  Route replay;
  MoeStep step;
  std::int64_t T = 0, first = 0;

  RankRun(const MoeConfig& c, int P, int rank, const Weights<float>& w, const Batch& batch) : weights(slice(c, P, rank, w)) {
    gradients.w = weights.w;
    gradients.w.for_each([](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 0.0f); });
    const auto me = static_cast<std::size_t>(rank);
    T = batch.tokens[me];
    first = std::accumulate(batch.tokens.begin(), batch.tokens.begin() + rank, std::int64_t{0});
    const auto cut = [&](const auto& v, std::int64_t width) {
      return v.empty() ? v : std::decay_t<decltype(v)>(v.begin() + first * width, v.begin() + (first + T) * width);
    };
    x = cut(batch.x, c.H), d_out = cut(batch.d_out, c.H), mask = cut(batch.mask, 1);
    out.assign(x.size(), -77.0f), dx.assign(x.size(), -77.0f);  // poison: everything must be written
    if (!batch.replay.empty()) {
      replay = Route(T, c.K, c.E);
      for (std::int64_t i = 0; i < T * c.K; ++i) {
        replay.view().set_id(i / c.K, i % c.K, batch.replay[static_cast<std::size_t>(first * c.K + i)]);
        replay.view().weights[i] = batch.replay[static_cast<std::size_t>(first * c.K + i)] < 0 ? 0.0f : 1.0f;
      }
      replay.recount();
    }
  }

  void run(MoeLayer& layer, const MoeConfig& c, const Batch& batch, const RunOptions& options) {
    const MoeTensors parameters = views(c, layer.L(), weights.w), grads = views(c, layer.L(), gradients.w);
    MoeForwardOptions forward = options.forward;
    if (!mask.empty() || (!batch.mask.empty() && T == 0)) forward.padding_mask = TensorView::of(mask.data(), {T});
    if (!batch.replay.empty()) forward.replay = &replay;
    forward.token_offset = first;
    const TensorView xv = TensorView::of(x.data(), {T, c.H}), outv = TensorView::of(out.data(), {T, c.H});
    for (int i = 0; i < options.evaluations_before; ++i) {
      MoeForwardOptions evaluation = forward;
      evaluation.training = false;
      layer.forward(parameters, xv, outv, step, evaluation);
    }
    layer.forward(parameters, xv, outv, step, forward);
    if (options.backward) {
      layer.backward(parameters, grads, xv, TensorView::of(d_out.data(), {T, c.H}), TensorView::of(dx.data(), {T, c.H}), step, batch.loss_scale);
    }
  }

  void collect(const MoeConfig& c, int P, int rank, MoeLayer& layer, Result& r) {
    const auto put = [&](std::vector<float>& whole, const std::vector<float>& part, std::int64_t width) {
      std::copy(part.begin(), part.end(), whole.begin() + first * width);
    };
    put(r.out, out, c.H), put(r.dx, dx, c.H);
    for (std::int64_t i = 0; i < T * c.K; ++i) {
      r.ids[static_cast<std::size_t>(first * c.K + i)] = step.route.view().id(i / c.K, i % c.K);
      r.weights[static_cast<std::size_t>(first * c.K + i)] = step.route.view().weights[i];
    }
    exchange_slice(c, P, rank, r.gradients, gradients.w, /*add=*/true);
    detail::add_to(r.gradients.gate, gradients.w.gate);
    detail::add_to(r.gradients.shared_w1, gradients.w.shared_w1), detail::add_to(r.gradients.shared_w2, gradients.w.shared_w2);
    detail::add_to(r.gradients.latent_down, gradients.w.latent_down), detail::add_to(r.gradients.latent_up, gradients.w.latent_up);
    r.losses.aux += step.losses.aux, r.losses.sequence += step.losses.sequence, r.losses.z += step.losses.z;
    r.global_loss += step.global_loss, r.valid_tokens = step.valid_tokens, r.counts = step.counts;
    const auto me = static_cast<std::size_t>(rank);
    r.slots[me] = step.slots, r.rows[me] = step.rows, r.status[me] = step.status, r.valid[me] = step.valid;
    r.flops += layer.expert_flops(), r.dense_forwards += layer.num_dense_map_forwards(), r.bytes += layer.bytes();
    r.dropped += step.dropped_routes;
    if (rank == 0) r.saved_bytes = step.saved_bytes;
  }
};

inline Result empty_result(const MoeConfig& c, int P, const Weights<float>& w, const Batch& batch) {
  Result r;
  const auto T = static_cast<std::size_t>(batch.T()), ranks = static_cast<std::size_t>(P);
  r.out.assign(T * static_cast<std::size_t>(c.H), 0.0f), r.dx = r.out;
  r.ids.assign(T * static_cast<std::size_t>(c.K), -9), r.weights.assign(r.ids.size(), 0.0f);
  r.gradients = w;
  r.gradients.for_each([](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 0.0f); });
  r.slots.resize(ranks), r.rows.resize(ranks), r.status.resize(ranks), r.valid.resize(ranks);
  return r;
}

// body(rank, layer, fabric) runs on every rank; results are collected in rank order so that sums over ranks are repeatable.
inline Result run_layer(const MoeConfig& c, const Weights<float>& w, const Batch& batch, const RunOptions& options = {}) {
  const int P = static_cast<int>(batch.tokens.size());
  Result result = empty_result(c, P, w, batch);
  std::mutex mutex;
  run_ranks(P, [&](Fabric& fabric) {
    ThreadPool pool(options.pool_threads);
    MoeLayer layer(c, fabric, fabric, &pool);
    RankRun rank(c, P, fabric.rank(), w, batch);
    rank.run(layer, c, batch, options);
    for (int turn = 0; turn < P; ++turn) {
      if (turn == fabric.rank()) {
        const std::lock_guard lock(mutex);
        rank.collect(c, P, turn, layer, result);
      }
      fabric.barrier("test turn");
    }
  });
  return result;
}

// Inputs of the oracle for the same batch and the routes that the layer took.
inline OracleInputs oracle_inputs(const MoeConfig& c, const Batch& batch, const std::vector<std::int32_t>& ids) {
  OracleInputs in;
  in.x.assign(batch.x.begin(), batch.x.end());
  in.ids = ids, in.masked = batch.mask;
  in.aux_counts.assign(static_cast<std::size_t>(c.E), 0.0);
  for (const std::int32_t id : ids) {
    if (id >= 0) in.aux_counts[static_cast<std::size_t>(id)] += 1;
  }
  in.global_counts = in.aux_counts;
  in.aux_tokens = static_cast<double>(batch.T() - std::accumulate(batch.mask.begin(), batch.mask.end(), std::int64_t{0}));
  in.global_tokens = in.loss_tokens = in.aux_tokens;
  return in;
}

// max |a - b| / max |b| (absolute when b is all 0).
template <class A, class B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
  double worst = 0, scale = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isfinite(difference) ? std::max(worst, difference) : HUGE_VAL;
    scale = std::max(scale, std::abs(static_cast<double>(b[i])));
  }
  return a.size() == b.size() ? (scale > 0 ? worst / scale : worst) : HUGE_VAL;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The values at `whole` are those of `part`, to the bit.
inline bool starts_with_bits(const float* whole, const std::vector<float>& part) {
  return part.empty() || std::memcmp(whole, part.data(), part.size() * sizeof(float)) == 0;
}

inline bool same_bits(Weights<float> a, Weights<float> b) {
  std::vector<std::vector<float>> left, right;
  a.for_each([&](const char*, std::vector<float>& v) { left.push_back(v); });
  b.for_each([&](const char*, std::vector<float>& v) { right.push_back(v); });
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (!same_bits(left[i], right[i])) return false;
  }
  return true;
}

// Small layer of the tests.
inline MoeConfig small_config(std::int64_t E = 4, std::int64_t K = 2, std::int64_t H = 6, std::int64_t F = 3) {
  MoeConfig c;
  c.H = H, c.E = E, c.K = K, c.F = F;
  c.debug_checks = true;
  return c;
}

}  // namespace waybill::test

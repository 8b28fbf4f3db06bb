// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include "ops/model/attention.h"

namespace waybill::ref {
namespace {

// Probabilities of query (b, h, i) over keys 0 .. i; returns the log-sum-exp.
double probabilities(const AttentionDims& d, const float* q, const float* k, std::int64_t b, std::int64_t h, std::int64_t i, std::vector<double>& p) {
  const std::int64_t kv = h / (d.num_heads / d.num_kv_heads), D = d.head_dim;
  p.assign(static_cast<std::size_t>(i + 1), 0.0);
  double total = 0;
  for (std::int64_t j = 0; j <= i; ++j) {
    double s = 0;
    for (std::int64_t c = 0; c < D; ++c)
      s += static_cast<double>(q[((b * d.seq_len + i) * d.num_heads + h) * D + c]) * k[((b * d.seq_len + j) * d.num_kv_heads + kv) * D + c];
    p[static_cast<std::size_t>(j)] = std::exp(s / std::sqrt(static_cast<double>(D)));
    total += p[static_cast<std::size_t>(j)];
  }
  for (double& value : p) value /= total;
  return std::log(total);
}

}  // namespace

void attention_forward(const AttentionDims& d, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o, float* lse) {
  std::vector<double> p;
  for (std::int64_t b = 0; b < d.B; ++b)
    for (std::int64_t h = 0; h < d.num_heads; ++h)
      for (std::int64_t i = 0; i < d.seq_len; ++i) {
        const double log_sum = probabilities(d, q.as<float>(), k.as<float>(), b, h, i, p);
        if (lse != nullptr) lse[(b * d.num_heads + h) * d.seq_len + i] = static_cast<float>(log_sum);
        const std::int64_t kv = h / (d.num_heads / d.num_kv_heads);
        for (std::int64_t c = 0; c < d.head_dim; ++c) {
          double total = 0;
          for (std::int64_t j = 0; j <= i; ++j)
            total += p[static_cast<std::size_t>(j)] * v.as<float>()[((b * d.seq_len + j) * d.num_kv_heads + kv) * d.head_dim + c];
          o.as<float>()[((b * d.seq_len + i) * d.num_heads + h) * d.head_dim + c] = static_cast<float>(total);
        }
      }
}

void attention_backward(const AttentionDims& d, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& d_o, const TensorView& dq,
                        const TensorView& dk, const TensorView& dv) {
  const std::int64_t D = d.head_dim, q_size = d.T() * d.num_heads * D, kv_size = d.T() * d.num_kv_heads * D;
  std::vector<double> gq(static_cast<std::size_t>(q_size)), gk(static_cast<std::size_t>(kv_size)), gv(static_cast<std::size_t>(kv_size)), p, dp;
  const float *qp = q.as<float>(), *kp = k.as<float>(), *vp = v.as<float>(), *gp = d_o.as<float>();
  for (std::int64_t b = 0; b < d.B; ++b)
    for (std::int64_t h = 0; h < d.num_heads; ++h)
      for (std::int64_t i = 0; i < d.seq_len; ++i) {
        probabilities(d, qp, kp, b, h, i, p);
        const std::int64_t kv = h / (d.num_heads / d.num_kv_heads), qi = ((b * d.seq_len + i) * d.num_heads + h) * D;
        const auto key = [&](std::int64_t j) { return ((b * d.seq_len + j) * d.num_kv_heads + kv) * D; };
        dp.assign(p.size(), 0.0);
        double mean = 0;
        for (std::int64_t j = 0; j <= i; ++j) {
          for (std::int64_t c = 0; c < D; ++c) dp[static_cast<std::size_t>(j)] += static_cast<double>(gp[qi + c]) * vp[key(j) + c];
          mean += p[static_cast<std::size_t>(j)] * dp[static_cast<std::size_t>(j)];
        }
        for (std::int64_t j = 0; j <= i; ++j) {
          const double pj = p[static_cast<std::size_t>(j)], ds = pj * (dp[static_cast<std::size_t>(j)] - mean) / std::sqrt(static_cast<double>(D));
          for (std::int64_t c = 0; c < D; ++c) {
            gq[static_cast<std::size_t>(qi + c)] += ds * kp[key(j) + c];
            gk[static_cast<std::size_t>(key(j) + c)] += ds * qp[qi + c];
            gv[static_cast<std::size_t>(key(j) + c)] += pj * gp[qi + c];
          }
        }
      }
  for (std::int64_t i = 0; i < q_size; ++i) dq.as<float>()[i] = static_cast<float>(gq[static_cast<std::size_t>(i)]);
  for (std::int64_t i = 0; i < kv_size; ++i) {
    dk.as<float>()[i] = static_cast<float>(gk[static_cast<std::size_t>(i)]);
    dv.as<float>()[i] = static_cast<float>(gv[static_cast<std::size_t>(i)]);
  }
}

}  // namespace waybill::ref

// SPDX-License-Identifier: Apache-2.0
#include "baselines/permuted_stack.h"

#include <algorithm>
#include <cstring>

namespace waybill::baselines {
namespace {

constexpr std::int64_t kGrainRows = 64;
constexpr std::int64_t kGrainColumns = 64;

}  // namespace

ExpertRows tight_rows(std::vector<std::int64_t> counts) {
  ExpertRows rows;
  for (const std::int64_t count : counts) {
    rows.starts.push_back(rows.total);
    rows.total += count;
  }
  rows.counts = std::move(counts);
  return rows;
}

// sent[i] = weight * from[token of slot i]; padding rows are 0.
void PermutedStack::gather(const TensorView& from, bool weighted, const TensorView& sent) {
  const std::int64_t H = config_.moe.H, K = config_.moe.K;
  const float* source = from.as<float>();
  float* target = sent.as<float>();
  const std::vector<std::int64_t>& slots = exchange_.send_slot();
  parallel_for(stream_.pool, exchange_.num_sent(), kGrainRows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t slot = slots[static_cast<std::size_t>(i)];
      float* row = target + i * H;
      if (slot < 0) {
        std::fill_n(row, H, 0.0f);
        continue;
      }
      const float* x = source + slot / K * H;
      const float weight = weighted ? sent_weight_[static_cast<std::size_t>(i)] : 1.0f;
      if (!weighted) std::memcpy(row, x, static_cast<std::size_t>(H) * sizeof(float));
      for (std::int64_t h = 0; weighted && h < H; ++h) row[h] = weight * x[h];
    }
  });
}

// out[token of slot i] += weight * sent[i], slots in the order they were sent. Threads split the columns: no two write one element.
void PermutedStack::index_add(const TensorView& sent, bool weighted, const TensorView& out) {
  const std::int64_t H = config_.moe.H, K = config_.moe.K;
  const float* source = sent.as<float>();
  float* target = out.as<float>();
  std::fill_n(target, out.size(), 0.0f);
  const std::vector<std::int64_t>& slots = exchange_.send_slot();
  const int threads = stream_.pool != nullptr ? stream_.pool->num_threads() : 1;
  const std::int64_t columns = std::max(kGrainColumns, (H + threads - 1) / threads), blocks = (H + columns - 1) / columns;
  parallel_for(stream_.pool, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * columns, last = std::min(H, end * columns);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      const float weight = weighted ? sent_weight_[i] : 1.0f;
      const float* row = source + static_cast<std::int64_t>(i) * H;
      float* sum = target + slots[i] / K * H;
      for (std::int64_t h = first; h < last; ++h) sum[h] += weight * row[h];
    }
  });
}

void PermutedStack::routed_forward(const StackCall& call, const TensorView& out) {
  const std::int64_t H = config_.moe.H;
  std::int64_t pad_rows = -1;
  const RouteView& route = routes_to_send(pad_rows);
  exchange_.plan(route, pad_rows, counters_.bytes, counters_.slots_visited, call.times);
  layout_ = lay_out(exchange_.expert_counts());
  counters_.computed_rows += layout_.total;
  sent_weight_.resize(exchange_.send_slot().size());
  std::int64_t real = 0;
  for (std::size_t i = 0; i < sent_weight_.size(); ++i) {
    const std::int64_t slot = exchange_.send_slot()[i];
    sent_weight_[i] = slot >= 0 ? route.weights[slot] : 0.0f;
    real += slot >= 0 ? 1 : 0;
  }
  counters_.real_rows += real;  // of this rank's tokens; summed over ranks it is what all ranks compute
  sent_.resize(DType::kF32, {exchange_.num_sent(), H});
  results_.resize(DType::kF32, {exchange_.num_sent(), H});
  rows_.resize(DType::kF32, {layout_.total, H});
  y_.resize(DType::kF32, {layout_.total, H});
  {
    const PhaseScope scope(call.times, Phase::kDispatch);
    gather(call.x, /*weighted=*/false, sent_);
    rows_.fill_zero();
  }
  exchange_.dispatch(sent_, layout_.starts, rows_, counters_.bytes, call.times);
  experts_forward(call, layout_, rows_, y_);
  exchange_.collect(y_, layout_.starts, results_, counters_.bytes, call.times);
  const PhaseScope scope(call.times, Phase::kCombine);
  index_add(results_, /*weighted=*/true, out);
  counters_.slots_visited += 2 * exchange_.num_sent();
}

void PermutedStack::routed_backward(const StackCall& call, const MoeTensors& gradients, const TensorView& d_out, const TensorView& dx, float* d_weights) {
  const std::int64_t H = config_.moe.H, K = config_.moe.K;
  {
    const PhaseScope scope(call.times, Phase::kCombine);
    std::fill_n(d_weights, route_.T() * K, 0.0f);
    const float* d_token = d_out.as<float>();
    const float* results = results_.as<float>();
    parallel_for(stream_.pool, exchange_.num_sent(), kGrainRows, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t slot = exchange_.send_slot()[static_cast<std::size_t>(i)];
        if (slot < 0) continue;
        float sum = 0;
        for (std::int64_t h = 0; h < H; ++h) sum += results[i * H + h] * d_token[slot / K * H + h];
        d_weights[slot] = sum;
      }
    });
  }
  {
    const PhaseScope scope(call.times, Phase::kDispatch);
    gather(d_out, /*weighted=*/true, sent_);
    y_.fill_zero();
  }
  exchange_.dispatch(sent_, layout_.starts, y_, counters_.bytes, call.times);
  Tensor d_rows(DType::kF32, {layout_.total, H});
  experts_backward(call, gradients, layout_, rows_, y_, d_rows);
  exchange_.collect(d_rows, layout_.starts, sent_, counters_.bytes, call.times);
  const PhaseScope scope(call.times, Phase::kCombine);
  index_add(sent_, /*weighted=*/false, dx);
  counters_.slots_visited += 3 * exchange_.num_sent();
}

}  // namespace waybill::baselines

// SPDX-License-Identifier: Apache-2.0
// Small kernels at the edges of a step: one CTA each, but for the sum over GPUs.
#include "core/cuda/block_sum.cuh"
#include "model/cuda/step_record.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) collect(const __grid_constant__ CollectCall c) {
  for (std::int64_t e = threadIdx.x; e < c.E; e += kThreads) {
    std::int64_t sum = c.total_counts[e];
    for (int r = 0; r < c.num_ranks; ++r) sum += c.counts[r][e];
    c.total_counts[e] = sum;
  }
  for (int r = static_cast<int>(threadIdx.x); r < c.num_ranks; r += kThreads) {
    const volatile DeviceMoeReport& report = *c.reports[r];
    RankRecord& rank = c.ranks[r];
    rank.slots += report.slots, rank.rows += report.rows;
    rank.min_expert_rows = report.min_expert_rows, rank.max_expert_rows = report.max_expert_rows;
  }
  if (threadIdx.x != 0) return;
  LayerRecord& layer = *c.layer;
  bool is_valid = true;
  for (int r = 0; r < c.num_ranks; ++r) {
    const volatile DeviceMoeReport& report = *c.reports[r];
    is_valid = is_valid && report.valid != 0;
    layer.max_slot_demand = max(layer.max_slot_demand, static_cast<std::int64_t>(report.max_slot_demand));
    layer.max_row_demand = max(layer.max_row_demand, static_cast<std::int64_t>(report.max_row_demand));
    layer.aux += report.aux_loss, layer.sequence += report.sequence_loss, layer.global += report.global_loss, layer.z += report.z_loss;
  }
  if (is_valid) return;
  ++layer.overflows, ++c.header->overflows;
}

__global__ void __launch_bounds__(kThreads) bias_update(const BiasUpdate c) {
  __shared__ long long room[kThreads / 32];
  if (c.state->valid == 0) return;
  const auto count_of = [&](std::int64_t e) {
    long long sum = 0;
    for (int d = 0; d < c.num_devices; ++d) sum += c.counts[d][e];
    return sum;
  };
  long long part = 0;
  for (std::int64_t e = threadIdx.x; e < c.E; e += kThreads) part += count_of(e);
  const long long total = block_sum<kThreads>(part, room);
  const auto sign_of = [&](std::int64_t e) {
    const long long excess = total - c.E * count_of(e);
    return excess > 0 ? 1 : (excess < 0 ? -1 : 0);
  };
  float mean = 0.0f;
  if (c.subtract_mean) {
    long long signs = 0;
    for (std::int64_t e = threadIdx.x; e < c.E; e += kThreads) signs += sign_of(e);
    mean = static_cast<float>(static_cast<double>(block_sum<kThreads>(signs, room)) / static_cast<double>(c.E));
  }
  for (std::int64_t e = threadIdx.x; e < c.E; e += kThreads) c.bias[e] += c.rate * (static_cast<float>(sign_of(e)) - mean);
}

__global__ void __launch_bounds__(kThreads) sum_groups(const __grid_constant__ SumGroups c) {
  for (int i = static_cast<int>(threadIdx.x); i < c.n; i += kThreads) {
    std::int32_t sum = 0;
    for (int g = 0; g < c.num_parts; ++g) sum += __ldcg(c.parts[g] + i);
    c.sum[i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) sum_over_devices(const SumOverDevices c) {
  for (std::int64_t i = c.begin + static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < c.end;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    float sum = c.parts[0][i];
    for (int d = 1; d < c.num_devices; ++d) sum += c.parts[d][i];
    for (int d = 0; d < c.num_devices; ++d) c.parts[d][i] = sum;
  }
}

}  // namespace

RecordLayout::RecordLayout(const std::vector<std::int64_t>& experts, int ranks_here, int world) : num_ranks(ranks_here), W(world) {
  ranks = layer(experts.size());
  bytes = rank(experts.size(), 0);
  for (const std::int64_t E : experts) counts.push_back(bytes), bytes += static_cast<std::size_t>(E) * sizeof(std::int64_t);
  host_bytes = wait(experts.size(), 0);
}

void launch_collect(const CollectCall& c, cudaStream_t stream) { collect<<<1, kThreads, 0, stream>>>(c); }
void launch_bias_update(const BiasUpdate& c, cudaStream_t stream) { bias_update<<<1, kThreads, 0, stream>>>(c); }
void launch_sum_groups(const SumGroups& c, cudaStream_t stream) { sum_groups<<<1, kThreads, 0, stream>>>(c); }
void launch_sum_over_devices(const SumOverDevices& c, cudaStream_t stream) {
  if (c.end > c.begin) sum_over_devices<<<264, kThreads, 0, stream>>>(c);
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// What a forward found, written to host memory that the host reads without a wait. One CTA.
#include "core/cuda/launch.h"
#include "core/cuda/ptx.cuh"
#include "moe/cuda/step_report.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) moe_step_report(const StepReportArgs args) {
  __shared__ std::int32_t least[kThreads / 32], most[kThreads / 32];
  const bool is_valid = args.header->valid != 0;
  std::int32_t low = 0x7fffffff, high = 0;
  for (int e = static_cast<int>(threadIdx.x); e < args.L && is_valid; e += kThreads) {
    const std::int32_t n = args.expert_counts[e];
    low = min(low, n), high = max(high, n);
  }
  low = __reduce_min_sync(ptx::kFullWarp, low), high = __reduce_max_sync(ptx::kFullWarp, high);
  if ((threadIdx.x & 31) == 0) least[threadIdx.x / 32] = low, most[threadIdx.x / 32] = high;
  for (int p = static_cast<int>(threadIdx.x); p < args.P; p += kThreads) reinterpret_cast<volatile std::uint64_t*>(args.report->wait_ns)[p] = args.wait_ns[p];
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) low = min(low, least[w]), high = max(high, most[w]);
  volatile DeviceMoeReport& report = *args.report;
  report.valid = is_valid ? 1 : 0;
  report.rows = is_valid ? args.header->R : 0, report.slots = is_valid ? args.header->S : 0;
  report.min_expert_rows = is_valid ? low : 0, report.max_expert_rows = is_valid ? high : 0;
  report.max_slot_demand = args.header->max_slot_demand, report.max_row_demand = args.header->max_row_demand;
  report.dense_map_reasons = args.dense_map_reasons;
  if (args.dense_map_reasons != 0) report.dense_map_forwards = report.dense_map_forwards + 1;
  report.dropped_routes = args.dropped != nullptr ? *args.dropped : 0;
  if (args.losses != nullptr) {
    report.aux_loss = args.is_global != 0 ? 0 : args.losses[0], report.global_loss = args.is_global != 0 ? args.losses[0] : 0;
    if (args.global_losses != nullptr) report.global_loss = args.global_losses[0];
    report.sequence_loss = args.losses[1], report.z_loss = args.losses[2];
  }
  __threadfence_system();
  report.forwards = report.forwards + 1;
}

}  // namespace

void launch_step_report(const StepReportArgs& args, cudaStream_t stream) { moe_step_report<<<1, kThreads, 0, stream>>>(args); }

}  // namespace waybill::cuda

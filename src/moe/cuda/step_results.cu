// SPDX-License-Identifier: Apache-2.0
// Counts, losses and status of a forward in device memory, narrowed to what frameworks hold. One CTA.
#include "moe/cuda/step_results.h"
#include "waybill/status.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMost = 0x7fffffff;

__global__ void __launch_bounds__(kThreads) moe_step_results(const StepResultsArgs args) {
  if (args.out_counts != nullptr) {
    for (int e = static_cast<int>(threadIdx.x); e < args.E; e += kThreads) args.out_counts[e] = args.counts[e];
  }
  if (threadIdx.x != 0) return;
  const volatile DeviceMoeReport& report = *args.report;
  if (args.losses != nullptr) {
    args.losses[0] = static_cast<float>(report.aux_loss), args.losses[1] = static_cast<float>(report.sequence_loss);
    args.losses[2] = static_cast<float>(report.global_loss), args.losses[3] = static_cast<float>(report.z_loss);
  }
  if (args.status == nullptr) return;
  const std::int64_t demand = report.max_slot_demand;
  const std::int32_t valid = report.valid;
  args.status[0] = valid, args.status[1] = static_cast<std::int32_t>(demand < kMost ? demand : kMost), args.status[2] = args.slot_capacity;
  args.status[3] = report.rows, args.status[4] = report.slots;
  const StatusFlag reason = demand > args.slot_capacity ? kStatusSlotOverflow : report.max_row_demand > args.row_capacity ? kStatusRowOverflow : kStatusTimeout;
  args.status[5] = valid != 0 ? 0 : static_cast<std::int32_t>(reason);
}

}  // namespace

void launch_step_results(const StepResultsArgs& args, cudaStream_t stream) { moe_step_results<<<1, kThreads, 0, stream>>>(args); }

}  // namespace waybill::cuda

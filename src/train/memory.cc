// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "rank_trainer.h"
#include "select_device.h"
#include "waybill/error.h"
#include "waybill/trainer.h"

namespace waybill {

MemoryEstimate cpu_memory(const RunConfig& config) {
  MemoryPlan plan;
  const std::int64_t sequences = config.train.global_batch / (config.train.micro_batches * config.parallel.W());
  plan.tokens_per_rank = sequences * config.model.seq_len;
  if (!config.model.layers.empty()) plan.receive_factor = std::max(1.0, initial_info(config).receive_factor);
  MemoryEstimate rank = memory_per_rank(architecture_of(config.model), plan);
  rank.scratch = scratch_per_rank(config.model, plan);
  // Tokens of all micro-batches of a step.
  rank.logits += static_cast<double>(config.train.micro_batches * sequences * (config.model.seq_len + 1) * 4);
  return rank;
}

GpuMemoryEstimate gpu_memory(const RunConfig& config, bool is_smallest) {
  if (detail::g_train_device_backend == nullptr) WB_FAIL(ErrorCode::kUnsupported, "memory on GPUs: this program was built without CUDA");
  detail::g_train_device_backend->check(config);
  return detail::g_train_device_backend->memory(config, is_smallest);
}

}  // namespace waybill

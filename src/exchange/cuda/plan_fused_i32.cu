// SPDX-License-Identifier: Apache-2.0
// The plan in one launch, for int32 ids, and the choice by id type.
#include "exchange/cuda/plan_fused.cuh"

namespace waybill::cuda {

int plan_fused_ctas(const ExchangeShape& shape, int num_sms) {
  return shape.id_bytes == 2 ? plan_fused_ctas_i16(shape, num_sms) : fused_ctas<std::int32_t>(shape, num_sms);
}
void launch_plan_fused(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream) {
  if (q.shape.id_bytes == 2) return launch_plan_fused_i16(q, num_tiles, overlap, stream);
  launch_fused<std::int32_t>(q, num_tiles, overlap, stream);
}

}  // namespace waybill::cuda

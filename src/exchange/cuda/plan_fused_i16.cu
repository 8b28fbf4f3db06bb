// SPDX-License-Identifier: Apache-2.0
// The plan in one launch, for int16 ids. A file an id type: twelve instances compile for long.
#include "exchange/cuda/plan_fused.cuh"

namespace waybill::cuda {

int plan_fused_ctas_i16(const ExchangeShape& shape, int num_sms) { return fused_ctas<std::int16_t>(shape, num_sms); }
void launch_plan_fused_i16(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream) {
  launch_fused<std::int16_t>(q, num_tiles, overlap, stream);
}

}  // namespace waybill::cuda

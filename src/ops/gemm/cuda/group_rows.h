// SPDX-License-Identifier: Apache-2.0
// The kernel of waybill/group_rows.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

struct GroupRows {
  const std::int32_t* sizes;  // [groups], or null
  std::int32_t* offsets;      // [groups + 1]
  int groups;
  std::int32_t S;
  unsigned char* rows;  // [S, row_bytes], or null
  std::int64_t row_bytes;
};
void launch_group_rows(const GroupRows& p, int num_sms, cudaStream_t stream);

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// Offsets that are made on the device: of a part of the rows and groups, and of weights that lie as rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "waybill/status.h"

namespace waybill::cuda {

// part[i] = offsets[first_group + i] within rows [row0, row0 + rows), counted from row0; i up to `groups`, which follow.
// firsts[i] = i * outer, or null. all_groups, all_rows: offsets that are not an increasing sequence from 0 within the rows set kStatusBadOffsets.
struct PartOffsets {
  const std::int32_t* offsets;
  int first_group, groups, row0, rows;
  std::int32_t *part, *firsts;
  std::int64_t outer;
  int all_groups, all_rows;
  StatusWord* status;  // or null
};
void launch_part_offsets(const PartOffsets& p, cudaStream_t stream);

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// Where the groups of a grouped matmul begin, from their sizes, and rows that belong to no group: what callers need who know no offsets.
#pragma once

#include "waybill/stream.h"
#include "waybill/tensor.h"

namespace waybill {

// All on one device; [L = 3, S = 6] sizes 2 0 3 -> offsets 0 2 2 5, and row 5 of `rows` becomes zero.
struct GroupRowsArgs {
  TensorView sizes;    // [L] int32; null: the offsets are given
  TensorView offsets;  // [L+1] int32: written from the sizes, or read
  TensorView rows;     // [S, columns]; rows offsets[L] .. S are set to zero. Null: none are
  std::int64_t S = 0;  // rows there are
};
// CPU: sizes that are negative or pass S are refused. GPU: queued on stream.native, nothing waits, so they are not seen: a negative size counts as 0 and
// what passes S is cut off, so that nothing outside the tensors is touched. Capturable.
WB_API void group_rows(const GroupRowsArgs& args, Stream stream = {});

}  // namespace waybill

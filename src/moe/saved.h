// SPDX-License-Identifier: Apache-2.0
// What a forward keeps for its backward. Buffers are reused by the next forward into the same step.
#pragma once

#include <vector>

#include "moe/row_path.h"
#include "waybill/moe.h"

namespace waybill {

struct MoeStep::Saved {
  moe::RowHandle handle;
  Tensor logits, rows, h, a;  // see MoeStep for shapes and for what Recompute leaves out
  Tensor shared_h, shared_a, latent_out;
  std::vector<std::uint8_t> padding_mask;   // [T] or empty
  std::vector<std::int32_t> aux_counts;     // [E] n_e of the aux loss, all ranks
  std::vector<std::int32_t> global_counts;  // [E] with the accumulated micro-batches
  double aux_tokens = 0, global_tokens = 0, loss_tokens = 0, loss_sequences = 0;
  std::int64_t T = 0;
  std::uint64_t rounding_seed = 0;
  bool ready = false;  // a forward filled it and no backward has used it

  std::size_t bytes() const;
};

}  // namespace waybill

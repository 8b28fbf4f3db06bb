// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "moe/layer_impl.h"

namespace waybill {

// Captured mode has fixed sizes: every buffer gets its budget before it is used, so later steps allocate nothing, whatever their
// routes and token counts.
void MoeLayer::Impl::reserve_captured(MoeStep::Saved& saved, bool training) {
  if (config.mode != ExchangeMode::kCaptured || compact == nullptr) return;
  const auto book = [](Tensor& tensor, std::int64_t rows, std::int64_t columns) {
    if (rows > 0 && columns > 0) tensor.resize(DType::kF32, {rows, columns});
  };
  const ReceiveBudget budget = compact->exchange().budget();
  const std::int64_t slots = budget.padded_slots, rows = budget.rows, T = config.T_max, W = config.row_width(), t = config.expert_tensor_parallel;
  const std::int64_t shared_inner = config.shared_F > 0 ? config.shared_inner_width() : 0;
  book(keep(saved, &MoeStep::Saved::logits, Recompute::kActivation), T, config.E);
  book(keep(saved, &MoeStep::Saved::rows, Recompute::kActivation), rows, W);
  book(keep(saved, &MoeStep::Saved::h, Recompute::kActivation), slots, config.inner_width());
  book(keep(saved, &MoeStep::Saved::a, Recompute::kNone), slots, config.local_F());
  book(keep(saved, &MoeStep::Saved::shared_h, Recompute::kActivation), T, shared_inner);
  book(keep(saved, &MoeStep::Saved::shared_a, Recompute::kNone), T, config.shared_F);
  book(saved.latent_out, T, config.latent);
  book(latent_in, T, config.latent);
  if (config.recipe.kind != Recipe::kF32) {  // a product's operands; wgrad's may be filled to whole Hadamard blocks
    const std::int64_t I = config.inner_width(), F = config.local_F(), filled = std::max(slots, rows) + kHadamardRows * L;
    const std::int64_t shared_size = shared_inner > 0 ? (T + kHadamardRows) * std::max({shared_inner, config.shared_F, config.H}) : 0;
    moe::OperandScratch& operands = expert_scratch.operands;
    book(operands.left, std::max(filled * std::max({W, I, F}), shared_size), 1);
    book(operands.weights, std::max(L * W * std::max(I, F), config.H * std::max(shared_inner, config.shared_F)), 1);
    if (training) book(operands.right, std::max(filled * std::max(I, F), shared_size), 1);
  }
  book(expert_scratch.y, slots, W);
  book(z, rows, W);
  if (!training) return;
  book(expert_scratch.da, slots, config.local_F());
  book(expert_scratch.dh, slots, config.inner_width());
  book(dz, rows, W);
  book(d_rows, rows, W);
  book(d_slot_weight, slots, 1);
  book(d_route_weights, T, config.K * t);
  if (t > 1) book(d_weights, T, config.K);
  book(d_logits, T, config.E);
  book(d_latent_out, T, config.latent);
  book(d_latent_in, T, config.latent);
  book(shared_da, T, config.shared_F);
  book(shared_dh, T, shared_inner);
}

}  // namespace waybill

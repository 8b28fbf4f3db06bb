// SPDX-License-Identifier: Apache-2.0
#include "moe/saved.h"

namespace waybill {
namespace {

std::size_t tensor_bytes(const Tensor& tensor) { return tensor ? static_cast<std::size_t>(tensor.size()) * size_bytes(tensor.view().dtype) : 0; }

}  // namespace

MoeStep::MoeStep() = default;
MoeStep::~MoeStep() = default;
MoeStep::MoeStep(MoeStep&&) noexcept = default;
MoeStep& MoeStep::operator=(MoeStep&&) noexcept = default;

std::size_t MoeStep::Saved::bytes() const {
  std::size_t total = handle.bytes() + padding_mask.size() + (aux_counts.size() + global_counts.size()) * sizeof(std::int32_t);
  for (const Tensor* tensor : {&logits, &rows, &h, &a, &shared_h, &shared_a, &latent_out}) total += tensor_bytes(*tensor);
  return total;
}

namespace moe {

std::size_t RowHandle::bytes() const {
  const auto size = [](const auto& v) { return v.size() * sizeof(v[0]); };
  const RoutePlan& p = exchange.plan;
  const ReceiveLayout& l = exchange.layout;
  return size(ids) + size(p.row_offsets) + size(p.row_token) + size(p.slot_offsets) + size(p.slot_expert) + size(p.slot_weight) + size(p.slot_k) +
         size(l.row_offsets) + size(l.row_slot_offsets) + size(l.slot_position) + size(l.expert_offsets) + size(l.expert_counts) + size(l.slot_row) +
         size(l.slot_weight) + exchange.nodes.bytes();
}

}  // namespace moe
}  // namespace waybill

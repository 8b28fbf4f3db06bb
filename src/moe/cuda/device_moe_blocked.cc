// SPDX-License-Identifier: Apache-2.0
// The layer's expert matmuls under a blocked recipe: what RecipeMatmuls is given. Rows of both directions are found in their windows through the list
// of the exchange, whatever the policy says: they are read once, to be quantised, and no copy in expert order exists.
#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"

namespace waybill::cuda {
namespace {

TensorView one_group(const TensorView& w) { return TensorView(w.data, w.dtype, {1, w.shape[0], w.shape[1]}, w.device); }

}  // namespace

void DeviceMoeLayer::Impl::make_recipe() {
  recipe = std::make_unique<RecipeMatmuls>(config, P);
  for (std::size_t i = 0; i < count(); ++i) recipe->prepare(scratch_at<unsigned char>(i, scratch_parts.recipe), where.index);
  recipe->on_part = [this](bool is_product, cudaStream_t stream) { mark(is_product ? Phase::kExpertGemm : Phase::kActivation, stream); };
}

ExpertSet DeviceMoeLayer::Impl::routed_set(const Saved& saved, std::size_t i) const {
  ExpertSet set{offsets(saved, i), L, slots(saved, i), config.row_width(), config.inner_width(), config.local_F(), RecipeWeight::kW1, RecipeWeight::kW2};
  const int t = config.expert_tensor_parallel, rank = exchange->node() * ranks.table.size + ranks.rank[i];  // a slice of an expert has an id of its own
  set.first_id = rank / t * L * t + rank % t, set.id_stride = t, set.status = status_word(i), set.scratch = scratch_at<unsigned char>(i, scratch_parts.recipe);
  set.x_turned = scratch_parts.x != kNoPart ? scratch_at<unsigned char>(i, scratch_parts.x) : static_cast<unsigned char*>(y(saved, i).data);
  set.seed = saved.seed, set.device = where;
  set.keeps_a = config.recompute == Recompute::kNone && recipe->fits_a(set);
  return set;
}
ExpertSet DeviceMoeLayer::Impl::shared_set(const Saved& saved, std::size_t i) const {
  ExpertSet set{dense_offsets(saved, i), 1, saved.routes[i].T, config.H, config.shared_inner_width(), config.shared_F, RecipeWeight::kSharedW1,
                RecipeWeight::kSharedW2};
  set.first_id = -1, set.status = status_word(i), set.scratch = scratch_at<unsigned char>(i, scratch_parts.recipe);
  set.x_turned = set.scratch + recipe->layout().left, set.seed = saved.seed, set.device = where;
  set.keeps_a = config.recompute == Recompute::kNone && recipe->fits_a(set);
  return set;
}

void DeviceMoeLayer::Impl::quantize_weights(std::span<const MoeTensors> parameters, const Saved& saved, cudaStream_t stream) {
  for (std::size_t i = 0; i < count(); ++i) {
    const ExpertSet routed = routed_set(saved, i), shared = shared_set(saved, i);
    recipe->quantize_weights(parameters[i].w1, RecipeWeight::kW1, routed, stream);
    recipe->quantize_weights(parameters[i].w2, RecipeWeight::kW2, routed, stream);
    if (config.shared_F == 0) continue;
    recipe->quantize_weights(one_group(parameters[i].shared_w1), RecipeWeight::kSharedW1, shared, stream);
    recipe->quantize_weights(one_group(parameters[i].shared_w2), RecipeWeight::kSharedW2, shared, stream);
  }
  ++weights_version;
}

void DeviceMoeLayer::Impl::blocked_first_matmul(std::span<const MoeTensors> parameters, const Saved& saved, bool keep_h, cudaStream_t stream) {
  for (std::size_t i = 0; i < count(); ++i) {
    recipe->first(routed_set(saved, i), sent_x(saved, i), h(saved, i), keep_h, a(saved, i), slot_weights(saved, i),
                  config.expert_bias ? parameters[i].b1 : TensorView(), stream);
  }
}

ListedRows DeviceMoeLayer::Impl::sent_x(const Saved& saved, std::size_t i) const { return {listed_x(saved, i), slot_rows(saved, i)}; }

// dy to its window, and beside that what of the gradients' operands does not hang on it.
void DeviceMoeLayer::Impl::blocked_send(const Backward& b, std::span<const DeviceRows> sent) {
  fork(b.stream);
  send_to_experts(b, sent, b.stream);  // first, so that its few CTAs find room
  for (std::size_t i = 0; i < count(); ++i) {
    recipe->quantize_a(routed_set(b.saved, i), h(b.saved, i), slot_weights(b.saved, i), side);
    if (!options.resend_rows) recipe->quantize_x(routed_set(b.saved, i), sent_x(b.saved, i), side);
  }
  join(b.stream);
}

void DeviceMoeLayer::Impl::blocked_second_gradients(const Backward& b) {
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView& d_w2 = b.gradients[i].w2;
    const TensorView d_weight(scratch_at<float>(i, scratch_parts.d_slot_weight), DType::kF32, {slots(b.saved, i)}, where);
    recipe->second_gradients(routed_set(b.saved, i), {listed_d_out(b.saved, i), slot_rows(b.saved, i)}, a(b.saved, i), h(b.saved, i), slot_weights(b.saved, i),
                             d_weight, d_w2, adds_to(d_w2, b), b.stream);
    if (config.expert_bias) bias_gradients(b, i);
  }
  if (options.resend_rows) {
    mark(Phase::kDispatch, b.stream);
    if (!home()) send_to_experts(b, sent_rows(b.parameters, b.x, b.saved, b.stream), b.stream);
    for (std::size_t i = 0; i < count(); ++i) recipe->quantize_x(routed_set(b.saved, i), sent_x(b.saved, i), b.stream);
  }
  for (std::size_t i = 0; i < count(); ++i) recipe->quantize_dh(routed_set(b.saved, i), h(b.saved, i), b.stream);
}

void DeviceMoeLayer::Impl::blocked_first_weight_gradients(const Backward& b) {
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView& d_w1 = b.gradients[i].w1;
    recipe->first_weight_gradients(routed_set(b.saved, i), sent_x(b.saved, i), h(b.saved, i), d_w1, adds_to(d_w1, b), b.stream);
  }
}

void DeviceMoeLayer::Impl::blocked_row_gradients(const Backward& b) {
  for (std::size_t i = 0; i < count(); ++i) recipe->row_gradients(routed_set(b.saved, i), h(b.saved, i), y(b.saved, i), /*accumulate=*/false, b.stream);
}

void DeviceMoeLayer::Impl::blocked_shared_hidden(std::span<const TensorView> x, const Saved& saved, bool keep_h, cudaStream_t stream) {
  for (std::size_t i = 0; i < count(); ++i) {
    recipe->first(shared_set(saved, i), {x[i], {}}, shared_h(saved, i), keep_h, shared_a(saved, i), {}, {}, stream);
  }
}

void DeviceMoeLayer::Impl::blocked_shared_result(const Forward& f) {
  for (std::size_t i = 0; i < count(); ++i) {
    ExpertSet set = shared_set(f.saved, i);
    set.keeps_a = set.keeps_a && f.options.training;
    recipe->second(set, shared_h(f.saved, i), {}, shared_a(f.saved, i), forward_base(f.saved, i), config.latent > 0, f.stream);
  }
}

void DeviceMoeLayer::Impl::blocked_shared_gradients(const Backward& b) {
  for (std::size_t i = 0; i < count(); ++i) {
    const ExpertSet set = shared_set(b.saved, i);
    const TensorView d_w1 = one_group(b.gradients[i].shared_w1), d_w2 = one_group(b.gradients[i].shared_w2);
    recipe->quantize_a(set, shared_h(b.saved, i), {}, b.stream);
    recipe->second_gradients(set, {b.d_out[i], {}}, shared_a(b.saved, i), shared_h(b.saved, i), {}, {}, d_w2, adds_to(d_w2, b), b.stream);
    recipe->quantize_x(set, {b.x[i], {}}, b.stream);
    recipe->quantize_dh(set, shared_h(b.saved, i), b.stream);
    recipe->first_weight_gradients(set, {b.x[i], {}}, shared_h(b.saved, i), d_w1, adds_to(d_w1, b), b.stream);
    recipe->row_gradients(set, shared_h(b.saved, i), backward_base(b.saved, i), /*accumulate=*/true, b.stream);
  }
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// What a first step would make while its kernels wait for other ranks, made before: its kernels are loaded, scratch and plans of its stream exist.
#include <algorithm>

#include "core/cuda/load_kernels.h"
#include "core/cuda/scratch_buffer.h"
#include "moe/cuda/device_moe_impl.h"
#include "waybill/log.h"

namespace waybill::cuda {
namespace {

// Views of T rows. Memory of a rank without tokens may be null; nothing reads it here.
std::vector<TensorView> with_rows(std::span<const TensorView> views, const std::vector<std::int64_t>& T, void* any) {
  std::vector<TensorView> all(views.begin(), views.end());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].shape[0] != T[i]) all[i].shape[0] = T[i], all[i].data = any;
  }
  return all;
}

void set_matmul_dtypes(MoeTensors& t, DType dtype) {
  for (TensorView* view : {&t.w1, &t.w2, &t.shared_w1, &t.shared_w2, &t.latent_down, &t.latent_up}) view->dtype = dtype;
}

}  // namespace

// Once a stream, before the first kernel of this layer there that waits for a peer. It cannot know what backward will be given: all types of gradients are
// walked through. Ranks without tokens in this step are given some, so that what they launch later is here too.
void DeviceMoeLayer::Impl::prepare(const Forward& f) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (options.nodes > 1) return;  // rails talk when they are called
  if (f.stream == nullptr || f.stream == cudaStreamLegacy || f.stream == cudaStreamPerThread) return;
  const auto known = prepared.find(f.stream);
  if (known != prepared.end() && (known->second || !f.options.training)) return;
  WB_TRY_CUDA(cudaStreamIsCapturing(f.stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return;
  void* any = scratch[0].data();
  std::vector<std::int64_t> T;
  const std::int64_t unit = std::max<std::int64_t>(config.sequence_coefficient != 0 ? config.sequence_length : 1, 1);
  for (const TensorView& x : f.x) T.push_back(x.shape[0] > 0 ? x.shape[0] : config.T_max / unit * unit);
  const std::vector<TensorView> x = with_rows(f.x, T, any), out = with_rows(f.out, T, any), masks = with_rows(f.options.padding_masks, T, any),
                                ids = with_rows(f.options.replay_ids, T, any), maps = with_rows(f.options.dense_maps, T, any);
  DeviceMoeForward forward_options = f.options;
  forward_options.padding_masks = masks, forward_options.replay_ids = ids, forward_options.dense_maps = maps;
  const std::uint64_t version = weights_version;
  const std::int64_t num_dense = dense_forwards;
  for (std::size_t i = 0; i < count(); ++i) set_routes(f.saved, i, T[i]);
  if (options.exact_sizes) f.saved.slots.assign(count(), std::clamp<std::int64_t>(config.T_max * config.K, 1, std::max<std::int64_t>(S, 1)));
  f.saved.padding_masks = masks;
  const Forward rehearsed{f.parameters, x, out, f.saved, forward_options, f.stream};
  set_totals(rehearsed);
  const auto rehearse = [&] {
    forward(rehearsed);
    if (!f.options.training) return;
    for (const auto& [dtype, accumulate] : {std::pair(DType::kBF16, false), std::pair(DType::kF32, false), std::pair(DType::kF32, true)}) {
      std::vector<MoeTensors> gradients(f.parameters.begin(), f.parameters.end());
      for (MoeTensors& g : gradients) set_matmul_dtypes(g, dtype), g.gate.dtype = DType::kF32;
      DeviceMoeBackward backward_options;
      backward_options.accumulate = accumulate;
      if (takes_map(f.saved)) backward_options.d_dense_maps = maps;
      backward({f.parameters, gradients, x, x, out, f.saved, backward_options, f.stream});
    }
  };
  try {
    load_kernels(f.stream, rehearse);
  } catch (const Error& error) {  // a capture can be spoilt by what other threads do; what is wrong with the call shows in the call
    warn_once("moe.prepare",
              fmt::format("kernels of the MoE layer are loaded when they are launched, which may hold up a peer's first step: {}", error.what()));
  }
  f.saved.ready = false, f.saved.weights_version = 0, weights_version = version, dense_forwards = num_dense;
  f.saved.padding_masks.assign(f.options.padding_masks.begin(), f.options.padding_masks.end());
  for (std::size_t i = 0; i < count(); ++i) set_routes(f.saved, i, f.x[i].shape[0]);
  set_totals(f);
  prepared[f.stream] = f.options.training;
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// The MoE layer on GPUs against the layer on the CPU.
#pragma once

#include "cuda/moe_harness.h"

namespace waybill::cuda {

// The layer on the CPU in fp32, on the routes that the GPU chose.
inline mt::Result cpu_result(MoeConfig c, const mt::Weights<float>& w, mt::Batch batch, const std::vector<std::int32_t>& ids) {
  c.recipe.kind = Recipe::kF32, c.combine_wire = CombineWire::kF32, c.mode = ExchangeMode::kEager, c.receive_factor = 0;
  batch.replay = ids;
  return mt::run_layer(c, w, batch);
}

inline void expect_agreement(const MoeConfig& c, const mt::Weights<float>& w, const mt::Batch& batch, mt::Result& got, const std::string& what) {
  mt::Result want = cpu_result(c, w, batch, got.ids);
  expect_close(got.out, want.out, kNormBound, what + ": out");
  expect_close(got.dx, want.dx, kNormBound, what + ": dx");
  expect_close(got.weights, want.weights, 1e-5, what + ": routing weights");
  std::vector<std::vector<float>> gradients;
  got.gradients.for_each([&](const char*, std::vector<float>& v) { gradients.push_back(v); });
  std::size_t next = 0;
  want.gradients.for_each([&](const char* name, std::vector<float>& v) {
    expect_close(gradients[next++], v, std::string(name) == "gate" ? kGateBound : kNormBound, what + ": d_" + name);
  });
  for (const auto& [loss, expected] : {std::pair(got.losses.aux, want.losses.aux), std::pair(got.losses.sequence, want.losses.sequence),
                                       std::pair(got.losses.z, want.losses.z), std::pair(got.global_loss, want.global_loss)}) {
    EXPECT_NEAR(loss, expected, 1e-5 * std::abs(expected)) << what << ": losses";
  }
  EXPECT_EQ(got.dropped, want.dropped) << what;
  for (std::size_t p = 0; p < got.slots.size(); ++p) {
    EXPECT_TRUE(got.valid[p]) << what;
    EXPECT_EQ(got.slots[p], want.slots[p]) << what << ", rank " << p;
    if (got.dense_forwards == 0) {  // on the dense-map path a rank of the CPU receives every token
      EXPECT_EQ(got.rows[p], want.rows[p]) << what << ", rank " << p;
    }
    EXPECT_EQ(got.status[p].flags, kStatusOk) << what << ": " << describe(got.status[p]);
  }
}

inline std::vector<std::int64_t> even(int P, std::int64_t T) { return std::vector<std::int64_t>(static_cast<std::size_t>(P), T); }

inline void check(const MoeConfig& c, const std::vector<std::int64_t>& tokens, const MoeGpuOptions& options, const std::string& what, std::uint64_t seed = 7,
                  bool masked = false) {
  const mt::Weights<float> w = bf16_weights(c, seed, c.bias_update_rate != 0);
  mt::Batch batch = bf16_batch(c, tokens, seed + 100);
  if (masked) {
    for (std::int64_t t = 0; t < batch.T(); ++t) batch.mask.push_back(t % 5 == 2 ? 1 : 0);
  }
  if (c.z_coefficient != 0 || c.global_coefficient != 0) batch.loss_scale = 0.5f;
  GpuMoe gpu(c, static_cast<int>(tokens.size()), w, options);
  gpu.upload(batch), gpu.zero_gradients();
  gpu.step();
  ASSERT_EQ(gpu.first_error(), "") << what;
  mt::Result got = gpu.result();
  expect_agreement(c, w, batch, got, what);
  // The same again: the same bits.
  gpu.upload(batch), gpu.zero_gradients();
  gpu.step();
  expect_same_bits(got, gpu.result(), what + ", repeated");
}

}  // namespace waybill::cuda

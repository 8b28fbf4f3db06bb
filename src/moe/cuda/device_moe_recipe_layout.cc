// SPDX-License-Identifier: Apache-2.0
// Scratch of the blocked recipes.
#include <algorithm>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "moe/cuda/device_moe_recipe.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t kBlock = 128;
constexpr std::int64_t kMaxGroups = 4096;  // of the quantisers

std::int64_t blocks(std::int64_t n) { return (n + kBlock - 1) / kBlock; }

struct Parts {
  std::size_t used = 0;
  std::uint64_t take(std::int64_t elements, std::size_t element_bytes) {
    const std::uint64_t offset = used;
    used += (static_cast<std::size_t>(elements) * element_bytes + 255) / 256 * 256;
    return offset;
  }
};

struct WeightShape {
  std::int64_t L, N, C;
};
void weight_shapes(const MoeConfig& c, std::int64_t L, WeightShape (&shapes)[4]) {
  shapes[0] = {L, c.inner_width(), c.row_width()}, shapes[1] = {L, c.row_width(), c.local_F()};
  shapes[2] = shapes[3] = {0, 0, 0};
  if (c.shared_F > 0) shapes[2] = {1, c.shared_inner_width(), c.H}, shapes[3] = {1, c.H, c.shared_F};
}

RecipeWeightLayout take_weight(Parts& parts, const MoeConfig& c, const WeightShape& s) {
  RecipeWeightLayout w{};
  const bool is_fp8 = c.recipe.kind == Recipe::kFP8;
  const std::int64_t size = s.L * s.N * s.C;
  if (is_fp8) {
    w.codes = parts.take(size, 1), w.turned = parts.take(s.L * blocks(s.N) * s.C * kBlock, 1), w.scales = parts.take(s.L * blocks(s.N) * blocks(s.C), 4);
  } else {
    w.forward = parts.take(size, 2);
    w.backward = c.recipe.kind == Recipe::kMXFP8 ? parts.take(size, 2) : w.forward;  // the others' blocks are square
  }
  w.firsts = parts.take(s.L + 1, 4);
  return w;
}

}  // namespace

RecipeLayout recipe_layout(const MoeConfig& c, int P) {
  RecipeLayout r{};
  if (!c.recipe.is_blocked()) return r;
  const std::int64_t L = c.L(P), S = receive_budget(device_exchange_config(c), P).padded_slots, T = c.shared_F > 0 ? c.T_max : 0;
  Parts parts;
  WeightShape shapes[4];
  weight_shapes(c, L, shapes);
  for (int i = 0; i < 4; ++i) r.weights[i] = take_weight(parts, c, shapes[i]);
  const std::int64_t W = c.row_width(), right = std::max(c.inner_width(), c.local_F()),
                     shared_right = std::max(c.shared_F > 0 ? c.shared_inner_width() : 0, c.shared_F);
  if (c.recipe.kind == Recipe::kFP8) {
    const std::int64_t B = max_block_rows(S, L, kBlock), shared_B = blocks(T), widest = std::max(W, right), shared_widest = std::max(c.H, shared_right);
    r.rows = parts.take(std::max(S * widest, T * shared_widest), 1), r.rows_scales = parts.take(std::max(S * blocks(widest), T * blocks(shared_widest)), 4);
    r.left = parts.take(std::max(B * W, shared_B * c.H) * kBlock, 1), r.left_scales = parts.take(std::max(B * W, shared_B * c.H), 4);
    r.x_scales = parts.take(B * W, 4);
    r.right = parts.take(std::max(B * right, shared_B * shared_right) * kBlock, 1),
    r.right_scales = parts.take(std::max(B * right, shared_B * shared_right), 4);
  } else {
    const bool fills = c.recipe.kind == Recipe::kNVFP4 && c.recipe.hadamard;
    const std::int64_t rows = S + (fills ? (kHadamardRows - 1) * std::min(L, S) : 0), shared_rows = T + (fills && T > 0 ? kHadamardRows - 1 : 0);
    r.left = parts.take(std::max(rows * W, shared_rows * c.H), 2), r.right = parts.take(std::max(rows * right, shared_rows * shared_right), 2);
    r.group_scales = parts.take(L, 4), r.weight_group_scales = parts.take(L, 4), r.group_offsets = parts.take(L + 1, 4);
  }
  r.bytes = parts.used;
  return r;
}

std::size_t recipe_y_bytes(const MoeConfig& c, std::int64_t S, std::int64_t L) {
  return c.recipe.kind == Recipe::kFP8 ? static_cast<std::size_t>(max_block_rows(S, L, kBlock) * kBlock * c.row_width()) : 0;
}

void check_device_recipe(const MoeConfig& c, int P) {
  if (c.recipe.kind == Recipe::kF32) WB_FAIL(ErrorCode::kUnsupported, "the MoE layer on GPUs does not do recipes other than bf16, fp8, mxfp8 and nvfp4");
  if (!c.recipe.is_blocked()) return;
  WB_CHECK(c.L(P) <= kMaxGroups, "the recipe {} on GPUs takes {} experts a rank, got {}", to_string(c.recipe.kind), kMaxGroups, c.L(P));
  WB_CHECK(c.recipe.kind != Recipe::kFP8 || (c.H % 16 == 0 && c.local_F() % 16 == 0 && c.latent % 16 == 0 && c.shared_F % 16 == 0),
           "the recipe fp8 on GPUs takes H, F / expert_tensor_parallel, latent and shared_F in multiples of 16, got H = {}, F / expert_tensor_parallel = {}, "
           "latent = {}, shared_F = {}",
           c.H, c.local_F(), c.latent, c.shared_F);
  const std::int64_t widest = std::max({c.inner_width(), c.row_width(), c.shared_F > 0 ? c.H : 0}) * c.L(P);
  WB_CHECK(widest < (std::int64_t{1} << 30), "the recipe {} on GPUs takes weights of 2^30 rows a rank, got {}", to_string(c.recipe.kind), widest);
}

void RecipeMatmuls::prepare(unsigned char* scratch, int device) const {
  const DeviceGuard guard(device);
  WeightShape shapes[4];
  weight_shapes(config_, L_, shapes);
  for (int i = 0; i < 4; ++i) {
    std::vector<std::int32_t> firsts;
    for (std::int64_t g = 0; g <= shapes[i].L; ++g) firsts.push_back(static_cast<std::int32_t>(g * shapes[i].N));
    WB_TRY_CUDA(cudaMemcpy(scratch + layout_.weights[i].firsts, firsts.data(), firsts.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
  }
  WB_TRY_CUDA(cudaStreamSynchronize(cudaStreamLegacy));  // small copies return before they are done, and the caller's stream need not wait for them
}

}  // namespace waybill::cuda

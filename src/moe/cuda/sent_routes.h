// SPDX-License-Identifier: Apache-2.0
// The routes as they travel: cut to the experts' capacity, expanded over the slices of F (src/moe/capacity.h, src/moe/etp.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace waybill::cuda {

// ids int16 or int32 (id_bytes).
struct KeepRoutes {
  const void* ids;           // [T, K]
  const float* weights;      // [T, K]
  const std::uint8_t* mask;  // [T], 1 = padding; or null
  std::int64_t T, K, E;
  double factor;          // an expert takes ceil(factor * valid tokens * K / E) routes
  void* kept_ids;         // [T, K] of the same type: -1 where a route was dropped
  float* kept_weights;    // [T, K]
  std::int32_t* dropped;  // [2]: the first is added to; the capacity is written to the second
  int id_bytes;
  std::int32_t* places;  // room, keep_places(T, K, E)
};
// Tokens of one choice that a warp places, and what that makes of T tokens.
inline constexpr std::int64_t kKeepSegment = 1024;
constexpr std::int64_t keep_segments_of(std::int64_t T) { return (T + kKeepSegment - 1) / kKeepSegment; }
constexpr std::size_t keep_places(std::int64_t T, std::int64_t K, std::int64_t E) { return static_cast<std::size_t>(K * keep_segments_of(T) * E); }
// First choices go before second choices, earlier tokens before later ones.
void launch_keep_routes(const KeepRoutes& args, cudaStream_t stream);

// out_ids [T, K t] over E t: column k t + j holds slice j of column k, with its weight.
struct ExpandRoutes {
  const void* ids;
  const float* weights;
  std::int64_t count;  // T K
  int t;
  void* out_ids;
  float* out_weights;
  int id_bytes, out_id_bytes;
};
void launch_expand_routes(const ExpandRoutes& args, cudaStream_t stream);

// found [1] = 1 where a row of ids [T, K] names an expert twice, else left alone.
void launch_find_duplicates(const void* ids, int id_bytes, std::int64_t T, std::int64_t K, std::int32_t* found, cudaStream_t stream);

// d_logits [T, E] of routes alone (no losses) as the router's backward leaves it, made right where a row names an expert twice.
struct DuplicateRoutes {
  const void* ids;  // [T, K]
  const float *weights, *d_weights;
  std::int64_t T, K, E;
  bool over_all;  // a softmax over all experts that is not normalised over the chosen: other logits are in the gradient, too
  int id_bytes;
};
void launch_scale_duplicates(const DuplicateRoutes& args, float* d_logits, cudaStream_t stream);

// counts [E] += the cells of each expert that are not 0. map [T, E] f32.
void launch_map_counts(const float* map, std::int64_t T, std::int64_t E, std::int32_t* counts, cudaStream_t stream);

// d_weights [count] = the sum over slices of d_expanded [count, t], in slice order.
void launch_sum_slices(const float* d_expanded, std::int64_t count, int t, float* d_weights, cudaStream_t stream);

}  // namespace waybill::cuda

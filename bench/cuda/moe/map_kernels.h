// SPDX-License-Identifier: Apache-2.0
// Kernels of the dense-map design: a [T, E] map and probability rows of all experts, scans over every (row, local expert) pair. A launch serves one
// rank; they wait for no peer.
//
// A token has the number source * T_max + t over all ranks; rows arrive ordered by that number.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fabric/cuda_local/device_peers.h"

namespace waybill::cuda::moe_bench {

inline constexpr int kMaxMapPeers = 8;
inline constexpr int kMapTile = 32;  // tokens, or rows, of a CTA of the plan

struct MapShape {
  std::int32_t P, E, L, K, H, T_max;
  std::int32_t T[kMaxMapPeers];
  std::int32_t row_capacity, slot_capacity;
  std::int32_t width;  // floats of a probability row: E, or L where only the destination's slice travels
  // Windows: [P T_max, E] bytes; [P T_max, K] i16; [row_capacity, H] bf16 three times; [row_capacity, width] f32 twice.
  std::uint64_t map, ids, rows, d_rows, partials, probabilities, d_probabilities;
  __host__ __device__ int first(int rank) const { return rank * L; }
};

// One rank's memory.
struct MapPlan {
  std::uint32_t* hits;         // [P T_max] bit p: the token has an expert of rank p
  std::int32_t* tile_hits;     // [tiles of tokens][P]
  std::int32_t* row_of;        // [P T_max][P], -1: none
  std::int32_t* row_token;     // [row_capacity]
  std::int32_t* num_rows;      // [1]
  std::int32_t* expert_tiles;  // [L][tiles of rows]: rows, then rows before
  std::int32_t* expert_rows;   // [L]
  std::int32_t* offsets;       // [L + 1]
  std::int32_t* slot_map;      // [row_capacity][L], -1: not routed
  float* slot_weight;          // [slot_capacity]
  std::int32_t* overflow;      // [1] set where a capacity does not hold the rows or slots
};

// Sigmoid scores, the K largest by K passes that take a maximum, renormalised: map [T, E] bytes and probabilities [T, E].
void launch_map_top_k(const float* logits, int T, int E, int K, std::uint8_t* map, float* probabilities, cudaStream_t stream);
// d_logits [T, E] of the same.
void launch_map_router_backward(const float* logits, const std::uint8_t* map, const float* probabilities, const float* d_probabilities, int T, int E,
                                float* d_logits, cudaStream_t stream);
// Into cleared memory, where not null: map[t, id] = 1, probabilities[t, id] = weights[t, k]. gather: weights[t, k] = probabilities[t, id].
void launch_map_scatter(const std::int16_t* ids, const float* weights, std::int64_t routes, int E, int K, std::uint8_t* map, float* probabilities,
                        cudaStream_t stream);
void launch_map_gather(const std::int16_t* ids, const float* probabilities, std::int64_t routes, int E, int K, float* weights, cudaStream_t stream);

// From the map of all tokens: rows, expert offsets, slots.
void launch_map_plan(const DevPeers& peers, const MapShape& s, const MapPlan& plan, cudaStream_t stream);

// x [T, H] bf16 to window `to`; with probabilities [T, E]: also them.
void launch_map_push(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const void* x, const float* probabilities, std::uint64_t to, int num_sms,
                     cudaStream_t stream);
// Rows of window `from` to y in expert order; with_weight: probabilities to slot_weight.
void launch_map_permute(const DevPeers& peers, const MapShape& s, const MapPlan& plan, std::uint64_t from, void* y, bool with_weight, int num_sms,
                        cudaStream_t stream);
// The row's slots of y added up, to the window of partials.
void launch_map_reduce(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const void* y, int num_sms, cudaStream_t stream);
// out [T, H] bf16 = (addend f32 or nothing) + partials of all ranks in rank order.
void launch_map_combine(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const float* addend, void* out, int num_sms, cudaStream_t stream);
// Gradients of the probabilities: rows of `width` to the own window, then [T, E] from the peers'.
void launch_map_return(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const float* d_slot_weight, int num_sms, cudaStream_t stream);
void launch_map_collect(const DevPeers& peers, const MapShape& s, const MapPlan& plan, float* d_probabilities, int num_sms, cudaStream_t stream);

}  // namespace waybill::cuda::moe_bench

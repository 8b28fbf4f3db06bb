// SPDX-License-Identifier: Apache-2.0
// What the exchange kernels know: sizes, where things lie, and the ranks of the launch. Plain data, passed by value; the same for virtual
// ranks on one GPU, GPUs of one process and windows of other processes.
//
// Letters: P ranks, T tokens of a rank, K experts a token, E experts, L local experts, D = min(P, K) rows a token can become.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fabric/cuda_local/cuda_local_kernels.h"
#include "waybill/status.h"

namespace waybill::cuda {

inline constexpr int kPlanTile = 64;     // tokens a CTA of the plan
inline constexpr int kMaxPlanK = 128;    // experts a token that the plan kernels take
inline constexpr int kLayoutTile = 128;  // rows a CTA of the layout, or 32 where L is large

// Signals between ranks. Phase numbers of wait errors are kExchangePhase + signal.
enum ExchangeSignal : int {
  kSignalCounts = 0,  // my totals are in your window; I am done with what arrived before
  kSignalMeta,        // my ids, weights and row metadata are in your window
  kSignalReady,       // you may write rows into my window (dispatch with an old plan)
  kSignalRows,        // my rows are in your window
  kSignalPartials,    // my partials may be read
  kSignalPulled,      // I have read your partials
  kSignalSlots,       // push combine: my partials are in your slots
  kSignalValues,      // my slot values may be read
  kSignalValuesRead,  // I have read your slot values
  kSignalPlanned,     // within a rank: its last CTA has the offsets
  kSignalChunks,      // dispatch in chunks: its number; told chunk by chunk
  kSignalArrived,     // within a rank: number of the permute_arriving() that took them
  kSignalCounted,     // within a rank: all tiles of the layout are counted
  kSignalScanned,     // within a rank: what lies before each tile is known
  kNumExchangeSignals,
};
inline constexpr int kExchangePhase = 100;

// Kernels whose last CTA does something.
enum ExchangeTicket : int {
  kTicketPlanCount = 0,
  kTicketPlanFill,
  kTicketLayoutScan,
  kTicketDispatch,
  kTicketCombine,
  kTicketValues,
  kTicketArriving,
  kTicketCounted,
  kTicketScanned,
  kNumExchangeTickets
};

// What becomes usable chunk by chunk: rows of 2^chunk_shift tokens (dispatch), or as many partials of one source (reduce_and_combine).
enum ChunkKind : int { kChunkRows = 0, kChunkPartials, kNumChunkKinds };
inline constexpr int kMaxChunks = 16;

// At ExchangeShape::control of every arena. Flags are written by peers, the rest by the rank itself.
struct ExchangeControl {
  std::uint32_t flag[kNumExchangeSignals][kMaxDevicePeers];               // [signal][source]: the source's epoch
  std::uint32_t epoch[kNumExchangeSignals];                               // what this rank has posted
  std::uint32_t ticket[kNumExchangeTickets];                              // zero between launches
  std::uint32_t chunk_flag[kNumChunkKinds][kMaxDevicePeers][kMaxChunks];  // [kind][rank that made it]: written by it, an epoch
  std::uint32_t chunk_done[kNumChunkKinds][kMaxDevicePeers][kMaxChunks];  // own: parts of a chunk that are there, zero between launches
  unsigned long long wait_ns[kMaxDevicePeers];                            // own: nanoseconds waited for each rank since reset(); see count_wait()
};

// First thing of a handle's memory.
struct HandleHeader {
  std::int32_t valid;  // 0: a budget was exceeded on some rank of the group, or a peer was lost
  std::int32_t R, S, S_padded;
  std::int64_t max_slot_demand, max_row_demand;  // of any rank
};

// One destination of a token.
struct alignas(16) RowEntry {
  std::int32_t rank;        // -1: none
  std::int32_t row;         // at the destination
  std::int32_t slot_begin;  // row-order slot at the destination
  std::int32_t num_slots;
};
static_assert(sizeof(RowEntry) == 16);

// What travels with a row besides its payload.
struct alignas(8) RowMeta {
  std::int32_t slot_begin;
  std::int32_t entry;  // token * D + index among the token's destinations: where a pushed partial goes back to
};

struct ExchangeShape {
  std::int32_t P, K, D, E, L, T_max;
  std::int32_t id_bytes;        // of the route
  std::int32_t local_id_bytes;  // of what travels
  std::int32_t alignment;
  std::int32_t row_budget, slot_budget, padded_budget;
  std::int32_t send_weights;        // 0: none travel
  std::int32_t chunk_shift;         // log2 of the tokens of a chunk, at most kMaxChunks of them
  std::int32_t plan_tiles;          // stride of the tile counts, a multiple of 4
  std::int32_t layout_rows;         // rows of a layout tile: 128 or 32
  std::int32_t layout_tiles;        // stride of the expert counts, a multiple of 4
  const std::int32_t* rank_table;   // [E] on the launch's device, or null: E / P consecutive experts a rank
  const std::int32_t* local_table;  // [E]

  // Windows: the same offsets in every arena.
  std::uint64_t control;       // ExchangeControl
  std::uint64_t counts;        // [2 parities][P sources][2P] int32: rows, then slots, for each destination
  std::uint64_t row_meta;      // [row_budget] RowMeta
  std::uint64_t slot_ids;      // [slot_budget] local ids in row order
  std::uint64_t slot_weights;  // [slot_budget] f32
  std::uint64_t slot_values;   // [slot_budget] f32, what return_slot_values reads
  std::uint64_t tile_counts;   // scratch: [2P][plan_tiles] int32
  std::uint64_t expert_tiles;  // scratch: [L][layout_tiles] int32, or [layout_tiles][L] (layout_fused)

  // Parts of a handle.
  std::uint32_t h_base;              // [2P] int32: this rank's first row and first slot at each destination
  std::uint32_t h_row_offsets;       // [P+1] int32, rows by source
  std::uint32_t h_expert_counts;     // [L] int32
  std::uint32_t h_expert_offsets;    // [L+1] int32
  std::uint64_t h_entries;           // [T_max * D] RowEntry
  std::uint64_t h_row_slot_offsets;  // [row_budget + 1] int32
  std::uint64_t h_row_entry;         // [row_budget] int32: RowMeta::entry
  std::uint64_t h_slot_position;     // [slot_budget] int32
  std::uint64_t h_slot_row;          // [padded_budget] int32
  std::uint64_t h_slot_weight;       // [padded_budget] f32
};

// One rank of a launch. Which of a, b, c, d is what: see the kernels.
struct RankCall {
  unsigned char* handle;
  StatusWord* status;
  const void* a;
  const void* b;
  void* c;
  void* d;
  std::int32_t T;
  std::int32_t lists_tokens;  // 1: h_slot_row holds the tokens of rows instead of the rows (a group of one rank)
};

struct ExchangeParams {
  LocalRanks ranks;  // the same order as call
  ExchangeShape shape;
  RankCall call[kMaxDevicePeers];

#if defined(__CUDACC__)
  template <class T>
  __device__ __forceinline__ T* window(int rank, std::uint64_t offset) const {
    return ranks.table.at<T>(rank, offset);
  }
  __device__ __forceinline__ ExchangeControl* control(int rank) const { return window<ExchangeControl>(rank, shape.control); }
#endif
};

#if defined(__CUDACC__)
template <class T>
__device__ __forceinline__ T* handle_part(const RankCall& call, std::uint64_t offset) {
  return reinterpret_cast<T*>(call.handle + offset);
}
__device__ __forceinline__ HandleHeader* header_of(const RankCall& call) { return reinterpret_cast<HandleHeader*>(call.handle); }
#endif

}  // namespace waybill::cuda

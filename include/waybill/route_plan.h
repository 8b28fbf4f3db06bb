// SPDX-License-Identifier: Apache-2.0
// RoutePlan: who sends which row where. Built from a Route and a placement; rows are deduplicated per destination rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/route.h"

namespace waybill {

// The sender's side. Rows are grouped by destination rank in rank order, tokens ascending within a rank; a token appears once
// per rank that holds at least one of its experts. Slots of a row are in order k.
//
// Worked example (the plan test uses these numbers): T=3, K=2, E=4, P=2, ids = {{0,2},{3,1},{2,3}}:
//   row_offsets  = {0, 2, 5}            rank 0 gets tokens 0,1; rank 1 gets tokens 0,1,2
//   row_token    = {0, 1, 0, 1, 2}
//   slot_offsets = {0, 1, 2, 3, 4, 6}
//   slot_expert  = {0, 1, 0, 1, 0, 1}   local ids
//   slot_k       = {0, 1, 1, 0, 0, 1}   column of ids the slot came from
//   token_offsets = {0, 2, 4, 5}        token 0: rows 0,2; token 1: rows 1,3; token 2: row 4
//   token_rows    = {0, 2, 1, 3, 4}
struct RoutePlan {
  std::int64_t T = 0, K = 0;
  int P = 1;
  std::vector<std::int64_t> row_offsets;    // [P+1]
  std::vector<std::int32_t> row_token;      // [rows]
  std::vector<std::int64_t> slot_offsets;   // [rows+1]
  std::vector<std::int32_t> slot_expert;    // [slots] local expert on the destination
  std::vector<float> slot_weight;           // [slots]
  std::vector<std::int16_t> slot_k;         // [slots]
  std::vector<std::int64_t> token_offsets;  // [T+1] into token_rows
  std::vector<std::int32_t> token_rows;     // [rows] rows of a token in rank order: what combine sums
  std::int64_t num_bad_ids = 0;             // ids outside [-1, E): ignored everywhere, counted here

  std::int64_t num_rows() const { return static_cast<std::int64_t>(row_token.size()); }
  std::int64_t num_slots() const { return static_cast<std::int64_t>(slot_expert.size()); }
};
// Host routes. Work and memory O(T*K + rows + P); duplicate ids of a row become slots of their own.
WB_API RoutePlan make_route_plan(const RouteView& route, const ExpertPlacement& placement);
// Throws kInvalidArgument naming the first broken rule with its place and values: array lengths, offsets, tokens ascending within a
// rank, slots in order k with local ids of the placement and finite weights, no (token, k) twice, and token_rows the exact inverse of
// row_token. Work and memory O(T*K + rows + P).
WB_API void validate(const RoutePlan& plan, const ExpertPlacement& placement);
// A few lines of text, no trailing newline: sizes, then rows and slots for each of the first 16 ranks.
WB_API std::string describe(const RoutePlan& plan);

// n rounded up to a multiple of a; 0 stays 0.
WB_HD inline std::int64_t round_up(std::int64_t n, std::int64_t a) { return (n + a - 1) / a * a; }

// The receiver's side: rows by source rank, then token; slots in expert order (CSR): by local expert, then source rank, then
// token, then k. Row-order slots (row, then k) keep their position in the expert order in `slot_position`.
//
// Worked example (the layout test uses these numbers): rank 0 of the routes above when rank 1 brings T=2, ids = {{1,0},{3,-1}};
// so rank 0 gets rows: rank 0 tokens 0,1 and rank 1 token 0, with local ids {0}, {1}, {1,0}:
//   row_offsets      = {0, 2, 3}
//   row_slot_offsets = {0, 1, 2, 4}
//   tight:        expert_counts = {2, 2}, expert_offsets = {0, 2, 4}, slot_row = {0, 2, 1, 2}, slot_position = {0, 2, 3, 1}
//   alignment 4:  expert_counts = {2, 2}, expert_offsets = {0, 4, 8}, slot_row = {0, 2, -1, -1, 1, 2, -1, -1},
//                 slot_position = {0, 4, 5, 1}
struct ReceiveLayout {
  int P = 1;
  std::int64_t L = 0;
  std::vector<std::int64_t> row_offsets;       // [P+1] rows from each source rank
  std::vector<std::int64_t> row_slot_offsets;  // [R+1] row-order slots
  std::vector<std::int64_t> slot_position;     // [S] row-order slot -> expert-order slot
  std::vector<std::int32_t> expert_offsets;    // [L+1] CSR over expert-order slots (aligned layouts: padded starts)
  std::vector<std::int32_t> expert_counts;     // [L] real slots, never padded
  std::vector<std::int32_t> slot_row;          // [S_padded] row of an expert-order slot; -1 for a padding slot
  std::vector<float> slot_weight;              // [S_padded] 0 for a padding slot

  std::int64_t R() const { return row_offsets.empty() ? 0 : row_offsets.back(); }
  std::int64_t S() const { return row_slot_offsets.empty() ? 0 : row_slot_offsets.back(); }  // real slots
  std::int64_t S_padded() const { return static_cast<std::int64_t>(slot_row.size()); }
};

// Builds the receive layout from the rows' metadata in arrival order: counts of slots per row, local expert and weight per
// row-order slot. `alignment`: every expert starts at a multiple of it (1 = tight); an empty expert takes 0 rows.
// Refuses local ids outside [0, L), offsets that decrease and more than 2^31 - 1 slots, with the values.
WB_API ReceiveLayout make_receive_layout(int P, std::int64_t L, std::vector<std::int64_t> row_offsets, std::vector<std::int64_t> row_slot_offsets,
                                         const std::int32_t* slot_expert, const float* slot_weight, std::int64_t alignment = 1);

}  // namespace waybill

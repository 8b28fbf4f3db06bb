// SPDX-License-Identifier: Apache-2.0
// Where the tables and counts of a product that widens its operands itself (cuda/widened_params.h) lie in its workspace.
#pragma once

#include <cstdint>

namespace waybill::detail {

inline constexpr int kWidenedRows = 256;  // of a block of rows, and of a group's weights

struct WidenedRoom {
  std::int64_t words = 0;                        // of 32 bits; offsets that never decrease come first
  std::int64_t first_block = 0, first_turn = 0;  // tables of groups + 1
  std::int64_t counts = 0;                       // all behind are zero when the product starts
  std::int64_t rows_ready = 0, weights_ready = 0, rows_read = 0, weights_read = 0, tickets = 0;
};
inline WidenedRoom widened_room(std::int64_t rows, std::int64_t groups, std::int64_t outer) {
  const std::int64_t blocks = rows / kWidenedRows + groups, weight_blocks = groups * ((outer + kWidenedRows - 1) / kWidenedRows);
  WidenedRoom r;
  r.first_block = groups + 1, r.first_turn = 2 * (groups + 1), r.counts = 3 * (groups + 1);
  r.rows_ready = r.counts, r.weights_ready = r.rows_ready + blocks, r.rows_read = r.weights_ready + weight_blocks;
  r.weights_read = r.rows_read + blocks, r.tickets = r.weights_read + groups, r.words = r.tickets + 2;
  return r;
}

}  // namespace waybill::detail

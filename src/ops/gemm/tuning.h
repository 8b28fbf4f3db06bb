// SPDX-License-Identifier: Apache-2.0
// How large a task is. These numbers change speed and never a result. Measured on 2-core AVX-512 machines with 48 KiB L1 and 2 MiB L2 (Intel), 32 KiB and 1 MiB
// (AMD).
#pragma once

#include <cstdint>

namespace waybill::detail {

constexpr std::int64_t kMaxTaskRows = 448;     // a block of 448 x 384 floats: 672 KiB
constexpr std::int64_t kMaxTaskColumns = 512;  // of which a panel of 384 x 32 floats is packed at a time: 48 KiB
constexpr std::int64_t kMinTaskColumns = 128;  // below this, packing a costs more than idle threads
constexpr std::int64_t kMinTaskRows = 56;
constexpr std::int64_t kTasksPerThread = 4;

constexpr std::int64_t kShortDepth = 128;  // weight gradients of groups with so few rows follow the rows of the output
constexpr int kCopyRows = 8;
constexpr std::int64_t kMaxDirectRows = 14;  // up to so many rows of a, an fp32 b with adjacent columns is read in place, not packed

}  // namespace waybill::detail

// SPDX-License-Identifier: Apache-2.0
// How much memory the engine's Buffers (waybill/tensor.h) hold.
#pragma once

#include <cstddef>

#include "waybill/error.h"

namespace waybill {

// Bytes of all Buffers of the process: those that live, and the most that did at once since reset_peak_buffer_bytes() or the start. Two relaxed atomics.
struct BufferBytes {
  std::size_t live = 0, peak = 0;
};
WB_API BufferBytes buffer_bytes();
WB_API void reset_peak_buffer_bytes();

}  // namespace waybill

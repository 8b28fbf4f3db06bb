// SPDX-License-Identifier: Apache-2.0
// Names of the low-precision formats, without the types of tensors, so that kernels can use them. What they mean: waybill/quantize.h.
#pragma once

#include <cstdint>

namespace waybill {

enum class ElementFormat : std::uint8_t {
  kE4M3 = 0,  // largest 448, smallest 2^-9, NaN 0x7f/0xff, no infinity
  kE5M2 = 1,  // largest finite 57344, smallest 2^-16
  kE2M1 = 2,  // 0 .5 1 1.5 2 3 4 6; code = 4 bits
};

// E8M0: 2^(byte - 127), 255 = NaN.
enum class ScaleRule : std::uint8_t {
  kRoundUp = 0,  // the smallest power of two with amax / scale <= largest element (RCEIL): never saturates. Default.
  kFloor = 1,    // floor(log2 amax) - floor(log2 largest element), the text of the OCP specification: saturates the top of a block
};

enum class ScaleFormat : std::uint8_t {
  kE8M0 = 0,        // MX
  kPowerOfTwo = 1,  // the same scale as fp32
  kF32 = 2,         // amax / largest element; 1 for a block of zeros
  kE4M3 = 3,        // NVFP4: two levels, a block's E4M3 scale under an fp32 scale of the group
};

}  // namespace waybill

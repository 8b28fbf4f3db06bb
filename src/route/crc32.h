// SPDX-License-Identifier: Apache-2.0
// CRC-32 of zip and PNG (reflected polynomial 0xEDB88320). For files, not for speed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace waybill::detail {

inline std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t crc = 0) {
  static constexpr std::array<std::uint32_t, 256> kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320u : 0u);
      table[i] = value;
    }
    return table;
  }();
  crc = ~crc;
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kTable[(crc ^ p[i]) & 0xff];
  return ~crc;
}

}  // namespace waybill::detail

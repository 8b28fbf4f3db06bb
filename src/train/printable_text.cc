// SPDX-License-Identifier: Apache-2.0
#include "waybill/data.h"

namespace waybill {
namespace {

// Length of the valid UTF-8 sequence at `i`, 0 where there is none.
std::size_t utf8_length(std::span<const std::int32_t> tokens, std::size_t i) {
  const std::int32_t lead = tokens[i];
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xc2 && lead < 0xe0 ? 2 : (lead & 0xf0) == 0xe0 ? 3 : lead >= 0xf0 && lead < 0xf5 ? 4 : 0;
  if (length == 0 || i + length > tokens.size()) return 0;
  for (std::size_t k = 1; k < length; ++k) {
    if ((tokens[i + k] & 0xc0) != 0x80 || tokens[i + k] > 0xff) return 0;
  }
  const std::int32_t next = tokens[i + 1];
  const bool overlong = (lead == 0xe0 && next < 0xa0) || (lead == 0xf0 && next < 0x90);
  const bool surrogate_or_high = (lead == 0xed && next >= 0xa0) || (lead == 0xf4 && next >= 0x90);
  return overlong || surrogate_or_high ? 0 : length;
}

}  // namespace

std::string printable_text(std::span<const std::int32_t> tokens) {
  std::string text;
  for (std::size_t i = 0; i < tokens.size();) {
    const std::size_t length = utf8_length(tokens, i);
    const bool control = length == 1 && (tokens[i] < 0x20 || tokens[i] == 0x7f) && tokens[i] != '\n' && tokens[i] != '\t';
    if (length == 0 || control || tokens[i] < 0) {
      text += '?';
      ++i;
      continue;
    }
    for (std::size_t k = 0; k < length; ++k) text += static_cast<char>(tokens[i + k]);
    i += length;
  }
  return text;
}

}  // namespace waybill

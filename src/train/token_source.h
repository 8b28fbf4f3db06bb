// SPDX-License-Identifier: Apache-2.0
// Where tokens come from: each function reads one kind of source completely and checks it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "waybill/data.h"

namespace waybill {

// Tokens at their own width.
using TokenArray = std::variant<std::vector<std::uint8_t>, std::vector<std::uint16_t>, std::vector<std::uint32_t>>;

// Bytes of a file, or of a folder's files joined in path order with a newline between them.
TokenArray read_text(const std::string& path, std::int64_t vocab);
TokenArray read_bin(const std::string& path, const std::string& dtype, std::int64_t vocab);

}  // namespace waybill

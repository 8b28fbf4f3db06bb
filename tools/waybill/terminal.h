// SPDX-License-Identifier: Apache-2.0
// What a live display needs from the terminal. Drawing is done only when the stream is a terminal.
#pragma once

#include <cstdio>
#include <string>

namespace waybill::cli {

bool is_terminal(std::FILE* stream);
int terminal_width(std::FILE* stream);  // columns; 80 where unknown
// "[#####.....]  50%", exactly `width` columns (at least 8).
std::string progress_bar(double fraction, int width);
// "1m 05s", "2h 03m", "0.4s".
std::string format_duration(double seconds);
// "12.3k", "4.56M".
std::string format_count(double count);

}  // namespace waybill::cli

// SPDX-License-Identifier: Apache-2.0
#include "terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace waybill::cli {

bool is_terminal(std::FILE* stream) {
  const char* term = std::getenv("TERM");
  return isatty(fileno(stream)) != 0 && (term == nullptr || std::string(term) != "dumb");
}

int terminal_width(std::FILE* stream) {
  winsize size{};
  if (ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

std::string progress_bar(double fraction, int width) {
  const int cells = std::max(width, 8) - 7;  // "[", "]", " 100%"
  const double clamped = std::clamp(fraction, 0.0, 1.0);
  const int full = static_cast<int>(clamped * cells);
  return fmt::format("[{}{}] {:3.0f}%", std::string(static_cast<std::size_t>(full), '#'), std::string(static_cast<std::size_t>(cells - full), '.'),
                     clamped * 100);
}

std::string format_duration(double seconds) {
  if (seconds < 10) return fmt::format("{:.1f}s", seconds);
  const long total = std::lround(seconds);
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m {:02}s", total / 60, total % 60);
  return fmt::format("{}h {:02}m", total / 3600, total % 3600 / 60);
}

std::string format_count(double count) {
  if (count < 1e3) return fmt::format("{:.0f}", count);
  if (count < 1e6) return fmt::format("{:.1f}k", count / 1e3);
  if (count < 1e9) return fmt::format("{:.2f}M", count / 1e6);
  return fmt::format("{:.2f}G", count / 1e9);
}

}  // namespace waybill::cli

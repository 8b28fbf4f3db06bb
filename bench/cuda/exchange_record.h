// SPDX-License-Identifier: Apache-2.0
// A measured step as a line of the table and as a JSON line. unchecked: what the line says where `checked` is false.
#pragma once

#include <cstdio>
#include <string>

#include "bench/cuda/exchange_group.h"

namespace waybill::cuda {

inline void write_record(std::FILE* out, const char* op, const std::string& name, const std::string& variant, const StepTime& t, double floor, double target,
                         bool checked, int iterations, const char* unchecked = "WRONG") {
  fmt::print("{:<28} {:<30} {:<22} {:8.1f} us  [{:.1f} {:.1f}]  floor {:6.1f} x{:4.2f}  target {:>5} {}{}\n", op, name, variant, t.p50, t.p10, t.p90, floor,
             floor > 0 ? t.p50 / floor : 0, target > 0 ? fmt::format("{:.0f}", target) : "-", target <= 0 ? "" : (t.p50 <= target ? "met" : "MISSED"),
             checked ? "" : fmt::format("  {}", unchecked));
  fmt::print(out,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{:.3f},\"floor\":{},"
             "\"target\":{},\"peers\":{{}},\"evidence\":\"distributed op\",\"checked\":{},\"p50\":{:.3f},\"p99\":null,\"iterations\":{}}}\n",
             op, name, variant, t.p50, t.p90 - t.p10, floor > 0 ? fmt::format("{:.3f}", floor) : "null", target > 0 ? fmt::format("{:.1f}", target) : "null",
             checked ? "true" : "false", t.p50, iterations);
  std::fflush(out), std::fflush(stdout);
}

// What the weights cost: a step's time with them over its time without. extra: bytes that cross the link with them over those without, less 1.
inline void write_weight_cost(std::FILE* out, const char* op, const std::string& name, const std::string& variant, double with_us, double without_us,
                              double bytes, double extra, bool checked) {
  const double ratio = with_us / without_us, most = 1.03 + extra;
  fmt::print("{:<28} {:<30} {:<22} x{:.3f}  bytes over the link {:.0f}, weights {:+.2f}%  target x{:.3f} {}\n", op, name, variant, ratio, bytes, 100 * extra,
             most, ratio <= most ? "met" : "MISSED");
  fmt::print(out,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}, weights over none; {:.0f} bytes cross without, {:.2f}% more with\",\"metric\":\"time ratio\","
             "\"unit\":\"x\",\"value\":{:.4f},\"spread\":0,\"floor\":{:.4f},\"target\":{:.4f},\"peers\":{{}},\"evidence\":\"distributed op\",\"checked\":{},"
             "\"p50\":{:.4f},\"p99\":null,\"iterations\":0}}\n",
             op, name, variant, bytes, 100 * extra, ratio, 1 + extra, most, checked ? "true" : "false", ratio);
  std::fflush(out), std::fflush(stdout);
}

}  // namespace waybill::cuda

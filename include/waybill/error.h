// SPDX-License-Identifier: Apache-2.0
// Errors of the C++ API: one exception type, thrown on the host at API boundaries only. The library never prints or exits.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "waybill/export.h"

namespace waybill {

enum class ErrorCode : int {
  kInvalidArgument = 1,  // the caller's values break a documented rule
  kUnsupported = 2,      // legal, but no implementation accepts it; the message lists every refusal
  kOutOfMemory = 3,
  kIo = 4,          // file missing, truncated, corrupt, disk full
  kTimeout = 5,     // a cross-rank wait ran out; the message names rank, peer, phase, expected and seen
  kPeerFailed = 6,  // another rank failed first; the message repeats its error
  kOverflow = 7,    // a receive budget was exceeded and the caller asked for an error
  kInternal = 8,    // our bug
  kCuda = 9,        // a CUDA or NCCL call failed
};

WB_API const char* to_string(ErrorCode code);

class WB_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// Out of line, so that a check costs one compare and one call at its call site.
[[noreturn]] WB_API void throw_error(ErrorCode code, std::string message);

}  // namespace waybill

// The caller's fault: WB_CHECK(K <= E, "K = {} exceeds E = {}", K, E).
#define WB_CHECK(condition, ...)                                                                  \
  do {                                                                                            \
    if (!(condition)) [[unlikely]]                                                                \
      ::waybill::throw_error(::waybill::ErrorCode::kInvalidArgument, ::fmt::format(__VA_ARGS__)); \
  } while (0)

#define WB_FAIL(code, ...) ::waybill::throw_error((code), ::fmt::format(__VA_ARGS__))

// Our own bug; compiled out of release builds.
#if defined(NDEBUG)
#define WB_ASSERT(condition) ((void)0)
#else
#define WB_ASSERT(condition)                                                                                                                      \
  do {                                                                                                                                            \
    if (!(condition)) [[unlikely]]                                                                                                                \
      ::waybill::throw_error(::waybill::ErrorCode::kInternal, ::fmt::format("{}:{}: internal check failed: {}", __FILE__, __LINE__, #condition)); \
  } while (0)
#endif

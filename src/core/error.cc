// SPDX-License-Identifier: Apache-2.0
#include "waybill/error.h"

namespace waybill {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kOutOfMemory:
      return "out of memory";
    case ErrorCode::kIo:
      return "input/output error";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kPeerFailed:
      return "peer failed";
    case ErrorCode::kOverflow:
      return "receive overflow";
    case ErrorCode::kInternal:
      return "internal error";
    case ErrorCode::kCuda:
      return "CUDA error";
  }
  return "unknown error";
}

void throw_error(ErrorCode code, std::string message) { throw Error(code, message); }

}  // namespace waybill

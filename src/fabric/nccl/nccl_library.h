// SPDX-License-Identifier: Apache-2.0
// NCCL, loaded at run time: the build needs its header only, and the library that is found must be of the header's version (the layout of a
// window is not stable between versions before 2.29). WAYBILL_NCCL_LIBRARY names the file; default libnccl.so.2 on the loader's path.
#pragma once

#include <nccl.h>

#include <string>

#include "waybill/error.h"

namespace waybill::cuda {

// NCCL's ncclTeam (nccl_device.h, which host compilers do not take): ranks that reach each other's memory.
struct NcclTeam {
  int num_ranks, rank, stride;
};

struct NcclLibrary {
  int version = 0;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRank) comm_init_rank = nullptr;
  decltype(&ncclCommSplit) comm_split = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclMemAlloc) mem_alloc = nullptr;
  decltype(&ncclMemFree) mem_free = nullptr;
  decltype(&ncclCommWindowRegister) window_register = nullptr;
  decltype(&ncclCommWindowDeregister) window_deregister = nullptr;
  NcclTeam (*team_lsa)(ncclComm_t) = nullptr;  // known once a window is registered
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
};

// The library of this process. kUnsupported naming both versions where they differ, or the loader's error where there is none. The first call
// turns NVLink multicast off for NCCL (NCCL_NVLS_ENABLE=0) unless the variable is set.
const NcclLibrary& nccl_library();

std::string nccl_version_text(int code);  // "2.28.9"

[[noreturn]] void throw_nccl_error(ncclResult_t error, const char* call);

// One NCCL group: queue() queues its messages and returns NCCL's error where one was refused. The group is closed also then: one that stays open would
// swallow every later call of this thread. The first error.
template <class Queue>
ncclResult_t in_one_group(const NcclLibrary& nccl, const Queue& queue) {
  const ncclResult_t started = nccl.group_start();
  if (started != ncclSuccess) return started;
  const ncclResult_t queued = queue(), ended = nccl.group_end();
  return queued != ncclSuccess ? queued : ended;
}

}  // namespace waybill::cuda

#define WB_TRY_NCCL(call)                                      \
  do {                                                         \
    const ncclResult_t wb_nccl_error = (call);                 \
    if (wb_nccl_error != ncclSuccess) [[unlikely]]             \
      ::waybill::cuda::throw_nccl_error(wb_nccl_error, #call); \
  } while (0)

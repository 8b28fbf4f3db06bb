// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

namespace waybill::cuda {
namespace {

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) WB_FAIL(ErrorCode::kUnsupported, "the NCCL library has no {}; version {} is needed", name, nccl_version_text(NCCL_VERSION_CODE));
}

NcclLibrary load() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const char* named = std::getenv("WAYBILL_NCCL_LIBRARY");
  void* library = dlopen(named != nullptr ? named : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) WB_FAIL(ErrorCode::kUnsupported, "NCCL cannot be loaded: {}; WAYBILL_NCCL_LIBRARY names its file", dlerror());
  NcclLibrary nccl;
  decltype(&ncclGetVersion) get_version = nullptr;
  find(library, "ncclGetVersion", get_version);
  find(library, "ncclGetErrorString", nccl.error_string);
  if (get_version(&nccl.version) != ncclSuccess || nccl.version != NCCL_VERSION_CODE) {
    WB_FAIL(ErrorCode::kUnsupported, "built with the header of NCCL {}, the library found is {}: build with the header of the library that is loaded",
            nccl_version_text(NCCL_VERSION_CODE), nccl_version_text(nccl.version));
  }
  find(library, "ncclGetUniqueId", nccl.get_unique_id), find(library, "ncclCommInitRank", nccl.comm_init_rank);
  find(library, "ncclCommSplit", nccl.comm_split);
  find(library, "ncclCommDestroy", nccl.comm_destroy), find(library, "ncclCommAbort", nccl.comm_abort);
  find(library, "ncclCommGetAsyncError", nccl.comm_get_async_error);
  find(library, "ncclMemAlloc", nccl.mem_alloc), find(library, "ncclMemFree", nccl.mem_free);
  find(library, "ncclCommWindowRegister", nccl.window_register), find(library, "ncclCommWindowDeregister", nccl.window_deregister);
  find(library, "ncclTeamLsa", nccl.team_lsa);
  find(library, "ncclGroupStart", nccl.group_start), find(library, "ncclGroupEnd", nccl.group_end);
  find(library, "ncclSend", nccl.send), find(library, "ncclRecv", nccl.receive);
  return nccl;
}

}  // namespace

const NcclLibrary& nccl_library() {
  static const NcclLibrary library = load();
  return library;
}

std::string nccl_version_text(int code) { return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100); }

void throw_nccl_error(ncclResult_t error, const char* call) { WB_FAIL(ErrorCode::kPeerFailed, "{} failed: {}", call, nccl_library().error_string(error)); }

}  // namespace waybill::cuda

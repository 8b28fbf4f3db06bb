// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/process_memory.h"
#include "waybill/error.h"

namespace waybill::capi {

std::unique_ptr<ProcessMemory> make_nccl_memory(const wb_process_group& group, std::size_t, bool) {
  WB_FAIL(ErrorCode::kUnsupported, "a group of {} processes needs a library that was built with NCCL's headers (2.28 or later)", group.size);
}

}  // namespace waybill::capi

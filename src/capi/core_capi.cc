// SPDX-License-Identifier: Apache-2.0
// Version, status names, thread pools.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "convert.h"
#include "waybill/build_info.h"

using namespace waybill;
using namespace waybill::capi;

const char* wb_status_name(wb_status status) noexcept {
  if (status == WB_OK) return "ok";
  return to_string(static_cast<ErrorCode>(status));
}

const char* wb_version(void) noexcept { return version(); }

const char* wb_build_info(void) noexcept {
  // Made on first use; where memory runs out the version alone is the answer.
  try {
    static const std::string text = describe(build_info());
    return text.c_str();
  } catch (...) {
    return version();
  }
}

wb_status wb_check_version(int32_t abi_version, const char* header_version) noexcept {
  return guarded([&] {
    if (abi_version != WB_ABI_VERSION) {
      WB_FAIL(ErrorCode::kUnsupported, "the caller's waybill.h has ABI {}, library {} has ABI {}; rebuild the caller", abi_version, version(), WB_ABI_VERSION);
    }
    check_component_version("the caller's waybill.h", &required(header_version, "header_version"));
  });
}

int64_t wb_struct_size(const char* name) noexcept {
#define WB_SIZE_OF(type) \
  { #type, sizeof(type) }
  static constexpr struct {
    std::string_view name;
    std::size_t bytes;
  } kStructs[] = {
      WB_SIZE_OF(wb_tensor),          WB_SIZE_OF(wb_stream),         WB_SIZE_OF(wb_route),
      WB_SIZE_OF(wb_route_stats),     WB_SIZE_OF(wb_router_config),  WB_SIZE_OF(wb_router_inputs),
      WB_SIZE_OF(wb_step_status),     WB_SIZE_OF(wb_router_outputs), WB_SIZE_OF(wb_grouped_gemm_args),
      WB_SIZE_OF(wb_quant_config),    WB_SIZE_OF(wb_quantized),      WB_SIZE_OF(wb_fabric_transport),
      WB_SIZE_OF(wb_exchange_config), WB_SIZE_OF(wb_dispatch_info),  WB_SIZE_OF(wb_exchange_bytes),
      WB_SIZE_OF(wb_moe_config),      WB_SIZE_OF(wb_moe_tensors),    WB_SIZE_OF(wb_moe_forward_options),
      WB_SIZE_OF(wb_moe_step_info),   WB_SIZE_OF(wb_train_progress), WB_SIZE_OF(wb_train_result),
      WB_SIZE_OF(wb_status_word),     WB_SIZE_OF(wb_process_group),  WB_SIZE_OF(wb_device_moe_outputs),
      WB_SIZE_OF(wb_activated_rows),
  };
#undef WB_SIZE_OF
  if (name == nullptr) return -1;
  for (const auto& known : kStructs) {
    if (known.name == name) return static_cast<int64_t>(known.bytes);
  }
  return -1;
}

wb_status wb_thread_pool_create(int32_t num_threads, wb_thread_pool** pool) noexcept {
  return guarded([&] {
    wb_thread_pool*& target = required(pool, "pool");
    WB_CHECK(num_threads >= 0 && num_threads <= 4096, "num_threads is {}, allowed are 0 (all usable cores) to 4096", num_threads);
    target = new wb_thread_pool(num_threads == 0 ? num_usable_cores() : num_threads);
  });
}

void wb_thread_pool_destroy(wb_thread_pool* pool) noexcept { delete pool; }

wb_status wb_step_status_init(wb_step_status* status, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(status, struct_size, from_status(StatusWord{}), "status"); });
}

// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/growable_buffer.h"

#include "core/alloc_trace.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/driver_function.h"

namespace waybill::cuda {
namespace {

struct Driver {
#define WB_DRIVER(name) decltype(name)* name##_ = driver_function<decltype(name)>(#name, 12000)
  WB_DRIVER(cuMemGetAllocationGranularity);
  WB_DRIVER(cuMemAddressReserve);
  WB_DRIVER(cuMemAddressFree);
  WB_DRIVER(cuMemCreate);
  WB_DRIVER(cuMemRelease);
  WB_DRIVER(cuMemMap);
  WB_DRIVER(cuMemUnmap);
  WB_DRIVER(cuMemSetAccess);
#undef WB_DRIVER
};
const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) WB_FAIL(ErrorCode::kCuda, "{} failed: {}", call, driver_error_text(result));
}

CUmemAllocationProp on_device(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE, properties.location.id = device;
  return properties;
}

std::size_t rounded(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::size_t GrowableBuffer::granularity(int device) {
  const CUmemAllocationProp properties = on_device(device);
  std::size_t unit = 0;
  check(driver().cuMemGetAllocationGranularity_(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity");
  return unit;
}

GrowableBuffer::GrowableBuffer(std::size_t most_bytes, int device) : device_(device) {
  if (most_bytes == 0) return;
  const DeviceGuard guard(device);
  WB_TRY_CUDA(cudaFree(nullptr));  // the device's context exists
  const std::size_t bytes = rounded(most_bytes, granularity(device));
  CUdeviceptr address = 0;
  check(driver().cuMemAddressReserve_(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  address_ = address, reserved_ = bytes;
}

GrowableBuffer::~GrowableBuffer() {
  if (address_ == 0) return;
  int previous = 0;
  WB_TRY_CUDA_NOEXCEPT(cudaGetDevice(&previous));
  WB_TRY_CUDA_NOEXCEPT(cudaSetDevice(device_));
  WB_TRY_CUDA_NOEXCEPT(cudaDeviceSynchronize());  // as cudaFree does
  if (mapped_ > 0) (void)driver().cuMemUnmap_(address_, mapped_);
  (void)driver().cuMemAddressFree_(address_, reserved_);
  WB_TRY_CUDA_NOEXCEPT(cudaSetDevice(previous));
}

void GrowableBuffer::grow(std::size_t bytes) {
  if (bytes <= mapped_) return;
  WB_CHECK(bytes <= reserved_, "a buffer for {} bytes at most cannot grow to {}", reserved_, bytes);
  const DeviceGuard guard(device_);
  const std::size_t more = rounded(bytes, granularity(device_)) - mapped_;
  const CUmemAllocationProp properties = on_device(device_);
  CUmemGenericAllocationHandle memory = 0;
  const CUresult created = driver().cuMemCreate_(&memory, more, &properties, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY) {
    std::size_t free_bytes = 0, total_bytes = 0;
    WB_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    WB_FAIL(ErrorCode::kOutOfMemory, "cannot grow a buffer on cuda:{} from {} to {} bytes: {} of {} bytes are free", device_, mapped_, mapped_ + more,
            free_bytes, total_bytes);
  }
  check(created, "cuMemCreate");
  const CUresult mapped = driver().cuMemMap_(address_ + mapped_, more, 0, memory, 0);
  (void)driver().cuMemRelease_(memory);  // the mapping keeps it
  check(mapped, "cuMemMap");
  CUmemAccessDesc access{};
  access.location = properties.location, access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult set = driver().cuMemSetAccess_(address_ + mapped_, more, &access, 1);
  if (set != CUDA_SUCCESS) (void)driver().cuMemUnmap_(address_ + mapped_, more);
  check(set, "cuMemSetAccess");
  mapped_ += more;
  waybill::detail::note_allocation(more);
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/scratch_buffer.h"

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "core/alloc_trace.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"

namespace waybill::cuda {

RelaxedCapture::RelaxedCapture() { WB_TRY_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
RelaxedCapture::~RelaxedCapture() { WB_TRY_CUDA_NOEXCEPT(cudaThreadExchangeStreamCaptureMode(&mode_)); }

namespace {

thread_local bool t_is_rehearsal = false;

// One pool a device for the process, visible to its own device alone. Freed memory stays in the pool: giving it back would unmap it in the middle of a step.
cudaMemPool_t pool_of(int device) {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t> pools;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = pools.try_emplace(device, nullptr);
  if (is_new) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {.type = cudaMemLocationTypeDevice, .id = device};
    WB_TRY_CUDA(cudaMemPoolCreate(&at->second, &properties));
    std::uint64_t keep = std::numeric_limits<std::uint64_t>::max();
    WB_TRY_CUDA(cudaMemPoolSetAttribute(at->second, cudaMemPoolAttrReleaseThreshold, &keep));
  }
  return at->second;
}

}  // namespace

Rehearsal::Rehearsal() { t_is_rehearsal = true; }
Rehearsal::~Rehearsal() { t_is_rehearsal = false; }
bool Rehearsal::is_on() { return t_is_rehearsal; }

ScratchBuffer::~ScratchBuffer() {
  for (void* memory : retired_) WB_TRY_CUDA_NOEXCEPT(cudaFree(memory));
  if (data_ != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaFree(data_));
}

void ScratchBuffer::reserve(std::size_t bytes, bool zero, int device, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (stream != nullptr) WB_TRY_CUDA(cudaStreamIsCapturing(stream, &status));
  const bool is_capturing = status != cudaStreamCaptureStatusNone;
  if (bytes_ < bytes) {
    const RelaxedCapture relaxed;
    const DeviceGuard guard(device);
    // A capture must not record any of this: there it runs on a stream of its own, and has ended when this function returns.
    const std::optional<CudaStream> own = is_capturing ? std::optional<CudaStream>(std::in_place, device) : std::nullopt;
    const cudaStream_t order = own ? own->get() : stream;
    void* fresh = nullptr;
    const cudaError_t error = cudaMallocFromPoolAsync(&fresh, bytes, pool_of(device), order);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      std::size_t free_bytes = 0, total_bytes = 0;
      WB_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
      WB_FAIL(ErrorCode::kOutOfMemory, "cannot allocate {} bytes of scratch on cuda:{}: {} of {} bytes are free", bytes, device, free_bytes, total_bytes);
    }
    WB_TRY_CUDA(error);
    if (zero) WB_TRY_CUDA(cudaMemsetAsync(fresh, 0, bytes, order));
    if (own) own->synchronize();
    waybill::detail::note_allocation(bytes);
    if (is_captured_ || (is_capturing && data_ != nullptr)) {
      retired_.push_back(data_);
      is_captured_ = false;
    } else if (data_ != nullptr) {
      WB_TRY_CUDA(cudaFreeAsync(data_, stream));  // after the calls that use it
    }
    data_ = fresh, bytes_ = bytes;
  }
  is_captured_ = is_captured_ || (is_capturing && !Rehearsal::is_on());
}

}  // namespace waybill::cuda

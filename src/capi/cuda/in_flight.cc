// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/in_flight.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "core/cuda/cuda_error.h"

namespace waybill::capi {
namespace {

struct AllInFlight {
  std::mutex mutex;
  std::atomic<int> count{0};
  std::vector<InFlight*> all;

  static AllInFlight& instance() {
    static AllInFlight* const everything = new AllInFlight;  // never destroyed: exchanges may outlive static destruction
    return *everything;
  }
};

}  // namespace

InFlight::InFlight(int on) : stream(on), device(on) {}

bool InFlight::reserve(const ExchangeConfig& config, cudaStream_t first) {
  if (out.bytes() > 0) return false;
  const auto rows = static_cast<std::size_t>(config.T_max * config.H) * 4, routes = static_cast<std::size_t>(config.T_max * config.K) * 4;
  for (cuda::ScratchBuffer* buffer : {&x, &out}) buffer->reserve(rows, /*zero=*/false, device, first);
  for (cuda::ScratchBuffer* buffer : {&ids, &weights}) buffer->reserve(routes, /*zero=*/false, device, first);
  AllInFlight& everything = AllInFlight::instance();
  const std::lock_guard lock(everything.mutex);
  everything.all.push_back(this);
  ++everything.count;
  return true;
}

InFlight::~InFlight() {
  AllInFlight& everything = AllInFlight::instance();
  const std::lock_guard lock(everything.mutex);
  everything.count -= static_cast<int>(std::erase(everything.all, this));
}

void order_behind_transfers(int device, cudaStream_t on) {
  AllInFlight& everything = AllInFlight::instance();
  if (everything.count.load(std::memory_order_relaxed) == 0) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  WB_TRY_CUDA(cudaStreamIsCapturing(on, &capture));
  if (capture != cudaStreamCaptureStatusNone) return;
  const std::lock_guard lock(everything.mutex);
  for (const InFlight* transfer : everything.all) {
    if (transfer->device != device) continue;
    const cudaError_t state = cudaEventQuery(transfer->finished.get());  // success also where it was never recorded
    if (state != cudaSuccess) transfer->finished.wait_on(on);
  }
}

}  // namespace waybill::capi

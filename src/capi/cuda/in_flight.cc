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

InFlight::InFlight(const ExchangeConfig& config, int on)
    : stream(on),
      x(static_cast<std::size_t>(config.T_max * config.H) * 4, on),
      ids(static_cast<std::size_t>(config.T_max * config.K) * 4, on),
      weights(static_cast<std::size_t>(config.T_max * config.K) * 4, on),
      out(static_cast<std::size_t>(config.T_max * config.H) * 4, on),
      device(on) {
  AllInFlight& everything = AllInFlight::instance();
  const std::lock_guard lock(everything.mutex);
  everything.all.push_back(this);
  ++everything.count;
}

InFlight::~InFlight() {
  AllInFlight& everything = AllInFlight::instance();
  const std::lock_guard lock(everything.mutex);
  std::erase(everything.all, this);
  --everything.count;
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

// SPDX-License-Identifier: Apache-2.0
// Transfers on streams of their own. Kernels of two streams of a GPU must not wait for other ranks at the same time, so every other call that waits for
// peers is queued behind them.
#pragma once

#include <memory>

#include "core/cuda/device_buffer.h"
#include "core/cuda/scratch_buffer.h"
#include "waybill/exchange.h"

namespace waybill::capi {

// What a begun call of an exchange keeps until its done: one at a time.
struct InFlight {
  enum class Kind { kNone, kDispatch, kCombine };

  explicit InFlight(int on);
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
  // The buffers, for work that is queued on `first` next, by the first call; true: this is it.
  bool reserve(const ExchangeConfig& config, cudaStream_t first);

  cuda::CudaStream stream;
  cuda::CudaEvent ready{false}, finished{false}, read{false};  // operands are here; the transfer has ended; its results have been read
  cuda::ScratchBuffer x, ids, weights, out;                    // operands of a dispatch; [T, H] f32 of a combine
  Kind kind = Kind::kNone;
  DType dtype = DType::kF32;
  std::int64_t T = 0;
  int device;
};

// `stream` waits for every transfer in flight on the GPU. Costs nothing where there is none. A stream that is captured does not: a graph cannot know what is in
// flight when it is replayed.
void order_behind_transfers(int device, cudaStream_t stream);

}  // namespace waybill::capi

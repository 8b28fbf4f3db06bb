// SPDX-License-Identifier: Apache-2.0
// C structs to C++ views and configs. Every function checks what the C side cannot: enum ranges, ranks, null pointers.
#pragma once

#include <memory>

#include "guard.h"
#include "waybill/router.h"
#include "waybill/stream.h"
#include "waybill/thread_pool.h"

struct wb_thread_pool {
  waybill::ThreadPool pool;
  explicit wb_thread_pool(int num_threads) : pool(num_threads) {}
};

namespace waybill::capi {

// Whose memory a function takes. kAny: also that of a CUDA device, where kernels are linked; the operation behind checks that all is on one.
enum class Memory { kHost, kAny };

TensorView to_view(const wb_tensor& tensor, const char* name, Memory memory = Memory::kHost);  // rank 0 gives a null view
TensorView to_view(const wb_tensor* tensor, const char* name, Memory memory = Memory::kHost);  // the pointer must be given
wb_tensor from_view(const TensorView& view);
Device to_device(std::int32_t type, std::int32_t index, const char* name, Memory memory = Memory::kHost);
// The stream of a call on `device`. A null stream is the device's default one, or the calling thread.
Stream stream_on(const wb_stream* stream, Device device, const char* name);
Stream to_stream(const wb_stream* stream, Memory memory = Memory::kHost);  // null = the calling thread on the CPU

RouteView to_route(const wb_route* route, const char* name, Memory memory = Memory::kHost);
wb_route from_route(const RouteView& route);

struct RouterSetup {
  RouterConfig config;
  RouterLossConfig losses;
};
wb_router_config default_router_config();
RouterSetup to_router_setup(const wb_router_config* config, const char* name);

wb_step_status from_status(const StatusWord& status);
void add_status(const StatusWord& from, wb_step_status* to);

}  // namespace waybill::capi

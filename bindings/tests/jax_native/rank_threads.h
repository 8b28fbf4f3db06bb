// SPDX-License-Identifier: Apache-2.0
// Ranks of one process as XLA runs them: a thread and a stream each. All are on GPU 0, where their kernels wait for each other.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "capi/cuda/process_memory.h"
#include "core/cuda/graph.h"
#include "cuda/device_tensor.h"
#include "cuda/needs_gpu.h"
#include "jax_native/handler_call.h"
#include "waybill/waybill.h"

extern "C" {
void wbx_set_process(std::int32_t index);
int wbx_make_local_layer(const wb_moe_config* config, std::int32_t P, const std::int32_t* ordinals, const std::int32_t* devices, std::int32_t index);
int wbx_make_local_exchange(const wb_exchange_config* config, std::int32_t P, const std::int32_t* ordinals, const std::int32_t* devices, std::int32_t index);
void wbx_device_pair_counts(std::int64_t* done, std::int64_t* begun);
XLA_FFI_Error* wbx_device_moe_forward_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_moe_backward_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_dispatch_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_combine_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_combine_backward_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_dispatch_start_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_dispatch_done_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_combine_start_cuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* wbx_device_combine_done_cuda(XLA_FFI_CallFrame*);
}

namespace waybill::jax {

// Before CUDA starts: kernels of all ranks run beside each other, and none is loaded while another waits.
inline const bool kPrepared = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0 && setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0;
// A test that fails ends soon.
inline const std::chrono::milliseconds kLongestWait = capi::local_timeout() = std::chrono::milliseconds(10000);

constexpr std::int32_t kProcess = 3;  // any: the groups name it

// The attribute of groups whose ranks are these ordinals.
inline std::vector<std::int32_t> groups_of(const std::vector<std::int32_t>& ordinals) {
  std::vector<std::int32_t> groups;
  for (const std::int32_t ordinal : ordinals) groups.insert(groups.end(), {kProcess, ordinal});
  return groups;
}

// body(i) on a thread each, the i-th `late` milliseconds after the one before it; its texts are errors.
inline void on_threads(std::size_t count, const std::function<std::string(std::size_t)>& body, int late = 0) {
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  std::barrier together(static_cast<std::ptrdiff_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      together.arrive_and_wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(static_cast<int>(i) * late));
      try {
        WB_TRY_CUDA(cudaSetDevice(0));
        errors[i] = body(i);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace waybill::jax

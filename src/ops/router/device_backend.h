// SPDX-License-Identifier: Apache-2.0
// Where the CUDA router plugs in without a CUDA header here: its library sets the pointer once, before the first call.
#pragma once

#include <string>

#include "ops/router/router_impl.h"

namespace waybill::router_impl {

// Checked by gate.cc.
struct GateCall {
  const TensorView& x;       // [T, H]
  const TensorView& weight;  // [E, H]
  const TensorView& logits;  // [T, E]; backward: their gradient
  TensorView d_x, d_weight;  // backward; null: not wanted
  bool accumulate;           // into d_weight
  Stream stream;
  std::int64_t T() const { return x.shape[0]; }
  std::int64_t H() const { return x.shape[1]; }
  std::int64_t E() const { return weight.shape[0]; }
};

// portable: only kernels that run on any supported GPU.
struct DeviceBackend {
  std::string (*refuse_forward)(const ForwardCall& call, bool portable);  // why not; empty = accepts
  void (*forward)(const ForwardCall& call, bool portable);
  RouterLosses (*losses)(const LossesCall& call, bool portable);  // with call.values: queues, returns nothing
  void (*backward)(const BackwardCall& call, bool portable);
  void (*gate_forward)(const GateCall& call);
  void (*gate_backward)(const GateCall& call);
};
extern const DeviceBackend* g_device_backend;

}  // namespace waybill::router_impl

// SPDX-License-Identifier: Apache-2.0
// Where the CUDA router plugs in without a CUDA header here: its library sets the pointer once, before the first call.
#pragma once

#include <string>

#include "ops/router/router_impl.h"

namespace waybill::router_impl {

// portable: only kernels that run on any supported GPU.
struct DeviceBackend {
  std::string (*refuse_forward)(const ForwardCall& call, bool portable);  // why not; empty = accepts
  void (*forward)(const ForwardCall& call, bool portable);
  RouterLosses (*losses)(const LossesCall& call);
  void (*backward)(const BackwardCall& call);
};
extern const DeviceBackend* g_device_backend;

}  // namespace waybill::router_impl

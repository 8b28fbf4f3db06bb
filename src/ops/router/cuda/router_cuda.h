// SPDX-License-Identifier: Apache-2.0
// The CUDA router behind router_forward(), router_losses() and router_backward(): host side.
//
// All calls queue on call.stream.native and return; nothing waits for the device except losses() (it returns values; losses_device()
// does not). Graph capturable once a call with the same device, stream and sizes has run (scratch is allocated then). A graph keeps the
// scratch of the stream it was captured on: do not replay it while that stream runs other router calls. Deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ops/router/router_impl.h"

namespace waybill::cuda {

// Why the kernels cannot take the call; empty = they can. portable: only the one-CTA-a-token kernel (sm_80 and up).
std::string refuse_router_forward(const router_impl::ForwardCall& call, bool portable);
std::string refuse_router(const RouterConfig& config, const RouterInputs& inputs);

void router_forward(const router_impl::ForwardCall& call, bool portable);
// out [3] doubles in device memory: aux, sequence, z. portable: only kernels for sm_80 and up.
void router_losses_device(const router_impl::LossesCall& call, double* out, bool portable = false);
RouterLosses router_losses(const router_impl::LossesCall& call, bool portable = false);
void router_backward(const router_impl::BackwardCall& call, bool portable = false);

// Makes the kernels available to router_forward() and its siblings. Once per process, before the first call.
void register_router();

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "ops/router/router_impl.h"

namespace waybill::router_impl {
RouterLosses losses_fast(const LossesCall& call) { return losses_ref(call); }
void backward_fast(const BackwardCall& call) { backward_ref(call); }
}  // namespace waybill::router_impl

// SPDX-License-Identifier: Apache-2.0
// The fused kernels behind quantize_activated() and quantize_both_activated().
#pragma once

#include <string>

#include "ops/quantize/device_backend.h"

namespace waybill::cuda {

std::string refuse_activated(const detail::QuantizeActivatedCall& call);  // why not; empty: accepts
void run_activated(const detail::QuantizeActivatedCall& call);

}  // namespace waybill::cuda

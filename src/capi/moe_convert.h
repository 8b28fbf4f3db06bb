// SPDX-License-Identifier: Apache-2.0
// The MoE layer's C structs as C++ ones, for both layers.
#pragma once

#include "convert.h"
#include "waybill/moe.h"

namespace waybill::capi {

MoeConfig to_moe_config(const wb_moe_config* config);
MoeTensors to_moe_tensors(const wb_moe_tensors* tensors, const char* name, Memory memory = Memory::kHost);
wb_moe_forward_options default_forward_options();

}  // namespace waybill::capi

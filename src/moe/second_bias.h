// SPDX-License-Identifier: Apache-2.0
// The bias of the second expert matmul: it is multiplied by the routing weight, so it cannot ride in the matmul's epilogue.
#pragma once

#include "waybill/route_plan.h"
#include "waybill/stream.h"

namespace waybill::moe {

// y[s, :] += weight[s] * b2[expert of s, :].   y [S_padded, W] fp32, b2 [L, W]. Padding slots stay as they are.
void add_second_bias(const ReceiveLayout& layout, const TensorView& b2, const TensorView& y, Stream stream);

// d_b2[e, :] += sum over e's slots of weight[s] * dz[row of s, :];  d_weight[s] += <b2[e, :], dz[row of s, :]>.
// dz [R, W]. Sums in slot order and column order, fp32.
void second_bias_backward(const ReceiveLayout& layout, const TensorView& b2, const TensorView& dz, const TensorView& d_b2, float* d_weight, Stream stream);

}  // namespace waybill::moe

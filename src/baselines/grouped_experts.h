// SPDX-License-Identifier: Apache-2.0
// The two expert matmuls on contiguous rows of each expert by grouped GEMM, forward and backward. With equal groups it is the batched
// GEMM of the padded designs.
#pragma once

#include <vector>

#include "waybill/moe.h"
#include "waybill/stream.h"

namespace waybill::baselines {

class GroupedExperts {
 public:
  GroupedExperts(const MoeConfig& config, Stream stream) : config_(config), stream_(stream) {}

  // y [S, H]; offsets [L+1] cover rows [S, H]; weight [S] or null multiplies the activation's result.
  void forward(const MoeTensors& parameters, std::vector<std::int32_t> offsets, const TensorView& rows, const float* weight, const TensorView& y,
               PhaseTimes* times);
  // With the same rows and weight. d_weight [S] or null.
  void backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& rows, const float* weight, const TensorView& dy,
                const TensorView& d_rows, float* d_weight, PhaseTimes* times);

 private:
  MoeConfig config_;
  Stream stream_;
  std::vector<std::int32_t> offsets_;
  Tensor h_, a_, da_, dh_;
};

}  // namespace waybill::baselines

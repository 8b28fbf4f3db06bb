// SPDX-License-Identifier: Apache-2.0
// Keeps a stream busy for a while without heating the chip, so that the host can queue what follows.
#pragma once

#include <cuda_runtime_api.h>

namespace waybill::cuda {

void spin(double milliseconds, cudaStream_t stream);

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize/cuda/quantize_tiles.cuh"

namespace waybill::cuda {

void launch_quantize_tiles_e4m3(const WideRows& x, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  launch_tiles_of<ElementFormat::kE4M3>(x, rows, columns, stream);
}

}  // namespace waybill::cuda

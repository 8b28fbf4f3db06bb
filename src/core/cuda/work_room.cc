// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/work_room.h"

#include "core/cuda/stream_map.h"

namespace waybill::cuda {

ScratchBuffer& work_room(int device, cudaStream_t stream) {
  static StreamMap<ScratchBuffer> all;
  return all.at(device, stream);
}

}  // namespace waybill::cuda

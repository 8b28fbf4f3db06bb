// SPDX-License-Identifier: Apache-2.0
// The fabric's interface tests (tests/fabric) on virtual ranks of GPU 0, or spread over all GPUs where there are several.
#include "cuda/router_harness.h"
#include "fabric/cuda_local/cuda_local_fabric.h"
#include "fabric/engine.h"

namespace waybill {

const char* engine_name() { return "cuda_local"; }
void run_engine(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options) {
  cuda::CudaLocalOptions cuda_options;
  cuda_options.arena_bytes = 4096, cuda_options.fabric = options;
  if (const std::vector<int> devices = cuda::all_devices(P); !devices.empty()) cuda_options.devices = devices;
  cuda::run_cuda_ranks(
      P, [&](cuda::CudaLocalFabric& fabric) { body(fabric); }, cuda_options);
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// Stands in for the mpi engine in builds without MPI.
#include "waybill/mpi_fabric.h"

namespace waybill {

bool mpi_available() { return false; }
bool mpi_launched() { return false; }

std::unique_ptr<Fabric> make_mpi_fabric(const MpiOptions&) {
  WB_FAIL(ErrorCode::kUnsupported, "this build has no MPI engine: install an MPI (Debian: libopenmpi-dev) and configure with -DWAYBILL_MPI=ON");
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// The mpi engine: one rank a process, started by mpirun or another MPI launcher.
#pragma once

#include <memory>

#include "waybill/fabric.h"

namespace waybill {

struct MpiOptions {
  FabricOptions fabric{};
};

// True when this build contains the engine.
WB_API bool mpi_available();

// True when the process was started by an MPI launcher with more than one rank (looks at the launcher's environment only).
WB_API bool mpi_launched();

// The world of all processes. Initialises MPI on the first call (MPI_THREAD_SERIALIZED at least; kUnsupported otherwise) and
// finalises it at exit, unless the world has failed: a failed process leaves without MPI_Finalize, which would wait for the dead.
// SIGPIPE is ignored from then on where it had its default action: MPI writes to sockets of ranks that may be dead.
// Peers are read by a progress thread, so an exchange that was started moves while the caller computes. Errors of the MPI
// library become kPeerFailed with the peer and the phase. Not built with MPI: kUnsupported.
WB_API std::unique_ptr<Fabric> make_mpi_fabric(const MpiOptions& options = {});

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// Which rank this process is, and how the processes of a group find each other before NCCL can talk.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace waybill::cuda {

struct ProcessRank {
  int rank = 0, size = 1;
  int local_rank = 0;  // on this host: the GPU it takes
  std::string address = "127.0.0.1";
  int port = 29531;
};

// From the launcher's environment: torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR), mpirun of Open MPI (OMPI_COMM_WORLD_*), srun
// (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID). Without any of them: one rank. WAYBILL_NCCL_ADDRESS and WAYBILL_NCCL_PORT say where rank 0
// listens (default: MASTER_ADDR or the launch node, port MASTER_PORT + 1 or 29531). Refuses values that are no numbers, naming them.
ProcessRank process_rank();

// rank 0 hands `bytes` bytes of `data` to every other rank over TCP, once all have come. kTimeout on every rank that came, naming those that did not;
// kInvalidArgument likewise for a rank that comes twice or was started for a group of another size. Connections of others are dropped.
void hand_out(const ProcessRank& self, void* data, std::size_t bytes, std::chrono::milliseconds timeout);

}  // namespace waybill::cuda

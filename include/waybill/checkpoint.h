// SPDX-License-Identifier: Apache-2.0
// Checkpoints: a folder per step that appears by one atomic rename, so that a kill at any instant leaves the last good one.
//   FOLDER/step_00000200/index.json   version, run state, and per tensor: name, dtype, shape, file, offset, bytes, crc
//   FOLDER/step_00000200/data_<rank>.bin
//   FOLDER/latest                     name of the newest complete step
// Experts are saved one by one under their global id ("layers.3.moe.experts.17.w1"), so any P can read them. Checksums are CRC-64/XZ.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/fabric.h"
#include "waybill/parameter.h"
#include "waybill/tensor.h"

namespace waybill {

// State of a run beside its tensors.
struct CheckpointInfo {
  std::int64_t step = 0;  // optimizer steps done; also the position in the data and in every random stream
  std::uint64_t seed = 0;
  int W = 1, P = 1;          // of the run that saved it
  std::int64_t tokens = 0;   // trained on so far
  std::int64_t updates = 0;  // optimizer updates: steps minus skipped ones
  std::int64_t skipped = 0;  // steps without an update (gradient not finite)
  std::int64_t reruns = 0;   // computations thrown away after a receive overflow
  double receive_factor = 0;
  std::string config;        // resolved config, TOML
  std::string model_config;  // the part that must agree on loading, TOML
};

// One tensor of this rank, in memory of the caller. Experts: dimension 0 holds experts [expert_begin, +shape[0]) of num_experts and
// each is saved as its own tensor; the writer is the lowest rank that holds it. Replicated tensors are written by rank 0.
struct CheckpointTensor {
  std::string name;
  TensorView view;
  bool is_expert = false;
  std::int64_t expert_begin = 0, num_experts = 0;
};
// "layers.3.moe.w1", 17 -> "layers.3.moe.experts.17.w1".
WB_API std::string expert_tensor_name(const std::string& name, std::int64_t expert);

// Collective over `world`; returns the path of the new folder. Written as a temporary folder, synced, then renamed; `latest` follows,
// then steps beyond the newest `keep_last` are removed. On a failed write (disk full) every rank throws the same kIo error with path,
// bytes and reason, nothing of the new step remains and the last good one stays.
WB_API std::string save_checkpoint(const std::string& folder, const CheckpointInfo& info, std::span<const CheckpointTensor> tensors, Fabric& world,
                                   int keep_last);

// Path of the step that FOLDER/latest names; kIo where there is none.
WB_API std::string latest_checkpoint(const std::string& folder);
// Reads and verifies the index only.
WB_API CheckpointInfo read_checkpoint_info(const std::string& path);
// The whole checkpoint, without a model: index, file sizes and the checksum of every tensor. kIo with file and tensor at the first fault.
struct CheckpointContents {
  CheckpointInfo info;
  std::int64_t num_tensors = 0, num_files = 0, bytes = 0;  // bytes of all tensors
};
WB_API CheckpointContents verify_checkpoint(const std::string& path);

// Fills the tensors in place. Collective. All checks come first, on every rank: index and file sizes, every tensor present with this
// dtype and shape (a missing expert is named), no tensor left over, checksums of all bytes this rank reads. Only then memory changes.
WB_API void load_checkpoint(const std::string& path, std::span<const CheckpointTensor> tensors, Fabric& world);

// CRC-64/XZ; `crc` continues an earlier result.
WB_API std::uint64_t crc64(const void* data, std::size_t bytes, std::uint64_t crc = 0);

}  // namespace waybill

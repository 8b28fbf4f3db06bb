// SPDX-License-Identifier: Apache-2.0
// index.json of a checkpoint, and the list of tensors a rank expects in it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "waybill/checkpoint.h"

namespace waybill {

struct SavedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::string file;
  std::int64_t offset = 0, bytes = 0;
  std::uint64_t crc = 0;
};

struct CheckpointIndex {
  CheckpointInfo info;
  std::map<std::string, std::int64_t> files;  // name -> bytes
  std::map<std::string, SavedTensor> tensors;
};

std::string to_json(const CheckpointIndex& index);
// Reads PATH/index.json; a missing, corrupt or newer file is an error that says so.
CheckpointIndex read_index(const std::string& path);

// Entries of one rank, as text that rank 0 merges.
std::string entries_to_json(const std::string& file, std::int64_t file_bytes, const std::vector<SavedTensor>& tensors);
void merge_entries(CheckpointIndex& index, const std::string& json);

// A piece of a rank's tensor: the whole of a replicated one, or one expert.
struct TensorPiece {
  std::string name;
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
};
std::vector<TensorPiece> pieces_of(const CheckpointTensor& tensor);
std::string describe_shape(const std::vector<std::int64_t>& shape);  // "[8, 64]"

}  // namespace waybill

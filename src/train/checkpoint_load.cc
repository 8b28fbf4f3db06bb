// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "checkpoint_index.h"
#include "collective_error.h"
#include "waybill/error.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kChunkBytes = 1 << 20;

void check_files(const std::string& path, const CheckpointIndex& index) {
  for (const auto& [name, bytes] : index.files) {
    std::error_code error;
    const auto seen = fs::file_size(fs::path(path) / name, error);
    if (error) WB_FAIL(ErrorCode::kIo, "checkpoint {}: {} is missing", path, name);
    if (static_cast<std::int64_t>(seen) != bytes) {
      WB_FAIL(ErrorCode::kIo, "checkpoint {}: {} has {} bytes, {} were saved", path, name, seen, bytes);
    }
  }
}

const SavedTensor& find_saved(const std::string& path, const CheckpointIndex& index, const std::string& name, DType dtype,
                              const std::vector<std::int64_t>& shape) {
  const auto it = index.tensors.find(name);
  WB_CHECK(it != index.tensors.end(), "checkpoint {}: tensor {} is missing", path, name);
  const SavedTensor& saved = it->second;
  WB_CHECK(saved.dtype == dtype && saved.shape == shape, "checkpoint {}: tensor {} is {} {}, the model needs {} {}", path, name, to_string(saved.dtype),
           describe_shape(saved.shape), to_string(dtype), describe_shape(shape));
  return saved;
}

// The whole model's tensors, not only this rank's: every rank finds the same fault.
void check_names(const std::string& path, const CheckpointIndex& index, std::span<const CheckpointTensor> tensors) {
  std::set<std::string> expected;
  for (const CheckpointTensor& tensor : tensors) {
    const TensorView& view = tensor.view;
    const int skip = tensor.is_expert ? 1 : 0;
    const std::vector<std::int64_t> shape(view.shape.begin() + skip, view.shape.begin() + view.rank);
    const std::int64_t count = tensor.is_expert ? tensor.num_experts : 1;
    for (std::int64_t e = 0; e < count; ++e) {
      const std::string name = tensor.is_expert ? expert_tensor_name(tensor.name, e) : tensor.name;
      find_saved(path, index, name, view.dtype, shape);
      expected.insert(name);
    }
  }
  for (const auto& [name, saved] : index.tensors) {
    WB_CHECK(expected.count(name) == 1, "checkpoint {}: surplus tensor {} {}: the model has none of that name", path, name, describe_shape(saved.shape));
  }
}

// Reads a tensor's bytes chunk by chunk and gives each to `use(offset, data, bytes)`; checks the checksum at the end.
template <class Use>
void read_tensor(const std::string& path, const SavedTensor& saved, Use use) {
  const std::string file_name = path + "/" + saved.file;
  std::ifstream file(file_name, std::ios::binary);
  if (!file) WB_FAIL(ErrorCode::kIo, "cannot read {}: {}", file_name, std::strerror(errno));
  file.seekg(saved.offset);
  std::vector<char> chunk(std::min<std::size_t>(kChunkBytes, static_cast<std::size_t>(saved.bytes)));
  std::uint64_t crc = 0;
  for (std::int64_t done = 0; done < saved.bytes;) {
    const auto part = std::min(static_cast<std::int64_t>(chunk.size()), saved.bytes - done);
    file.read(chunk.data(), part);
    if (file.gcount() != part) WB_FAIL(ErrorCode::kIo, "{}: tensor {} ends after {} of {} bytes", file_name, saved.name, done + file.gcount(), saved.bytes);
    crc = crc64(chunk.data(), static_cast<std::size_t>(part), crc);
    use(done, chunk.data(), static_cast<std::size_t>(part));
    done += part;
  }
  if (crc != saved.crc) {
    WB_FAIL(ErrorCode::kIo, "{}: tensor {} is corrupt: checksum {:016x} stored, {:016x} computed", file_name, saved.name, saved.crc, crc);
  }
}

}  // namespace

std::string latest_checkpoint(const std::string& folder) {
  std::ifstream file(folder + "/latest");
  std::string name;
  if (!file || !(file >> name)) WB_FAIL(ErrorCode::kIo, "no checkpoint in {}: its file `latest` is missing or empty", folder);
  std::string path = folder + "/" + name;
  if (!name.starts_with("step_") || name.find('/') != std::string::npos) WB_FAIL(ErrorCode::kIo, "{}/latest names \"{}\", which is not a step", folder, name);
  if (!fs::is_directory(path)) WB_FAIL(ErrorCode::kIo, "checkpoint {} is missing, though {}/latest names it", path, folder);
  return path;
}

CheckpointInfo read_checkpoint_info(const std::string& path) { return read_index(path).info; }

CheckpointContents verify_checkpoint(const std::string& path) {
  const CheckpointIndex index = read_index(path);
  check_files(path, index);
  CheckpointContents contents{index.info, static_cast<std::int64_t>(index.tensors.size()), static_cast<std::int64_t>(index.files.size()), 0};
  for (const auto& [name, saved] : index.tensors) {
    read_tensor(path, saved, [](std::int64_t, const char*, std::size_t) {});
    contents.bytes += saved.bytes;
  }
  return contents;
}

void load_checkpoint(const std::string& path, std::span<const CheckpointTensor> tensors, Fabric& world) {
  CheckpointIndex index;
  std::vector<TensorPiece> pieces;
  run_together(world, "checkpoint.verify", [&] {
    index = read_index(path);
    check_files(path, index);
    check_names(path, index, tensors);
    for (const CheckpointTensor& tensor : tensors) {
      for (TensorPiece& piece : pieces_of(tensor)) pieces.push_back(std::move(piece));
    }
    for (const TensorPiece& piece : pieces) read_tensor(path, index.tensors.at(piece.name), [](std::int64_t, const char*, std::size_t) {});
  });
  run_together(world, "checkpoint.read", [&] {
    for (const TensorPiece& piece : pieces) {
      read_tensor(path, index.tensors.at(piece.name),
                  [&piece](std::int64_t offset, const char* data, std::size_t bytes) { std::memcpy(static_cast<char*>(piece.data) + offset, data, bytes); });
    }
  });
}

}  // namespace waybill

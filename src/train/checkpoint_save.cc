// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "checkpoint_index.h"
#include "collective_error.h"
#include "durable_file.h"
#include "waybill/error.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kTensorAlignment = 64;
constexpr const char* kTemporaryPrefix = ".tmp_step_";

// A rank writes a replicated tensor when it is rank 0, an expert tensor when no lower rank holds the same experts.
std::vector<bool> choose_writers(std::span<const CheckpointTensor> tensors, Fabric& world) {
  const std::size_t n = tensors.size();
  std::vector<std::int64_t> begins(n), all(n * static_cast<std::size_t>(world.size()));
  for (std::size_t i = 0; i < n; ++i) begins[i] = tensors[i].is_expert ? tensors[i].expert_begin : 0;
  if (n > 0) world.all_gather(begins.data(), all.data(), n * sizeof(std::int64_t), "checkpoint.owners");
  std::vector<bool> writes(n, true);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(world.rank()); ++rank) {
      if (all[rank * n + i] == begins[i]) writes[i] = false;
    }
  }
  return writes;
}

std::vector<SavedTensor> write_data(const std::string& folder, const std::string& file_name, std::span<const CheckpointTensor> tensors,
                                    const std::vector<bool>& writes, std::int64_t& file_bytes) {
  std::vector<SavedTensor> entries;
  DurableFile file(folder + "/" + file_name);
  const std::vector<char> zeros(kTensorAlignment, 0);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!writes[i]) continue;
    for (const TensorPiece& piece : pieces_of(tensors[i])) {
      if (const std::int64_t over = file.size() % kTensorAlignment; over != 0) file.write(zeros.data(), static_cast<std::size_t>(kTensorAlignment - over));
      const auto bytes = static_cast<std::size_t>(piece.bytes);
      entries.push_back({piece.name, piece.dtype, piece.shape, file_name, file.size(), piece.bytes, crc64(piece.data, bytes)});
      file.write(piece.data, bytes);
    }
  }
  file.close();
  file_bytes = file.size();
  save_point("data");
  return entries;
}

// Texts of all ranks, on rank 0 in rank order (empty elsewhere).
std::vector<std::string> gather_texts(const std::string& text, Fabric& world) {
  const auto W = static_cast<std::size_t>(world.size());
  const auto bytes = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> sizes(W);
  world.all_gather(&bytes, sizes.data(), sizeof bytes, "checkpoint.entry_sizes");
  std::vector<std::string> texts(world.rank() == 0 ? W : 0);
  std::vector<Fabric::Span> send(W), receive(W);
  send[0] = {const_cast<char*>(text.data()), text.size()};
  for (std::size_t r = 0; r < texts.size(); ++r) {
    texts[r].resize(static_cast<std::size_t>(sizes[r]));
    receive[r] = {texts[r].data(), texts[r].size()};
  }
  world.all_to_all(send, receive, "checkpoint.entries");
  return texts;
}

void remove_leftovers(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().starts_with(kTemporaryPrefix)) fs::remove_all(entry.path(), ignored);
  }
}

// The new folder takes its name in one step, also when a folder of that name exists.
void publish(const std::string& temporary, const std::string& path) {
  if (fs::exists(path) && renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(temporary);
    return;
  }
  fs::remove_all(path);
  rename_path(temporary, path);
}

void remove_old(const std::string& folder, int keep_last) {
  std::vector<std::string> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory() && name.starts_with("step_")) steps.push_back(name);
  }
  std::sort(steps.begin(), steps.end());
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep_last) < steps.size(); ++i) {
    // Renamed first: a kill while files are being removed must not leave half a folder under a good name.
    const std::string doomed = folder + "/" + kTemporaryPrefix + "old_" + steps[i].substr(5);
    rename_path(folder + "/" + steps[i], doomed);
    fs::remove_all(doomed);
  }
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) WB_FAIL(ErrorCode::kIo, "cannot create folder {}: {}", path, error.message());
}

}  // namespace

std::string save_checkpoint(const std::string& folder, const CheckpointInfo& info, std::span<const CheckpointTensor> tensors, Fabric& world, int keep_last) {
  WB_CHECK(keep_last >= 1, "keep_last = {} must be at least 1", keep_last);
  const bool is_root = world.rank() == 0;
  const std::string name = fmt::format("step_{:08}", info.step);
  std::string path = folder + "/" + name;
  const std::string temporary = folder + "/" + kTemporaryPrefix + name.substr(5);
  const auto remove_temporary = [&temporary] {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
  };
  run_together(world, "checkpoint.prepare", [&] {
    if (!is_root) return;
    make_folder(folder);
    remove_leftovers(folder);
    make_folder(temporary);
  });
  const std::vector<bool> writes = choose_writers(tensors, world);
  const std::string file_name = fmt::format("data_{:04}.bin", world.rank());
  std::string entries;
  run_together(
      world, "checkpoint.write",
      [&] {
        std::int64_t bytes = 0;
        const auto saved = write_data(temporary, file_name, tensors, writes, bytes);
        entries = entries_to_json(file_name, bytes, saved);
        if (saved.empty()) fs::remove(temporary + "/" + file_name);
      },
      remove_temporary);
  const std::vector<std::string> all_entries = gather_texts(entries, world);
  run_together(
      world, "checkpoint.publish",
      [&] {
        if (!is_root) return;
        CheckpointIndex index;
        index.info = info;
        for (const std::string& text : all_entries) merge_entries(index, text);
        replace_file(temporary + "/index.json", to_json(index));
        save_point("index");
        publish(temporary, path);
        sync_folder(folder);
        save_point("rename");
        replace_file(folder + "/latest", name + "\n");
        save_point("latest");
        remove_old(folder, keep_last);
      },
      remove_temporary);
  return path;
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
#include "checkpoint_index.h"

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "waybill/error.h"

namespace waybill {
namespace {

using nlohmann::json;

constexpr int kVersion = 1, kMaxDepth = 16;
constexpr const char* kFormat = "waybill-checkpoint";

DType dtype_from(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kI16, DType::kI32, DType::kI64, DType::kU8, DType::kU16}) {
    if (name == to_string(dtype)) return dtype;
  }
  WB_FAIL(ErrorCode::kIo, "unknown dtype {}", name);
}

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

// get_to() alone would cut fractions and wrap what does not fit.
template <class Integer>
void read_integer(const json& j, Integer& value) {
  WB_CHECK(j.is_number_integer(), "{} is not an integer", j.dump());
  const bool fits = j.is_number_unsigned() ? std::in_range<Integer>(j.get<std::uint64_t>()) : std::in_range<Integer>(j.get<std::int64_t>());
  WB_CHECK(fits, "{} is out of range", j.dump());
  j.get_to(value);
}

json info_to_json(const CheckpointInfo& info) {
  return {{"step", info.step},
          {"seed", info.seed},
          {"W", info.W},
          {"P", info.P},
          {"tokens", info.tokens},
          {"reruns", info.reruns},
          {"updates", info.updates},
          {"skipped", info.skipped},
          {"receive_factor", info.receive_factor},
          {"config", info.config},
          {"model_config", info.model_config}};
}

CheckpointInfo info_from_json(const json& j) {
  CheckpointInfo info;
  read_integer(j.at("step"), info.step);
  read_integer(j.at("seed"), info.seed);
  read_integer(j.at("W"), info.W);
  read_integer(j.at("P"), info.P);
  read_integer(j.at("tokens"), info.tokens);
  read_integer(j.at("reruns"), info.reruns);
  read_integer(j.at("updates"), info.updates);
  read_integer(j.at("skipped"), info.skipped);
  j.at("receive_factor").get_to(info.receive_factor);
  j.at("config").get_to(info.config);
  j.at("model_config").get_to(info.model_config);
  return info;
}

json tensor_to_json(const SavedTensor& t) {
  return {{"name", t.name}, {"dtype", to_string(t.dtype)}, {"shape", t.shape}, {"file", t.file}, {"offset", t.offset}, {"bytes", t.bytes}, {"crc", hex(t.crc)}};
}

// Nothing but a name: no other folder is read, whatever an index says.
void check_file_name(const std::string& name) {
  WB_CHECK(!name.empty() && name.find('/') == std::string::npos && name != "." && name != "..", "\"{}\" is not the name of a file of this checkpoint", name);
}

// Bytes of a tensor of this type and shape; refuses shapes that no memory has.
std::int64_t bytes_of(const SavedTensor& t) {
  __int128 bytes = static_cast<__int128>(size_bytes(t.dtype));
  for (const std::int64_t dim : t.shape) {
    bytes *= dim;
    WB_CHECK(dim >= 0 && bytes <= std::numeric_limits<std::int64_t>::max(), "tensor {}: shape {} is not one", t.name, describe_shape(t.shape));
  }
  return static_cast<std::int64_t>(bytes);
}

// The file and its size are in `files`, the bytes are those of type and shape and lie inside the file.
void check_place(const SavedTensor& t, const std::map<std::string, std::int64_t>& files) {
  const auto file = files.find(t.file);
  WB_CHECK(file != files.end(), "tensor {}: its file {} is not in the list of files", t.name, t.file);
  WB_CHECK(t.bytes == bytes_of(t), "tensor {}: {} bytes, {} {} has {}", t.name, t.bytes, to_string(t.dtype), describe_shape(t.shape), bytes_of(t));
  WB_CHECK(t.offset >= 0 && t.offset <= file->second - t.bytes, "tensor {}: bytes {} to {} are not inside {} of {} bytes", t.name, t.offset,
           static_cast<__int128>(t.offset) + t.bytes > INT64_MAX ? INT64_MAX : t.offset + t.bytes, t.file, file->second);
}

SavedTensor tensor_from_json(const json& j) {
  SavedTensor t;
  j.at("name").get_to(t.name);
  t.dtype = dtype_from(j.at("dtype").get<std::string>());
  WB_CHECK(j.at("shape").is_array(), "tensor {}: shape {} is not a list", t.name, j.at("shape").dump());
  for (const json& dim : j.at("shape")) read_integer(dim, t.shape.emplace_back());
  j.at("file").get_to(t.file);
  read_integer(j.at("offset"), t.offset);
  read_integer(j.at("bytes"), t.bytes);
  t.crc = std::stoull(j.at("crc").get<std::string>(), nullptr, 16);
  return t;
}

void check_info(const CheckpointInfo& info) {
  WB_CHECK(info.P >= 1 && info.W >= info.P && info.W % info.P == 0, "saved with P = {}, W = {}", info.P, info.W);
  WB_CHECK(info.step >= 0 && info.tokens >= 0 && info.updates >= 0 && info.skipped >= 0 && info.reruns >= 0,
           "step {}, tokens {}, updates {}, skipped {} and reruns {} must not be negative", info.step, info.tokens, info.updates, info.skipped, info.reruns);
}

CheckpointIndex index_from_json(const std::string& text) {
  // Ours is five levels deep; writing a body of many thousands for its checksum would need as much stack.
  const json root = json::parse(text, [](int depth, json::parse_event_t, json&) {
    WB_CHECK(depth <= kMaxDepth, "nested more than {} deep", kMaxDepth);
    return true;
  });
  WB_CHECK(root.at("format") == kFormat, "not a waybill checkpoint");
  WB_CHECK(root.at("version") == kVersion, "version {} of the format; this build reads version {}", root.at("version").dump(), kVersion);
  const json& body = root.at("body");
  const std::string stored = root.at("crc").get<std::string>(), seen = hex(crc64(body.dump().data(), body.dump().size()));
  WB_CHECK(stored == seen, "checksum {} stored, {} computed", stored, seen);
  CheckpointIndex index;
  index.info = info_from_json(body.at("info"));
  for (const auto& [name, bytes] : body.at("files").items()) {
    check_file_name(name);
    read_integer(bytes, index.files[name]);
    WB_CHECK(index.files[name] >= 0, "file {} has {} bytes", name, index.files[name]);
  }
  for (const json& item : body.at("tensors")) {
    const SavedTensor tensor = tensor_from_json(item);
    check_place(tensor, index.files);
    WB_CHECK(index.tensors.emplace(tensor.name, tensor).second, "two tensors are named {}", tensor.name);
  }
  check_info(index.info);
  return index;
}

}  // namespace

std::string to_json(const CheckpointIndex& index) {
  json tensors = json::array();
  for (const auto& [name, tensor] : index.tensors) tensors.push_back(tensor_to_json(tensor));
  const json body = {{"info", info_to_json(index.info)}, {"files", index.files}, {"tensors", tensors}};
  const std::string text = body.dump();
  return json{{"format", kFormat}, {"version", kVersion}, {"crc", hex(crc64(text.data(), text.size()))}, {"body", body}}.dump(1) + "\n";
}

CheckpointIndex read_index(const std::string& path) {
  const std::string file = path + "/index.json";
  std::ifstream stream(file);
  if (!stream) WB_FAIL(ErrorCode::kIo, "checkpoint {}: index.json is missing", path);
  std::stringstream text;
  text << stream.rdbuf();
  try {
    return index_from_json(text.str());
  } catch (const std::exception& error) {
    WB_FAIL(ErrorCode::kIo, "checkpoint {}: index.json is corrupt: {}", path, error.what());
  }
}

std::string entries_to_json(const std::string& file, std::int64_t file_bytes, const std::vector<SavedTensor>& tensors) {
  json list = json::array();
  for (const SavedTensor& tensor : tensors) list.push_back(tensor_to_json(tensor));
  return json{{"file", file}, {"bytes", file_bytes}, {"tensors", list}}.dump();
}

void merge_entries(CheckpointIndex& index, const std::string& text) {
  const json entries = json::parse(text);
  if (entries.at("tensors").empty()) return;
  index.files[entries.at("file").get<std::string>()] = entries.at("bytes").get<std::int64_t>();
  for (const json& item : entries.at("tensors")) {
    const SavedTensor tensor = tensor_from_json(item);
    WB_CHECK(index.tensors.emplace(tensor.name, tensor).second, "two tensors of a checkpoint are named {}", tensor.name);
  }
}

std::string expert_tensor_name(const std::string& name, std::int64_t expert) {
  const auto dot = name.rfind('.');
  if (dot == std::string::npos) return fmt::format("experts.{}.{}", expert, name);
  return fmt::format("{}.experts.{}.{}", name.substr(0, dot), expert, name.substr(dot + 1));
}

std::vector<TensorPiece> pieces_of(const CheckpointTensor& tensor) {
  const TensorView& view = tensor.view;
  WB_CHECK(view.is_contiguous(), "checkpoint tensor {} is not contiguous", tensor.name);
  const std::vector<std::int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
  const auto bytes = view.size() * static_cast<std::int64_t>(size_bytes(view.dtype));
  if (!tensor.is_expert) return {{tensor.name, view.data, view.dtype, shape, bytes}};
  const std::int64_t L = shape.at(0);
  WB_CHECK(tensor.expert_begin >= 0 && tensor.expert_begin + L <= tensor.num_experts, "checkpoint tensor {}: experts {} to {} of {}", tensor.name,
           tensor.expert_begin, tensor.expert_begin + L, tensor.num_experts);
  std::vector<TensorPiece> pieces;
  for (std::int64_t e = 0; e < L; ++e) {
    auto* data = static_cast<std::byte*>(view.data) + e * (bytes / L);
    pieces.push_back({expert_tensor_name(tensor.name, tensor.expert_begin + e), data, view.dtype, {shape.begin() + 1, shape.end()}, bytes / L});
  }
  return pieces;
}

std::string describe_shape(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
#include "token_source.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "waybill/error.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;

template <class T>
void append_file(const fs::path& path, std::vector<T>& out) {
  if (fs::is_fifo(path)) WB_FAIL(ErrorCode::kIo, "cannot read {}: it is a pipe, which has no size; write it to a file first", path.string());
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) WB_FAIL(ErrorCode::kIo, "cannot read {}: {}", path.string(), std::strerror(errno));
  const auto bytes = static_cast<std::int64_t>(file.tellg());
  if (bytes < 0) WB_FAIL(ErrorCode::kIo, "cannot read {}: it has no size", path.string());
  WB_CHECK(bytes % static_cast<std::int64_t>(sizeof(T)) == 0, "{}: {} bytes is not a multiple of the {} bytes of a uint{} token", path.string(), bytes,
           sizeof(T), 8 * sizeof(T));
  const std::size_t begin = out.size();
  out.resize(begin + static_cast<std::size_t>(bytes) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(out.data() + begin), bytes);
  if (file.gcount() != bytes) WB_FAIL(ErrorCode::kIo, "{}: read {} of {} bytes", path.string(), file.gcount(), bytes);
}

std::vector<fs::path> regular_files(const fs::path& folder) {
  std::vector<fs::path> files;
  try {
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.is_regular_file() && !entry.path().filename().string().starts_with('.')) files.push_back(entry.path());
    }
  } catch (const fs::filesystem_error& error) {
    WB_FAIL(ErrorCode::kIo, "cannot read folder {}: {}", (error.path1().empty() ? folder : error.path1()).string(), error.code().message());
  }
  std::sort(files.begin(), files.end());
  WB_CHECK(!files.empty(), "folder {} holds no files to train on", folder.string());
  return files;
}

template <class T>
void check_vocab(const std::string& path, const std::vector<T>& tokens, std::int64_t vocab) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    WB_CHECK(static_cast<std::int64_t>(tokens[i]) < vocab, "{}: token {} at position {} is outside the vocabulary of {}", path, tokens[i], i, vocab);
  }
}

// The sidecar's fields; empty / 0 where it or the field is missing.
struct Sidecar {
  std::string dtype;
  std::int64_t vocab = 0;
};

Sidecar read_sidecar(const std::string& path) {
  Sidecar sidecar;
  std::ifstream file(path);
  if (!file) return sidecar;
  const auto json = nlohmann::json::parse(file, nullptr, false);
  WB_CHECK(json.is_object(), "{}: not a JSON object", path);
  if (json.contains("dtype")) {
    WB_CHECK(json["dtype"].is_string(), "{}: dtype = {} must be \"uint16\" or \"uint32\"", path, json["dtype"].dump());
    sidecar.dtype = json["dtype"].get<std::string>();
  }
  if (json.contains("vocab")) {
    WB_CHECK(json["vocab"].is_number_integer(), "{}: vocab = {} must be an integer", path, json["vocab"].dump());
    sidecar.vocab = json["vocab"].get<std::int64_t>();
  }
  return sidecar;
}

// A wrong type is plain in the halves of 32-bit words: uint32 tokens below 65,536 leave every upper half 0, and two uint16 tokens
// make a word that is outside every vocabulary while both its halves are inside.
void check_type(const std::string& path, const std::vector<std::uint16_t>& tokens) {
  constexpr std::size_t kEnough = 64;  // so many zeros in a row of odd places are no accident
  if (tokens.size() < 2 * kEnough || tokens.size() % 2 != 0) return;
  bool upper_zero = true, lower_zero = true;
  for (std::size_t i = 0; i < tokens.size(); i += 2) {
    lower_zero = lower_zero && tokens[i] == 0;
    upper_zero = upper_zero && tokens[i + 1] == 0;
  }
  WB_CHECK(lower_zero || !upper_zero, "{}: read as uint16, every second token of {} is 0: these are uint32 tokens; set data.dtype = \"uint32\"", path,
           tokens.size());
}

void check_type(const std::string& path, const std::vector<std::uint32_t>& tokens, std::int64_t vocab) {
  const auto is_pair = [vocab](std::uint32_t word) { return word >> 16 < vocab && (word & 0xffffu) < vocab; };
  const auto wrong = std::find_if(tokens.begin(), tokens.end(), [vocab](std::uint32_t token) { return token >= vocab; });
  WB_CHECK(wrong == tokens.end() || !std::all_of(tokens.begin(), tokens.end(), is_pair),
           "{}: read as uint32, token {} at position {} is outside the vocabulary of {}, but all 16-bit halves are inside: these are uint16 tokens; set "
           "data.dtype = \"uint16\"",
           path, *wrong, wrong - tokens.begin(), vocab);
}

template <class T>
TokenArray read_bin_as(const std::string& path, std::int64_t vocab) {
  std::vector<T> tokens;
  append_file(path, tokens);
  if constexpr (sizeof(T) == 2) {
    check_type(path, tokens);
  } else {
    check_type(path, tokens, vocab);
  }
  check_vocab(path, tokens, vocab);
  return tokens;
}

}  // namespace

TokenArray read_text(const std::string& path, std::int64_t vocab) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) WB_FAIL(ErrorCode::kIo, "text {} does not exist", path);
  std::vector<std::uint8_t> bytes;
  if (fs::is_directory(status)) {
    for (const fs::path& file : regular_files(path)) {
      if (!bytes.empty()) bytes.push_back('\n');
      append_file(file, bytes);
    }
  } else {
    append_file(path, bytes);
  }
  check_vocab(path, bytes, vocab);
  return bytes;
}

TokenArray read_bin(const std::string& path, const std::string& dtype, std::int64_t vocab) {
  if (!fs::is_regular_file(path)) WB_FAIL(ErrorCode::kIo, "token file {} does not exist", path);
  const std::string sidecar_path = path + ".json";
  const Sidecar sidecar = read_sidecar(sidecar_path);
  WB_CHECK(dtype.empty() || sidecar.dtype.empty() || dtype == sidecar.dtype, "{}: data.dtype = {} but {} says {}", path, dtype, sidecar_path, sidecar.dtype);
  const std::string& type = dtype.empty() ? sidecar.dtype : dtype;
  WB_CHECK(!type.empty(), "{}: the token type is not known; set data.dtype to uint16 or uint32, or write it into {}", path, sidecar_path);
  WB_CHECK(type == "uint16" || type == "uint32", "{}: dtype {} is not supported; tokens are uint16 or uint32", path, type);
  WB_CHECK(sidecar.vocab <= vocab, "{}: tokenised for a vocabulary of {}, the model has {}", path, sidecar.vocab, vocab);
  if (sidecar.vocab > 0) vocab = sidecar.vocab;  // what the tokeniser promised
  return type == "uint16" ? read_bin_as<std::uint16_t>(path, vocab) : read_bin_as<std::uint32_t>(path, vocab);
}

}  // namespace waybill

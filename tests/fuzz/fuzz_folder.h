// SPDX-License-Identifier: Apache-2.0
// A folder in memory for the files that a harness reads; it goes when the process ends.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace waybill::fuzz {

class Folder {
 public:
  Folder() {
    std::error_code error;
    const std::filesystem::path memory = "/dev/shm";
    const auto parent = std::filesystem::is_directory(memory, error) ? memory : std::filesystem::temp_directory_path();
    std::string pattern = (parent / "waybill_fuzz_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

}  // namespace waybill::fuzz

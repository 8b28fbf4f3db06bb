// SPDX-License-Identifier: Apache-2.0
// Files whose every failed write is an error with path, bytes and reason, and that are on disk when close() returns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace waybill {

class DurableFile {
 public:
  explicit DurableFile(std::string path);  // creates or truncates
  ~DurableFile();                          // closes without syncing; errors are lost: call close()
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void close();  // flush, fsync, close
  std::int64_t size() const { return size_; }

 private:
  void flush();
  std::string path_;
  int fd_ = -1;
  std::int64_t size_ = 0;
  std::vector<char> buffer_;
};

// A small file replaced as a whole: written beside its place, synced, renamed.
void replace_file(const std::string& path, const std::string& text);
void sync_folder(const std::string& path);
void rename_path(const std::string& from, const std::string& to);

// Called at named points of a save ("data", "index", "rename", "latest"); tests end the process there. Null otherwise.
using SaveHook = void (*)(const char* point);
extern SaveHook g_save_hook;
inline void save_point(const char* point) {
  if (g_save_hook != nullptr) g_save_hook(point);
}

}  // namespace waybill

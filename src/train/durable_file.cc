// SPDX-License-Identifier: Apache-2.0
#include "durable_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "waybill/error.h"

namespace waybill {
namespace {

constexpr std::size_t kBufferBytes = 1 << 20;

[[noreturn]] void fail(const std::string& what, const std::string& path, int error) {
  std::string room;
  struct statvfs space {};
  const std::string parent = std::filesystem::path(path).parent_path().string();
  if (error == ENOSPC && statvfs(parent.empty() ? "." : parent.c_str(), &space) == 0) {
    room = fmt::format(" ({} bytes free)", static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize);
  }
  WB_FAIL(ErrorCode::kIo, "{} {}: {}{}", what, path, std::strerror(error), room);
}

}  // namespace

SaveHook g_save_hook = nullptr;

DurableFile::DurableFile(std::string path) : path_(std::move(path)) {
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("cannot create", path_, errno);
  buffer_.reserve(kBufferBytes);
}

DurableFile::~DurableFile() {
  if (fd_ >= 0) ::close(fd_);
}

void DurableFile::write(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  size_ += static_cast<std::int64_t>(bytes);
  while (bytes > 0) {
    const std::size_t part = std::min(bytes, kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), p, p + part);
    p += part;
    bytes -= part;
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void DurableFile::flush() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t n = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(fmt::format("cannot write {} bytes to", buffer_.size() - done), path_, errno);
    done += static_cast<std::size_t>(n);
  }
  buffer_.clear();
}

void DurableFile::close() {
  flush();
  if (fsync(fd_) != 0) fail("cannot sync", path_, errno);
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) fail("cannot close", path_, errno);
}

void replace_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  try {
    DurableFile file(temporary);
    file.write(text.data(), text.size());
    file.close();
    rename_path(temporary, path);
  } catch (...) {
    std::remove(temporary.c_str());
    throw;
  }
  const std::string parent = std::filesystem::path(path).parent_path().string();
  sync_folder(parent.empty() ? "." : parent);
}

void sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("cannot open folder", path, errno);
  const int result = fsync(fd);
  const int error = errno;
  ::close(fd);
  if (result != 0 && error != EINVAL) fail("cannot sync folder", path, error);  // EINVAL: a file system without folder sync
}

void rename_path(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) fail(fmt::format("cannot rename {} to", from), to, errno);
}

}  // namespace waybill

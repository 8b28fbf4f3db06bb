// SPDX-License-Identifier: Apache-2.0
#include "run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "waybill/error.h"
#include "waybill/log.h"

namespace waybill {
namespace {

// "process 4711 on host node3", from what its holder wrote; of a file that others wrote, nothing that moves a terminal.
std::string holder(int fd) {
  char text[256] = {};
  const ssize_t bytes = pread(fd, text, sizeof text - 1, 0);
  std::string line(text, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  line = line.substr(0, line.find('\n'));
  std::replace_if(
      line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; }, '?');
  return line.empty() ? "another process" : line;
}

std::string own_name() {
  char host[128] = "unknown";
  gethostname(host, sizeof host - 1);
  return fmt::format("process {} on host {}", getpid(), host);
}

// The holder before may have removed the file between open and flock: then the lock is on a file that no one else will find.
bool is_the_file(int fd, const std::string& path) {
  struct stat mine {
  }, named{};
  return fstat(fd, &mine) == 0 && stat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
}

}  // namespace

RunLock::RunLock(const std::string& run_dir) : path_(lock_path(run_dir)) {
  for (;;) {
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) WB_FAIL(ErrorCode::kIo, "cannot open {}: {}", path_, std::strerror(errno));
    if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      const std::string other = error == EWOULDBLOCK ? holder(fd_) : "";
      close(fd_);
      fd_ = -1;
      WB_CHECK(other.empty(), "run folder {} is in use by {}; wait for it, or give another --run-dir", run_dir, other);
      log(LogLevel::kWarning, fmt::format("{} cannot be locked ({}): nothing keeps a second process out of this run folder", path_, std::strerror(error)));
      return;
    }
    if (is_the_file(fd_, path_)) break;
    close(fd_);
  }
  const std::string text = own_name() + "\n";
  // The text only names the holder: the lock holds without it.
  const bool named = ftruncate(fd_, 0) == 0 && pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
  if (!named) log(LogLevel::kDebug, fmt::format("{} could not be written: {}", path_, std::strerror(errno)));
}

RunLock::~RunLock() {
  if (fd_ < 0) return;
  unlink(path_.c_str());
  close(fd_);
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// One process at a time writes into a run folder.
#pragma once

#include <string>

namespace waybill {

inline std::string lock_path(const std::string& run_dir) { return run_dir + "/.lock"; }

// Holds RUN/.lock (flock) and writes process id and host into it. The kernel gives the lock up with the process, however it ends, so
// that a file left behind locks nothing. Not held: the folder is refused, naming who holds it.
class RunLock {
 public:
  explicit RunLock(const std::string& run_dir);
  ~RunLock();  // removes the file
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace waybill

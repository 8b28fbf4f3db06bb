// SPDX-License-Identifier: Apache-2.0
// Ranks as processes of this machine, one a GPU: forks before CUDA has started, with a launcher's environment.
#pragma once

#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "fabric/child_processes.h"
#include "fabric/nccl/nccl_world.h"

namespace waybill::cuda {

// Counts over processes that are forked after it was made. What has passed a host collective may end before the others have: a process that is to die must
// wait until all of them have passed.
class SharedCount {
 public:
  SharedCount() : count_(static_cast<std::atomic<int>*>(::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    WB_CHECK(count_ != MAP_FAILED, "no shared memory");
  }
  ~SharedCount() { ::munmap(count_, sizeof(std::atomic<int>)); }
  SharedCount(const SharedCount&) = delete;
  SharedCount& operator=(const SharedCount&) = delete;
  void pass_and_wait_for(int all) {
    count_->fetch_add(1);
    for (int ms = 0; ms < 60000 && count_->load() < all; ++ms) ::usleep(1000);  // one that failed never passes
  }

 private:
  std::atomic<int>* count_;
};

// A port that nobody listens on: programs that run beside each other do not meet.
inline int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(where);
  const bool found = ::bind(fd, reinterpret_cast<const sockaddr*>(&where), bytes) == 0 && ::getsockname(fd, reinterpret_cast<sockaddr*>(&where), &bytes) == 0;
  ::close(fd);
  WB_CHECK(found, "no port is free");
  return ntohs(where.sin_port);
}

// Exit code of each process, as fork_ranks(), with a launcher's environment.
inline std::vector<int> run_processes(int count, const std::function<int(int rank)>& body) {
  const int port = free_port();
  return test_support::fork_ranks(count, [&](int rank) {
    for (const auto& [name, value] : {std::pair<const char*, std::string>{"RANK", std::to_string(rank)},
                                      {"WORLD_SIZE", std::to_string(count)},
                                      {"LOCAL_RANK", std::to_string(rank)},
                                      {"WAYBILL_NCCL_ADDRESS", "127.0.0.1"},
                                      {"WAYBILL_NCCL_PORT", std::to_string(port)},
                                      {"CUDA_MODULE_LOADING", "EAGER"}}) {
      ::setenv(name, value.c_str(), 1);
    }
    return body(rank);
  });
}

// GPUs that a process with NCCL can use; asked in a process of its own.
inline int gpus_for_nccl() {
  const int found = run_processes(1, [](int) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
    (void)nccl_library();
    return count;
  })[0];
  return found == 100 ? 0 : found;
}

}  // namespace waybill::cuda

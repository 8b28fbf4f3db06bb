// SPDX-License-Identifier: Apache-2.0
// Ranks as processes that are forked from this one.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

namespace waybill::test_support {

// Exit code of each of `count` processes: what body(rank) returned, 100 after an error (its text goes to stderr), 128 + signal. Children end without the
// parent's destructors. when_forked: in this process, before it waits.
inline std::vector<int> fork_ranks(int count, const std::function<int(int rank)>& body, const std::function<void()>& when_forked = {}) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < count; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 100;
      try {
        code = body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      std::fflush(nullptr);
      ::_exit(code);
    }
    children.push_back(child);
  }
  if (when_forked) when_forked();
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

}  // namespace waybill::test_support

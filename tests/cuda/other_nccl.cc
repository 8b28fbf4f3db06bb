// SPDX-License-Identifier: Apache-2.0
// An NCCL of another version, for the test that it is refused: NCCL 2.1.7, and no more than what is asked before the refusal.
extern "C" {
#pragma GCC visibility push(default)
int ncclGetVersion(int* version) {
  *version = 20107;
  return 0;
}
const char* ncclGetErrorString(int) { return "no error"; }
#pragma GCC visibility pop
}

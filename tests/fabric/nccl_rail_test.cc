// SPDX-License-Identifier: Apache-2.0
// The rail over NCCL beside an NCCL that refuses a message. Needs no GPU.
#include "fabric/nccl/nccl_rail.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace waybill::cuda {
namespace {

// It takes `accepted` sends and refuses the next; what it was called.
struct RefusingNccl {
  static inline int accepted, sends, receives, open_groups;
  static NcclLibrary library(int takes) {
    accepted = takes, sends = receives = open_groups = 0;
    NcclLibrary nccl;
    nccl.group_start = [] { return ++open_groups, ncclSuccess; };
    nccl.group_end = [] { return --open_groups, ncclSuccess; };
    nccl.send = [](const void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ++sends > accepted ? ncclRemoteError : ncclSuccess; };
    nccl.receive = [](void*, std::size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ++receives, ncclSuccess; };
    return nccl;
  }
};

TEST(NcclRail, ARefusedMessageClosesTheGroupAndIsPassedOn) {
  NcclComm comm(reinterpret_cast<ncclComm_t>(std::uintptr_t{1}));
  for (int accepted = 0; accepted <= 3; ++accepted) {
    const NcclLibrary nccl = RefusingNccl::library(accepted);
    std::vector<ncclResult_t> failures;
    const auto rail =
        make_nccl_rail(nccl, comm, 0, 1, 4, /*progress=*/nullptr, /*poison=*/nullptr, [&](cudaStream_t, ncclResult_t error) { failures.push_back(error); });
    std::vector<RailMessage> messages;
    for (int node = 1; node < 4; ++node) messages.push_back({0, node, nullptr, nullptr, 16});
    rail->exchange(messages, nullptr);
    EXPECT_EQ(RefusingNccl::open_groups, 0) << accepted;
    EXPECT_EQ(RefusingNccl::receives, accepted) << accepted;  // nothing is queued behind the refused one
    EXPECT_EQ(failures, accepted == 3 ? std::vector<ncclResult_t>{} : std::vector<ncclResult_t>{ncclRemoteError}) << accepted;
  }
}

}  // namespace
}  // namespace waybill::cuda

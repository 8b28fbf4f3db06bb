// SPDX-License-Identifier: Apache-2.0
// GPUs without peer access are refused, with an answer of CUDA's that is made up. Needs no GPU.
#include "fabric/cuda_local/peer_access.h"

#include <gmock/gmock.h>

#include <string>
#include <utility>
#include <vector>

#include "waybill/error.h"

namespace waybill::cuda {
namespace {

std::string refusal(const std::vector<int>& devices, const CanAccessPeer& can_access) {
  try {
    check_peer_access(devices, can_access);
  } catch (const Error& error) {
    return error.code() == ErrorCode::kInvalidArgument ? error.what() : "another code";
  }
  return {};
}

TEST(PeerAccess, TheTwoGpusThatDoNotReachEachOtherAreNamed) {
  const std::vector<int> devices{0, 2, 5};
  for (const auto& [from, to] : std::vector<std::pair<int, int>>{{0, 2}, {5, 0}, {2, 5}}) {  // one direction is enough
    const std::string text = refusal(devices, [from = from, to = to](int device, int peer) { return device != from || peer != to; });
    EXPECT_THAT(text, testing::HasSubstr("cuda:" + std::to_string(from) + " cannot reach the memory of cuda:" + std::to_string(to) + ";"));
  }
}

TEST(PeerAccess, EveryPairIsAskedInBothDirectionsAndNoGpuAboutItself) {
  std::vector<std::pair<int, int>> asked;
  const auto yes = [&](int device, int peer) {
    asked.emplace_back(device, peer);
    return true;
  };
  EXPECT_EQ(refusal({3, 1}, yes), "");
  EXPECT_THAT(asked, testing::UnorderedElementsAre(std::pair(3, 1), std::pair(1, 3)));
  asked.clear();
  EXPECT_EQ(refusal({4, 4}, yes), "");
  EXPECT_TRUE(asked.empty());
}

}  // namespace
}  // namespace waybill::cuda

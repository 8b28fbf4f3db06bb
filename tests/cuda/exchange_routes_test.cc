// SPDX-License-Identifier: Apache-2.0
// The GPU exchange on routes and rows at the ends of what is allowed, beside the CPU engine: to the bit.
#include <gmock/gmock.h>

#include "cuda/exchange_harness.h"

namespace waybill::cuda {
namespace {

using ts::RandomRoute;

TEST(ExchangeHardRoutesCuda, EveryKFrom1To36) {
  WB_NEEDS_GPU();
  for (std::int64_t K = 1; K <= 36; ++K) {
    const ts::Group group = ts::random_group({41, 0, 30}, K, 72, 64, RandomRoute{.seed = 100 + static_cast<std::uint64_t>(K)}, false);
    GpuOptions options;
    options.weighted = K % 2 == 0, options.x_dtype = K % 3 == 0 ? DType::kBF16 : DType::kF32;
    compare(group, config_of(group), options, fmt::format("K = {}", K));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(ExchangeHardRoutesCuda, AnExpertWithTenTimesItsShare) {
  WB_NEEDS_GPU();
  for (const std::int32_t hot : {0, 37, 63}) {
    ts::Group group = ts::random_group({90, 70, 33, 81}, 4, 64, 256, RandomRoute{.seed = 15}, false);
    for (const Route& route : group.routes) {
      for (std::int64_t t = 0; t < route.T(); ++t) {
        bool has_hot = false;
        for (std::int64_t k = 0; k < 4; ++k) has_hot |= route.view().id(t, k) == hot;
        if (!has_hot && t % 8 < 5) route.view().set_id(t, t % 4, hot);  // 10/16 of the tokens: 10 times 4/64
      }
    }
    ExchangeConfig config = config_of(group);
    config.alignment = 8;
    compare(group, config, {}, fmt::format("expert {}", hot));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(ExchangeHardRoutesCuda, OneRankOneExpertNoRoutesAndEveryExpert) {
  WB_NEEDS_GPU();
  for (const int P : {1, 2, 8}) {
    const std::int64_t E = 16, T = 70, H = 96;
    for (const int kind : {0, 1, 2, 3, 4}) {
      const std::int64_t K = kind == 3 ? E : (kind == 4 ? 1 : 2);
      ts::Group group = ts::random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), T), K, E, H, RandomRoute{.seed = 3}, true);
      for (const Route& route : group.routes) {
        for (std::int64_t t = 0; t < T; ++t) {
          for (std::int64_t k = 0; k < K; ++k) {
            if (kind == 0) route.view().set_id(t, k, static_cast<std::int32_t>(E - 1 - k));        // all to the last rank
            if (kind == 1) route.view().set_id(t, k, -1);                                          // nothing moves
            if (kind == 2) route.view().set_id(t, k, k == 0 ? 5 : (t % 3 == 0 ? -1 : 9));          // two experts only
            if (kind == 3) route.view().set_id(t, k, static_cast<std::int32_t>((k * 7 + t) % E));  // K = E
            if (route.view().id(t, k) == -1) route.view().weights[t * K + k] = 0.0f;
          }
        }
      }
      ExchangeConfig config = config_of(group);
      config.alignment = kind == 2 ? 16 : 1;
      GpuOptions options;
      options.weighted = true;
      compare(group, config, options, fmt::format("P = {}, kind {}", P, kind));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(ExchangeHardRoutesCuda, BadIdsAreCountedAndIgnored) {
  WB_NEEDS_GPU();
  ts::Group group = ts::random_group({40, 33}, 4, 32, 64, RandomRoute{.seed = 4}, true);
  for (const Route& route : group.routes) {
    route.view().set_id(0, 0, 32), route.view().set_id(1, 3, -2), route.view().set_id(2, 1, 32767), route.view().set_id(3, 2, -32768);
  }
  compare(group, config_of(group), {}, "bad ids");
}

TEST(ExchangeHardRoutesCuda, WideRowsStridesAndWideIds) {
  WB_NEEDS_GPU();
  for (const std::int64_t H : {8, 1032, 7168, 16384}) {
    const ts::Group group = ts::random_group({19, 5}, 3, 12, H, RandomRoute{.seed = 5}, false);
    for (const DispatchPath path : {DispatchPath::kPush, DispatchPath::kBulk}) {
      GpuOptions options;
      options.tuning.dispatch = path;
      compare(group, config_of(group), options, fmt::format("H = {}", H));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  const ts::Group wide = ts::random_group({30, 31}, 5, 65536, 64, RandomRoute{.seed = 6}, false);  // int32 ids, 32,768 experts a rank: tiles of 32 rows
  compare(wide, config_of(wide), {}, "E = 65536");
}

TEST(ExchangeHardRoutesCuda, ADuplicateIdIsReported) {
  WB_NEEDS_GPU();
  ts::Group group = ts::random_group({40, 33}, 4, 32, 64, RandomRoute{.seed = 4}, true);
  group.routes[1].view().set_id(5, 1, group.routes[1].view().id(5, 0));
  GpuGroup gpu(config_of(group), group.placement, {});
  gpu.upload(group);
  gpu.step();
  EXPECT_EQ((gpu.status(0).flags | gpu.status(1).flags), kStatusDuplicateId);
}

}  // namespace
}  // namespace waybill::cuda

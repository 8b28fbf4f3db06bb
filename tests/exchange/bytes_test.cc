// SPDX-License-Identifier: Apache-2.0
// Bytes: what is reported is what moved, and how it compares with dense maps.
#include <gtest/gtest.h>

#include "exchange/counting_fabric.h"
#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;

TEST(ExchangeBytes, TheReportIsWhatTheFabricMoved) {
  for (const int P : {1, 2, 3, 6}) {
    for (const ExchangeMode mode : {ExchangeMode::kEager, ExchangeMode::kCaptured}) {
      for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
        std::vector<std::int64_t> T;
        for (int p = 0; p < P; ++p) T.push_back(p * 13 % 40);
        const Group group = random_group(T, 4, 12, 10, {.seed = 77, .drop = 0.2}, false);
        run_ranks(P, [&](Fabric& inner) {
          const auto p = static_cast<std::size_t>(inner.rank());
          CountingFabric fabric(inner);
          ExchangeConfig config = group.config();
          config.mode = mode;
          config.T_max = 40;
          config.combine_wire = wire;
          Exchange exchange(config, group.placement, fabric);
          fabric.sent = 0;  // the comparison of the configs is no step
          const RankResult result = run_rank(exchange, group, p, {.x_dtype = DType::kBF16});
          const ExchangeBytes& bytes = exchange.bytes();
          EXPECT_EQ(bytes.total(), fabric.sent);

          // Closed forms.
          const RoutePlan& plan = result.handle.plan;
          const std::int64_t own_rows = plan.row_offsets[p + 1] - plan.row_offsets[p];
          const std::int64_t own_slots =
              plan.slot_offsets[static_cast<std::size_t>(plan.row_offsets[p + 1])] - plan.slot_offsets[static_cast<std::size_t>(plan.row_offsets[p])];
          const std::int64_t rows = plan.num_rows() - own_rows, slots = plan.num_slots() - own_slots;
          const std::int64_t back_rows = result.handle.layout.R() - own_rows, back_slots = result.handle.layout.S() - own_slots;
          EXPECT_EQ(bytes.rows, rows);
          EXPECT_EQ(bytes.payload, rows * 10 * 2);
          EXPECT_EQ(bytes.combined, back_rows * 10 * (wire == CombineWire::kBF16 ? 2 : 4));
          EXPECT_EQ(bytes.ids, slots * 2);
          EXPECT_EQ(bytes.weights, slots * 4 + back_slots * 4);
          EXPECT_EQ(bytes.counts, (P - 1) * (mode == ExchangeMode::kCaptured ? 24 + 16 : 24) + rows * 2);
          EXPECT_EQ(bytes.dense_route_map, T[p] * 12);
          EXPECT_EQ(bytes.compact_route, T[p] * 4 * 2);
          EXPECT_EQ(bytes.dense_probability_row, rows * 12 * 4);
          EXPECT_EQ(bytes.local_probability_slice, rows * (12 / P) * 4);
          exchange.reset_bytes();
          EXPECT_EQ(exchange.bytes().total(), 0);
        });
      }
    }
  }
}

TEST(ExchangeBytes, ARowCrossesOncePerRankNotPerExpert) {
  // K = 8 experts, all of them on rank 1: one row and eight slots cross.
  std::vector<std::int32_t> ids;
  for (std::int32_t k = 0; k < 8; ++k) ids.push_back(8 + k);
  run_ranks(2, [&](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 100;
    config.E = 16;
    config.K = 8;
    Exchange exchange(config, block_placement(16, 2), fabric);
    const DispatchHandle handle = exchange.plan(fabric.rank() == 0 ? Route::from_ids(1, 8, 16, ids) : Route(0, 8, 16));
    Tensor rows;
    exchange.dispatch(handle, Tensor::zeros(DType::kBF16, {fabric.rank() == 0 ? 1 : 0, 100}), rows);
    EXPECT_EQ(exchange.bytes().payload, fabric.rank() == 0 ? 200 : 0);
    EXPECT_EQ(exchange.bytes().ids, fabric.rank() == 0 ? 16 : 0);
    EXPECT_EQ(handle.layout.S(), fabric.rank() == 1 ? 8 : 0);
    EXPECT_EQ(handle.layout.R(), fabric.rank() == 1 ? 1 : 0);
  });
}

// T=8192, E=2304, K=36: a byte map of 18.87 MB a rank becomes 0.59 MB of int16 ids.
TEST(ExchangeBytes, TheRouteMapShrinksFrom18_87To0_59Megabytes) {
  const std::int64_t T = 8192, E = 2304, K = 36;
  run_ranks(2, [&](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 1;
    config.E = E;
    config.K = K;
    Exchange exchange(config, block_placement(E, 2), fabric);
    const Route route = random_route(T, K, E, {.seed = static_cast<std::uint64_t>(fabric.rank())});
    exchange.plan(route);
    EXPECT_EQ(exchange.bytes().dense_route_map, 18874368);
    EXPECT_EQ(exchange.bytes().compact_route, 589824);
    EXPECT_NEAR(static_cast<double>(exchange.bytes().dense_route_map) / 1e6, 18.87, 0.005);
    EXPECT_NEAR(static_cast<double>(exchange.bytes().compact_route) / 1e6, 0.59, 0.005);
    EXPECT_EQ(route.view().id_dtype, DType::kI16);
  });
}

// EP72 with 32 local experts: a full probability row of 9,216 B a sent row becomes at most a slice of 128 B.
TEST(ExchangeBytes, TheProbabilityRowShrinksFrom9216To128Bytes) {
  run_ranks(72, [&](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 4;
    config.E = 2304;
    config.K = 36;
    Exchange exchange(config, block_placement(2304, 72), fabric);
    EXPECT_EQ(exchange.placement().L(), 32);
    exchange.plan(random_route(3, 36, 2304, {.seed = 500 + static_cast<std::uint64_t>(fabric.rank())}));
    const ExchangeBytes& bytes = exchange.bytes();
    ASSERT_GT(bytes.rows, 0);
    EXPECT_EQ(bytes.dense_probability_row, bytes.rows * 9216);
    EXPECT_EQ(bytes.local_probability_slice, bytes.rows * 128);
    EXPECT_LE(bytes.weights, bytes.local_probability_slice);  // only the chosen experts' weights travel
    EXPECT_LE(bytes.weights, 3 * 36 * 4);
  });
}

}  // namespace
}  // namespace waybill

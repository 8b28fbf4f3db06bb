// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include "capi_testing.h"

namespace waybill::capi_testing {
namespace {

struct Nodes {
  std::int32_t hierarchy, ranks_per_node;
};
class CApiExchangeNodes : public testing::TestWithParam<Nodes> {};
INSTANTIATE_TEST_SUITE_P(CApi, CApiExchangeNodes, testing::Values(Nodes{WB_FLAT, 0}, Nodes{WB_TWO_LEVEL, 2}, Nodes{WB_HIERARCHY_AUTO, 2}));

// Identity experts, unit weights: combine(dispatch(x)) = K x, ragged T, and the slot values find their way back.
TEST_P(CApiExchangeNodes, RoundTripGivesKTimesXAndReturnsSlotValues) {
  constexpr int P = 4;
  constexpr std::int64_t H = 6, E = 8, K = 2;
  const auto round_trip = [](wb_fabric* fabric, int rank) {
    const std::int64_t T = rank;  // rank 0 has none
    RouteMemory memory(T, K, E);
    std::vector<float> x(static_cast<std::size_t>(T * H)), out(x.size(), -1.0f), d_weights(static_cast<std::size_t>(T * K), -1.0f);
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t k = 0; k < K; ++k) {
        const auto i = static_cast<std::size_t>(t * K + k);
        memory.ids[i] = static_cast<std::int16_t>((3 * t + 5 * k + rank) % E);
        memory.weights[i] = 1;
        ++memory.counts[static_cast<std::size_t>(memory.ids[i])];
      }
    }
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i % 31) - 15);
    wb_exchange_config config{};
    ASSERT_WB_OK(wb_exchange_config_init(&config, sizeof config));
    config.H = H;
    config.E = E;
    config.K = K;
    config.debug_checks = 1;
    config.hierarchy = GetParam().hierarchy;
    wb_exchange* exchange = nullptr;
    wb_dispatch* dispatch = nullptr;
    ASSERT_WB_OK(wb_exchange_create(&config, fabric, &exchange));
    ASSERT_WB_OK(wb_exchange_plan(exchange, &memory.route, &dispatch));
    auto info = sized<wb_dispatch_info>();
    ASSERT_WB_OK(wb_dispatch_get_info(dispatch, &info));
    EXPECT_EQ(info.L, E / P);
    EXPECT_EQ(info.valid, 1);
    EXPECT_EQ(info.row_offsets[P], info.R);
    const wb_tensor x_tensor = tensor(x.data(), WB_F32, {T, H}), out_tensor = tensor(out.data(), WB_F32, {T, H});
    wb_tensor rows{};
    ASSERT_WB_OK(wb_exchange_dispatch(exchange, dispatch, &x_tensor, &rows));
    EXPECT_EQ(rows.shape[0], info.R);
    std::vector<float> y(static_cast<std::size_t>(info.S_padded * H)), z(static_cast<std::size_t>(info.R * H)), slots(static_cast<std::size_t>(info.S_padded));
    const wb_tensor y_tensor = tensor(y.data(), WB_F32, {info.S_padded, H}), z_tensor = tensor(z.data(), WB_F32, {info.R, H});
    ASSERT_WB_OK(wb_permute(dispatch, &rows, &y_tensor, nullptr));
    ASSERT_WB_OK(wb_unpermute_reduce(dispatch, &y_tensor, 1, &z_tensor, nullptr));
    ASSERT_WB_OK(wb_exchange_combine(exchange, dispatch, &z_tensor, &out_tensor));
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(out[i], static_cast<float>(K) * x[i]);
    // Slot value = global expert id, so every route must get its own id back.
    for (std::int64_t e = 0; e < info.L; ++e) {
      for (std::int32_t s = info.expert_offsets[e]; s < info.expert_offsets[e + 1]; ++s)
        slots[static_cast<std::size_t>(s)] = static_cast<float>(rank * info.L + e);
    }
    ASSERT_WB_OK(wb_exchange_return_slot_values(exchange, dispatch, slots.data(), d_weights.data()));
    for (std::size_t i = 0; i < d_weights.size(); ++i) EXPECT_EQ(d_weights[i], memory.ids[i]);
    auto bytes = sized<wb_exchange_bytes>();
    ASSERT_WB_OK(wb_exchange_get_bytes(exchange, &bytes));
    EXPECT_EQ(bytes.payload, bytes.rows * H * 4);
    auto status = sized<wb_step_status>();
    ASSERT_WB_OK(wb_exchange_get_status(exchange, &status));
    EXPECT_EQ(status.flags, 0u);
    wb_dispatch_destroy(dispatch);
    wb_exchange_destroy(exchange);
  };
  on_ranks(P, round_trip, 20000, GetParam().ranks_per_node);
}

TEST(CApiExchange, ConfigsThatCannotWorkAreRefusedOnEveryRank) {
  std::atomic<int> refused{0};
  on_ranks(2, [&refused](wb_fabric* fabric, int) {
    wb_exchange_config config{};
    ASSERT_WB_OK(wb_exchange_config_init(&config, sizeof config));
    config.H = 4;
    config.E = 5;  // not divisible by P = 2
    config.K = 2;
    wb_exchange* exchange = nullptr;
    if (wb_exchange_create(&config, fabric, &exchange) == WB_INVALID_ARGUMENT && exchange == nullptr) ++refused;
    EXPECT_NE(std::string(wb_last_error()).find("5"), std::string::npos) << wb_last_error();
  });
  EXPECT_EQ(refused, 2);
}

TEST(CApiFabric, AllReduceSumsOverRanks) {
  on_ranks(3, [](wb_fabric* fabric, int rank) {
    std::int64_t counts[2] = {rank, 10};
    float values[1] = {0.5f};
    ASSERT_WB_OK(wb_fabric_all_reduce_i64(fabric, counts, 2));
    ASSERT_WB_OK(wb_fabric_all_reduce_f32(fabric, values, 1));
    EXPECT_EQ(counts[0], 3);
    EXPECT_EQ(counts[1], 30);
    EXPECT_EQ(values[0], 1.5f);
    EXPECT_EQ(wb_fabric_all_reduce_f32(fabric, nullptr, 1), WB_INVALID_ARGUMENT);
  });
}

}  // namespace
}  // namespace waybill::capi_testing

// SPDX-License-Identifier: Apache-2.0
// A group over the caller's transport, formats and sizes, through the C ABI.
#include <barrier>
#include <cstring>

#include "capi_testing.h"

namespace waybill::capi_testing {
namespace {

// Two ranks that meet at a barrier and read each other's buffer.
struct Pair {
  std::barrier<> meeting{2};
  const void* sent[2] = {};
  bool cut = false;
};
struct End {
  Pair* pair;
  int rank;
};

int32_t all_to_all(void* user, const void* send, const int64_t*, void* receive, const int64_t* receive_bytes, char* error, int64_t error_bytes) {
  const End& end = *static_cast<End*>(user);
  if (end.pair->cut) {
    std::strncpy(error, "cable cut", static_cast<std::size_t>(error_bytes));
    return 1;
  }
  end.pair->sent[end.rank] = send;
  end.pair->meeting.arrive_and_wait();
  const auto bytes = static_cast<std::size_t>(receive_bytes[1 - end.rank]);
  if (bytes > 0) std::memcpy(receive, end.pair->sent[1 - end.rank], bytes);
  end.pair->meeting.arrive_and_wait();
  return 0;
}

TEST(CApiTransport, CarriesCollectivesAndItsFailureIsTold) {
  Pair pair;
  End ends[2] = {{&pair, 0}, {&pair, 1}};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      wb_fabric_transport transport = sized<wb_fabric_transport>();
      transport.user = &ends[rank];
      transport.all_to_all = all_to_all;
      wb_fabric* fabric = nullptr;
      ASSERT_WB_OK(wb_fabric_create(&transport, 2, rank, 0, &fabric));
      std::int64_t values[2] = {rank + 1, 10};
      EXPECT_WB_OK(wb_fabric_all_reduce_i64(fabric, values, 2));
      EXPECT_EQ(values[0], 3);
      EXPECT_EQ(values[1], 20);
      EXPECT_WB_OK(wb_fabric_barrier(fabric));
      pair.meeting.arrive_and_wait();
      if (rank == 0) pair.cut = true;
      pair.meeting.arrive_and_wait();
      EXPECT_EQ(wb_fabric_barrier(fabric), WB_PEER_FAILED);
      EXPECT_NE(std::string(wb_last_error()).find("transport failed: cable cut"), std::string::npos) << wb_last_error();
      wb_fabric_destroy(fabric);
    });
  }
  for (std::thread& thread : threads) thread.join();
  wb_fabric* fabric = nullptr;
  wb_fabric_transport empty = sized<wb_fabric_transport>();
  EXPECT_EQ(wb_fabric_create(&empty, 2, 0, 0, &fabric), WB_INVALID_ARGUMENT);
  wb_fabric_destroy(nullptr);
}

TEST(CApiQuantize, AnMxBlockThereAndBack) {
  wb_quant_config config;
  ASSERT_WB_OK(wb_quant_config_init(&config, sizeof(config)));
  std::vector<float> x(64), back(64);
  for (std::size_t i = 0; i < 64; ++i) x[i] = static_cast<float>(static_cast<int>(i) % 8 - 4);
  std::vector<std::uint8_t> codes(64), scales(2);
  wb_quantized out = sized<wb_quantized>();
  out.codes = tensor(codes.data(), WB_F8E4M3, {2, 32});
  out.scales = tensor(scales.data(), WB_U8, {2, 1});
  const wb_tensor from = tensor(x.data(), WB_F32, {2, 32}), to = tensor(back.data(), WB_F32, {2, 32});
  ASSERT_WB_OK(wb_quantize(&config, &from, nullptr, &out, nullptr));
  EXPECT_EQ(scales[0], 121);  // the least power of two with 4 / scale <= 448: 2^-6
  ASSERT_WB_OK(wb_dequantize(&config, &out, nullptr, &to, nullptr));
  EXPECT_EQ(back, x);
  config.block_columns = 48;
  EXPECT_EQ(wb_quantize(&config, &from, nullptr, &out, nullptr), WB_INVALID_ARGUMENT);
}

// silu(0) * 3 = 0 and, weighted by a quarter, 1000 * 2: scales 2^-127 and 2.
TEST(CApiQuantize, AnActivationIsQuantisedFromItsInputs) {
  wb_quant_config config;
  ASSERT_WB_OK(wb_quant_config_init(&config, sizeof(config)));
  config.scale = WB_SCALE_POWER_OF_TWO, config.block_columns = 128;
  float h[] = {0, 3, 1000, 2}, weight[] = {1, 0.25f}, scales[2] = {};
  std::uint8_t codes[2] = {};
  wb_quantized out = sized<wb_quantized>();
  out.codes = tensor(codes, WB_F8E4M3, {2, 1}), out.scales = tensor(scales, WB_F32, {2, 1});
  wb_activated_rows x;
  ASSERT_WB_OK(wb_activated_rows_init(&x, sizeof(x)));
  EXPECT_EQ(x.struct_size, sizeof(x));
  EXPECT_EQ(x.activation, WB_SWIGLU);
  EXPECT_EQ(x.activation_limit, 7.0f);
  EXPECT_EQ(x.activation_alpha, 1.702f);
  EXPECT_EQ(x.weight.rank, 0);
  x.h = tensor(h, WB_F32, {2, 2}), x.weight = tensor(weight, WB_F32, {2});
  ASSERT_WB_OK(wb_quantize_activated(&config, &x, nullptr, &out, nullptr));
  EXPECT_EQ(codes[0], 0);
  EXPECT_EQ(scales[1], 2.0f);
  EXPECT_EQ(codes[1], 0x78);  // 256: 250 lies between 240 and 256
  // Gate clamped to 7, up 2 + 1: 7 * 3 / 4, nearly; and nothing of a gate of -1000.
  x.activation = WB_CLAMPED_SWIGLU;
  h[0] = -1000;
  ASSERT_WB_OK(wb_quantize_activated(&config, &x, nullptr, &out, nullptr));
  EXPECT_EQ(codes[0] & 0x7f, 0);
  EXPECT_EQ(scales[1], 0.015625f);
  EXPECT_EQ(codes[1], 0x7a);  // 320: 336 lies half way to 352, and the value below it
  x.activation = 3;
  EXPECT_EQ(wb_quantize_activated(&config, &x, nullptr, &out, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_activated_rows_init(&x, sizeof(x) + 8), WB_INVALID_ARGUMENT);
}

TEST(CApiCore, StructSizesByName) {
  EXPECT_EQ(wb_struct_size("wb_tensor"), static_cast<std::int64_t>(sizeof(wb_tensor)));
  EXPECT_EQ(wb_struct_size("wb_moe_config"), static_cast<std::int64_t>(sizeof(wb_moe_config)));
  EXPECT_EQ(wb_struct_size("wb_nothing"), -1);
  EXPECT_EQ(wb_struct_size(nullptr), -1);
}

}  // namespace
}  // namespace waybill::capi_testing

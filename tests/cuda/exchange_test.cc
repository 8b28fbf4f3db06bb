// SPDX-License-Identifier: Apache-2.0
// The GPU exchange beside the CPU engine: the same layout, rows, sums and per-slot values, to the bit.
#include <gmock/gmock.h>

#include "cuda/exchange_harness.h"

namespace waybill::cuda {
namespace {

using ts::RandomRoute;

// Loading a kernel at its first launch waits for the device, and with it for a peer that waits for this launch.
const bool kEagerLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 0) == 0;

struct Case {
  int P;
  std::int64_t T, K, E, H;
};

class ExchangeCuda : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeCuda,
                         ::testing::Values(Case{1, 65, 4, 16, 64}, Case{2, 130, 8, 64, 512}, Case{2, 77, 36, 2304, 512}, Case{4, 100, 6, 64, 1032},
                                           Case{8, 63, 8, 256, 256}, Case{36, 20, 36, 72, 64}, Case{72, 17, 36, 2304, 64}, Case{72, 9, 1, 144, 128}));

TEST_P(ExchangeCuda, EqualsTheCpuEngineToTheBit) {
  WB_NEEDS_GPU();
  const Case& c = GetParam();
  const ts::Group group = ts::random_group(ragged_tokens(c.P, c.T), c.K, c.E, c.H, RandomRoute{.seed = 7}, false);
  for (const DispatchPath path : {DispatchPath::kPush, DispatchPath::kBulk}) {
    for (const bool half : {false, true}) {
      GpuOptions options;
      options.tuning.dispatch = path, options.weighted = half, options.handshake = half;
      options.tuning.combine = path == DispatchPath::kPush ? CombinePath::kPull : CombinePath::kBulk;
      options.split_permute = half, options.tuning.fused_plan = half == (path == DispatchPath::kBulk);
      options.tuning.fused_layout = path == DispatchPath::kPush;
      options.tuning.early_dispatch = half ? 1 : -1, options.tuning.permute_parts = half ? 3 : 0;
      options.x_dtype = half ? DType::kBF16 : DType::kF32, options.out_dtype = options.x_dtype;
      ExchangeConfig config = config_of(group);
      config.combine_wire = half ? CombineWire::kBF16 : CombineWire::kF32, config.alignment = half ? 8 : 1;
      compare(group, config, options, fmt::format("path {}, bf16 {}", static_cast<int>(path), half));
      if (HasFatalFailure()) return;
    }
  }
}

// Few and many counts, few and many tiles, with and without padding.
TEST(ExchangeLayoutCuda, OneLaunchOfManyTilesGivesTheSameBits) {
  WB_NEEDS_GPU();
  for (const Case& c :
       {Case{1, 3000, 4, 4096, 64}, Case{2, 700, 36, 2304, 64}, Case{2, 2500, 8, 64, 64}, Case{8, 300, 8, 1024, 64}, Case{1, 16800, 2, 128, 64}}) {
    const ts::Group group = ts::random_group(ragged_tokens(c.P, c.T), c.K, c.E, c.H, RandomRoute{.seed = 12}, false);
    for (const std::int64_t alignment : {1, 16}) {
      GpuOptions options;
      options.tuning.fused_layout = true;
      ExchangeConfig config = config_of(group);
      config.alignment = alignment;
      compare(group, config, options, fmt::format("P {}, T {}, alignment {}", c.P, c.T, alignment));
      if (HasFatalFailure()) return;
    }
  }
}

// The first tile of rows has 128 slots a row, the others one: what they add up must have waited for it.
TEST(ExchangeLayoutCuda, ASlowTileIsWaitedFor) {
  WB_NEEDS_GPU();
  ts::Group group = ts::random_group({1500}, 128, 256, 64, RandomRoute{.seed = 13}, false);
  const RouteView& route = group.routes[0].view();
  for (std::int64_t t = 128; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k)
      route.set_id(t, k, k == 0 ? static_cast<std::int32_t>(t % 256) : -1), route.weights[t * route.K + k] = k == 0 ? 1.0f : 0.0f;
  }
  GpuOptions options;
  options.tuning.fused_layout = true;
  compare(group, config_of(group), options, "a slow tile");
}

TEST_P(ExchangeCuda, PullDispatchAndPushCombineGiveTheSameBits) {
  WB_NEEDS_GPU();
  const Case& c = GetParam();
  const ts::Group group = ts::random_group(ragged_tokens(c.P, c.T), c.K, c.E, c.H, RandomRoute{.seed = 8}, false);
  GpuOptions options;
  options.push_combine = options.pull_dispatch = true;
  compare(group, config_of(group), options, "pull, push");
  options.x_dtype = DType::kBF16;
  ExchangeConfig config = config_of(group);
  config.combine_wire = CombineWire::kBF16;
  compare(group, config, options, "pull, push, bf16");
}

// One expert has ten times the slots of an even share, wherever it is.
TEST(ExchangePlacementCuda, TablesGiveTheSameBits) {
  WB_NEEDS_GPU();
  ts::Group group = ts::random_group({50, 20, 31, 7}, 4, 32, 64, RandomRoute{.seed = 14}, false);
  std::vector<std::int32_t> rank(32), local(32);
  for (int e = 0; e < 32; ++e) rank[static_cast<std::size_t>(e)] = (e * 5 + 3) % 4, local[static_cast<std::size_t>(e)] = 7 - e / 4;
  group.placement.rank_table = rank.data(), group.placement.local_table = local.data();
  compare(group, config_of(group), {}, "tables");
}

TEST(ExchangeBudgetCuda, ExactlyTheBudgetOneMoreAndTenTimes) {
  WB_NEEDS_GPU();
  constexpr std::int64_t kT = 40, kK = 2, kE = 8, kH = 64;
  for (const std::int64_t over : {0, 1, 9}) {
    // f = 1: S <= T_max * K = 80. Ranks 0 and 1 send `wanted` slots to rank 0 together; one slot a row, so R <= 80 as well.
    const std::int64_t wanted = over == 9 ? 800 : 80 + over;
    const int P = over == 9 ? 20 : 4;
    const std::int64_t E = over == 9 ? 40 : kE;
    ts::Group group = ts::random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), kT), kK, E, kH, RandomRoute{.seed = 9}, true);
    std::int64_t given = 0;
    for (const Route& route : group.routes) {
      for (std::int64_t t = 0; t < kT; ++t) {
        const bool to_first = given < wanted;
        given += to_first ? 1 : 0;
        route.view().set_id(t, 0, to_first ? static_cast<std::int32_t>(t % 2) : -1), route.view().set_id(t, 1, -1);
        route.view().weights[t * kK] = to_first ? 1.0f : 0.0f, route.view().weights[t * kK + 1] = 0.0f;
      }
    }
    ASSERT_EQ(given, wanted);
    ExchangeConfig config = config_of(group);
    config.mode = ExchangeMode::kCaptured, config.receive_factor = 1.0, config.T_max = kT;
    const std::vector<ts::RankResult> want = ts::run_group(group, config);
    GpuGroup gpu(config, group.placement, {});
    gpu.upload(group);
    gpu.step();
    for (int p = 0; p < P; ++p) {
      const ts::RankResult got = gpu.result(p);
      const ts::RankResult& expected = want[static_cast<std::size_t>(p)];
      EXPECT_EQ(got.handle.valid, over == 0) << over << ", rank " << p;
      EXPECT_EQ(got.status.flags, expected.status.flags) << over << ", rank " << p;
      EXPECT_EQ(got.status.slot_demand, expected.status.slot_demand);
      EXPECT_EQ(got.status.slot_capacity, expected.status.slot_capacity);
      EXPECT_EQ(got.status.row_demand, expected.status.row_demand);
      EXPECT_EQ(got.handle.max_slot_demand, wanted);
      EXPECT_EQ(got.out, expected.out) << over << ", rank " << p;
      EXPECT_EQ(got.d_weights, expected.d_weights) << over << ", rank " << p;
    }
    if (over == 0) continue;
    // The next step fits: the handle is valid again, the status stays until it is cleared.
    ts::Group fits = ts::random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), 10), kK, E, kH, RandomRoute{.seed = 10}, true);
    gpu.upload(fits);
    gpu.step();
    EXPECT_TRUE(gpu.result(0).handle.valid);
    EXPECT_TRUE(gpu.status(0).overflowed());
    for (int p = 0; p < P; ++p) ts::expect_factor(fits, static_cast<std::size_t>(p), gpu.result(p).out);
  }
}

// Rows with two slots each: the slots' budget is full while half of the rows' is left.
TEST(ExchangeBudgetCuda, SlotsAloneMayExceed) {
  WB_NEEDS_GPU();
  for (const bool over : {false, true}) {
    ts::Group group = ts::random_group({40, 40}, 2, 8, 64, RandomRoute{.seed = 11}, true);
    for (std::size_t p = 0; p < 2; ++p) {
      const RouteView& route = group.routes[p].view();
      for (std::int64_t t = 0; t < 40; ++t) {
        for (std::int64_t k = 0; k < 2; ++k) {
          const bool is_there = p == 0 || (over && t == 7 && k == 1);  // 80 slots from rank 0, one from rank 1
          route.set_id(t, k, is_there ? static_cast<std::int32_t>(k) : -1), route.weights[t * 2 + k] = is_there ? 1.0f : 0.0f;
        }
      }
    }
    ExchangeConfig config = config_of(group);
    config.mode = ExchangeMode::kCaptured, config.receive_factor = 1.0, config.T_max = 40;
    GpuGroup gpu(config, group.placement, {});
    gpu.upload(group);
    gpu.step();
    for (int p = 0; p < 2; ++p) EXPECT_EQ(gpu.handle(p).valid, !over) << "rank " << p;
    EXPECT_EQ(gpu.status(0).flags, over ? kStatusSlotOverflow : 0u);
    EXPECT_EQ(gpu.handle(0).max_slot_demand, over ? 81 : 80);
  }
}

TEST(ExchangeGraphCuda, TenThousandReplaysWithChangingRoutes) {
  WB_NEEDS_GPU();
  constexpr int P = 8, kSets = 5, kReplays = 10000;
  std::vector<ts::Group> groups;
  std::vector<std::vector<ts::RankResult>> want;
  for (int s = 0; s < kSets; ++s) {
    groups.push_back(ts::random_group(std::vector<std::int64_t>(P, 90), 6, 64, 128, RandomRoute{.seed = 20 + static_cast<std::uint64_t>(s)}, false));
    want.push_back(ts::run_group(groups.back(), config_of(groups.back())));
  }
  GpuGroup gpu(config_of(groups[0]), groups[0].placement, {});
  gpu.upload(groups[0]);
  gpu.step();
  gpu.capture();
  for (int i = 0; i < kReplays; ++i) {
    const int set = i / 100 % kSets;
    if (i % 100 == 0) gpu.upload(groups[static_cast<std::size_t>(set)]);
    gpu.replay();
    if (i % 1000 != 999) continue;
    gpu.synchronize();
    for (int p = 0; p < P; ++p)
      expect_same_result(want[static_cast<std::size_t>(set)][static_cast<std::size_t>(p)], gpu.result(p), fmt::format("replay {}", i));
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(gpu.group().first_error(), "");
  // Every step waits for a value of its own: an epoch that stood still would let a rank read what arrived before.
  for (int p = 0; p < P; ++p) {
    for (const ExchangeSignal signal : {kSignalCounts, kSignalMeta, kSignalRows, kSignalPartials, kSignalPulled, kSignalValues, kSignalValuesRead}) {
      ASSERT_EQ(gpu.epoch(p, signal), kReplays + 1u) << p << " " << signal;
    }
  }
}

TEST(ExchangeLostPeerCuda, EveryRankEndsInAStatusThatNamesIt) {
  WB_NEEDS_GPU();
  const ts::Group group = ts::random_group({40, 33, 12, 9}, 4, 32, 64, RandomRoute{.seed = 4}, true);
  GpuOptions options;
  options.absent = {2}, options.timeout = std::chrono::milliseconds(30);
  GpuGroup gpu(config_of(group), group.placement, options);
  gpu.upload(group);
  gpu.step();
  for (const int p : {0, 1, 3}) {
    const ts::RankResult got = gpu.result(p);
    EXPECT_EQ(got.status.flags, kStatusTimeout) << p;
    EXPECT_FALSE(got.handle.valid);
    EXPECT_EQ(got.status.timeout_peer, 2);
    EXPECT_EQ(got.status.timeout_phase, kExchangePhase + kSignalCounts);
    for (const float value : got.out) ASSERT_EQ(value, 0.0f);
  }
  EXPECT_THAT(gpu.group().first_error(), ::testing::HasSubstr("waited for rank 2"));
}

TEST(ExchangeBackwardCuda, GradientsOfTheWeightedReduce) {
  WB_NEEDS_GPU();
  const ts::Group group = ts::random_group({60, 45}, 6, 24, 264, RandomRoute{.seed = 30}, false);
  for (const bool weighted : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      ExchangeConfig config = config_of(group);
      config.alignment = 4;
      GpuOptions options;
      options.x_dtype = dtype, options.weighted = weighted;
      GpuGroup gpu(config, group.placement, options);
      gpu.upload(group);
      gpu.step();
      DeviceExchange& e = gpu.exchange();
      std::vector<DeviceBuffer> dy, dw, dz;
      std::vector<DeviceRows> y_rows, dz_rows, dy_rows;
      std::vector<float*> d_weights;
      std::vector<ts::Floats> y_values, dz_values;
      std::vector<ReceiveLayout> layouts;
      for (int p = 0; p < 2; ++p) {
        layouts.push_back(gpu.handle(p).layout);
        const auto S = layouts.back().S_padded(), R = layouts.back().R();
        y_values.push_back(ts::normal_values(static_cast<std::size_t>(S * 264), 50 + static_cast<std::uint64_t>(p)));
        dz_values.push_back(ts::normal_values(static_cast<std::size_t>(R * 264), 60 + static_cast<std::uint64_t>(p)));
        const Tensor y = ts::to_tensor(y_values.back(), S, 264, dtype), z = ts::to_tensor(dz_values.back(), R, 264, DType::kF32);
        dy.emplace_back(static_cast<std::size_t>(S * 264) * 4), dz.emplace_back(static_cast<std::size_t>(R * 264) * 4),
            dw.emplace_back(static_cast<std::size_t>(S) * 4);
        dy.back().upload(y.view().data, static_cast<std::size_t>(S * 264) * size_bytes(dtype)), dz.back().upload(z.view().data, dz.back().bytes());
        dw.back().fill(0xff);
        y_rows.push_back({dy.back().data(), 0}), dz_rows.push_back({dz.back().data(), 0}), d_weights.push_back(dw.back().as<float>());
      }
      WB_TRY_CUDA(cudaDeviceSynchronize());
      e.unpermute_backward(gpu.device_handle(), dtype, y_rows, weighted, DType::kF32, dz_rows, y_rows, d_weights, gpu.stream());  // in place
      gpu.stream().synchronize();
      for (std::size_t p = 0; p < 2; ++p) {
        const auto S = layouts[p].S_padded(), R = layouts[p].R();
        const Tensor y = ts::to_tensor(y_values[p], S, 264, dtype), z = ts::to_tensor(dz_values[p], R, 264, DType::kF32);
        Tensor want_dy(dtype, {S, 264}), got_dy(dtype, {S, 264});
        std::vector<float> want_dw(static_cast<std::size_t>(S)), got_dw(want_dw.size());
        unpermute_reduce_backward(layouts[p], y, weighted, z, want_dy, want_dw.data());
        dy[p].download(got_dy.view().data, static_cast<std::size_t>(S * 264) * size_bytes(dtype)), dw[p].download(got_dw.data(), got_dw.size() * 4);
        WB_TRY_CUDA(cudaDeviceSynchronize());
        EXPECT_EQ(ts::to_floats(want_dy), ts::to_floats(got_dy));
        for (std::size_t s = 0; s < got_dw.size(); ++s) ASSERT_NEAR(want_dw[s], got_dw[s], 1e-4 * std::sqrt(264.0)) << s;
      }
    }
  }
}

TEST(ExchangeScalesCuda, BytesAndScalesTravelTogether) {
  WB_NEEDS_GPU();
  constexpr std::int64_t kH = 1024, kScales = 32;
  const ts::Group group = ts::random_group({60, 45}, 6, 24, kH, RandomRoute{.seed = 31}, true);
  for (const DispatchPath path : {DispatchPath::kPush, DispatchPath::kBulk}) {
    GpuOptions options;
    options.tuning.dispatch = path;
    GpuGroup gpu(config_of(group), group.placement, options);
    gpu.upload(group);
    gpu.step();
    std::vector<DeviceBuffer> x, scales;
    std::vector<DeviceRows> x_rows, scale_rows;
    for (std::size_t p = 0; p < 2; ++p) {
      const auto T = static_cast<std::size_t>(group.routes[p].T());
      std::vector<std::uint8_t> bytes(T * kH), s(T * kScales);
      for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(random_u64(90 + p, i));
      for (std::size_t i = 0; i < s.size(); ++i) s[i] = static_cast<std::uint8_t>(random_u64(95 + p, i));
      x.emplace_back(bytes.size()), scales.emplace_back(s.size());
      x.back().upload(bytes.data(), bytes.size()), scales.back().upload(s.data(), s.size());
      WB_TRY_CUDA(cudaDeviceSynchronize());
      x_rows.push_back({x.back().data(), 0}), scale_rows.push_back({scales.back().data(), 0});
    }
    // The f32 row window holds four times the bytes: scales go behind the rows.
    const std::uint64_t rows = gpu.rows_window(), behind = rows + static_cast<std::uint64_t>(gpu.exchange().budget().rows * kH);
    gpu.exchange().dispatch(gpu.device_handle(), DType::kU8, x_rows, rows, {scale_rows, kScales, behind}, false, gpu.stream());
    gpu.stream().synchronize();
    for (int p = 0; p < 2; ++p) {
      const ReceiveLayout layout = gpu.handle(p).layout;
      const reference::GroupRoutes views = group.views();
      std::int64_t row = 0;
      for (std::size_t source = 0; source < 2; ++source) {
        for (std::int64_t t = 0; t < group.routes[source].T(); ++t) {
          bool comes = false;
          for (std::int64_t k = 0; k < 6; ++k)
            comes |= group.routes[source].view().id(t, k) >= 0 && group.placement.rank_of(group.routes[source].view().id(t, k)) == p;
          if (!comes) continue;
          std::vector<std::uint8_t> got(kH), got_scales(kScales);
          WB_TRY_CUDA(cudaMemcpy(got.data(), gpu.group().at<unsigned char>(p, rows) + row * kH, kH, cudaMemcpyDeviceToHost));
          WB_TRY_CUDA(cudaMemcpy(got_scales.data(), gpu.group().at<unsigned char>(p, behind) + row * kScales, kScales, cudaMemcpyDeviceToHost));
          for (std::int64_t i = 0; i < kH; ++i)
            ASSERT_EQ(got[static_cast<std::size_t>(i)], static_cast<std::uint8_t>(random_u64(90 + source, static_cast<std::uint64_t>(t * kH + i))));
          for (std::int64_t i = 0; i < kScales; ++i)
            ASSERT_EQ(got_scales[static_cast<std::size_t>(i)], static_cast<std::uint8_t>(random_u64(95 + source, static_cast<std::uint64_t>(t * kScales + i))));
          ++row;
        }
      }
      EXPECT_EQ(row, layout.R());
    }
  }
}

TEST(ExchangeLargeCuda, MoreThanTwoToThe31Elements) {
  WB_NEEDS_GPU();
  constexpr std::int64_t kT = 17000, kH = 16384, kK = 8;  // 136,000 slots, 2.2e9 elements
  ExchangeConfig config;
  config.H = kH, config.E = kK, config.K = kK, config.T_max = kT;
  const int devices[] = {0};
  const std::size_t row = static_cast<std::size_t>(kH) * 2;
  CudaLocalGroup group(1, devices, exchange_window_bytes(config, 1) + row_window_bytes(config, 1, row) + 4096);
  const ExchangeWindows windows = book_exchange_windows(config, 1, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); });
  const std::uint64_t rows_window = group.window("rows", row_window_bytes(config, 1, row));
  DeviceExchange exchange(config, block_placement(kK, 1), local_ranks(group, 0), 0, windows);
  DeviceHandle handle = exchange.make_handle();
  std::vector<std::int16_t> ids(static_cast<std::size_t>(kT * kK));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int16_t>(i % kK);
  const DeviceBuffer d_ids(ids.size() * 2), weights(ids.size() * 4), x(static_cast<std::size_t>(kT) * row), y(static_cast<std::size_t>(kT * kK) * row);
  d_ids.upload(ids.data(), d_ids.bytes()), weights.fill(0);
  std::vector<std::uint16_t> stamp(static_cast<std::size_t>(kH));
  for (const std::int64_t t : {std::int64_t{0}, std::int64_t{16383}, kT - 1}) {
    for (std::size_t h = 0; h < stamp.size(); ++h) stamp[h] = static_cast<std::uint16_t>(h * 31 + static_cast<std::size_t>(t));
    WB_TRY_CUDA(cudaMemcpy(x.as<unsigned char>() + static_cast<std::size_t>(t) * row, stamp.data(), row, cudaMemcpyHostToDevice));
  }
  WB_TRY_CUDA(cudaDeviceSynchronize());
  const CudaStream stream;
  const DeviceRoute routes[] = {{d_ids.data(), weights.as<float>(), kT}};
  const DeviceRows x_rows[] = {{x.data(), 0}}, rows[] = {{group.at<void>(0, rows_window), 0}}, y_rows[] = {{y.data(), 0}};
  exchange.plan(handle, routes, stream);
  exchange.layout(handle, stream);
  exchange.dispatch(handle, DType::kBF16, x_rows, rows_window, true, stream);
  exchange.permute(handle, DType::kBF16, rows, y_rows, stream);
  stream.synchronize();
  for (const std::int64_t e : {std::int64_t{0}, kK - 1}) {
    for (const std::int64_t t : {std::int64_t{0}, std::int64_t{16383}, kT - 1}) {  // all tokens visit all experts: slot e * T + t
      std::vector<std::uint16_t> got(stamp.size());
      WB_TRY_CUDA(cudaMemcpy(got.data(), y.as<unsigned char>() + static_cast<std::size_t>(e * kT + t) * row, row, cudaMemcpyDeviceToHost));
      for (std::size_t h = 0; h < got.size(); ++h)
        ASSERT_EQ(got[h], static_cast<std::uint16_t>(h * 31 + static_cast<std::size_t>(t))) << e << " " << t << " " << h;
    }
  }
}

TEST(ExchangeRefusalsCuda, BadArgumentsAreNamedBeforeALaunch) {
  WB_NEEDS_GPU();
  const int devices[] = {0};
  ExchangeConfig config;
  config.H = 64, config.E = 8, config.K = 2, config.T_max = 16;
  const auto refusal = [&](ExchangeConfig bad, int P) {
    try {
      (void)exchange_window_bytes(bad, P);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  ExchangeConfig bad = config;
  bad.H = 63;
  EXPECT_THAT(refusal(bad, 2), ::testing::HasSubstr("H = 63"));
  bad = config, bad.T_max = 0;
  EXPECT_THAT(refusal(bad, 2), ::testing::HasSubstr("T_max = 0"));
  bad = config, bad.E = 1024, bad.K = 129;
  EXPECT_THAT(refusal(bad, 2), ::testing::HasSubstr("K = 129"));
  bad = config, bad.hierarchy = Hierarchy::kTwoLevel;
  EXPECT_THAT(refusal(bad, 2), ::testing::HasSubstr("two_level"));
  bad = config, bad.E = 7;
  EXPECT_NE(refusal(bad, 2), "");
  CudaLocalGroup group(2, devices, 1 << 20);
  const ExchangeWindows windows = book_exchange_windows(config, 2, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); });
  DeviceExchange exchange(config, block_placement(8, 2), local_ranks(group, 0), 0, windows);
  DeviceHandle handle = exchange.make_handle();
  const DeviceBuffer memory(1 << 16);
  std::vector<DeviceRoute> routes(2, DeviceRoute{memory.data(), memory.as<float>(), 17});
  EXPECT_THROW(exchange.plan(handle, routes, nullptr), Error);
  routes[0].T = routes[1].T = 4, routes[1].ids = nullptr;
  EXPECT_THROW(exchange.plan(handle, routes, nullptr), Error);
  std::vector<DeviceRows> rows(2, DeviceRows{memory.as<unsigned char>() + 4, 0});
  EXPECT_THROW(exchange.dispatch(handle, DType::kBF16, rows, 0, true, nullptr), Error);
  rows.assign(2, DeviceRows{memory.data(), 60});
  EXPECT_THROW(exchange.dispatch(handle, DType::kBF16, rows, 0, true, nullptr), Error);
  rows.assign(1, DeviceRows{memory.data(), 0});
  EXPECT_THROW(exchange.combine(handle, 0, DType::kF32, rows, nullptr), Error);
}

}  // namespace
}  // namespace waybill::cuda

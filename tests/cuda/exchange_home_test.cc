// SPDX-License-Identifier: Apache-2.0
// What a group of one rank does without its links: reduce_home() instead of partials, list_tokens() and permute_own() instead of a dispatch. The bits are those
// of the general calls, which other tests compare with the CPU engine.
#include <gmock/gmock.h>

#include "cuda/exchange_harness.h"

namespace waybill::cuda {
namespace {

using ts::RandomRoute;

struct Case {
  std::int64_t T, K, E, H;
};

// The last has more slots a row than the ring of bulk loads takes.
class ExchangeHomeCuda : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, ExchangeHomeCuda,
                         ::testing::Values(Case{1, 1, 4, 64}, Case{333, 4, 16, 1032}, Case{130, 36, 256, 512}, Case{700, 8, 64, 2048}, Case{40, 80, 128, 192}));

class Home {
 public:
  Home(const Case& c, double drop, double receive_factor = 0)
      : group_(ts::random_group({c.T}, c.K, c.E, c.H, RandomRoute{.seed = 21, .drop = drop}, false)),
        gpu_(config(receive_factor), group_.placement, options()) {
    gpu_.upload(group_);
    gpu_.step();
  }
  static GpuOptions options() {
    GpuOptions options;
    options.x_dtype = options.out_dtype = DType::kBF16;
    return options;
  }
  ExchangeConfig config(double receive_factor) const {
    ExchangeConfig c = config_of(group_);
    c.alignment = 8, c.receive_factor = receive_factor, c.mode = receive_factor > 0 ? ExchangeMode::kCaptured : ExchangeMode::kEager;
    return c;
  }
  // `count` random values of `dtype`.
  DeviceBuffer values(DType dtype, std::int64_t count, std::uint64_t seed) {
    const Tensor t = ts::to_tensor(ts::normal_values(static_cast<std::size_t>(count), seed), 1, count, dtype);
    DeviceBuffer buffer(static_cast<std::size_t>(count) * size_bytes(dtype));
    buffer.upload(t.view().data, buffer.bytes(), stream());
    stream().synchronize();
    return buffer;
  }
  std::vector<std::byte> bytes(const DeviceBuffer& buffer) {
    std::vector<std::byte> all(buffer.bytes());
    buffer.download(all.data(), all.size(), stream());
    stream().synchronize();
    return all;
  }
  DeviceExchange& exchange() { return gpu_.exchange(); }
  DeviceHandle& handle() { return gpu_.device_handle(); }
  const CudaStream& stream() { return gpu_.stream(); }
  GpuGroup& gpu() { return gpu_; }
  std::int64_t slots() { return exchange().budget().padded_slots; }

 private:
  ts::Group group_;
  GpuGroup gpu_;
};

TEST_P(ExchangeHomeCuda, SumsAreThoseOfPartialsThatCrossNoLink) {
  WB_NEEDS_GPU();
  const Case& c = GetParam();
  for (const double drop : {0.0, 0.5, 1.0}) {  // with tokens that go nowhere, then none but these
    Home home(c, drop);
    const DeviceBuffer y = home.values(DType::kBF16, home.slots() * c.H, 1), base = home.values(DType::kF32, c.T * c.H, 2);
    const std::vector<DeviceRows> rows{{y.data(), 0}}, z{{home.gpu().group().at<void>(0, home.gpu().z_window()), 0}};
    for (const DType out_dtype : {DType::kBF16, DType::kF32}) {
      for (const bool has_base : {false, true}) {
        SCOPED_TRACE(fmt::format("drop {}, out {}, base {}", drop, to_string(out_dtype), has_base));
        DeviceBuffer want(static_cast<std::size_t>(c.T * c.H) * size_bytes(out_dtype)), got(want.bytes()), in_blocks(want.bytes());
        want.fill(0x11, home.stream()), got.fill(0xff, home.stream()), in_blocks.fill(0xff, home.stream());
        std::vector<const void*> bases;
        if (has_base) bases.push_back(base.data());
        DeviceExchange& e = home.exchange();
        e.unpermute_reduce(home.handle(), DType::kBF16, rows, false, DType::kF32, z, true, home.stream());
        e.combine(home.handle(), home.gpu().z_window(), out_dtype, std::vector<DeviceRows>{{want.data(), 0}}, home.stream(), bases);
        e.reduce_home(home.handle(), DType::kBF16, rows, out_dtype, std::vector<DeviceRows>{{got.data(), 0}}, home.stream(), bases);
        EXPECT_EQ(home.bytes(got), home.bytes(want));
        for (std::int64_t first = 0; first < c.H; first += 64) {
          const std::int64_t columns = std::min<std::int64_t>(64, c.H - first);
          std::vector<const void*> part;
          if (has_base) part.push_back(base.as<float>() + first);
          e.reduce_home(home.handle(), DType::kBF16, std::vector<DeviceRows>{{y.as<std::uint16_t>() + first, c.H}}, out_dtype,
                        std::vector<DeviceRows>{{in_blocks.as<unsigned char>() + static_cast<std::size_t>(first) * size_bytes(out_dtype), c.H}}, home.stream(),
                        part, columns, /*num_sms=*/8);
        }
        EXPECT_EQ(home.bytes(in_blocks), home.bytes(want)) << "in blocks of columns, on 8 SMs";
      }
    }
  }
}

TEST_P(ExchangeHomeCuda, SlotsNameTokensAndOwnRowsNeedNoDispatch) {
  WB_NEEDS_GPU();
  const Case& c = GetParam();
  Home home(c, 0.5);
  DeviceExchange& e = home.exchange();
  const HostHandle rows = home.gpu().handle(0);
  ASSERT_TRUE(rows.valid);
  std::vector<std::int32_t> token_of(rows.entries.size(), -1), want;
  for (std::size_t t = 0; t < rows.entries.size(); ++t) {
    if (rows.entries[t].rank >= 0) token_of.at(static_cast<std::size_t>(rows.entries[t].row)) = static_cast<std::int32_t>(t);
  }
  for (const std::int32_t row : rows.layout.slot_row) want.push_back(row < 0 ? -1 : token_of.at(static_cast<std::size_t>(row)));
  const DeviceBuffer x = home.values(DType::kBF16, c.T * c.H, 3);
  DeviceBuffer dispatched(static_cast<std::size_t>(home.slots() * c.H) * 2), own(dispatched.bytes());
  dispatched.fill(0xff, home.stream()), own.fill(0xff, home.stream());
  const std::vector<DeviceRows> from{{x.data(), 0}}, window{{home.gpu().group().at<void>(0, home.gpu().rows_window()), 0}};
  e.dispatch(home.handle(), DType::kBF16, from, home.gpu().rows_window(), /*after_plan=*/false, home.stream());
  e.permute(home.handle(), DType::kBF16, window, std::vector<DeviceRows>{{dispatched.data(), 0}}, home.stream());
  e.permute_own(home.handle(), DType::kBF16, from, std::vector<DeviceRows>{{own.data(), 0}}, home.stream());
  EXPECT_EQ(home.bytes(own), home.bytes(dispatched));  // padding among it
  own.fill(0xff, home.stream());
  for (std::int64_t first = 0; first < c.H; first += 64) {
    e.permute_own(home.handle(), DType::kBF16, std::vector<DeviceRows>{{x.as<std::uint16_t>() + first, c.H}},
                  std::vector<DeviceRows>{{own.as<std::uint16_t>() + first, c.H}}, home.stream(), std::min<std::int64_t>(64, c.H - first));
  }
  EXPECT_EQ(home.bytes(own), home.bytes(dispatched)) << "in blocks of columns";
  for (const bool fused : {true, false}) {
    e.tuning().fused_layout = fused;
    e.list_tokens();
    e.layout(home.handle(), home.stream());
    EXPECT_EQ(home.gpu().handle(0).layout.slot_row, want) << "fused layout " << fused;
    EXPECT_EQ(home.gpu().handle(0).layout.slot_position, rows.layout.slot_position) << "fused layout " << fused;
  }
}

TEST(ExchangeHomeCuda, AnExceededBudgetGivesZeros) {
  WB_NEEDS_GPU();
  for (const std::int64_t K : {8, 80}) {
    const Case c{64, K, 128, 256};
    Home home(c, 0, 0.5);
    const DeviceBuffer y = home.values(DType::kBF16, home.slots() * c.H, 1), base = home.values(DType::kF32, c.T * c.H, 2);
    DeviceBuffer out(static_cast<std::size_t>(c.T * c.H) * 2);
    out.fill(0xff, home.stream());
    ASSERT_FALSE(home.gpu().handle(0).valid);
    home.exchange().reduce_home(home.handle(), DType::kBF16, std::vector<DeviceRows>{{y.data(), 0}}, DType::kBF16, std::vector<DeviceRows>{{out.data(), 0}},
                                home.stream(), std::vector<const void*>{base.data()});
    EXPECT_EQ(home.bytes(out), std::vector<std::byte>(out.bytes())) << "K = " << K;
  }
}

TEST(ExchangeHomeCuda, SeveralRanksAreRefused) {
  WB_NEEDS_GPU();
  const ts::Group group = ts::random_group({10, 10}, 2, 4, 64, RandomRoute{}, false);
  GpuGroup gpu(config_of(group), group.placement, {});
  EXPECT_THROW(gpu.exchange().list_tokens(), Error);
  const std::vector<DeviceRows> rows{{nullptr, 0}};
  EXPECT_THROW(gpu.exchange().reduce_home(gpu.device_handle(), DType::kF32, rows, DType::kF32, rows, gpu.stream()), Error);
}

}  // namespace
}  // namespace waybill::cuda

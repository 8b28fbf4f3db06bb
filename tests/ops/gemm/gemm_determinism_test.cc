// SPDX-License-Identifier: Apache-2.0
// What a result may not depend on: threads, repeats, other rows, rows that belong to nobody, the width of the machine.
#include "ops/gemm/gemm_test_util.h"

namespace waybill::testing {
namespace {

class GemmBits : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::force_gemm(GetParam().c_str()); }
  void TearDown() override { detail::force_gemm(""); }
};
INSTANTIATE_TEST_SUITE_P(Implementations, GemmBits, ::testing::ValuesIn(implementations()), [](const auto& param) { return param.param; });

struct Results {
  Tensor y, da, d_weights, d_bias, c;
};

// Every product once, with sizes that cross all tile borders.
Results run_everything(ThreadPool* pool) {
  const std::vector<std::int64_t> sizes = {5, 0, 61, 130, 1};
  const std::int64_t N = 70, C = 90, S = 197;
  const Stream stream = Stream::cpu(pool);
  const Tensor a = random_tensor(DType::kF32, {S, C}, 1), w = random_tensor(DType::kBF16, {5, N, C}, 2), dy = random_tensor(DType::kF32, {S, N}, 3);
  const Tensor offsets = offsets_of(sizes);
  Results out{Tensor(DType::kF32, {S, N}), Tensor(DType::kBF16, {S, C}), random_tensor(DType::kF32, {5, N, C}, 4), Tensor(DType::kF32, {5, N}),
              Tensor(DType::kF32, {N, N})};
  grouped_gemm({a, w, offsets, out.y, WeightLayout::kLNC, {}, {}, false}, stream);
  grouped_gemm_dgrad({dy, w, offsets, out.da, WeightLayout::kLNC, false}, stream);
  out.d_bias.fill_zero();
  grouped_gemm_wgrad({a, dy, offsets, out.d_weights, WeightLayout::kLNC, {}, out.d_bias, true}, stream);
  gemm({dy, dy, out.c, true, false, false}, stream);
  return out;
}

void expect_equal(const Results& x, const Results& y) {
  EXPECT_TRUE(bit_equal(x.y, y.y));
  EXPECT_TRUE(bit_equal(x.da, y.da));
  EXPECT_TRUE(bit_equal(x.d_weights, y.d_weights));
  EXPECT_TRUE(bit_equal(x.d_bias, y.d_bias));
  EXPECT_TRUE(bit_equal(x.c, y.c));
}

TEST_P(GemmBits, AreEqualForAnyNumberOfThreadsAndOnRepeat) {
  const Results alone = run_everything(nullptr);
  expect_equal(alone, run_everything(nullptr));
  for (const int threads : {1, 2, 3, 7}) {
    SCOPED_TRACE(threads);
    ThreadPool pool(threads);
    expect_equal(alone, run_everything(&pool));
  }
}

TEST_P(GemmBits, OfARowDoNotDependOnOtherRows) {
  const std::int64_t N = 45, C = 400;
  const Tensor a = random_tensor(DType::kF32, {40, C}, 1), w = random_tensor(DType::kF32, {1, N, C}, 2);
  const Tensor together(DType::kF32, {40, N}), offsets = offsets_of({40});
  grouped_gemm({a, w, offsets, together, WeightLayout::kLNC, {}, {}, false});
  const Tensor one = offsets_of({1}), alone(DType::kF32, {1, N});
  for (const std::int32_t row : {0, 13, 14, 27, 39}) {
    const Tensor rows = index_tensor({row});
    grouped_gemm({a, w, one, alone, WeightLayout::kLNC, rows, {}, false});
    EXPECT_EQ(std::memcmp(alone.as<float>(), together.as<float>() + row * N, sizeof(float) * static_cast<std::size_t>(N)), 0) << "row " << row;
  }
}

TEST_P(GemmBits, IgnoreWhatFollowsTheLastGroup) {
  const std::int64_t N = 33, C = 50, S = 300, capacity = 512;
  const Tensor offsets = offsets_of({100, 0, 200}), w = random_tensor(DType::kF32, {3, N, C}, 1);
  std::vector<Results> all;
  for (const float tail : {0.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Tensor a = random_tensor(DType::kF32, {capacity, C}, 2), dy = random_tensor(DType::kF32, {capacity, N}, 3);
    for (std::int64_t i = S * C; i < a.size(); ++i) a.as<float>()[i] = tail;
    for (std::int64_t i = S * N; i < dy.size(); ++i) dy.as<float>()[i] = tail;
    all.push_back({Tensor::zeros(DType::kF32, {capacity, N}), Tensor::zeros(DType::kF32, {capacity, C}), Tensor(DType::kF32, {3, N, C}),
                   Tensor(DType::kF32, {3, N}), Tensor::zeros(DType::kF32, {1, 1})});
    Results& out = all.back();
    grouped_gemm({a, w, offsets, out.y, WeightLayout::kLNC, {}, {}, false});
    grouped_gemm_dgrad({dy, w, offsets, out.da, WeightLayout::kLNC, false});
    grouped_gemm_wgrad({a, dy, offsets, out.d_weights, WeightLayout::kLNC, {}, out.d_bias, false});
  }
  expect_equal(all[0], all[1]);
  expect_equal(all[0], all[2]);
  for (std::int64_t i = 0; i < all[1].d_weights.size(); ++i) ASSERT_TRUE(std::isfinite(all[1].d_weights.as<float>()[i]));
}

TEST_P(GemmBits, ABadRowSpoilsOnlyItself) {
  const Tensor a = random_tensor(DType::kF32, {30, 20}, 1), w = random_tensor(DType::kF32, {1, 25, 20}, 2), offsets = offsets_of({30});
  const Tensor clean(DType::kF32, {30, 25}), spoilt(DType::kF32, {30, 25});
  grouped_gemm({a, w, offsets, clean, WeightLayout::kLNC, {}, {}, false});
  a.as<float>()[11 * 20 + 3] = std::numeric_limits<float>::quiet_NaN();
  grouped_gemm({a, w, offsets, spoilt, WeightLayout::kLNC, {}, {}, false});
  for (std::int64_t s = 0; s < 30; ++s) {
    for (std::int64_t n = 0; n < 25; ++n) {
      if (s == 11) {
        EXPECT_TRUE(std::isnan(spoilt.as<float>()[s * 25 + n]));
      } else {
        ASSERT_EQ(spoilt.as<float>()[s * 25 + n], clean.as<float>()[s * 25 + n]);
      }
    }
  }
}

TEST_P(GemmBits, APaddingRowIsZeroEvenBesideInfiniteWeights) {
  const Tensor a = random_tensor(DType::kF32, {2, 20}, 1), offsets = offsets_of({3}), rows = index_tensor({1, -1, 0});
  const Tensor w = filled_tensor(DType::kF32, {1, 33, 20}, std::numeric_limits<float>::infinity());
  const Tensor y = filled_tensor(DType::kF32, {3, 33}, 2.0f), added = filled_tensor(DType::kF32, {3, 33}, 2.0f);
  grouped_gemm({a, w, offsets, y, WeightLayout::kLNC, rows, {}, false});
  grouped_gemm({a, w, offsets, added, WeightLayout::kLNC, rows, {}, true});
  for (std::int64_t n = 0; n < 33; ++n) {
    EXPECT_EQ(y.as<float>()[33 + n], 0.0f);
    EXPECT_EQ(added.as<float>()[33 + n], 2.0f);
  }
}

// Both fuse multiply and add and sum in the same order.
TEST(GemmImplementations, Avx2AndAvx512AgreeBitForBit) {
  if (detail::usable_kernels().count < 3) GTEST_SKIP() << "needs a machine with AVX-512";
  const Forced wide("avx512");
  const Results x = run_everything(nullptr);
  detail::force_gemm("avx2");
  expect_equal(x, run_everything(nullptr));
}

TEST(GemmImplementations, AnUnknownNameIsRefusedWithTheKnownOnes) {
  try {
    detail::force_gemm("avx1024");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("\"avx1024\""), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos);
  }
}

TEST(GemmMemory, ScratchIsAllocatedOnceAThread) {
  run_everything(nullptr);
  const Tensor a = random_tensor(DType::kF32, {64, 32}, 1), w = random_tensor(DType::kF32, {1, 16, 32}, 2), y(DType::kF32, {64, 16});
  const Tensor offsets = offsets_of({64});
  const AllocationTrace trace;
  for (int i = 0; i < 3; ++i) grouped_gemm({a, w, offsets, y, WeightLayout::kLNC, {}, {}, false});
  EXPECT_EQ(trace.count(), 0u);
}

}  // namespace
}  // namespace waybill::testing

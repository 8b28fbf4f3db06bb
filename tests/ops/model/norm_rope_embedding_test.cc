// SPDX-License-Identifier: Apache-2.0
#include "op_test_util.h"
#include "ops/model/embedding.h"
#include "ops/model/rms_norm.h"
#include "ops/model/rope.h"

namespace waybill {
namespace {

using testing::dot;
using testing::expect_gradient;
using testing::random_tensor;
using testing::relative_difference;

constexpr float kEpsilon = 1e-5f;

TEST(RmsNorm, WorkedExample) {
  Tensor x(DType::kF32, {1, 2}), w(DType::kF32, {2}), y(DType::kF32, {1, 2});
  x.as<float>()[0] = 3;
  x.as<float>()[1] = 4;
  w.as<float>()[0] = 2;
  w.as<float>()[1] = 10;
  float rstd = 0;
  rms_norm_forward(x, w, 0.0f, y, &rstd);  // mean square 12.5
  EXPECT_NEAR(rstd, 1 / std::sqrt(12.5), 1e-7);
  EXPECT_NEAR(y.as<float>()[0], 6 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(y.as<float>()[1], 40 / std::sqrt(12.5), 1e-5);
}

TEST(RmsNorm, MatchesTheReferenceAtEveryWidthAndRowCount) {
  for (const std::int64_t width : {1, 7, 16, 31, 64, 100, 128})
    for (const std::int64_t rows : {0, 1, 63, 64, 130}) {
      const Tensor x = random_tensor({rows, width}, 1), w = random_tensor({width}, 2), dy = random_tensor({rows, width}, 3);
      Tensor y(DType::kF32, {rows, width}), y_ref(DType::kF32, {rows, width});
      std::vector<float> rstd(static_cast<std::size_t>(rows)), rstd_ref(rstd.size());
      rms_norm_forward(x, w, kEpsilon, y, rstd.data());
      ref::rms_norm_forward(x, w, kEpsilon, y_ref, rstd_ref.data());
      EXPECT_LE(relative_difference(y, y_ref), 2e-6) << width << " x " << rows;
      for (const bool accumulate : {false, true}) {
        Tensor dx = random_tensor({rows, width}, 4), dx_ref = random_tensor({rows, width}, 4), dw = random_tensor({width}, 5),
               dw_ref = random_tensor({width}, 5);
        rms_norm_backward(x, w, rstd_ref.data(), dy, dx, accumulate, dw);
        ref::rms_norm_backward(x, w, rstd_ref.data(), dy, dx_ref, accumulate, dw_ref);
        EXPECT_LE(relative_difference(dx, dx_ref), 5e-6) << width << " x " << rows;
        EXPECT_LE(relative_difference(dw, dw_ref), 5e-6) << width << " x " << rows;
      }
    }
}

TEST(RmsNorm, GradientsAgreeWithFiniteDifferences) {
  Tensor x = random_tensor({5, 24}, 1), w = random_tensor({24}, 2), dx(DType::kF32, {5, 24}), dw = Tensor::zeros(DType::kF32, {24});
  const Tensor dy = random_tensor({5, 24}, 3);
  Tensor y(DType::kF32, {5, 24});
  std::vector<float> rstd(5);
  rms_norm_forward(x, w, kEpsilon, y, rstd.data());
  rms_norm_backward(x, w, rstd.data(), dy, dx, false, dw);
  const auto value = [&] {
    rms_norm_forward(x, w, kEpsilon, y, nullptr);
    return dot(y, dy);
  };
  expect_gradient("x", x, dx, value, 1e-2, 1e-3);
  expect_gradient("weight", w, dw, value, 1e-2, 1e-3);
}

TEST(RmsNorm, SameBitsForAnyNumberOfThreads) {
  const Tensor x = random_tensor({300, 48}, 1), w = random_tensor({48}, 2), dy = random_tensor({300, 48}, 3);
  Tensor y(DType::kF32, {300, 48}), dx1(DType::kF32, {300, 48}), dx3(DType::kF32, {300, 48}), dw1 = Tensor::zeros(DType::kF32, {48}),
                                                                                              dw3 = Tensor::zeros(DType::kF32, {48});
  std::vector<float> rstd(300);
  ThreadPool pool(3);
  rms_norm_forward(x, w, kEpsilon, y, rstd.data(), Stream::cpu(&pool));
  rms_norm_backward(x, w, rstd.data(), dy, dx1, false, dw1);
  rms_norm_backward(x, w, rstd.data(), dy, dx3, false, dw3, Stream::cpu(&pool));
  EXPECT_EQ(relative_difference(dx1, dx3), 0.0);
  EXPECT_EQ(relative_difference(dw1, dw3), 0.0);
}

TEST(Rope, MatchesTheReferenceAndItsInverseUndoesIt) {
  for (const std::int64_t D : {2, 8, 20, 32, 64}) {
    const std::int64_t seq_len = 9;
    Tensor x = random_tensor({2 * seq_len, 3, D}, 1), expected = random_tensor({2 * seq_len, 3, D}, 1);
    const Tensor original = random_tensor({2 * seq_len, 3, D}, 1);
    const RopeTable table(16, D, 10000.0f);
    rope(table, x, seq_len, false);
    ref::rope(10000.0f, expected, seq_len, false);
    EXPECT_LE(relative_difference(x, expected), 1e-6) << D;
    EXPECT_GT(relative_difference(x, original), 0.1) << D;
    rope(table, x, seq_len, true);
    EXPECT_LE(relative_difference(x, original), 1e-6) << D;
  }
}

TEST(Rope, PositionZeroIsUnchangedAndProductsDependOnDistanceOnly) {
  const std::int64_t D = 16;
  const RopeTable table(40, D, 10000.0f);
  const auto product = [&](std::int64_t i, std::int64_t j) {
    Tensor q = Tensor::zeros(DType::kF32, {40, 1, D}), k = Tensor::zeros(DType::kF32, {40, 1, D});
    for (std::int64_t c = 0; c < D; ++c) {
      q.as<float>()[i * D + c] = random_normal(1, static_cast<std::uint64_t>(c));
      k.as<float>()[j * D + c] = random_normal(2, static_cast<std::uint64_t>(c));
    }
    rope(table, q, 40, false);
    rope(table, k, 40, false);
    double total = 0;
    for (std::int64_t c = 0; c < D; ++c) total += static_cast<double>(q.as<float>()[i * D + c]) * k.as<float>()[j * D + c];
    return total;
  };
  EXPECT_NEAR(product(5, 2), product(38, 35), 2e-5);
  EXPECT_GT(std::fabs(product(5, 2) - product(5, 4)), 1e-3);
  double plain = 0;
  for (std::uint64_t c = 0; c < static_cast<std::uint64_t>(D); ++c) plain += static_cast<double>(random_normal(1, c)) * random_normal(2, c);
  EXPECT_NEAR(product(0, 0), plain, 1e-6);
}

TEST(Rope, RefusesAnOddHeadAndTooManyPositions) {
  EXPECT_THROW(RopeTable(4, 7, 10000.0f), Error);
  const RopeTable table(4, 8, 10000.0f);
  Tensor x = Tensor::zeros(DType::kF32, {5, 1, 8});
  EXPECT_THROW(rope(table, x, 5, false), Error);
}

TEST(Embedding, GathersRowsAndScattersGradientsInOrder) {
  const Tensor table = random_tensor({4, 3}, 1), dy = random_tensor({5, 3}, 2);
  const std::int32_t tokens[5] = {2, -1, 2, 0, 3};
  Tensor y(DType::kF32, {5, 3}), d_table = Tensor::zeros(DType::kF32, {4, 3});
  embedding_forward(table, tokens, 5, y);
  embedding_backward(tokens, 5, dy, d_table);
  const float *w = table.as<float>(), *g = dy.as<float>();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(y.as<float>()[i], w[6 + i]);
    EXPECT_EQ(y.as<float>()[3 + i], 0.0f);
    EXPECT_EQ(y.as<float>()[9 + i], w[i]);
    EXPECT_EQ(d_table.as<float>()[i], g[9 + i]);
    EXPECT_EQ(d_table.as<float>()[3 + i], 0.0f);
    EXPECT_EQ(d_table.as<float>()[6 + i], g[i] + g[6 + i]);
  }
}

TEST(Embedding, RefusesATokenOutsideTheTable) {
  const Tensor table = random_tensor({4, 3}, 1);
  Tensor y(DType::kF32, {1, 3});
  for (const std::int32_t bad : {4, -2}) EXPECT_THROW(embedding_forward(table, &bad, 1, y), Error) << bad;
}

}  // namespace
}  // namespace waybill

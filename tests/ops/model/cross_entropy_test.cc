// SPDX-License-Identifier: Apache-2.0
#include "ops/model/cross_entropy.h"

#include "op_test_util.h"

namespace waybill {
namespace {

using testing::expect_gradient;
using testing::random_tensor;
using testing::relative_difference;

std::vector<std::int32_t> random_targets(std::int64_t T, std::int64_t vocab) {
  std::vector<std::int32_t> targets(static_cast<std::size_t>(T));
  for (std::size_t t = 0; t < targets.size(); ++t) targets[t] = static_cast<std::int32_t>(random_u64(9, t) % static_cast<std::uint64_t>(vocab + 1)) - 1;
  return targets;
}

TEST(CrossEntropy, UniformLogitsCostTheLogOfTheVocabulary) {
  const Tensor x = Tensor::zeros(DType::kF32, {3, 4}), head = random_tensor({10, 4}, 1);
  const std::int32_t targets[3] = {0, 9, -1};
  const CrossEntropySum sum = cross_entropy_forward(x, head, targets);
  EXPECT_EQ(sum.count, 2);
  EXPECT_NEAR(sum.loss, 2 * std::log(10.0), 1e-6);
}

TEST(CrossEntropy, MatchesTheReferenceAcrossChunksAndOddVocabularies) {
  struct Case {
    std::int64_t T, H, vocab;
  };
  for (const Case& c : {Case{0, 4, 5}, Case{1, 3, 1}, Case{37, 8, 33}, Case{1030, 16, 50}, Case{40, 8, 40000}}) {
    const Tensor x = random_tensor({c.T, c.H}, 1), head = random_tensor({c.vocab, c.H}, 2);
    const std::vector<std::int32_t> targets = random_targets(c.T, c.vocab);
    Tensor dx = random_tensor({c.T, c.H}, 3), dx_ref = random_tensor({c.T, c.H}, 3), dh = random_tensor({c.vocab, c.H}, 4),
           dh_ref = random_tensor({c.vocab, c.H}, 4);
    const CrossEntropySum sum = cross_entropy_forward_backward(x, head, targets.data(), 0.25f, dx, dh);
    const CrossEntropySum expected = ref::cross_entropy(x, head, targets.data(), 0.25f, dx_ref, dh_ref);
    EXPECT_EQ(sum.count, expected.count);
    EXPECT_NEAR(sum.loss, expected.loss, 1e-6 * std::max(1.0, expected.loss)) << c.vocab;
    // dx sums `vocab` rounded products in fp32.
    EXPECT_LE(relative_difference(dx, dx_ref), std::max(5e-6, 3e-7 * std::sqrt(static_cast<double>(c.vocab)))) << c.vocab;
    EXPECT_LE(relative_difference(dh, dh_ref), 5e-6) << c.vocab;
    EXPECT_EQ(cross_entropy_forward(x, head, targets.data()).loss, sum.loss);
  }
}

TEST(CrossEntropy, GradientsAgreeWithFiniteDifferences) {
  Tensor x = random_tensor({6, 5}, 1), head = random_tensor({11, 5}, 2), dx(DType::kF32, {6, 5}), dh = Tensor::zeros(DType::kF32, {11, 5});
  const std::vector<std::int32_t> targets = random_targets(6, 11);
  cross_entropy_forward_backward(x, head, targets.data(), 1.0f, dx, dh);
  const auto value = [&] { return cross_entropy_forward(x, head, targets.data()).loss; };
  expect_gradient("x", x, dx, value, 1e-2, 1e-3);
  expect_gradient("head", head, dh, value, 1e-2, 1e-3);
}

TEST(CrossEntropy, PaddingRowsGetExactlyZeroWhateverTheirInput) {
  Tensor x = random_tensor({2, 4}, 1), dx = random_tensor({2, 4}, 5);
  for (int i = 4; i < 8; ++i) x.as<float>()[i] = 1e30f;
  const Tensor head = random_tensor({6, 4}, 2);
  Tensor dh = Tensor::zeros(DType::kF32, {6, 4});
  const std::int32_t targets[2] = {3, -1};
  const CrossEntropySum sum = cross_entropy_forward_backward(x, head, targets, 1.0f, dx, dh);
  EXPECT_EQ(sum.count, 1);
  EXPECT_TRUE(std::isfinite(sum.loss));
  for (int i = 4; i < 8; ++i) EXPECT_EQ(dx.as<float>()[i], 0.0f);
  for (std::int64_t i = 0; i < dh.size(); ++i) EXPECT_TRUE(std::isfinite(dh.as<float>()[i]));
}

TEST(CrossEntropy, LogitsOfALargeVocabularyNeverExistAtOnce) {
  const std::int64_t T = 256, H = 4, vocab = 60000;
  const Tensor x = random_tensor({T, H}, 1), head = random_tensor({vocab, H}, 2);
  const std::vector<std::int32_t> targets = random_targets(T, vocab);
  const AllocationTrace trace;
  cross_entropy_forward(x, head, targets.data());
  EXPECT_LE(trace.largest_bytes(), static_cast<std::size_t>(16 * vocab) * sizeof(float));
}

TEST(CrossEntropy, SameBitsForAnyNumberOfThreads) {
  const Tensor x = random_tensor({200, 16}, 1), head = random_tensor({300, 16}, 2);
  const std::vector<std::int32_t> targets = random_targets(200, 300);
  Tensor dx1(DType::kF32, {200, 16}), dx3(DType::kF32, {200, 16}), dh1 = Tensor::zeros(DType::kF32, {300, 16}), dh3 = Tensor::zeros(DType::kF32, {300, 16});
  ThreadPool pool(3);
  const double a = cross_entropy_forward_backward(x, head, targets.data(), 0.1f, dx1, dh1).loss;
  const double b = cross_entropy_forward_backward(x, head, targets.data(), 0.1f, dx3, dh3, Stream::cpu(&pool)).loss;
  EXPECT_EQ(a, b);
  EXPECT_EQ(relative_difference(dx1, dx3), 0.0);
  EXPECT_EQ(relative_difference(dh1, dh3), 0.0);
}

TEST(CrossEntropy, RefusesATargetOutsideTheVocabulary) {
  const Tensor x = random_tensor({1, 4}, 1), head = random_tensor({6, 4}, 2);
  for (const std::int32_t bad : {6, -2}) EXPECT_THROW(cross_entropy_forward(x, head, &bad), Error) << bad;
}

}  // namespace
}  // namespace waybill

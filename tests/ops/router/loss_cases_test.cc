// SPDX-License-Identifier: Apache-2.0
// Field cases F07 to F11 and F13 (their router parts): auxiliary losses, padding, layouts, offsets.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "ops/router/router_fixture.h"
#include "waybill/balance.h"

namespace waybill {
namespace {

using test::RouterCase;
using test::RouterResult;
using Ids = std::vector<std::int32_t>;

class RouterLossCases : public ::testing::TestWithParam<const char*> {
 protected:
  test::ForceRouter force_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Implementations, RouterLossCases, ::testing::Values("ref", "fast"), [](const auto& suite) { return std::string(suite.param); });

constexpr float kFar = -200.0f;  // softmax of {0, kFar, ...} is exactly {1, 0, ...}

RouterLossConfig aux_loss(float c) {
  RouterLossConfig config;
  config.aux_coefficient = c;
  return config;
}

RouterLossConfig sequence_loss(float c, std::int64_t length) {
  RouterLossConfig config;
  config.sequence_coefficient = c;
  config.sequence_length = length;
  return config;
}

// T rows that all hold `row`.
std::vector<float> repeat(std::int64_t T, const std::vector<float>& row) {
  std::vector<float> x;
  for (std::int64_t t = 0; t < T; ++t) x.insert(x.end(), row.begin(), row.end());
  return x;
}

std::vector<std::int32_t> counts_of(const Route& route) { return {route.view().counts, route.view().counts + route.E()}; }

TEST_P(RouterLossCases, F07_PaddingRowsAreNoTokens) {
  std::vector<float> x = repeat(4, {0, 0, 0, 0});
  const std::vector<float> padding = repeat(4, {0, kFar, kFar, kFar});
  x.insert(x.end(), padding.begin(), padding.end());
  RouterCase c(4, 1, ScoreFunction::kSoftmax, x);
  c.config.renormalise = false;
  c.padding_mask = {0, 0, 0, 0, 1, 1, 1, 1};
  c.replay = {0, 1, 2, 3, 0, 0, 0, 0};
  const RouterResult result = test::forward(c);
  for (std::int64_t t = 0; t < 8; ++t) EXPECT_EQ(result.ids(t)[0], t < 4 ? t : -1);
  EXPECT_EQ(result.counts(), (Ids{1, 1, 1, 1}));
  EXPECT_NEAR(test::losses(c, aux_loss(1), result.route).aux, 1.0, 1e-6);

  const std::vector<std::int64_t> counts{1, 1, 1, 1};
  std::vector<float> bias(4, 0.5f);
  update_expert_bias(bias, counts, 0.001f);
  EXPECT_EQ(bias, std::vector<float>(4, 0.5f));

  std::fill(c.logits.begin() + 16, c.logits.end(), 10.0f);
  RouterLossConfig z;
  z.z_coefficient = 1;
  EXPECT_NEAR(test::losses(c, z, result.route).z, 1.921812, 2e-6);

  RouterLossConfig all = aux_loss(1);
  all.z_coefficient = 1;
  const std::vector<float> d = test::backward(c, all, result.route, std::vector<float>(8, 1.0f));
  for (std::size_t i = 16; i < 32; ++i) EXPECT_EQ(d[i], 0.0f);
  for (std::int64_t t = 4; t < 8; ++t) EXPECT_EQ(result.weights(t)[0], 0.0f);
  EXPECT_NE(d[0], 0.0f);
}

TEST_P(RouterLossCases, F07_TMayDifferFromE) {
  RouterCase c(4, 1, ScoreFunction::kSoftmax, repeat(64, {0, 0, 0, 0}));
  for (std::int32_t t = 0; t < 64; ++t) {
    c.padding_mask.push_back(t < 32 ? 0 : 1);
    c.replay.push_back(t % 4);
  }
  const RouterResult result = test::forward(c);
  EXPECT_NEAR(test::losses(c, aux_loss(1), result.route).aux, 1.0, 1e-6);
  EXPECT_EQ(result.counts(), (Ids{8, 8, 8, 8}));
}

TEST_P(RouterLossCases, F07_ABatchOfOnlyPaddingChangesNothing) {
  RouterCase c(4, 1, ScoreFunction::kSoftmax, test::normal_logits(8, 4, 1));
  c.padding_mask.assign(8, 1);
  const RouterResult result = test::forward(c);
  RouterLossConfig config = sequence_loss(1, 4);
  config.aux_coefficient = config.z_coefficient = 1;
  const RouterLosses losses = test::losses(c, config, result.route);
  EXPECT_EQ(losses.aux, 0.0);
  EXPECT_EQ(losses.z, 0.0);
  EXPECT_EQ(losses.sequence, 0.0);
  EXPECT_EQ(result.counts(), (Ids{0, 0, 0, 0}));
  EXPECT_EQ(result.status.num_short_rows, 0);
  EXPECT_EQ(result.status.num_nonfinite_rows, 0);
  std::vector<float> bias{0.1f, 0.2f, 0.3f, 0.4f};
  update_expert_bias(bias, std::vector<std::int64_t>(4, 0), 0.001f);
  EXPECT_EQ(bias, (std::vector<float>{0.1f, 0.2f, 0.3f, 0.4f}));
  EXPECT_EQ(test::backward(c, config, result.route, std::vector<float>(8, 1.0f)), std::vector<float>(32, 0.0f));
}

TEST_P(RouterLossCases, F08_TheSequenceLossIsAMeanOverSequences) {
  for (const std::int64_t B : {1, 2}) {
    RouterCase c(4, 1, ScoreFunction::kSoftmax, repeat(4 * B, {0, 0, 0, 0}));
    for (std::int32_t t = 0; t < 4 * B; ++t) c.replay.push_back(t % 4);
    EXPECT_NEAR(test::losses(c, sequence_loss(1, 4), test::forward(c).route).sequence, 1.0, 1e-6);
  }
  std::vector<float> x = repeat(4, {0, 0, 0, 0});
  const std::vector<float> hot = repeat(4, {0, kFar, kFar, kFar});
  x.insert(x.end(), hot.begin(), hot.end());
  RouterCase c(4, 1, ScoreFunction::kSoftmax, x);
  c.replay = {0, 1, 2, 3, 0, 0, 0, 0};
  c.padding_mask = {0, 0, 0, 0, 0, 0, 1, 1};
  EXPECT_NEAR(test::losses(c, sequence_loss(1, 4), test::forward(c).route).sequence, 2.5, 1e-6);

  RouterCase large(256, 8, ScoreFunction::kSoftmax, std::vector<float>(1024 * 256, 0.0f));
  for (std::int32_t i = 0; i < 1024 * 8; ++i) large.replay.push_back(i % 4096 % 256);
  EXPECT_NEAR(test::losses(large, sequence_loss(1, 512), test::forward(large).route).sequence, 1.0, 1e-5);
}

TEST_P(RouterLossCases, F08_ABatchEqualsTheMeanOfItsSequences) {
  constexpr std::int64_t kLength = 100, kE = 48;
  RouterCase c(kE, 4, ScoreFunction::kSigmoid, test::normal_logits(4 * kLength, kE, 3));
  const RouterResult whole = test::forward(c);
  const double loss = test::losses(c, sequence_loss(0.5f, kLength), whole.route).sequence;
  const std::vector<float> d = test::backward(c, sequence_loss(0.5f, kLength), whole.route, {});
  double sum = 0;
  for (std::int64_t b = 0; b < 4; ++b) {
    RouterCase part = c;
    part.T = kLength;
    part.logits.assign(c.logits.begin() + b * kLength * kE, c.logits.begin() + (b + 1) * kLength * kE);
    const RouterResult result = test::forward(part);
    sum += test::losses(part, sequence_loss(0.5f, kLength), result.route).sequence;
    const std::vector<float> part_d = test::backward(part, sequence_loss(0.5f, kLength), result.route, {});
    for (std::size_t i = 0; i < part_d.size(); ++i) {
      const float got = d[static_cast<std::size_t>(b * kLength * kE) + i], want = part_d[i] / 4;
      ASSERT_NEAR(got, want, 1.2e-7 * std::abs(want)) << "sequence " << b << " element " << i;
    }
  }
  EXPECT_NEAR(loss, sum / 4, 1.2e-7 * loss);
}

// --- F09: the same batch on emulated ranks and in micro-batches ---

struct Layout {
  const char* name;
  std::vector<std::int64_t> bounds;  // row boundaries of the parts
};

// Losses and the gradient of W [E, H] for x [T, H], summed over parts that share counts and totals.
struct LayoutResult {
  RouterLosses losses;
  std::vector<double> grad_w;
};

LayoutResult run_layout(const RouterCase& whole, const RouterLossConfig& config, const std::vector<float>& x, std::int64_t H, const Layout& layout) {
  const std::int64_t E = whole.config.E, K = whole.config.K;
  std::vector<RouterCase> parts;
  std::vector<RouterResult> results;
  Ids counts(static_cast<std::size_t>(E), 0);
  for (std::size_t p = 0; p + 1 < layout.bounds.size(); ++p) {
    const std::int64_t begin = layout.bounds[p], end = layout.bounds[p + 1];
    RouterCase part = whole;
    part.T = end - begin;
    part.logits.assign(whole.logits.begin() + begin * E, whole.logits.begin() + end * E);
    if (!whole.replay.empty()) part.replay.assign(whole.replay.begin() + begin * K, whole.replay.begin() + end * K);
    if (!whole.padding_mask.empty()) part.padding_mask.assign(whole.padding_mask.begin() + begin, whole.padding_mask.begin() + end);
    results.push_back(test::forward(part));
    for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += results.back().counts()[e];
    parts.push_back(std::move(part));
  }
  RouterLossInputs given;
  given.aux_counts = counts.data();
  given.aux_tokens = given.loss_tokens = static_cast<double>(whole.T);
  for (const std::uint8_t pad : whole.padding_mask) given.aux_tokens = given.loss_tokens -= pad;
  LayoutResult total;
  total.grad_w.assign(static_cast<std::size_t>(E * H), 0.0);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const RouterLosses losses = test::losses(parts[p], config, results[p].route, given);
    total.losses.aux += losses.aux;
    total.losses.z += losses.z;
    const std::vector<float> d = test::backward(parts[p], config, results[p].route, {}, given);
    for (std::int64_t t = 0; t < parts[p].T; ++t) {
      for (std::int64_t e = 0; e < E; ++e) {
        for (std::int64_t h = 0; h < H; ++h) {
          total.grad_w[static_cast<std::size_t>(e * H + h)] +=
              static_cast<double>(d[static_cast<std::size_t>(t * E + e)]) * x[static_cast<std::size_t>((layout.bounds[p] + t) * H + h)];
        }
      }
    }
  }
  return total;
}

TEST_P(RouterLossCases, F09_ValueOnGlobalCounts) {
  RouterCase c(4, 2, ScoreFunction::kSoftmax, std::vector<float>(16 * 4, 0.0f));
  for (std::int32_t t = 0; t < 16; ++t) c.replay.insert(c.replay.end(), {2 * t % 4, (2 * t + 1) % 4});
  const LayoutResult result = run_layout(c, aux_loss(1), std::vector<float>(16, 1.0f), 1, {"two ranks", {0, 8, 16}});
  EXPECT_NEAR(result.losses.aux, 1.0, 1e-6);
}

TEST_P(RouterLossCases, F09_ValueAndRouterGradientDoNotDependOnTheLayout) {
  const float ln7 = std::log(7.0f);
  RouterCase c(4, 1, ScoreFunction::kSoftmax, repeat(4, {ln7, 0, 0, 0}));
  for (std::int32_t i = 0; i < 4; ++i) {
    std::vector<float> row(4, 0.0f);
    row[static_cast<std::size_t>(i)] = ln7;
    c.logits.insert(c.logits.end(), row.begin(), row.end());
  }
  c.T = 8;
  c.replay = {0, 0, 0, 0, 0, 1, 2, 3};
  const std::vector<float> x(16, 1.0f);
  for (const Layout& layout :
       {Layout{"one rank", {0, 8}}, Layout{"two ranks", {0, 4, 8}}, Layout{"uneven", {0, 1, 6, 8}}, Layout{"an empty rank", {0, 0, 8}}}) {
    const LayoutResult result = run_layout(c, aux_loss(1), x, 1, layout);
    EXPECT_NEAR(result.losses.aux, 1.45, 2e-6) << layout.name;
    const double want[] = {0.33, -0.11, -0.11, -0.11};
    for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(result.grad_w[e], want[e], 2e-6) << layout.name;
  }
  // Twice the batch as two equal micro-batches: the same loss and the same averaged gradient.
  RouterCase twice = c;
  twice.T = 16;
  twice.logits.insert(twice.logits.end(), c.logits.begin(), c.logits.end());
  twice.replay.insert(twice.replay.end(), c.replay.begin(), c.replay.end());
  const LayoutResult result = run_layout(twice, aux_loss(1), x, 1, {"micro-batches", {0, 8, 16}});
  EXPECT_NEAR(result.losses.aux, 1.45, 2e-6);
  EXPECT_NEAR(result.grad_w[0], 0.33, 2e-6);
  EXPECT_NEAR(result.grad_w[1], -0.11, 2e-6);
}

TEST_P(RouterLossCases, F09_AuxAndZAgreeAtEveryLayoutOnRandomRoutes) {
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    RouterCase c(24, 3, score, test::normal_logits(120, 24, 31));
    for (std::uint64_t t = 0; t < 120; ++t) c.padding_mask.push_back(random_uniform(32, t) < 0.2f ? 1 : 0);
    std::vector<float> x(120 * 5);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = random_normal(33, i);
    RouterLossConfig config = aux_loss(0.3f);
    config.z_coefficient = 0.2f;
    const LayoutResult one = run_layout(c, config, x, 5, {"one", {0, 120}});
    double largest = 0;
    for (const double g : one.grad_w) largest = std::max(largest, std::abs(g));
    for (const Layout& layout :
         {Layout{"two", {0, 60, 120}}, Layout{"four, uneven", {0, 7, 7, 90, 120}}, Layout{"eight", {0, 15, 30, 45, 60, 75, 90, 105, 120}}}) {
      const LayoutResult many = run_layout(c, config, x, 5, layout);
      EXPECT_NEAR(many.losses.aux, one.losses.aux, 1e-6 * one.losses.aux) << layout.name;
      EXPECT_NEAR(many.losses.z, one.losses.z, 1e-6 * one.losses.z) << layout.name;
      for (std::size_t i = 0; i < one.grad_w.size(); ++i) ASSERT_NEAR(many.grad_w[i], one.grad_w[i], 1e-6 * largest) << layout.name << " element " << i;
    }
  }
}

TEST_P(RouterLossCases, F10_TheAuxLossTrainsTheRouter) {
  RouterCase c(4, 1, ScoreFunction::kSoftmax, std::vector<float>(16, 0.0f));
  const RouterResult result = test::forward(c);
  for (std::int64_t t = 0; t < 4; ++t) EXPECT_EQ(result.ids(t), (Ids{0}));
  EXPECT_NEAR(test::losses(c, aux_loss(0.01f), result.route).aux, 0.01, 1e-8);
  const std::vector<float> d1 = test::backward(c, aux_loss(0.01f), result.route, std::vector<float>(4, 0.0f));
  const std::vector<float> d2 = test::backward(c, aux_loss(0.02f), result.route, std::vector<float>(4, 0.0f));
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_NEAR(d1[i], i % 4 == 0 ? 0.001875 : -0.000625, 1e-8);
    EXPECT_NEAR(d2[i], i % 4 == 0 ? 0.00375 : -0.00125, 2e-8);
  }
}

TEST_P(RouterLossCases, F10_TheValueFollowsTheCounts) {
  const RouterCase c(4, 1, ScoreFunction::kSoftmax, repeat(8, {0, kFar, kFar, kFar}));
  const RouterResult result = test::forward(c);
  RouterLossInputs given;
  const Ids balanced{2, 2, 2, 2}, collapsed{8, 0, 0, 0};
  given.aux_counts = balanced.data();
  EXPECT_NEAR(test::losses(c, aux_loss(1), result.route, given).aux, 1.0, 1e-6);
  given.aux_counts = collapsed.data();
  EXPECT_NEAR(test::losses(c, aux_loss(1), result.route, given).aux, 4.0, 1e-6);
}

// L of the softmax router in double, counts constant.
double aux_value(const std::vector<double>& x, std::size_t E, std::size_t K, const Ids& n) {
  const std::size_t T = x.size() / E;
  double loss = 0;
  for (std::size_t t = 0; t < T; ++t) {
    double sum = 0;
    for (std::size_t e = 0; e < E; ++e) sum += std::exp(x[t * E + e]);
    for (std::size_t e = 0; e < E; ++e) loss += std::exp(x[t * E + e]) / sum * n[e];
  }
  return loss * static_cast<double>(E) / static_cast<double>(K * T * T);
}

TEST_P(RouterLossCases, F10_TheGradientIsThatOfTheLossAndLinearInC) {
  RouterCase c(16, 4, ScoreFunction::kSoftmax, test::normal_logits(32, 16, 51));
  const RouterResult result = test::forward(c);
  const std::vector<float> d = test::backward(c, aux_loss(1), result.route, {});
  const std::vector<float> d3 = test::backward(c, aux_loss(3), result.route, {});
  RouterLossInputs scaled;  // a larger batch elsewhere with the same load: the gradient per token falls with loss_tokens alone
  Ids counts = counts_of(result.route);
  for (std::int32_t& n : counts) n *= 7;
  scaled.aux_counts = counts.data();
  scaled.aux_tokens = 7 * 32;
  const std::vector<float> d_scaled = test::backward(c, aux_loss(1), result.route, {}, scaled);
  std::vector<double> x(c.logits.begin(), c.logits.end());
  double largest = 0;
  for (const float g : d) largest = std::max(largest, std::abs(static_cast<double>(g)));
  ASSERT_GT(largest, 1e-4);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double keep = x[i], h = 1e-5;
    x[i] = keep + h;
    const double up = aux_value(x, 16, 4, result.counts());
    x[i] = keep - h;
    const double down = aux_value(x, 16, 4, result.counts());
    x[i] = keep;
    ASSERT_NEAR(d[i], (up - down) / (2 * h), 1e-5 * largest) << "element " << i;
    ASSERT_NEAR(d3[i], 3 * d[i], 1e-6 * largest);
    ASSERT_NEAR(d_scaled[i], d[i], 1e-6 * largest);
  }
}

TEST_P(RouterLossCases, F11_RecomputeAndEvaluationCountNothingTwice) {
  RouterCase c(8, 2, ScoreFunction::kSoftmax, std::vector<float>(64 * 8, 0.0f));
  for (std::int32_t i = 0; i < 128; ++i) c.replay.push_back(i % 8);
  const RouterResult once = test::forward(c);
  const double loss = test::losses(c, aux_loss(1), once.route).aux;
  EXPECT_NEAR(loss, 1.0, 1e-6);
  EXPECT_EQ(once.counts(), Ids(8, 16));
  EXPECT_EQ(std::accumulate(once.route.view().counts, once.route.view().counts + 8, 0), 128);
  // Counts are written, not accumulated, so evaluation passes and a recomputed forward leave the same bits behind.
  const test::StoredInputs stored(c);
  const std::vector<float> before(once.route.view().weights, once.route.view().weights + 128);
  for (int pass = 0; pass < 3; ++pass) router_forward(c.config, stored.inputs, {once.route.view()});
  EXPECT_EQ(once.counts(), Ids(8, 16));
  EXPECT_EQ(std::memcmp(before.data(), once.route.view().weights, 128 * sizeof(float)), 0);
  EXPECT_EQ(test::losses(c, aux_loss(1), once.route).aux, loss);
}

// Address space without memory behind it: only pages that are written exist.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) data_ = nullptr;
  }
  ~SparseMemory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  float* data() const { return static_cast<float*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

constexpr std::int64_t kE = 256;
constexpr std::int64_t kSampleRows[] = {0, 8388607, 8388608, 8388735};

TEST_P(RouterLossCases, F13_RowsBeyond2To31ElementsAreRoutedLikeTheSameRowsAlone) {
  constexpr std::int64_t kT = 8388736;
  EXPECT_EQ((std::int64_t{1} << 31) / kE, kSampleRows[2]);  // the first router row whose offset is >= 2^31
  const SparseMemory memory(static_cast<std::size_t>(kT * kE) * sizeof(float));
  if (memory.data() == nullptr) GTEST_SKIP() << "needs 8 GiB of address space";
  const std::vector<float> x = test::normal_logits(4, kE, 61);
  RouterConfig config;
  config.E = kE;
  config.K = 1;
  config.score = ScoreFunction::kSigmoid;
  config.renormalise = false;
  std::vector<std::uint8_t> padding(kT, 1);  // only the sampled rows are looked at; K = 1 keeps the outputs small
  for (std::size_t i = 0; i < 4; ++i) {
    std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(i) * kE, kE, memory.data() + kSampleRows[i] * kE);
    padding[static_cast<std::size_t>(kSampleRows[i])] = 0;
  }
  RouterInputs inputs;
  inputs.logits = TensorView::of(memory.data(), {kT, kE});
  inputs.padding_mask = TensorView::of(padding.data(), {kT});
  const Route route(kT, 1, kE);
  router_forward(config, inputs, {route.view()});

  RouterCase alone(kE, 1, config.score, x);
  alone.config = config;
  const RouterResult result = test::forward(alone);
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(route.view().id(kSampleRows[i], 0), result.route.view().id(i, 0));
    EXPECT_EQ(route.view().weights[kSampleRows[i]], result.route.view().weights[i]);
  }
  EXPECT_EQ(std::accumulate(route.view().counts, route.view().counts + kE, 0), 4);
}

TEST_P(RouterLossCases, F13_RowStridesBeyond2To31ElementsInForwardLossesAndBackward) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;
  const auto bytes = static_cast<std::size_t>(kStride + kE) * sizeof(float);
  const SparseMemory logits(bytes), gradient(bytes);
  if (logits.data() == nullptr || gradient.data() == nullptr) GTEST_SKIP() << "needs 16 GiB of address space";
  RouterCase c(kE, 8, ScoreFunction::kSoftmax, test::normal_logits(2, kE, 62));
  c.config.renormalise = false;
  for (std::int64_t t = 0; t < 2; ++t) std::copy_n(c.logits.begin() + t * kE, kE, logits.data() + t * kStride);
  RouterInputs inputs;
  inputs.logits = TensorView::of(logits.data(), {2, kE});
  inputs.logits.stride[0] = kStride;
  TensorView d_logits = TensorView::of(gradient.data(), {2, kE});
  d_logits.stride[0] = kStride;
  const Route route(2, 8, kE);
  router_forward(c.config, inputs, {route.view()});
  const RouterResult result = test::forward(c);
  RouterLossConfig config = aux_loss(1);
  config.z_coefficient = 1;
  EXPECT_EQ(router_losses(c.config, config, inputs, route.view(), {}).z, test::losses(c, config, result.route).z);
  const std::vector<float> g{1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1};
  router_backward(c.config, config, inputs, route.view(), g.data(), {}, 1.0f, d_logits);
  const std::vector<float> want = test::backward(c, config, result.route, g);
  for (std::int64_t i = 0; i < 2 * kE; ++i) ASSERT_EQ(gradient.data()[i / kE * kStride + i % kE], want[static_cast<std::size_t>(i)]);
  for (std::int64_t i = 0; i < 16; ++i) EXPECT_EQ(route.view().id(i / 8, i % 8), result.route.view().id(i / 8, i % 8));
}

}  // namespace
}  // namespace waybill

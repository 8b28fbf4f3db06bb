// SPDX-License-Identifier: Apache-2.0
#include "ops/model/attention.h"

#include "op_test_util.h"

namespace waybill {
namespace {

using testing::dot;
using testing::expect_gradient;
using testing::random_tensor;
using testing::relative_difference;

struct Problem {
  AttentionDims d;
  Tensor q, k, v, d_o, o, dq, dk, dv;
  std::vector<float> lse;
  explicit Problem(const AttentionDims& dims, float scale = 1.0f) : d(dims) {
    const auto queries = [&](std::uint64_t key) { return random_tensor({d.T(), d.num_heads, d.head_dim}, key, scale); };
    const auto keys = [&](std::uint64_t key) { return random_tensor({d.T(), d.num_kv_heads, d.head_dim}, key, scale); };
    q = queries(1);
    k = keys(2);
    v = keys(3);
    d_o = queries(4);
    o = queries(5);
    dq = queries(6);  // garbage, to be overwritten
    dk = keys(7);
    dv = keys(8);
    lse.resize(static_cast<std::size_t>(d.T() * d.num_heads));
  }
  void forward(Stream stream = {}) { attention_forward(d, q, k, v, o, lse.data(), stream); }
  void backward(Stream stream = {}) { attention_backward(d, q, k, v, o, lse.data(), d_o, dq, dk, dv, stream); }
};

TEST(Attention, FirstPositionCopiesItsValueAndEqualKeysAverage) {
  Problem p({.B = 1, .seq_len = 3, .num_heads = 1, .num_kv_heads = 1, .head_dim = 2});
  for (int i = 0; i < 6; ++i) p.k.as<float>()[i] = 0.5f;
  p.forward();
  const float *v = p.v.as<float>(), *o = p.o.as<float>();
  for (int c = 0; c < 2; ++c) {
    EXPECT_EQ(o[c], v[c]);
    EXPECT_NEAR(o[2 + c], (v[c] + v[2 + c]) / 2, 1e-6);
    EXPECT_NEAR(o[4 + c], (v[c] + v[2 + c] + v[4 + c]) / 3, 1e-6);
  }
}

TEST(Attention, MatchesTheReferenceAcrossBlocksGroupsAndOddSizes) {
  const AttentionDims cases[] = {{2, 5, 2, 2, 4}, {1, 64, 4, 2, 16}, {2, 65, 4, 1, 8}, {1, 150, 2, 1, 32}, {3, 1, 2, 2, 6}, {1, 17, 6, 3, 10}};
  for (const AttentionDims& d : cases) {
    Problem fast(d), slow(d);
    fast.forward();
    fast.backward();
    ref::attention_forward(d, slow.q, slow.k, slow.v, slow.o, slow.lse.data());
    ref::attention_backward(d, slow.q, slow.k, slow.v, slow.d_o, slow.dq, slow.dk, slow.dv);
    EXPECT_LE(relative_difference(fast.o, slow.o), 3e-6) << d.seq_len;
    EXPECT_LE(relative_difference(fast.dq, slow.dq), 5e-6) << d.seq_len;
    EXPECT_LE(relative_difference(fast.dk, slow.dk), 5e-6) << d.seq_len;
    EXPECT_LE(relative_difference(fast.dv, slow.dv), 5e-6) << d.seq_len;
    for (std::size_t i = 0; i < fast.lse.size(); ++i) ASSERT_NEAR(fast.lse[i], slow.lse[i], 2e-5) << d.seq_len << " at " << i;
  }
}

TEST(Attention, GradientsAgreeWithFiniteDifferences) {
  Problem p({.B = 1, .seq_len = 7, .num_heads = 2, .num_kv_heads = 1, .head_dim = 4});
  p.forward();
  p.backward();
  const auto value = [&] {
    p.forward();
    return dot(p.o, p.d_o);
  };
  expect_gradient("q", p.q, p.dq, value, 1e-2, 2e-3);
  expect_gradient("k", p.k, p.dk, value, 1e-2, 2e-3);
  expect_gradient("v", p.v, p.dv, value, 1e-2, 2e-3);
}

TEST(Attention, LargeScoresStayFinite) {
  Problem p({.B = 1, .seq_len = 80, .num_heads = 1, .num_kv_heads = 1, .head_dim = 16}, 30.0f);
  p.forward();
  p.backward();
  for (const Tensor* t : {&p.o, &p.dq, &p.dk, &p.dv})
    for (std::int64_t i = 0; i < t->size(); ++i) ASSERT_TRUE(std::isfinite(t->as<float>()[i]));
}

TEST(Attention, LaterTokensDoNotChangeEarlierOutputs) {
  Problem a({.B = 1, .seq_len = 70, .num_heads = 2, .num_kv_heads = 1, .head_dim = 8}), b(a.d);
  for (std::int64_t i = 66 * 8; i < 70 * 8; ++i) b.k.as<float>()[i] = b.v.as<float>()[i] = 9.0f;
  a.forward();
  b.forward();
  for (std::int64_t i = 0; i < 66 * 16; ++i) ASSERT_EQ(a.o.as<float>()[i], b.o.as<float>()[i]) << i;
  EXPECT_NE(a.o.as<float>()[69 * 16], b.o.as<float>()[69 * 16]);
}

TEST(Attention, SameBitsForAnyNumberOfThreads) {
  Problem a({.B = 3, .seq_len = 70, .num_heads = 4, .num_kv_heads = 2, .head_dim = 8}), b(a.d);
  ThreadPool pool(3);
  a.forward();
  a.backward();
  b.forward(Stream::cpu(&pool));
  b.backward(Stream::cpu(&pool));
  EXPECT_EQ(relative_difference(a.o, b.o), 0.0);
  EXPECT_EQ(relative_difference(a.dq, b.dq), 0.0);
  EXPECT_EQ(relative_difference(a.dk, b.dk), 0.0);
  EXPECT_EQ(relative_difference(a.dv, b.dv), 0.0);
}

TEST(Attention, NoTensorOfAllProbabilitiesExists) {
  Problem p({.B = 2, .seq_len = 256, .num_heads = 2, .num_kv_heads = 2, .head_dim = 8});
  const AllocationTrace trace;
  p.forward();
  p.backward();
  EXPECT_LT(trace.largest_bytes(), 256u * 256u * sizeof(float));
}

TEST(Attention, RefusesHeadsThatDoNotDivide) {
  Problem p({.B = 1, .seq_len = 2, .num_heads = 3, .num_kv_heads = 2, .head_dim = 4});
  EXPECT_THROW(p.forward(), Error);
}

}  // namespace
}  // namespace waybill

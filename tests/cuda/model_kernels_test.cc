// SPDX-License-Identifier: Apache-2.0
// The language model's kernels against the CPU's ops and references, eager and captured.
#include "ops/model/cuda/model_kernels.h"

#include <random>

#include "cuda/model_harness.h"
#include "ops/model/attention.h"
#include "ops/model/cross_entropy.h"
#include "ops/model/embedding.h"
#include "ops/model/rms_norm.h"
#include "ops/model/rope.h"

namespace waybill::cuda {
namespace {

using namespace testing;
using waybill::testing::random_tensor;
using waybill::testing::relative_difference;

std::vector<std::int32_t> some_tokens(std::int64_t T, std::int32_t vocab, std::int32_t lowest) {
  std::mt19937 random(static_cast<unsigned>(T));
  std::uniform_int_distribution<std::int32_t> pick(lowest, vocab - 1);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(T));
  for (std::int32_t& token : tokens) token = pick(random);
  return tokens;
}

TEST(ModelKernelsCuda, EmbeddingGathersAndAddsInTokenOrderWithTheCpusBits) {
  WB_NEEDS_GPU();
  struct Case {
    std::int64_t T, H;
    std::int32_t vocab;
  };
  for (const Case c : {Case{1, 4, 3}, Case{300, 40, 5}, Case{1000, 128, 256}, Case{257, 300, 1}}) {
    const std::vector<std::int32_t> tokens = some_tokens(c.T, c.vocab, c.vocab > 1 ? -1 : 0);
    const Tensor table = random_tensor({c.vocab, c.H}, 1), dy = random_tensor({c.T, c.H}, 2);
    Tensor y(DType::kF32, {c.T, c.H}), d_table = random_tensor({c.vocab, c.H}, 3), got_y(DType::kF32, {c.T, c.H}), got_d(DType::kF32, {c.vocab, c.H});
    const DeviceBuffer on_table = upload(table), on_tokens = upload(tokens), on_dy = upload(dy), before = upload(d_table), on_y = upload(y),
                       on_d = upload(d_table);
    expect_equal_on_replay(
        [&](cudaStream_t stream) {
          launch_embedding_forward(on_table.as<float>(), on_tokens.as<std::int32_t>(), c.T, c.H, on_y.as<float>(), stream);
          launch_embedding_backward(on_tokens.as<std::int32_t>(), on_dy.as<float>(), c.T, c.H, on_d.as<float>(), stream);
        },
        {&on_y, &on_d},
        [&](cudaStream_t stream) {
          on_y.fill(0xcd, stream);
          WB_TRY_CUDA(cudaMemcpyAsync(on_d.data(), before.data(), before.bytes(), cudaMemcpyDeviceToDevice, stream));
        });
    download(on_y, got_y), download(on_d, got_d);
    embedding_forward(table, tokens.data(), c.T, y);
    embedding_backward(tokens.data(), c.T, dy, d_table);
    EXPECT_EQ(std::memcmp(got_y.as<float>(), y.as<float>(), static_cast<std::size_t>(y.size()) * 4), 0) << c.T;
    EXPECT_EQ(std::memcmp(got_d.as<float>(), d_table.as<float>(), static_cast<std::size_t>(d_table.size()) * 4), 0) << c.T;
  }
}

TEST(ModelKernelsCuda, RmsNormMatchesTheReferenceForwardAndBackward) {
  WB_NEEDS_GPU();
  struct Case {
    std::int64_t rows, width;
    bool accumulate, in_place;
  };
  for (const Case c :
       {Case{1, 1, false, false}, Case{65, 16, false, true}, Case{200, 100, true, false}, Case{130, 1024, true, false}, Case{64, 33, false, false}}) {
    const Tensor x = random_tensor({c.rows, c.width}, 1), weight = random_tensor({c.width}, 2), dy = random_tensor({c.rows, c.width}, 3);
    const Tensor dx_before = random_tensor({c.rows, c.width}, 4), dw_before = random_tensor({c.width}, 5);
    Tensor y(DType::kF32, {c.rows, c.width}), dx = random_tensor({c.rows, c.width}, 4), dw = random_tensor({c.width}, 5);
    std::vector<float> rstd(static_cast<std::size_t>(c.rows));
    const DeviceBuffer on_x = upload(x), on_w = upload(weight), on_dy = upload(dy), first_dx = upload(c.in_place ? dy : dx_before),
                       first_dw = upload(dw_before);
    const DeviceBuffer on_y = upload(y), on_rstd = upload(rstd), on_dx = upload(dx_before), on_dw = upload(dw_before);
    const DeviceBuffer on_half(static_cast<std::size_t>(c.rows * c.width) * 2), partial(static_cast<std::size_t>(rms_norm_partials(c.rows, c.width)) * 4);
    expect_equal_on_replay(
        [&](cudaStream_t stream) {
          RmsNormForward f{on_x.as<float>(), on_w.as<float>(), 1e-5f, c.rows, c.width, on_y.data(), false, on_rstd.as<float>()};
          launch_rms_norm_forward(f, stream);
          f.y = on_half.data(), f.y_is_bf16 = true, f.rstd = nullptr;
          launch_rms_norm_forward(f, stream);
          launch_rms_norm_backward({on_x.as<float>(), on_w.as<float>(), on_rstd.as<float>(), c.in_place ? on_dx.as<float>() : on_dy.as<float>(),
                                    on_dx.as<float>(), c.accumulate, on_dw.as<float>(), partial.as<float>(), c.rows, c.width},
                                   stream);
        },
        {&on_y, &on_half, &on_rstd, &on_dx, &on_dw},
        [&](cudaStream_t stream) {
          for (const DeviceBuffer* b : {&on_y, &on_half, &on_rstd, &partial}) b->fill(0xcd, stream);
          WB_TRY_CUDA(cudaMemcpyAsync(on_dx.data(), first_dx.data(), first_dx.bytes(), cudaMemcpyDeviceToDevice, stream));
          WB_TRY_CUDA(cudaMemcpyAsync(on_dw.data(), first_dw.data(), first_dw.bytes(), cudaMemcpyDeviceToDevice, stream));
        });
    Tensor got_y(DType::kF32, {c.rows, c.width}), got_dx(DType::kF32, {c.rows, c.width}), got_dw(DType::kF32, {c.width});
    download(on_y, got_y), download(on_dx, got_dx), download(on_dw, got_dw);
    const std::vector<std::uint16_t> half = download<std::uint16_t>(on_half, y.size());
    ref::rms_norm_forward(x, weight, 1e-5f, y, rstd.data());
    ref::rms_norm_backward(x, weight, rstd.data(), dy, dx, c.accumulate, dw);
    EXPECT_LE(relative_difference(got_y, y), 2e-6) << c.rows << " x " << c.width;
    EXPECT_LE(relative_difference(got_dx, dx), 4e-6) << c.rows << " x " << c.width;
    EXPECT_LE(relative_difference(got_dw, dw), 4e-6) << c.rows << " x " << c.width;
    for (std::size_t i = 0; i < half.size(); ++i) {
      const float exact = got_y.as<float>()[i];
      ASSERT_LE(std::fabs(from_bf16(half[i]) - exact), std::fabs(exact) * 0x1p-8f) << i;
    }
  }
}

TEST(ModelKernelsCuda, RopeHasTheCpusBitsBothWays) {
  WB_NEEDS_GPU();
  for (const bool inverse : {false, true}) {
    const std::int64_t T = 70, heads = 3, D = 10, seq_len = 14;
    const RopeTable table(seq_len, D, 10000.0f);
    const Tensor x = random_tensor({T, heads, D}, 1);
    const DeviceBuffer on_x = upload(x), first = upload(x), cos = upload(table.cos(0), seq_len * D / 2), sin = upload(table.sin(0), seq_len * D / 2);
    expect_equal_on_replay(
        [&](cudaStream_t stream) {
          launch_rope({on_x.as<float>(), cos.as<float>(), sin.as<float>(), T, heads, D, seq_len, inverse}, stream);
        },
        {&on_x}, [&](cudaStream_t stream) { WB_TRY_CUDA(cudaMemcpyAsync(on_x.data(), first.data(), first.bytes(), cudaMemcpyDeviceToDevice, stream)); });
    Tensor got(DType::kF32, {T, heads, D});
    download(on_x, got);
    rope(table, x, seq_len, inverse);
    EXPECT_EQ(std::memcmp(got.as<float>(), x.as<float>(), static_cast<std::size_t>(x.size()) * 4), 0) << inverse;
  }
}

TEST(ModelKernelsCuda, AttentionMatchesTheReferenceAcrossTilesGroupsAndHeadWidths) {
  WB_NEEDS_GPU();
  const AttentionDims cases[] = {{2, 5, 2, 2, 4}, {1, 64, 4, 2, 16}, {2, 65, 4, 1, 8},   {1, 150, 2, 1, 32},
                                 {3, 1, 2, 2, 6}, {1, 40, 6, 3, 48}, {1, 33, 2, 1, 128}, {1, 70, 1, 1, 256}};
  for (const AttentionDims& d : cases) {
    const auto queries = [&](std::uint64_t key) { return random_tensor({d.T(), d.num_heads, d.head_dim}, key); };
    const auto keys = [&](std::uint64_t key) { return random_tensor({d.T(), d.num_kv_heads, d.head_dim}, key); };
    const Tensor q = queries(1), k = keys(2), v = keys(3), d_o = queries(4);
    Tensor o = queries(5), dq = queries(6), dk = keys(7), dv = keys(8);
    std::vector<float> lse(static_cast<std::size_t>(d.T() * d.num_heads));
    const DeviceBuffer on_q = upload(q), on_k = upload(k), on_v = upload(v), on_d_o = upload(d_o), on_o = upload(o), on_dq = upload(dq), on_dk = upload(dk),
                       on_dv = upload(dv);
    const DeviceBuffer on_lse = upload(lse), delta = upload(lse);
    AttentionCall call{d.B,
                       d.seq_len,
                       d.num_heads,
                       d.num_kv_heads,
                       static_cast<int>(d.head_dim),
                       on_q.as<float>(),
                       on_k.as<float>(),
                       on_v.as<float>(),
                       on_o.as<float>(),
                       on_lse.as<float>(),
                       on_d_o.as<float>(),
                       on_dq.as<float>(),
                       on_dk.as<float>(),
                       on_dv.as<float>(),
                       delta.as<float>()};
    expect_equal_on_replay(
        [&](cudaStream_t stream) {
          launch_attention_forward(call, stream);
          launch_attention_backward(call, stream);
        },
        {&on_o, &on_lse, &on_dq, &on_dk, &on_dv});
    Tensor got_o = queries(0), got_dq = queries(0), got_dk = keys(0), got_dv = keys(0);
    download(on_o, got_o), download(on_dq, got_dq), download(on_dk, got_dk), download(on_dv, got_dv);
    const std::vector<float> got_lse = download<float>(on_lse, d.T() * d.num_heads);
    ref::attention_forward(d, q, k, v, o, lse.data());
    ref::attention_backward(d, q, k, v, d_o, dq, dk, dv);
    EXPECT_LE(relative_difference(got_o, o), 5e-6) << d.seq_len << " x " << d.head_dim;
    EXPECT_LE(relative_difference(got_dq, dq), 1e-5) << d.seq_len << " x " << d.head_dim;
    EXPECT_LE(relative_difference(got_dk, dk), 1e-5) << d.seq_len << " x " << d.head_dim;
    EXPECT_LE(relative_difference(got_dv, dv), 1e-5) << d.seq_len << " x " << d.head_dim;
    for (std::size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(got_lse[i], lse[i], 3e-5) << d.seq_len << " at " << i;
  }
}

TEST(ModelKernelsCuda, CrossEntropyRowsMatchTheReferenceAndSkipRowsWithoutATarget) {
  WB_NEEDS_GPU();
  for (const std::int64_t vocab : {2, 37, 256, 5000}) {
    const std::int64_t rows = 19;
    const float scale = 0.25f;
    std::vector<std::int32_t> targets = some_tokens(rows, static_cast<std::int32_t>(vocab), -1);
    targets[3] = -1;
    const Tensor logits = random_tensor({rows, vocab}, 1, 4.0f);
    const DeviceBuffer on_logits = upload(logits), on_targets = upload(targets), losses(static_cast<std::size_t>(rows) * 8), total(8);
    const DeviceBuffer gradient(static_cast<std::size_t>(rows * vocab) * 2);
    expect_equal_on_replay(
        [&](cudaStream_t stream) {
          launch_cross_entropy_rows({on_logits.as<float>(), on_targets.as<std::int32_t>(), rows, vocab, scale, gradient.data(), losses.as<double>()}, stream);
          launch_sum(losses.as<double>(), rows, total.as<double>(), false, stream);
          launch_sum(losses.as<double>(), 1, total.as<double>(), true, stream);
        },
        {&losses, &total, &gradient});
    const std::vector<double> got = download<double>(losses, rows);
    const std::vector<std::uint16_t> bits = download<std::uint16_t>(gradient, rows * vocab);
    double sum = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* row = logits.as<float>() + r * vocab;
      const std::int32_t target = targets[static_cast<std::size_t>(r)];
      double top = row[0], denominator = 0;
      for (std::int64_t j = 0; j < vocab; ++j) top = std::max(top, static_cast<double>(row[j]));
      for (std::int64_t j = 0; j < vocab; ++j) denominator += std::exp(row[j] - top);
      const double loss = target < 0 ? 0 : std::log(denominator) + top - row[target];
      sum += loss;
      ASSERT_NEAR(got[static_cast<std::size_t>(r)], loss, 1e-6 * (1 + loss)) << vocab << " row " << r;
      for (std::int64_t j = 0; j < vocab; ++j) {
        const double p = std::exp(row[j] - top) / denominator, exact = target < 0 ? 0 : scale * (p - (j == target ? 1 : 0));
        ASSERT_NEAR(from_bf16(bits[static_cast<std::size_t>(r * vocab + j)]), exact, std::fabs(exact) * 0x1p-8 + scale * 1e-6)
            << vocab << " at " << r << ", " << j;
      }
    }
    EXPECT_NEAR(download<double>(total, 1)[0], sum + got[0], 1e-5);
  }
}

TEST(ModelKernelsCuda, ElementwiseWork) {
  WB_NEEDS_GPU();
  const std::int64_t count = 100003;
  const Tensor a = random_tensor({3, count}, 1), b = random_tensor({count}, 2);
  const DeviceBuffer on_a = upload(a), on_b = upload(b), sum(static_cast<std::size_t>(count) * 4), parts(static_cast<std::size_t>(count) * 4),
                     half(static_cast<std::size_t>(count) * 2);
  expect_equal_on_replay(
      [&](cudaStream_t stream) {
        launch_add(on_a.as<float>(), on_b.as<float>(), sum.as<float>(), count, stream);
        launch_sum_parts(on_a.as<float>(), 3, parts.as<float>(), count, stream);
        launch_to_bf16(on_a.as<float>(), half.data(), count, stream);
      },
      {&sum, &parts, &half});
  const std::vector<float> got_sum = download<float>(sum, count), got_parts = download<float>(parts, count);
  const std::vector<std::uint16_t> bits = download<std::uint16_t>(half, count);
  const float *pa = a.as<float>(), *pb = b.as<float>();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    ASSERT_EQ(got_sum[at], pa[i] + pb[i]) << i;
    ASSERT_EQ(got_parts[at], (pa[i] + pa[count + i]) + pa[2 * count + i]) << i;
    ASSERT_EQ(bits[at], bf16::from_float(pa[i])) << i;
  }
}

}  // namespace
}  // namespace waybill::cuda

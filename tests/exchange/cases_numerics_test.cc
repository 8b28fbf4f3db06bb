// SPDX-License-Identifier: Apache-2.0
// Field case F16: combine and its backward give the same bits every time, in the documented order and within the bounds.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <set>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;

std::uint64_t hash_of(const TensorView& view) {
  std::uint64_t hash = 14695981039346656037ull;
  const auto* pairs = static_cast<const std::uint16_t*>(view.data);
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.size()) * size_bytes(view.dtype) / 2; ++i) hash = (hash ^ pairs[i]) * 1099511628211ull;
  return hash;
}

// Forward and backward of experts y = e-dependent scale * row, weighted; all results of a rank in one hash.
std::uint64_t pass(Exchange& exchange, const Group& group, std::size_t p, const Tensor& x, const Tensor& d_out, ThreadPool* pool) {
  const std::int64_t T = group.routes[p].T(), H = group.H;
  const DispatchHandle handle = exchange.plan(group.routes[p]);
  const ReceiveLayout& layout = handle.layout;
  const Stream stream = Stream::cpu(pool);
  Tensor rows, d_rows, y(DType::kBF16, {layout.S_padded(), H}), dy(DType::kBF16, {layout.S_padded(), H}), z(DType::kF32, {layout.R(), H});
  Tensor out(DType::kBF16, {T, H}), dx(DType::kBF16, {T, H}), d_weights(DType::kF32, {T, group.routes[p].K()}), loss = Tensor::zeros(DType::kF32, {1});
  exchange.dispatch(handle, x, rows);
  permute(layout, rows, y, stream);
  for (std::int64_t e = 0; e < layout.L; ++e) {
    for (std::int64_t i = layout.expert_offsets[static_cast<std::size_t>(e)] * H; i < layout.expert_offsets[static_cast<std::size_t>(e) + 1] * H; ++i) {
      y.as<bf16>()[i] = bf16(static_cast<float>(y.as<bf16>()[i]) * (1.0f + 0.1f * static_cast<float>(e)));
    }
  }
  unpermute_reduce(layout, y, true, z, stream);
  exchange.combine(handle, z, out);
  for (std::int64_t i = 0; i < out.size(); ++i) loss.as<float>()[0] += out.as<bf16>()[i];
  exchange.dispatch(handle, d_out, d_rows);
  Floats d_slots(static_cast<std::size_t>(layout.S_padded()));
  unpermute_reduce_backward(layout, y, true, d_rows, dy, d_slots.data(), stream);
  unpermute_reduce(layout, dy, false, z, stream);
  exchange.combine(handle, z, dx);
  exchange.return_slot_values(handle, d_slots.data(), d_weights.as<float>());
  return mix64(hash_of(out) ^ mix64(hash_of(dx) ^ mix64(hash_of(d_weights) ^ mix64(hash_of(loss)))));
}

TEST(ExchangeCases, F16_FortyRepeatsGiveOneBitPattern) {
  ThreadPool pool_of_2(2), pool_of_3(3);
  ThreadPool* const pools[] = {nullptr, &pool_of_2, &pool_of_3};
  for (const int P : {1, 2}) {
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      const Group group = random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), 512), 8, 16, 512, {.seed = 16}, false);
      std::vector<std::set<std::uint64_t>> patterns(static_cast<std::size_t>(P));
      std::vector<Tensor> x, d_out;
      for (std::size_t p = 0; p < static_cast<std::size_t>(P); ++p) {
        x.push_back(to_tensor(group.x[p], 512, 512, DType::kBF16));
        d_out.push_back(to_tensor(normal_values(512 * 512, 99 + p), 512, 512, DType::kF32));
      }
      for (std::size_t repeat = 0; repeat < 40; ++repeat) {
        run_ranks(P, [&](Fabric& fabric) {
          const auto p = static_cast<std::size_t>(fabric.rank());
          ThreadPool* const pool = P == 1 ? pools[repeat % 3] : nullptr;
          ExchangeConfig config = group.config();
          config.combine_wire = wire;
          Exchange exchange(config, group.placement, fabric, pool);
          patterns[p].insert(pass(exchange, group, p, x[p], d_out[p], pool));
        });
      }
      for (const auto& distinct : patterns) EXPECT_EQ(distinct.size(), 1u) << "P = " << P;
    }
  }
}

// One element with magnitudes that make every other order visible: within a rank that of the slots, and from four ranks on (two partial sums
// commute) that of the ranks.
TEST(ExchangeCases, F16_SumsRunInSlotOrderThenRankOrder) {
  const float big = 16777216.0f;
  const std::vector<float> y_of_k = {big, 1.0f, 1.0f, -big, 3.0f, big, -big, 1.0f};
  const std::vector<std::int32_t> ids = {0, 4, 1, 5, 6, 2, 7, 3};  // of 8 experts: rank 0 of 2 gets slots k = 0, 2, 5, 7
  std::map<std::int32_t, float> y_of_expert;
  for (std::size_t k = 0; k < 8; ++k) y_of_expert[ids[k]] = y_of_k[k];
  const auto sum = [](const std::vector<float>& values) {
    float total = values[0];
    for (std::size_t i = 1; i < values.size(); ++i) total += values[i];
    return total;
  };
  const auto parts = [&](int P) {  // by rank, each in slot order
    std::vector<std::vector<float>> slots(static_cast<std::size_t>(P));
    for (std::size_t k = 0; k < 8; ++k) slots[static_cast<std::size_t>(ids[k] / (8 / P))].push_back(y_of_k[k]);
    std::vector<float> sums;
    for (const std::vector<float>& of_rank : slots) sums.push_back(sum(of_rank));
    return sums;
  };
  const std::map<int, float> wanted = {{1, 5.0f}, {2, 4.0f}, {4, 3.0f}, {8, 4.0f}};
  EXPECT_NE(sum(y_of_k), sum({y_of_k.rbegin(), y_of_k.rend()}));
  for (const auto& [P, value] : wanted) {
    const std::vector<float> by_rank = parts(P);
    EXPECT_EQ(sum(by_rank), value) << "P = " << P;
    if (P >= 4) {
      EXPECT_NE(sum({by_rank.rbegin(), by_rank.rend()}), value) << "P = " << P;
    }
    run_ranks(P, [&, ranks = P, total = value](Fabric& fabric) {
      ExchangeConfig config;
      config.H = 1;
      config.E = 8;
      config.K = 8;
      Exchange exchange(config, block_placement(8, ranks), fabric);
      const std::int64_t T = fabric.rank() == 0 ? 1 : 0;
      const DispatchHandle handle = exchange.plan(T == 1 ? Route::from_ids(1, 8, 8, ids) : Route(0, 8, 8));
      const ReceiveLayout& layout = handle.layout;
      Tensor y(DType::kF32, {layout.S_padded(), 1}), z(DType::kF32, {layout.R(), 1}), out(DType::kF32, {T, 1});
      for (std::int32_t e = 0; e < layout.L; ++e) y.as<float>()[e] = y_of_expert.at(e + fabric.rank() * static_cast<std::int32_t>(layout.L));
      unpermute_reduce(layout, y, true, z);
      exchange.combine(handle, z, out);
      if (T == 1) {
        EXPECT_EQ(out.as<float>()[0], total) << "P = " << ranks;
      }
    });
  }
}

// Part b at full size: T=8192, H=2048, E=16, K=4, against fp64 sums of the same fp32 products.
void check_bounds(int P, CombineWire wire, DType out_dtype) {
  const std::int64_t H = 2048, K = 4, E = 16, tokens = 8192 / P;
  const Group group = random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), tokens), K, E, H, {.seed = 1600}, false);
  ExchangeConfig config = group.config();
  config.combine_wire = wire;
  // Expert e multiplies column h by a pattern of its own, so that slots differ.
  const auto scale = [](std::int64_t e, std::int64_t h) { return 1.0f + 0.25f * static_cast<float>((e * 5 + h) % 7) - (e % 2 == 0 ? 2.0f : 0.0f); };
  double worst = 0;
  std::mutex mutex;
  run_ranks(P, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    const RouteView& route = group.routes[p].view();
    Exchange exchange(config, group.placement, fabric);
    const DispatchHandle handle = exchange.plan(route);
    const ReceiveLayout& layout = handle.layout;
    Tensor rows, y(DType::kF32, {layout.S_padded(), H}), z(DType::kF32, {layout.R(), H}), out(out_dtype, {tokens, H});
    exchange.dispatch(handle, to_tensor(group.x[p], tokens, H, DType::kF32), rows);
    permute(layout, rows, y);
    for (std::int64_t e = 0; e < layout.L; ++e) {
      for (std::int64_t s = layout.expert_offsets[static_cast<std::size_t>(e)]; s < layout.expert_offsets[static_cast<std::size_t>(e) + 1]; ++s) {
        for (std::int64_t h = 0; h < H; ++h) y.as<float>()[s * H + h] *= scale(e + layout.L * fabric.rank(), h);
      }
    }
    unpermute_reduce(layout, y, true, z);
    exchange.combine(handle, z, out);
    double my_worst = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < H; ++h) {
        double exact = 0, magnitude = 0;
        std::array<double, 2> z_of_rank{};
        for (std::int64_t k = 0; k < K; ++k) {
          const std::int64_t e = route.id(t, k);
          const float product = group.x[p][static_cast<std::size_t>(t * H + h)] * scale(e, h);
          const double term = static_cast<double>(route.weights[t * K + k]) * product;
          exact += term;
          magnitude += std::fabs(term);
          z_of_rank[static_cast<std::size_t>(e / layout.L)] += term;
        }
        double bound = static_cast<double>(K) * 0x1p-23 * magnitude;
        if (out_dtype == DType::kBF16) bound += 0x1p-8 * std::fabs(exact);
        if (wire == CombineWire::kBF16 && P > 1) {
          for (const double part : z_of_rank) bound += 0x1p-8 * std::fabs(part);
        }
        const float got = out_dtype == DType::kF32 ? out.as<float>()[t * H + h] : static_cast<float>(out.as<bf16>()[t * H + h]);
        const double error = std::fabs(got - exact);
        ASSERT_LE(error, bound) << "token " << t << ", column " << h;
        if (bound > 0) my_worst = std::max(my_worst, error / bound);
      }
    }
    const std::lock_guard lock(mutex);
    worst = std::max(worst, my_worst);
  });
  EXPECT_GT(worst, 0.05);  // the bound is of the size of the error
}

TEST(ExchangeCases, F16_ErrorBoundFp32OneRank) { check_bounds(1, CombineWire::kF32, DType::kF32); }
TEST(ExchangeCases, F16_ErrorBoundFp32TwoRanks) { check_bounds(2, CombineWire::kF32, DType::kF32); }
TEST(ExchangeCases, F16_ErrorBoundBf16Output) { check_bounds(2, CombineWire::kF32, DType::kBF16); }
TEST(ExchangeCases, F16_ErrorBoundBf16WireTwoRanks) { check_bounds(2, CombineWire::kBF16, DType::kF32); }
TEST(ExchangeCases, F16_ABf16WireAtOneRankRoundsNothing) { check_bounds(1, CombineWire::kBF16, DType::kF32); }

TEST(ExchangeCases, F16_IntegerStampsAreExactOnTheBf16WireUpToSeventeenSlots) {
  for (const int P : {2, 4}) {
    const Group group = random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), 128), 17, 32, 64, {.seed = 160, .unit_weights = true}, true);
    ExchangeConfig config = group.config();
    config.combine_wire = CombineWire::kBF16;
    const auto results = run_group(group, config, {.x_dtype = DType::kBF16, .out_dtype = DType::kBF16});
    for (std::size_t p = 0; p < group.routes.size(); ++p) expect_factor(group, p, results[p].out);
  }
}

}  // namespace
}  // namespace waybill

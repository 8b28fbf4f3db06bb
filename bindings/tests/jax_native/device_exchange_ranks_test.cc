// SPDX-License-Identifier: Apache-2.0
// The handlers of dispatch and combine with several ranks in one process, a thread and a stream each: all values are whole numbers, so every result is exact.
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <random>

#include "cuda/moe_harness.h"
#include "jax_native/rank_threads.h"

namespace waybill::jax {
namespace {

using cuda::DeviceTensor;
using testing::HasSubstr;

constexpr std::int64_t kT = 90, kH = 64, kE = 8, kK = 3;
constexpr auto kF32 = XLA_FFI_DataType_F32, kI32 = XLA_FFI_DataType_S32, kI16 = XLA_FFI_DataType_S16, kU32 = XLA_FFI_DataType_U32;

wb_exchange_config config_of() {
  wb_exchange_config config{};
  EXPECT_EQ(wb_exchange_config_init(&config, sizeof(config)), WB_OK);
  config.H = kH, config.E = kE, config.K = kK, config.T_max = kT, config.mode = 1;
  return config;
}

struct Rank {
  std::int32_t ordinal;
  cuda::CudaStream stream{0};
  DeviceTensor x, weights, d_out, slots, out, dy, d_weights;
  cuda::DeviceBuffer ids, sizes, valid, handle;
};

class Group {
 public:
  explicit Group(const std::vector<std::int32_t>& ordinals, std::uint64_t seed = 5)
      : P_(static_cast<std::int64_t>(ordinals.size())), L_(kE / P_), S_(P_ * kT * std::min(kK, L_)), groups_(groups_of(ordinals)), random_(seed) {
    const std::vector<std::int32_t> devices(ordinals.size(), 0);
    cuda::register_moe_kernels();  // else the library takes CPU arrays only
    wbx_set_process(kProcess);
    for (const std::int32_t index : {0, 1}) {
      EXPECT_EQ(wbx_make_local_exchange(&config_, static_cast<std::int32_t>(P_), ordinals.data(), devices.data(), index), WB_OK) << wb_last_error();
    }
    for (const std::int32_t ordinal : ordinals) add_rank(ordinal);
  }

  std::string dispatch(Rank& r) { return slots_of(routes(r.x), r).run(&wbx_device_dispatch_cuda, r.stream.get(), r.ordinal); }
  std::string combine(Rank& r) { return result(routes(r.slots).flag("weighted", true), r.out).run(&wbx_device_combine_cuda, r.stream.get(), r.ordinal); }
  std::string combine_backward(Rank& r) {
    HandlerCall call;
    f32(f32(call, r.d_out), r.slots);
    with_routes(call, r);
    return result(result(call, r.dy), r.d_weights).run(&wbx_device_combine_backward_cuda, r.stream.get(), r.ordinal);
  }
  std::string whole(Rank& r) {
    for (std::string error : {dispatch(r), combine(r), combine_backward(r)}) {
      if (!error.empty()) return error;
    }
    return {};
  }
  std::string start(Rank& r) {
    HandlerCall call = routes(r.x);
    return call.result(r.handle.data(), kU32, {2}).run(&wbx_device_dispatch_start_cuda, r.stream.get(), r.ordinal, 1);
  }

  void expect(const std::string& what) const {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const Rank& r = *ranks[rank];
      const std::string where = what + ", rank " + std::to_string(rank);
      std::vector<std::int32_t> sizes(static_cast<std::size_t>(L_)), valid(1), want_sizes(sizes.size());
      WB_TRY_CUDA(cudaMemcpy(sizes.data(), r.sizes.data(), sizes.size() * 4, cudaMemcpyDeviceToHost));
      WB_TRY_CUDA(cudaMemcpy(valid.data(), r.valid.data(), 4, cudaMemcpyDeviceToHost));
      for (std::int64_t e = 0; e < L_; ++e) {
        want_sizes[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(std::count(ids_.begin(), ids_.end(), static_cast<std::int64_t>(rank) * L_ + e));
      }
      EXPECT_EQ(sizes, want_sizes) << where;
      EXPECT_EQ(valid[0], 1) << where;
      EXPECT_EQ(r.slots.get(), sorted(x_, rank)) << where << ": slots";
      std::vector<float> want_out = own(x_, rank);
      for (float& value : want_out) value *= static_cast<float>(kK);
      EXPECT_EQ(r.out.get(), want_out) << where << ": out";
      EXPECT_EQ(r.dy.get(), sorted(d_out_, rank)) << where << ": dy";
      EXPECT_EQ(r.d_weights.get(), dots(rank)) << where << ": d_weights";
    }
  }
  void poison() const {
    for (const auto& r : ranks) {
      for (DeviceTensor* t : {&r->slots, &r->out, &r->dy, &r->d_weights}) t->memory.fill(0xff, r->stream);
      r->sizes.fill(0xff, r->stream), r->valid.fill(0xff, r->stream);
      r->stream.synchronize();
    }
  }

  std::vector<std::unique_ptr<Rank>> ranks;

 private:
  void add_rank(std::int32_t ordinal) {
    auto r = std::make_unique<Rank>();
    r->ordinal = ordinal;
    const auto numbers = [&](DeviceTensor& t, std::vector<float>& all) {
      std::vector<float> values(static_cast<std::size_t>(kT * kH));
      for (float& value : values) value = static_cast<float>(static_cast<int>(random_() % 31) - 15);
      t = DeviceTensor(DType::kF32, {kT, kH}, 0), t.set(values);
      all.insert(all.end(), values.begin(), values.end());
    };
    numbers(r->x, x_), numbers(r->d_out, d_out_);
    std::vector<std::int16_t> ids;
    std::vector<std::int16_t> experts(kE);
    std::iota(experts.begin(), experts.end(), std::int16_t{0});
    for (std::int64_t t = 0; t < kT; ++t) {
      std::shuffle(experts.begin(), experts.end(), random_);
      ids.insert(ids.end(), experts.begin(), experts.begin() + kK);
    }
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    r->ids = cuda::DeviceBuffer(ids.size() * 2, 0), r->ids.upload(ids.data(), ids.size() * 2, r->stream);
    r->weights = DeviceTensor(DType::kF32, {kT, kK}, 0), r->weights.set(std::vector<float>(ids.size(), 1.0f));
    r->slots = DeviceTensor(DType::kF32, {S_, kH}, 0), r->out = DeviceTensor(DType::kF32, {kT, kH}, 0);
    r->dy = DeviceTensor(DType::kF32, {S_, kH}, 0), r->d_weights = DeviceTensor(DType::kF32, {kT, kK}, 0);
    r->sizes = cuda::DeviceBuffer(static_cast<std::size_t>(L_) * 4, 0), r->valid = cuda::DeviceBuffer(4, 0), r->handle = cuda::DeviceBuffer(8, 0);
    r->stream.synchronize();
    ranks.push_back(std::move(r));
  }
  HandlerCall routes(const DeviceTensor& rows) {
    HandlerCall call;
    f32(call, rows);
    for (const auto& r : ranks) {
      if (&r->x == &rows || &r->slots == &rows) with_routes(call, *r);
    }
    return call;
  }
  void with_routes(HandlerCall& call, const Rank& r) const {
    f32(call.argument(r.ids.data(), kI16, {kT, kK}), r.weights);
    call.attribute("E", kE).attribute("P", P_).attribute("groups", groups_).bytes("config", config_);
  }
  HandlerCall& slots_of(HandlerCall&& call, const Rank& r) const { return slots_of(call, r); }
  HandlerCall& slots_of(HandlerCall& call, const Rank& r) const {
    return result(call, r.slots).result(r.sizes.data(), kI32, {L_}).result(r.valid.data(), kI32, {});
  }
  static HandlerCall& f32(HandlerCall& call, const DeviceTensor& t) { return call.argument(t.view.data, kF32, dims(t)); }
  static HandlerCall& result(HandlerCall&& call, const DeviceTensor& t) { return result(call, t); }
  static HandlerCall& result(HandlerCall& call, const DeviceTensor& t) { return call.result(t.view.data, kF32, dims(t)); }
  static HandlerCall::Dims dims(const DeviceTensor& t) { return {t.view.shape.begin(), t.view.shape.begin() + t.view.rank}; }

  static std::vector<float> own(const std::vector<float>& all, std::size_t rank) {
    const auto from = all.begin() + static_cast<std::int64_t>(rank) * kT * kH;
    return {from, from + kT * kH};
  }
  // Rows of the rank's experts: by expert, then by rank and token they came from.
  std::vector<float> sorted(const std::vector<float>& all, std::size_t rank) const {
    std::vector<float> slots;
    for (std::int64_t e = 0; e < L_; ++e) {
      for (std::int64_t t = 0; t < P_ * kT; ++t) {
        const auto ids = ids_.begin() + t * kK;
        if (std::find(ids, ids + kK, static_cast<std::int64_t>(rank) * L_ + e) != ids + kK) {
          slots.insert(slots.end(), all.begin() + t * kH, all.begin() + (t + 1) * kH);
        }
      }
    }
    slots.resize(static_cast<std::size_t>(S_ * kH));
    return slots;
  }
  std::vector<float> dots(std::size_t rank) const {
    std::vector<float> d;
    for (std::int64_t t = static_cast<std::int64_t>(rank) * kT; t < (static_cast<std::int64_t>(rank) + 1) * kT; ++t) {
      const float dot = std::inner_product(x_.begin() + t * kH, x_.begin() + (t + 1) * kH, d_out_.begin() + t * kH, 0.0f);
      d.insert(d.end(), kK, dot);
    }
    return d;
  }

  wb_exchange_config config_ = config_of();
  std::int64_t P_, L_, S_;
  std::vector<std::int32_t> groups_;
  std::mt19937 random_;
  std::vector<float> x_, d_out_;
  std::vector<std::int64_t> ids_;
};

class JaxExchangeRanksCuda : public ::testing::TestWithParam<int> {
 protected:
  std::vector<std::int32_t> ordinals() const {
    std::vector<std::int32_t> all(static_cast<std::size_t>(GetParam()));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, JaxExchangeRanksCuda, ::testing::Values(2, 4));

TEST_P(JaxExchangeRanksCuda, DispatchCombineAndItsBackwardAreExact) {
  WB_NEEDS_GPU();
  Group group(ordinals());
  for (const int late : {0, 15}) {
    group.poison();
    const auto body = [&](std::size_t i) {
      std::string error = group.whole(*group.ranks[i]);
      group.ranks[i]->stream.synchronize();
      return error;
    };
    on_threads(group.ranks.size(), body, late);
    group.expect("late " + std::to_string(late));
  }
}

TEST_P(JaxExchangeRanksCuda, CapturedCallsAreExactOnEveryReplay) {
  WB_NEEDS_GPU();
  Group group(ordinals(), 6);
  on_threads(group.ranks.size(), [&](std::size_t i) { return group.whole(*group.ranks[i]); });
  WB_TRY_CUDA(cudaDeviceSynchronize());
  std::vector<cuda::GraphExec> graphs(group.ranks.size());
  on_threads(group.ranks.size(), [&](std::size_t i) {
    std::string error;
    graphs[i] = cuda::GraphExec::capture(group.ranks[i]->stream.get(), [&](cudaStream_t) { error = group.whole(*group.ranks[i]); });
    return error;
  });
  for (int replay = 0; replay < 3; ++replay) {
    group.poison();
    const auto body = [&](std::size_t i) {
      graphs[i].launch(group.ranks[i]->stream.get());
      group.ranks[i]->stream.synchronize();
      return std::string();
    };
    on_threads(group.ranks.size(), body, 5 * replay);
    group.expect("replay " + std::to_string(replay));
  }
}

TEST(JaxExchangeGroupsCuda, PairsOfRanksThatShareAGpuAreRefused) {
  WB_NEEDS_GPU();
  Group group({0, 1}, 7);
  EXPECT_THAT(group.start(*group.ranks[0]), HasSubstr("start and done need a GPU for each rank, 2 ranks of the group share cuda:0"));
}

TEST(JaxExchangeGroupsCuda, TwoGroupsKeepApart) {
  WB_NEEDS_GPU();
  Group first({0, 1}, 8), second({3, 2}, 9);
  for (int round = 0; round < 3; ++round) {
    first.poison(), second.poison();
    const auto body = [&](std::size_t i) {
      Group& group = i % 2 == 0 ? first : second;
      std::string error = group.whole(*group.ranks[i / 2]);
      group.ranks[i / 2]->stream.synchronize();
      return error;
    };
    on_threads(4, body, 3 * round);
    first.expect("first group"), second.expect("second group");
  }
}

TEST(JaxExchangeGroupsCuda, AGroupThatIsNotMadeIsRefused) {
  WB_NEEDS_GPU();
  Group group({0, 1}, 10);
  group.ranks[1]->ordinal = 7;
  EXPECT_THAT(group.dispatch(*group.ranks[1]), HasSubstr("device 7 of process 3 is in no group of this program"));
}

}  // namespace
}  // namespace waybill::jax

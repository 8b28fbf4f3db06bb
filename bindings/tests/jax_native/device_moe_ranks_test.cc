// SPDX-License-Identifier: Apache-2.0
// moe_block's handlers with several ranks in one process, a thread and a stream each, give the bits of the layer that runs all ranks in one launch.
#include <gmock/gmock.h>

#include <limits>
#include <memory>

#include "capi/moe_convert.h"
#include "cuda/moe_harness.h"
#include "jax_native/rank_threads.h"

namespace waybill::jax {
namespace {

namespace mt = waybill::test;
using cuda::DeviceTensor;
using testing::HasSubstr;

constexpr std::int64_t kT = 120;
constexpr std::int64_t kGiven = 1 | 1 << 2 | 1 << 3;  // gate, w1, w2

wb_moe_config config_of(std::int32_t recipe) {
  wb_moe_config config{};
  EXPECT_EQ(wb_moe_config_init(&config, sizeof(config)), WB_OK);
  config.router.E = 8, config.router.K = 3, config.router.aux_coefficient = 0.05f, config.router.z_coefficient = 0.01f;
  config.H = 64, config.F = 48, config.T_max = kT, config.recipe = recipe;
  return config;
}

MoeConfig in_cpp(const wb_moe_config& config) {
  MoeConfig c = capi::to_moe_config(&config);
  c.bias_update_rate = std::numeric_limits<float>::min();  // as the C layer: counts over all ranks
  return c;
}

// One rank's arrays.
struct Rank {
  std::int32_t ordinal;
  cuda::CudaStream stream{0};
  DeviceTensor gate, w1, w2, x, d_out, out, dx, weights, losses, g_gate, g_w1, g_w2;
  cuda::DeviceBuffer ids, counts, status, saved;
  std::int64_t L;

  Rank(const wb_moe_config& config, const MoeConfig& c, int P, int rank, std::int32_t on, const mt::Weights<float>& whole, const mt::Batch& batch)
      : ordinal(on), L(c.L(P)) {
    const mt::RankWeights own = mt::slice(c, P, rank, whole);
    const auto set = [](DeviceTensor& t, std::initializer_list<std::int64_t> shape, const std::vector<float>& values) {
      t = DeviceTensor(DType::kBF16, shape, 0), t.set(values);
    };
    set(gate, {c.E, c.H}, own.w.gate), set(w1, {L, 2 * c.F, c.H}, own.w.w1), set(w2, {L, c.H, c.F}, own.w.w2);
    const auto cut = [&](const std::vector<float>& v) { return std::vector<float>(v.begin() + rank * kT * c.H, v.begin() + (rank + 1) * kT * c.H); };
    set(x, {kT, c.H}, cut(batch.x)), set(d_out, {kT, c.H}, cut(batch.d_out));
    out = DeviceTensor(DType::kF32, {kT, c.H}, 0), dx = DeviceTensor(DType::kF32, {kT, c.H}, 0), weights = DeviceTensor(DType::kF32, {kT, c.K}, 0);
    losses = DeviceTensor(DType::kF32, {4}, 0), g_gate = DeviceTensor(DType::kF32, {c.E, c.H}, 0);
    g_w1 = DeviceTensor(DType::kF32, {L, 2 * c.F, c.H}, 0), g_w2 = DeviceTensor(DType::kF32, {L, c.H, c.F}, 0);
    std::int64_t bytes = 0;
    EXPECT_EQ(wb_device_moe_saved_bytes(&config, P, &bytes), WB_OK) << wb_last_error();
    ids = cuda::DeviceBuffer(static_cast<std::size_t>(kT * c.K) * 2, 0), counts = cuda::DeviceBuffer(static_cast<std::size_t>(c.E) * 4, 0);
    status = cuda::DeviceBuffer(24, 0), saved = cuda::DeviceBuffer(static_cast<std::size_t>(bytes), 0);
    poison();
  }
  void poison() {
    for (DeviceTensor* t : {&out, &dx, &weights, &losses, &g_gate, &g_w1, &g_w2}) t->memory.fill(0xff, stream);
    for (cuda::DeviceBuffer* b : {&ids, &counts, &status, &saved}) b->fill(0xff, stream);
    stream.synchronize();
  }
  template <class T>
  static std::vector<T> read(const cuda::DeviceBuffer& from, std::size_t count) {
    std::vector<T> values(count);
    WB_TRY_CUDA(cudaMemcpy(values.data(), from.data(), count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
};

// The ranks of a group, and the same layer in one launch.
class Group {
 public:
  Group(const wb_moe_config& config, const std::vector<std::int32_t>& ordinals, std::uint64_t seed)
      : config_(config),
        c_(in_cpp(config)),
        P_(static_cast<int>(ordinals.size())),
        whole_(cuda::bf16_weights(c_, seed)),
        batch_(cuda::bf16_batch(c_, std::vector<std::int64_t>(ordinals.size(), kT), seed + 1)) {
    cuda::register_moe_kernels();
    const std::vector<std::int32_t> devices(ordinals.size(), 0);
    wbx_set_process(kProcess);
    EXPECT_EQ(wbx_make_local_layer(&config_, P_, ordinals.data(), devices.data(), 0), WB_OK) << wb_last_error();
    for (int rank = 0; rank < P_; ++rank) {
      ranks.push_back(std::make_unique<Rank>(config_, c_, P_, rank, ordinals[static_cast<std::size_t>(rank)], whole_, batch_));
    }
    cuda::GpuMoe together(c_, P_, whole_, {});
    together.upload(batch_), together.step();
    want = together.result();
    for (int rank = 0; rank < P_; ++rank) reports_.push_back(together.report(rank));
    counts_ = together.total_counts(0);
  }

  std::string forward_and_backward(Rank& r, const std::vector<std::int32_t>& groups) const { return queue(r, groups, r.stream.get()); }
  std::string queue(Rank& r, const std::vector<std::int32_t>& groups, void* stream) const {
    const auto start = [&](HandlerCall& call) {
      call.attribute("given", kGiven).attribute("P", P_).attribute("groups", groups).bytes("config", config_);
      bf16(call, r.x), bf16(call, r.gate), bf16(call, r.w1), bf16(call, r.w2);
    };
    const auto saved = static_cast<std::int64_t>(r.saved.bytes());
    HandlerCall forward, backward;
    start(forward), start(backward);
    result(forward.flag("training", true), r.out).result(r.ids.data(), XLA_FFI_DataType_S16, {kT, c_.K});
    result(forward, r.weights).result(r.counts.data(), XLA_FFI_DataType_S32, {c_.E});
    result(forward, r.losses).result(r.status.data(), XLA_FFI_DataType_S32, {6}).result(r.saved.data(), XLA_FFI_DataType_U8, {saved});
    bf16(backward.argument(r.saved.data(), XLA_FFI_DataType_U8, {saved}), r.d_out).argument(nullptr, XLA_FFI_DataType_F32, {0});
    for (const DeviceTensor* t : {&r.dx, &r.g_gate, &r.g_w1, &r.g_w2}) result(backward, *t);
    std::string error = forward.run(&wbx_device_moe_forward_cuda, stream, r.ordinal);
    return error.empty() ? backward.run(&wbx_device_moe_backward_cuda, stream, r.ordinal) : error;
  }

  void compare(const std::string& what) const {
    mt::Result got = mt::empty_result(c_, P_, whole_, batch_);
    for (int rank = 0; rank < P_; ++rank) {
      const Rank& r = *ranks[static_cast<std::size_t>(rank)];
      const auto rows = [&](const std::vector<float>& from, std::vector<float>& to, std::int64_t width) {
        std::copy(from.begin(), from.end(), to.begin() + rank * kT * width);
      };
      rows(r.out.get(), got.out, c_.H), rows(r.dx.get(), got.dx, c_.H), rows(r.weights.get(), got.weights, c_.K);
      const std::vector<std::int16_t> ids = Rank::read<std::int16_t>(r.ids, static_cast<std::size_t>(kT * c_.K));
      std::copy(ids.begin(), ids.end(), got.ids.begin() + rank * kT * c_.K);
      mt::RankWeights local = mt::slice(c_, P_, rank, whole_);
      local.w.gate = r.g_gate.get(), local.w.w1 = r.g_w1.get(), local.w.w2 = r.g_w2.get();
      mt::exchange_slice(c_, P_, rank, got.gradients, local.w, /*add=*/true);
      mt::detail::add_to(got.gradients.gate, local.w.gate);
      const cuda::DeviceMoeReport& report = reports_[static_cast<std::size_t>(rank)];
      EXPECT_EQ(Rank::read<std::int32_t>(r.counts, counts_.size()), counts_) << what << ", rank " << rank;
      const std::vector<std::int32_t> status = Rank::read<std::int32_t>(r.status, 6);
      EXPECT_THAT(status, testing::ElementsAre(1, testing::_, testing::_, report.rows, report.slots, 0)) << what << ", rank " << rank;
      EXPECT_EQ(r.losses.get(), (std::vector<float>{static_cast<float>(report.aux_loss), 0.0f, 0.0f, static_cast<float>(report.z_loss)})) << what;
    }
    cuda::expect_same_bits(got, want, what);
  }
  void poison() const {
    for (const auto& rank : ranks) rank->poison();
  }

  std::vector<std::unique_ptr<Rank>> ranks;
  mt::Result want;

 private:
  static HandlerCall& bf16(HandlerCall& call, const DeviceTensor& t) { return call.argument(t.view.data, XLA_FFI_DataType_BF16, dims(t)); }
  static HandlerCall& result(HandlerCall& call, const DeviceTensor& t) { return call.result(t.view.data, XLA_FFI_DataType_F32, dims(t)); }
  static HandlerCall::Dims dims(const DeviceTensor& t) { return {t.view.shape.begin(), t.view.shape.begin() + t.view.rank}; }

  wb_moe_config config_;
  MoeConfig c_;
  int P_;
  mt::Weights<float> whole_;
  mt::Batch batch_;
  std::vector<cuda::DeviceMoeReport> reports_;
  std::vector<std::int32_t> counts_;
};

struct Case {
  int P;
  std::int32_t recipe;
};
class JaxMoeRanksCuda : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ranks, JaxMoeRanksCuda, ::testing::Values(Case{2, WB_RECIPE_BF16}, Case{4, WB_RECIPE_BF16}, Case{2, WB_RECIPE_FP8}),
                         [](const auto& of) { return "P" + std::to_string(of.param.P) + (of.param.recipe == WB_RECIPE_FP8 ? "_fp8" : "_bf16"); });

std::vector<std::int32_t> in_order(int P) {
  std::vector<std::int32_t> ordinals(static_cast<std::size_t>(P));
  std::iota(ordinals.begin(), ordinals.end(), 0);
  return ordinals;
}

TEST_P(JaxMoeRanksCuda, ThreadsThatComeOneByOneGiveTheBitsOfOneLaunch) {
  WB_NEEDS_GPU();
  const Group group(config_of(GetParam().recipe), in_order(GetParam().P), 11);
  const std::vector<std::int32_t> groups = groups_of(in_order(GetParam().P));
  for (const int late : {0, 20}) {
    group.poison();
    on_threads(
        group.ranks.size(),
        [&](std::size_t i) {
          std::string error = group.forward_and_backward(*group.ranks[i], groups);
          group.ranks[i]->stream.synchronize();
          return error;
        },
        late);
    group.compare("late " + std::to_string(late));
  }
}

TEST_P(JaxMoeRanksCuda, GraphsThatWereCapturedByThreadsGiveTheSameBitsOnReplay) {
  WB_NEEDS_GPU();
  const Group group(config_of(GetParam().recipe), in_order(GetParam().P), 13);
  const std::vector<std::int32_t> groups = groups_of(in_order(GetParam().P));
  const auto threads = [&](const auto& body, int late) {
    on_threads(
        group.ranks.size(), [&](std::size_t i) { return body(i); }, late);
  };
  // One eager run first: a command buffer is recorded after it, too.
  threads([&](std::size_t i) { return group.forward_and_backward(*group.ranks[i], groups); }, 0);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  std::vector<cuda::GraphExec> graphs(group.ranks.size());
  threads(
      [&](std::size_t i) {
        std::string error;
        graphs[i] = cuda::GraphExec::capture(group.ranks[i]->stream.get(), [&](cudaStream_t stream) { error = group.queue(*group.ranks[i], groups, stream); });
        return error;
      },
      0);
  for (int replay = 0; replay < 3; ++replay) {
    group.poison();
    threads(
        [&](std::size_t i) {
          graphs[i].launch(group.ranks[i]->stream.get());
          group.ranks[i]->stream.synchronize();
          return std::string();
        },
        replay * 5);
    group.compare("replay " + std::to_string(replay));
  }
}

// A mesh of two axes: two groups of one program, the second with its devices in another order.
TEST(JaxMoeGroupsCuda, TwoGroupsOfOneProgramRunBesideEachOther) {
  WB_NEEDS_GPU();
  const wb_moe_config config = config_of(WB_RECIPE_BF16);
  const Group first(config, {4, 5}, 17), second(config, {7, 6}, 19);
  const std::vector<std::int32_t> groups = groups_of({4, 5, 7, 6});
  for (int round = 0; round < 3; ++round) {
    first.poison(), second.poison();
    on_threads(
        4,
        [&](std::size_t i) {
          const Group& group = i % 2 == 0 ? first : second;
          Rank& rank = *group.ranks[i / 2];
          std::string error = group.forward_and_backward(rank, groups);
          rank.stream.synchronize();
          return error;
        },
        5 * round);
    first.compare("first group"), second.compare("second group");
  }
}

TEST(JaxMoeGroupsCuda, AProgramWhoseGroupsAreNotHereIsRefused) {
  WB_NEEDS_GPU();
  const wb_moe_config config = config_of(WB_RECIPE_BF16);
  const Group group(config, {0, 1}, 11);
  Rank& rank = *group.ranks[0];
  EXPECT_THAT(group.forward_and_backward(rank, groups_of({2, 3})), HasSubstr("device 0 of process 3 is in no group of this program"));
  EXPECT_THAT(group.forward_and_backward(rank, {kProcess + 1, 0, kProcess + 1, 1}), HasSubstr("device 0 of process 3 is in no group of this program"));
  EXPECT_THAT(group.forward_and_backward(rank, groups_of({1, 0})), HasSubstr("this process has not made the layer or exchange of this program"));
  EXPECT_THAT(group.forward_and_backward(rank, {-1}), HasSubstr("this process has not made the layer or exchange of this program"));
}

// While one lives, groups are made with this timeout.
struct Timeout {
  explicit Timeout(int ms) { std::swap(before, capi::local_timeout()), capi::local_timeout() = std::chrono::milliseconds(ms); }
  ~Timeout() { capi::local_timeout() = before; }
  std::chrono::milliseconds before{};
};

TEST(JaxMoeGroupsCuda, ARankThatNeverComesIsNamed) {
  WB_NEEDS_GPU();
  const Timeout timeout(300);
  const Group group(config_of(WB_RECIPE_BF16), {10, 11}, 23);
  const std::string text = "rank 1 of 2 ranks of this process has made no call within 300 ms of rank 0's first";
  EXPECT_THAT(group.forward_and_backward(*group.ranks[0], groups_of({10, 11})), HasSubstr(text));
  EXPECT_THAT(group.forward_and_backward(*group.ranks[1], groups_of({10, 11})), HasSubstr(text));  // the group is not used again
}

TEST(JaxMoeGroupsCuda, ARankThatStaysAwayLaterEndsTheOthersWaits) {
  WB_NEEDS_GPU();
  const Timeout timeout(4000);  // of a step beside other programs, too
  const Group group(config_of(WB_RECIPE_BF16), {12, 13}, 29);
  const std::vector<std::int32_t> groups = groups_of({12, 13});
  on_threads(2, [&](std::size_t i) { return group.forward_and_backward(*group.ranks[i], groups); });
  WB_TRY_CUDA(cudaDeviceSynchronize());
  group.compare("together");
  EXPECT_EQ(group.forward_and_backward(*group.ranks[0], groups), "");
  group.ranks[0]->stream.synchronize();
  EXPECT_EQ(Rank::read<std::int32_t>(group.ranks[0]->status, 6)[0], 0) << "valid";
}

TEST(JaxMoeGroupsCuda, AGroupThatCannotBeIsRefusedAndNothingIsMade) {
  WB_NEEDS_GPU();
  const wb_moe_config config = config_of(WB_RECIPE_BF16);
  const std::int32_t ordinals[] = {0, 1, 2};
  std::int32_t devices[] = {0, 0, 0};
  wb_device_moe* layers[3] = {};
  EXPECT_EQ(wb_device_moe_create_local(&config, 3, devices, layers), WB_INVALID_ARGUMENT);  // 8 experts over 3 ranks
  EXPECT_THAT(wb_last_error(), HasSubstr("3"));
  EXPECT_EQ(wb_device_moe_create_local(&config, 0, devices, layers), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_device_moe_create_local(&config, 2, nullptr, layers), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_device_moe_create_local(&config, 2, devices, nullptr), WB_INVALID_ARGUMENT);
  devices[1] = 4096;
  EXPECT_EQ(wbx_make_local_layer(&config, 2, ordinals, devices, 9), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), HasSubstr("device is 4096, this process sees"));
  for (const wb_device_moe* layer : layers) EXPECT_EQ(layer, nullptr);
  devices[1] = 0;
  ASSERT_EQ(wb_device_moe_create_local(&config, 2, devices, layers), WB_OK) << wb_last_error();
  wb_device_moe_destroy(layers[0]);  // the other rank keeps the group's memory
  wb_step_status status{};
  status.struct_size = sizeof(status);
  wb_stream stream{sizeof(wb_stream), WB_CUDA_DEVICE, 0, nullptr, nullptr};
  EXPECT_EQ(wb_device_moe_get_status(layers[1], &status, &stream), WB_OK) << wb_last_error();
  wb_device_moe_destroy(layers[1]);
}

}  // namespace
}  // namespace waybill::jax

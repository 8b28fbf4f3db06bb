// SPDX-License-Identifier: Apache-2.0
// AdamW on the GPU against the CPU's, and the verdict that a step is made on the device.
#include "ops/optimizer/cuda/optimizer_kernels.h"

#include <limits>

#include "cuda/model_harness.h"
#include "waybill/optimizer.h"

namespace waybill::cuda {
namespace {

using namespace testing;
using waybill::testing::random_tensor;

constexpr std::int64_t kSizes[] = {5000, 33, 8192};  // the parameters; the second has no decay
constexpr std::int64_t kCount = 5000 + 33 + 8192;

// Three parameters on the host and on the device, side by side in the device's arrays.
struct TwoSides {
  OptimizerConfig config;
  std::vector<Parameter> parameters;
  std::vector<OptimizerState> states;
  DeviceBuffer value, grad, m, v, copy{kCount * 2}, state{sizeof(UpdateState)}, loss{8}, overflows{4}, chunks, unit_begin, units, owner, chunk_squares,
      squares{3 * 8};
  std::int64_t num_chunks = 0;

  TwoSides() {
    std::vector<OptimizerChunk> list;
    std::vector<std::int64_t> begin{0};
    std::vector<float> values;
    std::int64_t first = 0;
    for (std::int32_t i = 0; i < 3; ++i) {
      Parameter& p = parameters.emplace_back();
      p.name = std::string("p") + std::to_string(i);
      p.value = random_tensor({kSizes[i]}, static_cast<std::uint64_t>(i + 1)), p.grad = Tensor::zeros(DType::kF32, {kSizes[i]}), p.decay = i != 1;
      values.insert(values.end(), p.value.as<float>(), p.value.as<float>() + kSizes[i]);
      for (std::int64_t at = 0; at < kSizes[i]; at += kOptimizerChunk) {
        list.push_back({first + at, static_cast<std::int32_t>(std::min<std::int64_t>(kOptimizerChunk, kSizes[i] - at)), i, p.decay ? 1 : 0, 0});
      }
      begin.push_back(static_cast<std::int64_t>(list.size())), first += kSizes[i];
    }
    num_chunks = static_cast<std::int64_t>(list.size());
    states = make_optimizer_states(parameters);
    const std::vector<float> zeros(kCount, 0.0f);
    value = upload(values), grad = upload(zeros), m = upload(zeros), v = upload(zeros), chunks = upload(list), unit_begin = upload(begin);
    units = upload(std::vector<std::int32_t>{0, 1, 2}), owner = upload(std::vector<std::uint8_t>{0, 0, 0});
    chunk_squares = DeviceBuffer(list.size() * 8);
    state.fill(0), set_loss(1.0), set_overflows(0);
  }
  void set_loss(double sum) { WB_TRY_CUDA(cudaMemcpy(loss.data(), &sum, 8, cudaMemcpyHostToDevice)); }
  void set_overflows(std::int32_t count) { WB_TRY_CUDA(cudaMemcpy(overflows.data(), &count, 4, cudaMemcpyHostToDevice)); }
  void set_gradients(std::uint64_t key, float scale) {
    std::vector<float> all;
    for (Parameter& p : parameters) {
      p.grad = random_tensor({p.value.size()}, key++, scale);
      all.insert(all.end(), p.grad.as<float>(), p.grad.as<float>() + p.grad.size());
    }
    WB_TRY_CUDA(cudaMemcpy(grad.data(), all.data(), all.size() * 4, cudaMemcpyHostToDevice));
  }
  void step(float learning_rate, double clip_norm, cudaStream_t stream = nullptr) {
    launch_sum_squares({chunks.as<OptimizerChunk>(), num_chunks, grad.as<float>(), chunk_squares.as<double>(), unit_begin.as<std::int64_t>(),
                        units.as<std::int32_t>(), 3, squares.as<double>()},
                       stream);
    DecideUpdate decide{};
    decide.beta1 = config.beta1, decide.beta2 = config.beta2, decide.weight_decay = config.weight_decay, decide.learning_rate = learning_rate;
    decide.clip_norm = clip_norm, decide.owner = owner.as<std::uint8_t>(), decide.squares[0] = squares.as<double>(), decide.all_units = 3;
    decide.loss_sums[0] = loss.as<double>(), decide.num_devices = 1, decide.loss_scale = 0.5, decide.overflows = overflows.as<std::int32_t>();
    decide.state = state.as<UpdateState>();
    launch_decide_update(decide, stream);
    launch_adamw({chunks.as<OptimizerChunk>(), num_chunks, value.as<float>(), m.as<float>(), v.as<float>(), grad.as<float>(), copy.data(), config.beta1,
                  config.beta2, config.epsilon, state.as<UpdateState>()},
                 stream);
  }
  UpdateState read_state() { return download<UpdateState>(state, 1)[0]; }
  // Elements of value, m and v that differ from the host's in any bit.
  std::int64_t differences() {
    std::int64_t count = 0, first = 0;
    const std::vector<float> got[] = {download<float>(value, kCount), download<float>(m, kCount), download<float>(v, kCount)};
    for (std::size_t p = 0; p < parameters.size(); first += parameters[p++].value.size()) {
      const float* expected[] = {parameters[p].value.as<float>(), states[p].m.as<float>(), states[p].v.as<float>()};
      for (int a = 0; a < 3; ++a)
        for (std::int64_t i = 0; i < parameters[p].value.size(); ++i) count += got[a][static_cast<std::size_t>(first + i)] != expected[a][i] ? 1 : 0;
    }
    return count;
  }
};

TEST(OptimizerCuda, TwentyStepsHaveTheCpusBitsAndCopiesAreTheRoundedValues) {
  WB_NEEDS_GPU();
  TwoSides two;
  for (std::int64_t step = 1; step <= 20; ++step) {
    two.set_gradients(static_cast<std::uint64_t>(100 * step), step % 3 == 0 ? 1e-3f : 1.0f);
    const float rate = 0.01f / static_cast<float>(step);
    two.step(rate, 1.0);
    std::vector<double> squares;
    for (const Parameter& p : two.parameters) squares.push_back(waybill::testing::dot(p.grad, p.grad));
    const double norm = norm_from_parts(squares, {}), scale = clip_scale(norm, 1.0);
    adamw_step(two.config, rate, static_cast<float>(scale), step, two.parameters, two.states);
    const UpdateState s = two.read_state();
    EXPECT_EQ(s.updates, step);
    EXPECT_NEAR(s.norm, norm, 1e-12 * norm);
    EXPECT_NEAR(s.clip_scale, scale, 1e-12);
    EXPECT_EQ(s.loss, 0.5);
  }
  EXPECT_EQ(two.differences(), 0);
  const std::vector<float> values = download<float>(two.value, kCount);
  const std::vector<std::uint16_t> copies = download<std::uint16_t>(two.copy, kCount);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(copies[i], bf16::from_float(values[i])) << i;
}

TEST(OptimizerCuda, AnInvalidStepChangesNothingAndDoesNotCount) {
  WB_NEEDS_GPU();
  TwoSides two;
  two.set_gradients(7, 1.0f);
  two.step(0.1f, 0.0);
  adamw_step(two.config, 0.1f, 1.0f, 1, two.parameters, two.states);
  ASSERT_EQ(two.differences(), 0);
  const std::vector<std::uint16_t> copies = download<std::uint16_t>(two.copy, kCount);
  const auto expect_skipped = [&](const char* why) {
    two.step(0.1f, 0.0);
    const UpdateState s = two.read_state();
    EXPECT_EQ(s.valid, 0) << why;
    EXPECT_EQ(s.updates, 1) << why;
    EXPECT_EQ(two.differences(), 0) << why;
    EXPECT_EQ(download<std::uint16_t>(two.copy, kCount), copies) << why;
  };
  two.set_overflows(2);
  expect_skipped("a budget was exceeded");
  two.set_overflows(0), two.set_loss(std::numeric_limits<double>::quiet_NaN());
  expect_skipped("the loss is not a number");
  two.set_loss(1.0);
  const float infinite = std::numeric_limits<float>::infinity();
  WB_TRY_CUDA(cudaMemcpy(two.grad.as<float>() + kCount - 1, &infinite, 4, cudaMemcpyHostToDevice));
  expect_skipped("the last gradient is infinite");
  two.set_gradients(8, 1.0f);
  two.step(0.1f, 0.0);
  adamw_step(two.config, 0.1f, 1.0f, 2, two.parameters, two.states);
  EXPECT_EQ(two.differences(), 0);
  EXPECT_EQ(two.read_state().updates, 2);
}

TEST(OptimizerCuda, ACapturedStepEqualsAnEagerOne) {
  WB_NEEDS_GPU();
  TwoSides two;
  two.set_gradients(9, 1.0f);
  const std::vector<float> first = download<float>(two.value, kCount);
  expect_equal_on_replay([&](cudaStream_t stream) { two.step(0.1f, 1.0, stream); }, {&two.value, &two.m, &two.v, &two.copy, &two.state},
                         [&](cudaStream_t stream) {
                           two.value.upload(first.data(), first.size() * 4, stream);
                           for (const DeviceBuffer* b : {&two.m, &two.v, &two.copy, &two.state}) b->fill(0, stream);
                         });
}

}  // namespace
}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "waybill/optimizer.h"

#include <cmath>

namespace waybill {
namespace {

struct StepFactors {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float step_size;        // learning_rate / (1 - beta1^t)
  float second_inverse;   // 1 / (1 - beta2^t)
  float epsilon, shrink;  // shrink = learning_rate * weight_decay, 0 without decay
  float gradient_scale;
};

// Elementwise with IEEE operations only: every instruction set gives the same bits, so the compiler may use wide ones.
#define WB_ADAMW_LOOP                                                                       \
  for (std::int64_t i = 0; i < count; ++i) {                                                \
    const float g = f.gradient_scale * grad[i];                                             \
    const float mi = f.beta1 * m[i] + f.one_minus_beta1 * g;                                \
    const float vi = f.beta2 * v[i] + f.one_minus_beta2 * (g * g);                          \
    m[i] = mi;                                                                              \
    v[i] = vi;                                                                              \
    const float update = f.step_size * mi / (std::sqrt(vi * f.second_inverse) + f.epsilon); \
    value[i] = (value[i] - f.shrink * value[i]) - update;                                   \
  }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void adamw_range_avx2(const StepFactors& f, std::int64_t count, const float* __restrict grad, float* __restrict value,
                                                      float* __restrict m, float* __restrict v) {
  WB_ADAMW_LOOP
}
#endif
void adamw_range_base(const StepFactors& f, std::int64_t count, const float* __restrict grad, float* __restrict value, float* __restrict m,
                      float* __restrict v) {
  WB_ADAMW_LOOP
}

void adamw_range(const StepFactors& f, std::int64_t count, const float* grad, float* value, float* m, float* v) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return adamw_range_avx2(f, count, grad, value, m, v);
#endif
  adamw_range_base(f, count, grad, value, m, v);
}

void check_tensor(const Parameter& p, const Tensor& tensor, const char* what) {
  WB_CHECK(tensor.view().dtype == DType::kF32 && tensor.size() == p.value.size(), "{}: {} {} does not fit the value {}", p.name, what, tensor.view().describe(),
           p.value.view().describe());
}

constexpr std::int64_t kGrain = 1 << 15;

}  // namespace

void validate(const OptimizerConfig& config) {
  WB_CHECK(config.beta1 >= 0 && config.beta1 < 1, "beta1 = {} must be in [0, 1)", config.beta1);
  WB_CHECK(config.beta2 >= 0 && config.beta2 < 1, "beta2 = {} must be in [0, 1)", config.beta2);
  WB_CHECK(config.epsilon > 0 && std::isfinite(config.epsilon), "epsilon = {} must be positive", config.epsilon);
  WB_CHECK(config.weight_decay >= 0 && std::isfinite(config.weight_decay), "weight_decay = {} must not be negative", config.weight_decay);
}

std::vector<OptimizerState> make_optimizer_states(std::span<const Parameter> parameters) {
  std::vector<OptimizerState> states;
  states.reserve(parameters.size());
  for (const Parameter& p : parameters) {
    OptimizerState& state = states.emplace_back();
    if (!p.trainable) continue;
    for (Tensor* moment : {&state.m, &state.v}) {
      const TensorView& value = p.value.view();
      switch (value.rank) {
        case 1:
          *moment = Tensor::zeros(DType::kF32, {value.shape[0]});
          break;
        case 2:
          *moment = Tensor::zeros(DType::kF32, {value.shape[0], value.shape[1]});
          break;
        case 3:
          *moment = Tensor::zeros(DType::kF32, {value.shape[0], value.shape[1], value.shape[2]});
          break;
        default:
          *moment = Tensor::zeros(DType::kF32, {value.shape[0], value.shape[1], value.shape[2], value.shape[3]});
      }
    }
  }
  return states;
}

void adamw_step(const OptimizerConfig& config, float learning_rate, float gradient_scale, std::int64_t step, std::span<Parameter> parameters,
                std::span<OptimizerState> states, Stream stream) {
  validate(config);
  WB_CHECK(step >= 1, "adamw: step {} must be at least 1", step);
  WB_CHECK(std::isfinite(learning_rate) && std::isfinite(gradient_scale), "adamw: learning rate {} and gradient scale {} must be finite", learning_rate,
           gradient_scale);
  WB_CHECK(parameters.size() == states.size(), "adamw: {} parameters but {} states", parameters.size(), states.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].trainable) continue;
    check_tensor(parameters[i], parameters[i].grad, "gradient");
    check_tensor(parameters[i], states[i].m, "first moment");
    check_tensor(parameters[i], states[i].v, "second moment");
  }
  const double t = static_cast<double>(step);
  StepFactors f{};
  f.beta1 = config.beta1;
  f.one_minus_beta1 = 1 - config.beta1;
  f.beta2 = config.beta2;
  f.one_minus_beta2 = 1 - config.beta2;
  f.step_size = static_cast<float>(learning_rate / (1 - std::pow(static_cast<double>(config.beta1), t)));
  f.second_inverse = static_cast<float>(1 / (1 - std::pow(static_cast<double>(config.beta2), t)));
  f.epsilon = config.epsilon;
  f.gradient_scale = gradient_scale;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].trainable) continue;
    f.shrink = parameters[i].decay ? learning_rate * config.weight_decay : 0.0f;
    const float* grad = parameters[i].grad.as<float>();
    float *value = parameters[i].value.as<float>(), *m = states[i].m.as<float>(), *v = states[i].v.as<float>();
    parallel_for(stream.pool, parameters[i].value.size(), kGrain,
                 [&](std::int64_t begin, std::int64_t end) { adamw_range(f, end - begin, grad + begin, value + begin, m + begin, v + begin); });
  }
}

void sgd_step(float learning_rate, float gradient_scale, std::span<Parameter> parameters, Stream stream) {
  for (const Parameter& p : parameters)
    if (p.trainable) check_tensor(p, p.grad, "gradient");
  const float rate = learning_rate * gradient_scale;
  for (Parameter& p : parameters) {
    if (!p.trainable) continue;
    const float* grad = p.grad.as<float>();
    float* value = p.value.as<float>();
    parallel_for(stream.pool, p.value.size(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) value[i] -= rate * grad[i];
    });
  }
}

double norm_from_parts(std::span<const double> replicated, std::span<const double> experts) {
  double total = 0;
  for (const double square : replicated) total += square;
  for (const double square : experts) total += square;
  return std::sqrt(total);
}

double clip_scale(double norm, double max_norm) { return max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0; }

}  // namespace waybill

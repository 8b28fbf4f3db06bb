// SPDX-License-Identifier: Apache-2.0
// The experts of a baseline on rows in expert order, by the library's matmuls: the baselines differ in what they feed them.
#pragma once

#include "bench/cuda/moe/stack.h"

namespace waybill::cuda::moe_bench {

// Everything on one rank's device. rows, y, dy, dx [capacity, H] bf16; weight, d_weight [capacity] f32; offsets [L + 1] i32.
struct ExpertRows {
  const std::int32_t* offsets;
  std::int64_t capacity;
  void *rows, *y, *dy, *dx;
  const float* weight;
  float* d_weight;
};

class Experts {
 public:
  Experts(Problem& problem, RankTensors& tensors, std::int64_t capacity);
  // one_by_one: a call an expert, of rows the host knows (counts [L]); experts without rows are passed over.
  void forward(const ExpertRows& rows, const std::vector<std::int64_t>* one_by_one, const OnPhase& on_phase, cudaStream_t stream) const;
  void backward(const ExpertRows& rows, const std::vector<std::int64_t>* one_by_one, const OnPhase& on_phase, cudaStream_t stream) const;

 private:
  struct Part {  // experts [first, first + count), rows [begin, begin + size)
    std::int64_t first, count, begin, size;
  };
  std::vector<Part> parts(const ExpertRows& rows, const std::vector<std::int64_t>* one_by_one) const;
  TensorView view(void* data, DType dtype, std::initializer_list<std::int64_t> shape) const { return {data, dtype, shape, device_}; }
  TensorView part_of(const TensorView& experts, const Part& part) const { return experts.rows(part.first, part.first + part.count); }
  TensorView rows_of(void* data, const Part& part, std::int64_t width) const;

  RankTensors& tensors_;
  Device device_;
  std::int64_t H_, F_, L_;
  DeviceBuffer h_, a_, da_, single_;  // [capacity, 2F], [capacity, F] twice; offsets of the groups of one call: pairs (0, rows)
};

}  // namespace waybill::cuda::moe_bench

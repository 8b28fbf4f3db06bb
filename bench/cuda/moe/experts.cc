// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/experts.h"

#include "core/cuda/cuda_error.h"
#include "waybill/grouped_gemm_activation.h"

namespace waybill::cuda::moe_bench {

Experts::Experts(Problem& problem, RankTensors& tensors, std::int64_t capacity)
    : tensors_(tensors), device_{DeviceType::kCuda, tensors.device}, H_(problem.shape().H), F_(problem.shape().F), L_(problem.L()) {
  const auto rows = static_cast<std::size_t>(std::max<std::int64_t>(capacity, 1));
  h_ = DeviceBuffer(rows * static_cast<std::size_t>(2 * F_) * 2, tensors.device);
  a_ = DeviceBuffer(rows * static_cast<std::size_t>(F_) * 2, tensors.device);
  da_ = DeviceBuffer(rows * static_cast<std::size_t>(F_) * 2, tensors.device);
  single_ = DeviceBuffer(static_cast<std::size_t>(2 * L_) * 4, tensors.device);
}

std::vector<Experts::Part> Experts::parts(const ExpertRows& rows, const std::vector<std::int64_t>* one_by_one) const {
  if (one_by_one == nullptr) return {{0, L_, 0, rows.capacity}};
  std::vector<Part> list;
  std::int64_t begin = 0;
  for (std::int64_t e = 0; e < L_; begin += (*one_by_one)[static_cast<std::size_t>(e++)])
    list.push_back({e, 1, begin, (*one_by_one)[static_cast<std::size_t>(e)]});
  return list;
}

TensorView Experts::rows_of(void* data, const Part& part, std::int64_t width) const {
  return view(static_cast<std::uint16_t*>(data) + part.begin * width, DType::kBF16, {part.size, width});
}

void Experts::forward(const ExpertRows& rows, const std::vector<std::int64_t>* one_by_one, const OnPhase& on_phase, cudaStream_t stream) const {
  const Stream on{device_, stream};
  on_phase(Phase::kExpertGemm, stream);
  if (one_by_one != nullptr) {
    std::vector<std::int32_t> pairs;
    for (const std::int64_t count : *one_by_one) pairs.push_back(0), pairs.push_back(static_cast<std::int32_t>(count));
    WB_TRY_CUDA(cudaMemcpyAsync(single_.data(), pairs.data(), pairs.size() * 4, cudaMemcpyHostToDevice, stream));
  }
  for (const Part& p : parts(rows, one_by_one)) {
    if (p.size == 0) continue;
    const TensorView offsets = one_by_one != nullptr ? view(single_.as<std::int32_t>() + 2 * p.first, DType::kI32, {2})
                                                     : view(const_cast<std::int32_t*>(rows.offsets), DType::kI32, {L_ + 1});
    const TensorView a = rows_of(a_.data(), p, F_);
    GroupedGemmActivationArgs first;
    first.product.a = rows_of(rows.rows, p, H_), first.product.weights = part_of(tensors_.weights.w1, p), first.product.offsets = offsets;
    first.product.y = rows_of(h_.data(), p, 2 * F_), first.out = a;
    first.weight = view(const_cast<float*>(rows.weight) + p.begin, DType::kF32, {p.size});
    grouped_gemm_activation(first, on);
    GroupedGemmArgs second;
    second.a = a, second.weights = part_of(tensors_.weights.w2, p), second.offsets = offsets, second.y = rows_of(rows.y, p, H_);
    grouped_gemm(second, on);
  }
}

void Experts::backward(const ExpertRows& rows, const std::vector<std::int64_t>* one_by_one, const OnPhase& on_phase, cudaStream_t stream) const {
  const Stream on{device_, stream};
  on_phase(Phase::kExpertGemm, stream);
  for (const Part& p : parts(rows, one_by_one)) {
    if (p.size == 0) {  // an expert without rows has a gradient of zeros
      for (const TensorView& gradient : {part_of(tensors_.gradients.w1, p), part_of(tensors_.gradients.w2, p)})
        WB_TRY_CUDA(cudaMemsetAsync(gradient.data, 0, static_cast<std::size_t>(gradient.size()) * size_bytes(gradient.dtype), stream));
      continue;
    }
    const TensorView offsets = one_by_one != nullptr ? view(single_.as<std::int32_t>() + 2 * p.first, DType::kI32, {2})
                                                     : view(const_cast<std::int32_t*>(rows.offsets), DType::kI32, {L_ + 1});
    const TensorView dy = rows_of(rows.dy, p, H_), h = rows_of(h_.data(), p, 2 * F_);
    GroupedGemmWgradArgs w2;
    w2.a = rows_of(a_.data(), p, F_), w2.dy = dy, w2.offsets = offsets, w2.d_weights = part_of(tensors_.gradients.w2, p);
    grouped_gemm_wgrad(w2, on);
    GroupedGemmActivationBackwardArgs middle;
    middle.product.a = dy, middle.product.weights = part_of(tensors_.weights.w2, p), middle.product.layout = WeightLayout::kLCN;
    middle.product.offsets = offsets, middle.product.y = rows_of(da_.data(), p, F_);
    middle.h = h, middle.dh = h, middle.weight = view(const_cast<float*>(rows.weight) + p.begin, DType::kF32, {p.size});
    middle.d_weight = view(rows.d_weight + p.begin, DType::kF32, {p.size});
    grouped_gemm_activation_backward(middle, on);
    GroupedGemmWgradArgs w1;
    w1.a = rows_of(rows.rows, p, H_), w1.dy = h, w1.offsets = offsets, w1.d_weights = part_of(tensors_.gradients.w1, p);
    grouped_gemm_wgrad(w1, on);
    GroupedGemmDgradArgs last;
    last.dy = h, last.weights = part_of(tensors_.weights.w1, p), last.offsets = offsets, last.da = rows_of(rows.dx, p, H_);
    grouped_gemm_dgrad(last, on);
  }
}

}  // namespace waybill::cuda::moe_bench

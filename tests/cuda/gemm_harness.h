// SPDX-License-Identifier: Apache-2.0
// A grouped product with random operands on the device, rows past the last group NaN, and results over a poison byte.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/graph.h"
#include "core/cuda/status_device.h"
#include "cuda/device_random.h"
#include "cuda/gemm_reference.h"
#include "ops/gemm/cuda/grouped_run.h"

#define WB_NEEDS_HOPPER()                                                                                 \
  do {                                                                                                    \
    int wb_count = 0, wb_major = 0;                                                                       \
    if (cudaGetDeviceCount(&wb_count) != cudaSuccess || wb_count == 0) GTEST_SKIP() << "needs a GPU";     \
    WB_TRY_CUDA(cudaDeviceGetAttribute(&wb_major, cudaDevAttrComputeCapabilityMajor, 0));                 \
    if (wb_major != 9) GTEST_SKIP() << "needs compute capability 9.0, this GPU has " << wb_major << ".x"; \
  } while (0)

namespace waybill::cuda {

inline constexpr unsigned char kPoison = 0xcd;

inline std::vector<std::int32_t> offsets_of(const std::vector<int>& counts) {
  std::vector<std::int32_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

struct GemmSizes {
  GemmForm form;
  GemmOutput output = GemmOutput::kBf16;
  std::vector<int> counts;
  std::int64_t m = 0, n = 0, k = 0;  // as in GroupedProblem
  std::int64_t spare_rows = 37;      // NaN rows behind the last group
  bool bias = false;
  bool listed = false, b_listed = false;  // A, or B of kTN, is read through a shuffled list with some padding rows
};

class GemmCase {
 public:
  explicit GemmCase(const GemmSizes& sizes) : sizes_(sizes), offsets_host_(offsets_of(sizes.counts)) {
    groups_ = static_cast<std::int64_t>(sizes.counts.size());
    valid_rows_ = offsets_host_.back();
    rows_ = valid_rows_ + sizes.spare_rows;
    const bool is_tn = sizes.form == GemmForm::kTN;
    const std::int64_t a_width = is_tn ? sizes.m : sizes.k;
    a_ = random(rows_ * a_width, 1), b_ = random(is_tn ? rows_ * sizes.n : groups_ * sizes.n * sizes.k, 2);
    spoil_tail(a_, a_width);
    if (is_tn) spoil_tail(b_, sizes.n);
    d_elements_ = (is_tn ? groups_ * sizes.m : rows_) * sizes.n;
    d_ = DeviceBuffer(bytes(d_elements_) * (sizes.output == GemmOutput::kBf16 ? 2 : 4) + 16);
    offsets_ = DeviceBuffer(offsets_host_.size() * 4);
    offsets_.upload(offsets_host_.data(), offsets_.bytes());
    if (sizes.bias) {
      bias_ = DeviceBuffer(bytes(groups_ * sizes.n) * 4);
      fill_normal(bias_.data(), DType::kF32, bytes(groups_ * sizes.n), 3, 1.0f, nullptr);
    }
    if (sizes.listed || sizes.b_listed) {
      std::vector<std::int32_t> list(static_cast<std::size_t>(rows_));
      std::iota(list.begin(), list.end(), 0);
      std::shuffle(list.begin(), list.begin() + valid_rows_, std::mt19937(5));
      for (std::size_t i = 0; i < list.size(); i += 13) {
        list[i] = i % 2 == 0 ? -1 : 1 << 30;
        if (is_tn) spoil_row(sizes.listed ? b_ : a_, sizes.listed ? sizes.n : sizes.m, static_cast<std::int64_t>(i));
      }
      list_ = DeviceBuffer(list.size() * 4 + 16);
      list_.upload(list.data(), list.size() * 4);
    }
    if (sizes.output == GemmOutput::kAddF32) {
      before_ = DeviceBuffer(bytes(d_elements_) * 4 + 16);
      fill_normal(before_.data(), DType::kF32, bytes(d_elements_), 4, 1.0f, nullptr);
      if (!is_tn) WB_TRY_CUDA(cudaMemset(before_.as<float>() + valid_rows_ * sizes.n, kPoison, bytes(sizes.spare_rows * sizes.n) * 4));
    }
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }

  GroupedProblem problem() const {
    GroupedProblem p{sizes_.form, sizes_.output, groups_, rows_, sizes_.m, sizes_.n, sizes_.k, a_.data(), b_.data(), offsets_.as<std::int32_t>(), d_.data()};
    p.bias = sizes_.bias ? bias_.as<float>() : nullptr;
    p.status = status_.device_ptr();
    if (sizes_.listed) p.a_list = list_.as<std::int32_t>(), p.a_rows = valid_rows_;
    if (sizes_.b_listed) p.b_list = list_.as<std::int32_t>(), p.b_rows = valid_rows_;
    return p;
  }
  void reset(cudaStream_t stream) const {
    if (before_.data() != nullptr) {
      WB_TRY_CUDA(cudaMemcpyAsync(d_.data(), before_.data(), bytes(d_elements_) * 4, cudaMemcpyDeviceToDevice, stream));
    } else {
      d_.fill(kPoison, stream);
    }
  }
  void run(const GemmTuning& tuning) const {
    reset(stream_);
    run_grouped(problem(), tuning, 0, stream_);
  }
  GemmCheck check(std::int64_t samples = std::int64_t{1} << 40) const {
    return check_grouped(problem(), before_.as<float>(), kPoison, rows_, samples, stream_);
  }
  std::vector<unsigned char> result() const {
    std::vector<unsigned char> host(bytes(d_elements_) * (sizes_.output == GemmOutput::kBf16 ? 2 : 4));
    d_.download(host.data(), host.size(), stream_);
    stream_.synchronize();
    return host;
  }
  unsigned flags() const { return status_.read(stream_).flags; }
  const CudaStream& stream() const { return stream_; }
  const DeviceBuffer& a() const { return a_; }
  const DeviceBuffer& offsets() const { return offsets_; }
  std::int64_t valid_rows() const { return valid_rows_; }

 private:
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count); }
  static DeviceBuffer random(std::int64_t count, std::uint64_t seed) {
    DeviceBuffer buffer(bytes(count) * 2 + 16);
    fill_normal(buffer.data(), DType::kBF16, bytes(count), seed, 1.0f, nullptr);
    return buffer;
  }
  void spoil_tail(const DeviceBuffer& buffer, std::int64_t width) const {
    WB_TRY_CUDA(cudaMemset(buffer.as<unsigned char>() + valid_rows_ * width * 2, 0xff, bytes((rows_ - valid_rows_) * width) * 2));
  }
  static void spoil_row(const DeviceBuffer& buffer, std::int64_t width, std::int64_t row) {
    WB_TRY_CUDA(cudaMemset(buffer.as<unsigned char>() + row * width * 2, 0xff, bytes(width) * 2));
  }

  GemmSizes sizes_;
  std::vector<std::int32_t> offsets_host_;
  std::int64_t groups_ = 0, rows_ = 0, valid_rows_ = 0, d_elements_ = 0;
  CudaStream stream_;
  DeviceStatus status_;
  DeviceBuffer a_, b_, d_, offsets_, bias_, before_, list_;
};

inline const std::vector<int>& ragged_counts() {
  static const std::vector<int> counts = {0, 1, 15, 16, 17, 31, 32, 33, 44, 63, 64, 65, 0, 0, 127, 128, 129, 130, 192, 193, 255, 256, 257, 384, 300, 0};
  return counts;
}

}  // namespace waybill::cuda

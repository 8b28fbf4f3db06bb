// SPDX-License-Identifier: Apache-2.0
// An 8-bit grouped product whose operands the GPU quantisers make from random bf16 tensors; what lies past the last group is NaN, results go
// over a poison byte.
#pragma once

#include "cuda/fp8_reference.h"
#include "cuda/gemm_harness.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "waybill/quantize.h"

namespace waybill::cuda {

struct Fp8Sizes {
  GemmForm form;
  GemmOutput output = GemmOutput::kBf16;
  Fp8Types types = Fp8Types::kE4M3;
  std::vector<int> counts;
  std::int64_t m = 0, n = 0, k = 0;  // as in Fp8Problem
  ScaleFormat scale = ScaleFormat::kPowerOfTwo;
  bool turned = false;  // kNT: B from turned tiles of a [groups, k, n] tensor
  bool bias = false;
  bool row_scales = false;      // kNT: A's scales of a row are adjacent, not those of a column
  bool odd_scales = false;      // kNT: columns of A's scales at a distance that the copy engine does not take
  bool small_integers = false;  // operands whose sums are exact
  std::int64_t spare_rows = 37;
};

class Fp8Case {
 public:
  explicit Fp8Case(const Fp8Sizes& sizes) : s_(sizes), offsets_host_(offsets_of(sizes.counts)) {
    register_quantize();
    groups_ = static_cast<std::int64_t>(s_.counts.size()), valid_rows_ = offsets_host_.back(), rows_ = valid_rows_ + s_.spare_rows;
    offsets_ = upload(offsets_host_);
    const ElementFormat a_element = s_.types == Fp8Types::kE5M2E4M3 ? ElementFormat::kE5M2 : ElementFormat::kE4M3;
    const ElementFormat b_element = s_.types == Fp8Types::kE4M3E5M2 ? ElementFormat::kE5M2 : ElementFormat::kE4M3;
    if (s_.form == GemmForm::kTN) {
      max_blocks_ = max_block_rows(rows_, groups_, 128);
      turn_rows(a_element, s_.m, 1, a_, a_scales_), turn_rows(b_element, s_.n, 2, b_, b_scales_);
    } else {
      make_rows(a_element);
      make_weights(b_element);
    }
    d_elements_ = (s_.form == GemmForm::kTN ? groups_ * s_.m : rows_) * s_.n;
    d_ = DeviceBuffer(bytes(d_elements_) * (s_.output == GemmOutput::kBf16 ? 2 : 4) + 16);
    if (s_.bias) {
      bias_ = DeviceBuffer(bytes(groups_ * s_.n) * 4);
      fill_normal(bias_.data(), DType::kF32, bytes(groups_ * s_.n), 3, 1.0f, nullptr);
    }
    if (s_.output == GemmOutput::kAddF32) {
      before_ = DeviceBuffer(bytes(d_elements_) * 4 + 16);
      fill_normal(before_.data(), DType::kF32, bytes(d_elements_), 4, s_.small_integers ? 0.0f : 1.0f, nullptr);
      if (s_.form == GemmForm::kNT) WB_TRY_CUDA(cudaMemset(before_.as<float>() + valid_rows_ * s_.n, kPoison, bytes(s_.spare_rows * s_.n) * 4));
    }
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }

  Fp8Problem problem() const {
    Fp8Problem p{};
    p.form = s_.form, p.output = s_.output, p.types = s_.types, p.groups = groups_, p.rows = rows_, p.m = s_.m, p.n = s_.n, p.k = s_.k;
    p.a = a_.data(), p.b = b_.data(), p.a_scales = a_scales_.as<float>(), p.b_scales = b_scales_.as<float>();
    const std::int64_t k_blocks = (s_.k + 127) / 128, n_blocks = (s_.n + 127) / 128;
    p.a_scale_stride = s_.row_scales ? k_blocks : 1, p.a_scale_k = s_.row_scales ? 1 : column_of_scales(), p.b_scale_group = k_blocks * n_blocks;
    p.b_scale_column = s_.turned ? 1 : k_blocks, p.b_scale_k = s_.turned ? n_blocks : 1;
    p.b_is_turned = s_.turned, p.max_blocks = max_blocks_, p.offsets = offsets_.as<std::int32_t>(), p.d = d_.data();
    p.bias = s_.bias ? bias_.as<float>() : nullptr, p.status = status_.device_ptr();
    return p;
  }
  void reset(cudaStream_t stream) const {
    if (before_.data() != nullptr) {
      WB_TRY_CUDA(cudaMemcpyAsync(d_.data(), before_.data(), bytes(d_elements_) * 4, cudaMemcpyDeviceToDevice, stream));
    } else {
      d_.fill(kPoison, stream);
    }
  }
  void run(const Fp8Tuning& tuning) const {
    reset(stream_);
    run_fp8(problem(), tuning, 0, stream_);
  }
  GemmCheck check(std::int64_t samples = std::int64_t{1} << 40) const {
    return check_fp8(problem(), before_.as<float>(), kPoison, rows_, samples, s_.small_integers, stream_);
  }
  std::vector<unsigned char> result() const {
    std::vector<unsigned char> host(bytes(d_elements_) * (s_.output == GemmOutput::kBf16 ? 2 : 4));
    d_.download(host.data(), host.size(), stream_);
    stream_.synchronize();
    return host;
  }
  unsigned flags() const { return status_.read(stream_).flags; }
  const CudaStream& cuda_stream() const { return stream_; }
  const DeviceBuffer& a() const { return a_; }
  const DeviceBuffer& offsets() const { return offsets_; }

 private:
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count); }
  static TensorView view(const DeviceBuffer& buffer, DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView v(buffer.data(), dtype, shape);
    v.device = Device{DeviceType::kCuda, 0};
    return v;
  }
  static DeviceBuffer upload(const std::vector<std::int32_t>& values) {
    DeviceBuffer buffer(values.size() * 4 + 16);
    buffer.upload(values.data(), values.size() * 4);
    return buffer;
  }
  DeviceBuffer wide(std::int64_t count, std::uint64_t seed) const {
    DeviceBuffer x(bytes(count) * 2 + 16);
    s_.small_integers ? fill_small_integers(x.data(), bytes(count), seed, nullptr) : fill_normal(x.data(), DType::kBF16, bytes(count), seed, 1.0f, nullptr);
    return x;
  }
  // NaN codes and scales where the quantiser writes nothing.
  static DeviceBuffer nan(std::int64_t size, int byte) {
    DeviceBuffer buffer(bytes(size) + 16);
    buffer.fill(byte);
    return buffer;
  }
  static Stream stream() { return {Device{DeviceType::kCuda, 0}, nullptr, nullptr}; }
  std::int64_t column_of_scales() const { return s_.odd_scales ? rows_ | 1 : (rows_ + 3) / 4 * 4; }
  void make_rows(ElementFormat element) {
    const std::int64_t blocks = (s_.k + 127) / 128;
    const DeviceBuffer x = wide(rows_ * s_.k, 1);
    a_ = nan(rows_ * s_.k, 0x7f), a_scales_ = nan((rows_ + 4) * blocks * 4, 0xff);
    TensorView scales = view(a_scales_, DType::kF32, {rows_, blocks});
    if (!s_.row_scales) scales.stride[0] = 1, scales.stride[1] = column_of_scales();
    quantize({element, s_.scale, ScaleRule::kRoundUp, 1, 128}, view(x, DType::kBF16, {rows_, s_.k}), view(offsets_, DType::kI32, {groups_ + 1}),
             {view(a_, DType::kU8, {rows_, s_.k}), scales, {}}, stream());
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  void make_weights(ElementFormat element) {
    const std::int64_t outer = s_.turned ? s_.k : s_.n, inner = s_.turned ? s_.n : s_.k, blocks = (outer + 127) / 128;
    std::vector<std::int32_t> firsts;
    for (std::int64_t g = 0; g <= groups_; ++g) firsts.push_back(static_cast<std::int32_t>(g * outer));
    const DeviceBuffer x = wide(groups_ * outer * inner, 2), offsets = upload(firsts);
    b_ = nan((s_.turned ? groups_ * blocks * inner * 128 : groups_ * outer * inner), 0x7f), b_scales_ = nan(groups_ * blocks * ((inner + 127) / 128) * 4, 0xff);
    QuantizedView out;
    out.scales = view(b_scales_, DType::kF32, {groups_ * blocks, (inner + 127) / 128});
    if (s_.turned) {
      out.turned = view(b_, DType::kU8, {groups_ * blocks, inner, 128});
    } else {
      out.codes = view(b_, DType::kU8, {groups_ * outer, inner});
    }
    quantize({element, s_.scale, ScaleRule::kRoundUp, 128, 128}, view(x, DType::kBF16, {groups_ * outer, inner}), view(offsets, DType::kI32, {groups_ + 1}),
             out, stream());
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  void turn_rows(ElementFormat element, std::int64_t columns, std::uint64_t seed, DeviceBuffer& codes, DeviceBuffer& scales) const {
    const DeviceBuffer x = wide(rows_ * columns, seed);
    codes = nan(max_blocks_ * columns * 128, 0x7f), scales = nan(max_blocks_ * columns * 4, 0xff);
    QuantizedView out;
    out.scales = view(scales, DType::kF32, {max_blocks_, columns}), out.turned = view(codes, DType::kU8, {max_blocks_, columns, 128});
    quantize({element, s_.scale, ScaleRule::kRoundUp, 128, 1}, view(x, DType::kBF16, {rows_, columns}), view(offsets_, DType::kI32, {groups_ + 1}), out,
             stream());
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }

  Fp8Sizes s_;
  std::vector<std::int32_t> offsets_host_;
  std::int64_t groups_ = 0, rows_ = 0, valid_rows_ = 0, d_elements_ = 0, max_blocks_ = 0;
  CudaStream stream_;
  DeviceStatus status_;
  DeviceBuffer a_, b_, a_scales_, b_scales_, d_, offsets_, bias_, before_;
};

}  // namespace waybill::cuda

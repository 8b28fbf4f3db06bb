// SPDX-License-Identifier: Apache-2.0
// One tensor quantised on the CPU and on the GPU, outputs over a poison byte, compared to the bit (a NaN equals a NaN).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/status_device.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "waybill/quantize.h"

#define WB_NEEDS_GPU()                                                                                \
  do {                                                                                                \
    int wb_count = 0;                                                                                 \
    if (cudaGetDeviceCount(&wb_count) != cudaSuccess || wb_count == 0) GTEST_SKIP() << "needs a GPU"; \
  } while (0)

namespace waybill::cuda {

inline constexpr Device kGpu{DeviceType::kCuda, 0};
inline constexpr unsigned char kPoison = 0xa5;

inline std::vector<std::int32_t> offsets_of(const std::vector<int>& counts) {
  std::vector<std::int32_t> offsets(1, 0);
  for (const int c : counts) offsets.push_back(offsets.back() + c);
  return offsets;
}

// A host tensor and its copy on the device.
struct Pair {
  Tensor host;
  DeviceBuffer memory;

  Pair() = default;
  Pair(DType dtype, std::initializer_list<std::int64_t> shape, bool poison = true) {
    host.resize(dtype, shape);
    memory = DeviceBuffer(size() + 64);
    if (poison && size() > 0) std::memset(host.view().data, kPoison, size()), memory.fill(kPoison);
  }
  std::size_t size() const { return static_cast<std::size_t>(host.size()) * size_bytes(host.view().dtype); }
  TensorView cpu() const { return host.view(); }
  TensorView gpu() const {
    TensorView view = host.view();
    if (view) view.data = memory.data(), view.device = kGpu;
    return view;
  }
  void upload() const { memory.upload(host.view().data, size()); }
  std::vector<unsigned char> downloaded() const {
    std::vector<unsigned char> bytes(size());
    memory.download(bytes.data(), bytes.size());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    return bytes;
  }
  // The first difference, or empty.
  std::string difference(const char* name) const {
    const std::vector<unsigned char> got = downloaded();
    const auto* want = static_cast<const unsigned char*>(host.view().data);
    const std::size_t width = size_bytes(host.view().dtype);
    for (std::size_t i = 0; i < got.size(); i += width) {
      if (std::memcmp(got.data() + i, want + i, width) == 0) continue;
      if (host.view().dtype == DType::kF32) {
        float a, b;
        std::memcpy(&a, got.data() + i, 4), std::memcpy(&b, want + i, 4);
        if (a != a && b != b) continue;
      }
      if (host.view().dtype == DType::kBF16) {
        bf16 a, b;
        std::memcpy(&a, got.data() + i, 2), std::memcpy(&b, want + i, 2);
        if (static_cast<float>(a) != static_cast<float>(a) && static_cast<float>(b) != static_cast<float>(b)) continue;
      }
      return std::string(name) + " differ at element " + std::to_string(i / width) + " of " + std::to_string(got.size() / width) + ": GPU " +
             std::to_string(got[i]) + ", CPU " + std::to_string(want[i]);
    }
    return {};
  }
};

// All outputs of one direction.
struct CodedPair {
  QuantConfig config;
  Pair codes, scales, group_scales, turned, swizzled;

  CodedPair(const QuantConfig& given, std::int64_t S, std::int64_t C, const TensorView& offsets, bool with_turned, bool with_swizzled) : config(given) {
    const std::int64_t L = offsets ? offsets.shape[0] - 1 : 1;
    const auto blocks = [&](std::int64_t rows) { return offsets ? block_row_offsets(offsets, rows).back() : (S + rows - 1) / rows; };
    const bool is_f32 = config.scale == ScaleFormat::kF32 || config.scale == ScaleFormat::kPowerOfTwo;
    const std::int64_t columns = (C + config.block_columns - 1) / config.block_columns;
    codes = Pair(DType::kU8, {S, config.element == ElementFormat::kE2M1 ? C / 2 : C});
    scales = Pair(is_f32 ? DType::kF32 : DType::kU8, {blocks(config.block_rows), columns});
    group_scales = Pair(DType::kF32, {L});
    if (with_turned) turned = Pair(DType::kU8, {blocks(128), C, 128});
    if (with_swizzled) swizzled = Pair(DType::kU8, {swizzled_layout(offsets, columns).byte_offsets.back()});
  }
  QuantizedView cpu() const { return {codes.cpu(), scales.cpu(), group_scales.cpu(), turned.cpu(), swizzled.cpu()}; }
  QuantizedView gpu() const { return {codes.gpu(), scales.gpu(), group_scales.gpu(), turned.gpu(), swizzled.gpu()}; }
  std::string difference() const {
    std::string text = scales.difference("scales");
    if (text.empty() && config.scale == ScaleFormat::kE4M3) text = group_scales.difference("group scales");
    if (text.empty()) text = codes.difference("codes");
    if (text.empty() && turned.host) text = turned.difference("turned codes");
    if (text.empty() && swizzled.host) text = swizzled.difference("swizzled scales");
    return text;
  }
};

inline std::string name_of(const QuantConfig& c) {
  static constexpr const char *kElements[] = {"e4m3", "e5m2", "e2m1"}, *kScales[] = {"e8m0", "pow2", "f32", "nvfp4"};
  return std::string(kElements[static_cast<int>(c.element)]) + " " + kScales[static_cast<int>(c.scale)] + (c.rule == ScaleRule::kFloor ? " floor " : " up ") +
         std::to_string(c.block_rows) + "x" + std::to_string(c.block_columns) + (c.stochastic ? " stochastic" : "");
}

// A value of many magnitudes; one in 400 is hard: zeros, infinities, NaN, subnormals.
inline float wild_value(std::mt19937& random, std::int64_t i) {
  static const float kHard[] = {0.0f,
                                -0.0f,
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN(),
                                1e-40f,
                                -3e-45f,
                                std::numeric_limits<float>::max(),
                                448.0f,
                                464.0f,
                                480.0f,
                                57344.0f,
                                61440.0f,
                                6.0f,
                                5.0f,
                                2.5f};
  if (random() % 4000 == 0) return kHard[random() % 16];
  const float mantissa = static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
  return std::ldexp(mantissa, static_cast<int>(random() % 13) - 6 + static_cast<int>((i / 97) % 9) + (random() % 1000 == 0 ? -120 : 0));
}

}  // namespace waybill::cuda

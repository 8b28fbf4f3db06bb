// SPDX-License-Identifier: Apache-2.0
// Random tensors, an fp64 oracle and its error bound for the matmul tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/gemm/element.h"
#include "ops/gemm/kernel.h"
#include "waybill/grouped_gemm.h"

namespace waybill::testing {

using detail::load_element;
using detail::store_element;

inline Tensor random_tensor(DType dtype, std::initializer_list<std::int64_t> shape, std::uint32_t seed) {
  Tensor tensor(dtype, shape);
  std::mt19937 random(seed);
  for (std::int64_t i = 0; i < tensor.size(); ++i) store_element(tensor, i, static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f);
  return tensor;
}

inline Tensor filled_tensor(DType dtype, std::initializer_list<std::int64_t> shape, float value) {
  Tensor tensor(dtype, shape);
  for (std::int64_t i = 0; i < tensor.size(); ++i) store_element(tensor, i, value);
  return tensor;
}

inline Tensor copy_of(const Tensor& from) {
  Tensor tensor;
  const TensorView& v = from.view();
  v.rank == 3 ? tensor.resize(v.dtype, {v.shape[0], v.shape[1], v.shape[2]}) : tensor.resize(v.dtype, {v.shape[0], v.shape[1]});
  if (v.size() > 0) std::memcpy(tensor.view().data, v.data, static_cast<std::size_t>(v.size()) * size_bytes(v.dtype));
  return tensor;
}

inline Tensor offsets_of(const std::vector<std::int64_t>& sizes) {
  Tensor offsets(DType::kI32, {static_cast<std::int64_t>(sizes.size()) + 1});
  std::int32_t sum = 0;
  offsets.as<std::int32_t>()[0] = 0;
  for (std::size_t g = 0; g < sizes.size(); ++g) offsets.as<std::int32_t>()[g + 1] = sum += static_cast<std::int32_t>(sizes[g]);
  return offsets;
}

inline Tensor index_tensor(const std::vector<std::int32_t>& values) {
  Tensor tensor(DType::kI32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) tensor.as<std::int32_t>()[i] = values[i];
  return tensor;
}

inline bool bit_equal(const Tensor& x, const Tensor& y) {
  return x.view().dtype == y.view().dtype && x.size() == y.size() &&
         (x.size() == 0 || std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(x.size()) * size_bytes(x.view().dtype)) == 0);
}

// A sum in fp64 beside the sum of magnitudes that bounds what fp32 may lose.
struct Sum {
  double value = 0, magnitude = 0;
  std::int64_t terms = 0;
  void add(double a, double b) {
    value += a * b;
    magnitude += std::abs(a * b);
    ++terms;
  }
};

// fp32 accumulation in any order: (terms + 3) * 2^-24 of the magnitudes; a bf16 result adds half a unit of its last place.
inline void expect_near_sum(const TensorView& out, std::int64_t index, const Sum& sum, const std::string& what) {
  const double bound = (static_cast<double>(sum.terms) + 3) * 0x1p-24 * sum.magnitude + (out.dtype == DType::kBF16 ? 0x1p-8 * std::abs(sum.value) : 0) + 1e-38;
  const double got = load_element(out, index);
  ASSERT_LE(std::abs(got - sum.value), bound) << what << " at element " << index << ": " << got << " instead of " << sum.value;
}

// The names of every implementation this machine can run, the reference included.
inline std::vector<std::string> implementations() {
  std::vector<std::string> names;
  for (int i = 0; i < detail::usable_kernels().count; ++i) names.emplace_back(detail::usable_kernels().sets[i]->name);
  names.emplace_back("ref");
  return names;
}

// Pins an implementation while it lives.
class Forced {
 public:
  explicit Forced(const std::string& name) { detail::force_gemm(name.c_str()); }
  ~Forced() { detail::force_gemm(""); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
};

}  // namespace waybill::testing

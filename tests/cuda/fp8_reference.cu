// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "cuda/fp8_reference.h"

namespace waybill::cuda {
namespace {

struct Check {
  Fp8Problem p;
  const float* before;
  unsigned poison;
  bool is_exact;
};

__device__ double decode(unsigned char code, bool is_e5m2) {
  if (is_e5m2) {
    __nv_fp8_e5m2 v;
    v.__x = code;
    return static_cast<double>(static_cast<float>(v));
  }
  __nv_fp8_e4m3 v;
  v.__x = code;
  return static_cast<double>(static_cast<float>(v));
}

__device__ double a_code(const Check& c, long long i) { return decode(static_cast<const unsigned char*>(c.p.a)[i], c.p.types == Fp8Types::kE5M2E4M3); }
__device__ double b_code(const Check& c, long long i) { return decode(static_cast<const unsigned char*>(c.p.b)[i], c.p.types == Fp8Types::kE4M3E5M2); }

struct Sum {
  double value = 0, magnitude = 0;
  __device__ void add(double v) { value += v, magnitude += fabs(v); }
};

// First block of group g, and its rows.
__device__ long long blocks_before(const Check& c, int g) {
  long long blocks = 0;
  for (int i = 0; i < g; ++i) blocks += (c.p.offsets[i + 1] - c.p.offsets[i] + 127) / 128;
  return blocks;
}

__device__ Sum sum_rows(const Check& c, long long row, long long column, int g) {
  Sum s;
  const long long k_blocks = (c.p.k + 127) / 128;
  for (long long k = 0; k < c.p.k; ++k) {
    const long long kb = k / 128;
    const double b = c.p.b_is_turned ? b_code(c, ((g * k_blocks + kb) * c.p.n + column) * 128 + k % 128) : b_code(c, (g * c.p.n + column) * c.p.k + k);
    const double scale = static_cast<double>(c.p.a_scales[row * c.p.a_scale_stride + kb * c.p.a_scale_k]) *
                         c.p.b_scales[g * c.p.b_scale_group + column / 128 * c.p.b_scale_column + kb * c.p.b_scale_k];
    s.add(a_code(c, row * c.p.k + k) * b * scale);
  }
  return s;
}

__device__ Sum sum_group(const Check& c, long long row, long long column, int g) {
  Sum s;
  const long long first = blocks_before(c, g), blocks = (c.p.offsets[g + 1] - c.p.offsets[g] + 127) / 128;
  for (long long b = first; b < first + blocks; ++b) {
    const double scale = static_cast<double>(c.p.a_scales[b * c.p.m + row]) * c.p.b_scales[b * c.p.n + column];
    for (int r = 0; r < 128; ++r) s.add(a_code(c, (b * c.p.m + row) * 128 + r) * b_code(c, (b * c.p.n + column) * 128 + r) * scale);
  }
  return s;
}

__device__ bool is_wrong(const Check& c, long long i, Sum s, bool is_owned, double& error) {
  error = 0;
  const bool is_bf16 = c.p.output == GemmOutput::kBf16;
  if (!is_owned) {
    return is_bf16 ? static_cast<const unsigned short*>(c.p.d)[i] != (c.poison | c.poison << 8)
                   : static_cast<const unsigned*>(c.p.d)[i] != c.poison * 0x01010101u;
  }
  if (c.before != nullptr) s.add(c.before[i]);
  const double got = is_bf16 ? static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(c.p.d)[i])) : static_cast<const float*>(c.p.d)[i];
  if (c.is_exact) {
    const double want =
        is_bf16 ? static_cast<double>(__bfloat162float(__float2bfloat16_rn(static_cast<float>(s.value)))) : static_cast<double>(static_cast<float>(s.value));
    error = got == want ? 1e-9 : 2;
    return got != want;
  }
  const double bound = (is_bf16 ? fabs(s.value) * 0.00390625 : 0) + s.magnitude * 0x1p-11 + 1e-30;
  error = fabs(got - s.value) / bound;
  return !(error <= 1);
}

__global__ void check(const Check c, long long elements, long long step, GemmCheckTotals* totals) {
  for (long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * step; i < elements;
       i += static_cast<long long>(gridDim.x) * blockDim.x * step) {
    Sum s;
    bool is_owned = true;
    const long long column = i % c.p.n;
    if (c.p.form == GemmForm::kTN) {
      s = sum_group(c, i / c.p.n % c.p.m, column, static_cast<int>(i / (c.p.m * c.p.n)));
    } else {
      const long long row = i / c.p.n;
      is_owned = row < c.p.offsets[c.p.groups];
      int g = 0;
      while (is_owned && c.p.offsets[g + 1] <= row) ++g;
      if (is_owned) s = sum_rows(c, row, column, g);
      if (is_owned && c.p.bias != nullptr) s.add(c.p.bias[g * c.p.n + column]);
    }
    double error;
    const bool wrong = is_wrong(c, i, s, is_owned, error);
    atomicAdd(&totals->checked, 1ull);
    if (wrong) {
      atomicAdd(&totals->wrong, 1ull);
      atomicMin(&totals->first_wrong, static_cast<unsigned long long>(i));
    } else {
      atomicMax(&totals->worst_bits, static_cast<unsigned long long>(__double_as_longlong(error)));
    }
  }
}

__global__ void small_integers(__nv_bfloat16* data, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull ^ seed * 0xd1342543de82ef95ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull, x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    data[i] = __float2bfloat16_rn(static_cast<float>(static_cast<int>((x >> 40) % 5) - 2));
  }
}

}  // namespace

void launch_check_fp8(const Fp8Problem& problem, const float* before, unsigned char poison, std::int64_t elements, std::int64_t step, bool is_exact,
                      GemmCheckTotals* totals, cudaStream_t stream) {
  check<<<2048, 128, 0, stream>>>({problem, before, poison, is_exact}, elements, step, totals);
}

void fill_small_integers(void* data, std::size_t count, std::uint64_t seed, cudaStream_t stream) {
  if (count > 0) small_integers<<<2048, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(data), count, seed);
}

}  // namespace waybill::cuda

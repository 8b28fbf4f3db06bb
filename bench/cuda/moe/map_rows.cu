// SPDX-License-Identifier: Apache-2.0
// Rows and probability rows of the dense-map design. A warp a row; slots are found by a scan over all local experts of the row.
#include "bench/cuda/moe/map_kernels.h"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMaxSlots = 128;  // of a row: K at most

__device__ __forceinline__ int first_warp() { return static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32); }
__device__ __forceinline__ int num_warps() { return static_cast<int>(gridDim.x) * kWarps; }

__device__ __forceinline__ void copy_row(unsigned char* to, const unsigned char* from, int bytes, int lane) {
  for (int base = lane * 16; base < bytes; base += 4 * 512) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * 512 < bytes) v[i] = load_row(from + base + i * 512);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * 512 < bytes) store_row(to + base + i * 512, v[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) map_push(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan,
                                                     const unsigned char* __restrict__ x, const float* __restrict__ probabilities, const std::uint64_t to) {
  const int lane = static_cast<int>(threadIdx.x) & 31, T = s.T[peers.rank];
  for (int item = first_warp(); item < T * s.P; item += num_warps()) {
    const int t = item / s.P, p = item % s.P, row = plan.row_of[(peers.rank * s.T_max + t) * s.P + p];
    if (row < 0) continue;
    copy_row(peers.at<unsigned char>(p, to) + static_cast<std::int64_t>(row) * s.H * 2, x + static_cast<std::int64_t>(t) * s.H * 2, s.H * 2, lane);
    if (probabilities == nullptr) continue;
    const float* from = probabilities + static_cast<std::int64_t>(t) * s.E + (s.width == s.E ? 0 : s.first(p));
    copy_row(peers.at<unsigned char>(p, s.probabilities) + static_cast<std::int64_t>(row) * s.width * 4, reinterpret_cast<const unsigned char*>(from),
             s.width * 4, lane);
  }
}

// The slots of a row, in expert order, into `list`; `each(l, position)` by the lane that found it. Returns their number.
template <class Each>
__device__ __forceinline__ int scan_slots(const MapShape& s, const MapPlan& plan, int row, int lane, std::int32_t* list, const Each& each) {
  const std::int32_t* slots = plan.slot_map + static_cast<std::int64_t>(row) * s.L;
  int count = 0;
  for (int first = 0; first < s.L; first += 32) {
    const int l = first + lane, position = l < s.L ? slots[l] : -1;
    const unsigned set = __ballot_sync(ptx::kFullWarp, position >= 0);
    if (position >= 0) {
      const int at = count + __popc(set & ptx::lanemask_lt());
      if (at < kMaxSlots) list[at] = position;
      each(l, position);
    }
    count += __popc(set);
  }
  __syncwarp();
  return min(count, kMaxSlots);
}

__global__ void __launch_bounds__(kThreads) map_permute(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan,
                                                        const std::uint64_t from, unsigned char* y, const bool with_weight) {
  __shared__ std::int32_t lists[kWarps][kMaxSlots];
  const int lane = static_cast<int>(threadIdx.x) & 31, R = *plan.num_rows, bytes = s.H * 2;
  std::int32_t* list = lists[threadIdx.x / 32];
  const unsigned char* rows = peers.at<unsigned char>(peers.rank, from);
  const float* probabilities = peers.at<float>(peers.rank, s.probabilities) + (s.width == s.E ? s.first(peers.rank) : 0);
  for (int row = first_warp(); row < R; row += num_warps()) {
    const int count = scan_slots(s, plan, row, lane, list, [&](int l, int position) {
      if (with_weight) plan.slot_weight[position] = probabilities[static_cast<std::int64_t>(row) * s.width + l];
    });
    for (int at = lane * 16; at < bytes; at += 1024) {
      const unsigned char* source = rows + static_cast<std::int64_t>(row) * bytes + at;
      const bool second = at + 512 < bytes;
      const uint4 a = load_row(source), b = second ? load_row(source + 512) : uint4{};
      for (int j = 0; j < count; ++j) {
        unsigned char* to = y + static_cast<std::int64_t>(list[j]) * bytes + at;
        store_row(to, a);
        if (second) store_row(to + 512, b);
      }
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    map_reduce(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan, const unsigned char* __restrict__ y) {
  using V = Vector<__nv_bfloat16>;
  constexpr int kBatch = 4;
  __shared__ std::int32_t lists[kWarps][kMaxSlots];
  const int lane = static_cast<int>(threadIdx.x) & 31, R = *plan.num_rows, bytes = s.H * 2;
  std::int32_t* list = lists[threadIdx.x / 32];
  unsigned char* partials = peers.at<unsigned char>(peers.rank, s.partials);
  for (int row = first_warp(); row < R; row += num_warps()) {
    const int count = scan_slots(s, plan, row, lane, list, [](int, int) {});
    for (int at = lane * 16; at < bytes; at += 1024) {
      float sum[2][8] = {};
      for (int j0 = 0; j0 < count; j0 += kBatch) {
        uint4 v[kBatch][2];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          v[j][0] = v[j][1] = uint4{};
          if (j0 + j >= count) continue;
          const unsigned char* from = y + static_cast<std::int64_t>(list[j0 + j]) * bytes + at;
          v[j][0] = load_row(from);
          if (at + 512 < bytes) v[j][1] = load_row(from + 512);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float x[8];
            V::to_float(v[j][i], x);
#pragma unroll
            for (int n = 0; n < 8; ++n) sum[i][n] += x[n];
          }
        }
      }
      unsigned char* to = partials + static_cast<std::int64_t>(row) * bytes + at;
      store_row(to, V::from_float(sum[0]));
      if (at + 512 < bytes) store_row(to + 512, V::from_float(sum[1]));
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads) map_combine(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan,
                                                        const float* __restrict__ addend, unsigned char* out) {
  using V = Vector<__nv_bfloat16>;
  const int lane = static_cast<int>(threadIdx.x) & 31, T = s.T[peers.rank], bytes = s.H * 2, pieces = (bytes + 1023) / 1024;
  for (int item = first_warp(); item < T * pieces; item += num_warps()) {
    const int t = item / pieces, at = item % pieces * 1024 + lane * 16;
    const std::int32_t* rows = plan.row_of + (peers.rank * s.T_max + t) * s.P;
    float sum[2][8] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (addend == nullptr || at + i * 512 >= bytes) continue;
      const float* a = addend + static_cast<std::int64_t>(t) * s.H + (at + i * 512) / 2;
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[i][n] = a[n];
    }
    for (int p = 0; p < s.P; ++p) {
      if (rows[p] < 0) continue;
      const unsigned char* from = peers.at<unsigned char>(p, s.partials) + static_cast<std::int64_t>(rows[p]) * bytes + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (at + i * 512 >= bytes) continue;
        float x[8];
        V::to_float(load_row(from + i * 512), x);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[i][n] += x[n];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at + i * 512 < bytes) store_row(out + static_cast<std::int64_t>(t) * bytes + at + i * 512, V::from_float(sum[i]));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    map_return(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan, const float* __restrict__ d_slot_weight) {
  const int lane = static_cast<int>(threadIdx.x) & 31, R = *plan.num_rows, first = s.width == s.E ? s.first(peers.rank) : 0;
  float* window = peers.at<float>(peers.rank, s.d_probabilities);
  for (int row = first_warp(); row < R; row += num_warps()) {
    const std::int32_t* slots = plan.slot_map + static_cast<std::int64_t>(row) * s.L;
    for (int c = lane; c < s.width; c += 32) {
      const int l = c - first, position = l >= 0 && l < s.L ? slots[l] : -1;
      window[static_cast<std::int64_t>(row) * s.width + c] = position >= 0 ? d_slot_weight[position] : 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    map_collect(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan, float* d_probabilities) {
  const int lane = static_cast<int>(threadIdx.x) & 31, T = s.T[peers.rank];
  for (int t = first_warp(); t < T; t += num_warps()) {
    const std::int32_t* rows = plan.row_of + (peers.rank * s.T_max + t) * s.P;
    for (int e = lane * 4; e < s.E; e += 128) {
      float4 sum{0, 0, 0, 0};
      for (int p = 0; p < s.P; ++p) {
        const bool in_slice = e / s.L == p;
        if (rows[p] < 0 || (s.width != s.E && !in_slice)) continue;
        const float* from = peers.at<float>(p, s.d_probabilities) + static_cast<std::int64_t>(rows[p]) * s.width + (s.width == s.E ? e : e - s.first(p));
        const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      *reinterpret_cast<float4*>(d_probabilities + static_cast<std::int64_t>(t) * s.E + e) = sum;
    }
  }
}

unsigned grid(int num_sms) { return static_cast<unsigned>(2 * num_sms); }

}  // namespace

void launch_map_push(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const void* x, const float* probabilities, std::uint64_t to, int num_sms,
                     cudaStream_t stream) {
  map_push<<<grid(num_sms), kThreads, 0, stream>>>(peers, s, plan, static_cast<const unsigned char*>(x), probabilities, to);
}
void launch_map_permute(const DevPeers& peers, const MapShape& s, const MapPlan& plan, std::uint64_t from, void* y, bool with_weight, int num_sms,
                        cudaStream_t stream) {
  map_permute<<<grid(num_sms), kThreads, 0, stream>>>(peers, s, plan, from, static_cast<unsigned char*>(y), with_weight);
}
void launch_map_reduce(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const void* y, int num_sms, cudaStream_t stream) {
  map_reduce<<<grid(num_sms), kThreads, 0, stream>>>(peers, s, plan, static_cast<const unsigned char*>(y));
}
void launch_map_combine(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const float* addend, void* out, int num_sms, cudaStream_t stream) {
  map_combine<<<grid(num_sms), kThreads, 0, stream>>>(peers, s, plan, addend, static_cast<unsigned char*>(out));
}
void launch_map_return(const DevPeers& peers, const MapShape& s, const MapPlan& plan, const float* d_slot_weight, int num_sms, cudaStream_t stream) {
  map_return<<<grid(num_sms), kThreads, 0, stream>>>(peers, s, plan, d_slot_weight);
}
void launch_map_collect(const DevPeers& peers, const MapShape& s, const MapPlan& plan, float* d_probabilities, int num_sms, cudaStream_t stream) {
  map_collect<<<grid(num_sms), kThreads, 0, stream>>>(peers, s, plan, d_probabilities);
}

}  // namespace waybill::cuda::moe_bench

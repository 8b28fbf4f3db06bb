// SPDX-License-Identifier: Apache-2.0
// The whole layout in one launch: layout_count, layout_scan and layout_scatter, with ids and metadata read once and no launch between.
//
// Grid (layout_tiles_of(shape), ranks), 512 threads; all CTAs must be resident together (layout_fused_ctas says how many are). Waits for the metadata of all
// ranks (kSignalMeta) with a timeout; CTAs wait for each other without one of their own, and every CTA arrives, whatever it found. expert_tiles is
// [tiles][L] here. What a tile's first kHeldSlots slots are and weigh is read once and kept in shared memory over the waits (the weights come while the CTA
// counts), so that scattering waits for no memory. Not for plans from maps, which may pad to capacity. With few counts every CTA sums them for itself; with
// many the CTAs share that and wait a second time.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/layout_tile.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {
namespace {

constexpr int kWarps = kLayoutThreads / 32;
constexpr int kOwnSums = 8192;    // counts that every CTA reads by itself
constexpr int kHeldSlots = 3072;  // 24 slots a row of the tile
constexpr int kBatch = 5;
constexpr int kKeptTiles = 8;
constexpr int kRowBits = 7;
static_assert(kLayoutTile == 1 << kRowBits);

// The tile's first slots, in shared memory behind the sums.
struct HeldSlots {
  int* place;     // [kHeldSlots] expert << kRowBits | row of the tile
  float* weight;  // [kHeldSlots]
};

// What lies before this tile at each expert, and each expert's slots: shared memory behind the bits.
struct ExpertSums {
  int* before;  // [L]
  int* total;   // [L]
};

// All CTAs of the rank have called it before wait() ends. What the CTA wrote before is visible to them then.
class CtaBarrier {
 public:
  __device__ __forceinline__ CtaBarrier(const ExchangeParams& q, int rank, ExchangeSignal signal, ExchangeTicket ticket)
      : q_(q), rank_(rank), signal_(signal), ticket_(ticket), epoch_(open_epoch(q, rank, signal)) {}
  __device__ __forceinline__ void arrive() const {
    if (!last_cta(q_, rank_, ticket_)) return;
    close_epoch(q_, rank_, signal_, epoch_);
    if (threadIdx.x == 0) ptx::st_release_gpu(&q_.control(rank_)->flag[signal_][rank_], epoch_);
  }
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      while (static_cast<std::int32_t>(ptx::ld_acquire_gpu(&q_.control(rank_)->flag[signal_][rank_]) - epoch_) < 0) {
      }
    }
    __syncthreads();
  }

 private:
  const ExchangeParams& q_;
  int rank_;
  ExchangeSignal signal_;
  ExchangeTicket ticket_;
  std::uint32_t epoch_;
};

template <int kWords>
__device__ __forceinline__ void write_counts(const std::uint32_t* bits, int L, int* counts) {
  for (int e = static_cast<int>(threadIdx.x); e < L; e += kLayoutThreads) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) count += __popc(bits[e * kWords + w]);
    counts[e] = count;
  }
}

// sums from all counts [num_tiles][L].
__device__ __forceinline__ void sum_all(const int* counts, int num_tiles, int L, const ExpertSums& sums) {
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, tile = static_cast<int>(blockIdx.x);
  for (int e = static_cast<int>(threadIdx.x); e < L; e += kLayoutThreads) sums.before[e] = sums.total[e] = 0;
  __syncthreads();
  for (int e = lane; e < L; e += 32) {
    int before = 0, total = 0;
#pragma unroll 4
    for (int t = warp; t < num_tiles; t += kWarps) {
      const int n = __ldcg(counts + static_cast<std::int64_t>(t) * L + e);
      before += t < tile ? n : 0, total += n;
    }
    if (total != 0) atomicAdd(sums.before + e, before), atomicAdd(sums.total + e, total);
  }
  __syncthreads();
}

// counts [num_tiles][L] become what lies before each tile, 32 experts a CTA at a time; totals go to `totals`. A warp keeps the counts of its first tiles.
__device__ __forceinline__ void scan_shared(int* counts, int num_tiles, int L, int* totals, int (&parts)[kWarps][32]) {
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int per_warp = (num_tiles + kWarps - 1) / kWarps, begin = min(num_tiles, warp * per_warp), end = min(num_tiles, begin + per_warp);
  for (int e0 = static_cast<int>(blockIdx.x) * 32; e0 < L; e0 += max(1, num_tiles) * 32) {  // by the CTAs that have a tile
    const int e = e0 + lane;
    int sum = 0, kept[kKeptTiles];
#pragma unroll
    for (int i = 0; i < kKeptTiles; ++i) {
      kept[i] = begin + i < end && e < L ? __ldcg(counts + static_cast<std::int64_t>(begin + i) * L + e) : 0;
    }
#pragma unroll
    for (int i = 0; i < kKeptTiles; ++i) sum += kept[i];
#pragma unroll 4
    for (int t = begin + kKeptTiles; t < end; ++t) sum += e < L ? __ldcg(counts + static_cast<std::int64_t>(t) * L + e) : 0;
    parts[warp][lane] = sum;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < kWarps; ++w) before += w < warp ? parts[w][lane] : 0, total += parts[w][lane];
    if (e < L) {
#pragma unroll
      for (int i = 0; i < kKeptTiles; ++i) {
        if (begin + i < end) counts[static_cast<std::int64_t>(begin + i) * L + e] = before;
        before += kept[i];
      }
#pragma unroll 4
      for (int t = begin + kKeptTiles; t < end; ++t) {
        int* at = counts + static_cast<std::int64_t>(t) * L + e;
        const int n = __ldcg(at);
        *at = before, before += n;
      }
      if (warp == 0) totals[e] = total;
    }
    __syncthreads();
  }
}

// sums.before: also where each expert starts, at multiples of the alignment a. The first CTA writes what the handle keeps.
__device__ __forceinline__ void add_offsets(const ExchangeParams& q, const RankCall& call, int num_ctas, const ExpertSums& sums, int* warp_sums) {
  const int L = q.shape.L, a = q.shape.alignment, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  int* counts = handle_part<int>(call, q.shape.h_expert_counts);
  int* offsets = handle_part<int>(call, q.shape.h_expert_offsets);
  // A thread has `per` experts one behind the other.
  const int per = (L + kLayoutThreads - 1) / kLayoutThreads, first = static_cast<int>(threadIdx.x) * per, end = min(L, first + per);
  const auto padded = [a](int n) { return (n + a - 1) / a * a; };
  int own = 0;
  for (int e = first; e < end; ++e) own += padded(sums.total[e]);
  const int scan = warp_inclusive(own);
  if (lane == 31) warp_sums[warp] = scan;
  __syncthreads();
  int offset = scan - own, all = 0;
  for (int w = 0; w < kWarps; ++w) offset += w < warp ? warp_sums[w] : 0, all += warp_sums[w];
  for (int e = first; e < end; ++e) {
    const int n = sums.total[e], next = offset + padded(n);
    sums.before[e] += offset;
    if (blockIdx.x == 0) counts[e] = n, offsets[e] = offset;
    if (a > 1 && e % num_ctas == static_cast<int>(blockIdx.x)) {  // padding of the experts this CTA takes
      for (int s = offset + n; s < next; ++s) {
        handle_part<int>(call, q.shape.h_slot_row)[s] = -1;
        handle_part<float>(call, q.shape.h_slot_weight)[s] = 0.0f;
      }
    }
    offset = next;
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) offsets[L] = header_of(call)->S_padded = all;
}

// Starts the copy of the weights of the held slots: each thread those that it scatters itself.
__device__ __forceinline__ void copy_weights(const ExchangeParams& q, int rank, const LayoutTile& tile, const HeldSlots& held) {
  const float* weights = q.window<float>(rank, q.shape.slot_weights) + tile.begin;
  const int num = q.shape.send_weights != 0 ? min(kHeldSlots, tile.end - tile.begin) : 0;
  for (int i = static_cast<int>(threadIdx.x); i < num; i += kLayoutThreads) ptx::copy_async_4(ptx::smem_address(held.weight + i), weights + i, true);
  ptx::copy_async_commit();
}

// As mark_tile(), with places kept.
template <int kWords>
__device__ __forceinline__ bool mark_held(const ExchangeParams& q, int rank, const LayoutTile& tile, const int* starts, std::uint32_t* bits,
                                          const HeldSlots& held) {
  for (int i = static_cast<int>(threadIdx.x); i < q.shape.L * kWords; i += kLayoutThreads) bits[i] = 0;
  __syncthreads();
  bool twice = false;
  for (int first = tile.begin + static_cast<int>(threadIdx.x); first < tile.end; first += kBatch * kLayoutThreads) {
    int ids[kBatch];  // read together
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int j = first + b * kLayoutThreads;
      ids[b] = j < tile.end ? local_id_of_slot(q, rank, j) : -1;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int j = first + b * kLayoutThreads, e = ids[b];
      if (e < 0) continue;
      const int row = row_of_slot(starts, tile.num_rows, j);
      const std::uint32_t bit = 1u << (row & 31);
      twice |= (atomicOr(bits + e * kWords + (row >> 5), bit) & bit) != 0;
      if (j - tile.begin < kHeldSlots) held.place[j - tile.begin] = e << kRowBits | row;
    }
  }
  return __syncthreads_or(twice ? 1 : 0) != 0;
}

// Every slot of the tile to its place in expert order.
template <int kWords>
__device__ __forceinline__ void scatter(const ExchangeParams& q, int rank, const RankCall& call, const LayoutTile& tile, const int* starts,
                                        const std::uint32_t* bits, const ExpertSums& sums, const HeldSlots& held) {
  const ExchangeShape& shape = q.shape;
  const auto* meta = q.window<RowMeta>(rank, shape.row_meta);
  for (int i = static_cast<int>(threadIdx.x); i < tile.num_rows; i += kLayoutThreads) {
    handle_part<int>(call, shape.h_row_slot_offsets)[tile.first + i] = starts[i];
    handle_part<int>(call, shape.h_row_entry)[tile.first + i] = __ldcg(&meta[tile.first + i].entry);
  }
  const auto put = [&](int j, int e, int row, float weight) {
    const int s = sums.before[e] + bits_below<kWords>(bits, e, row);
    handle_part<int>(call, shape.h_slot_position)[j] = s;
    handle_part<int>(call, shape.h_slot_row)[s] = call.lists_tokens != 0 ? __ldcg(&meta[tile.first + row].entry) : tile.first + row;
    if (shape.send_weights != 0) handle_part<float>(call, shape.h_slot_weight)[s] = weight;
  };
  ptx::copy_async_wait<0>();
  const int held_end = min(tile.end, tile.begin + kHeldSlots);
  for (int j = tile.begin + static_cast<int>(threadIdx.x); j < held_end; j += kLayoutThreads) {
    const int place = held.place[j - tile.begin];
    put(j, place >> kRowBits, place & (kLayoutTile - 1), held.weight[j - tile.begin]);
  }
  const float* weights = q.window<float>(rank, shape.slot_weights);
  for (int j = held_end + static_cast<int>(threadIdx.x); j < tile.end; j += kLayoutThreads) {
    put(j, local_id_of_slot(q, rank, j), row_of_slot(starts, tile.num_rows, j), shape.send_weights != 0 ? __ldcg(weights + j) : 0.0f);
  }
}

template <int kWords>
__global__ void __launch_bounds__(kLayoutThreads, 2) exchange_layout_fused(const __grid_constant__ ExchangeParams q, const int twice_waited) {
  extern __shared__ __align__(16) std::uint32_t bits[];  // [L][kWords], then the sums [2][L], then what is held
  __shared__ int starts[kLayoutTile + 1];
  __shared__ int parts[kWarps][32];
  __shared__ HandleHeader header;  // one thread reads it: another CTA may find a peer lost at any time
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], L = shape.L;
  begin_exchange_kernel();
  const CtaBarrier counted(q, rank, kSignalCounted, kTicketCounted), scanned(q, rank, kSignalScanned, kTicketScanned);
  if (threadIdx.x == 0) header = *header_of(call);
  __syncthreads();
  int num_tiles = (header.R + shape.layout_rows - 1) / shape.layout_rows;  // 0 where the handle is invalid
  if (static_cast<int>(blockIdx.x) >= max(1, num_tiles)) {
    counted.arrive();
    if (twice_waited != 0) scanned.arrive();
    return;
  }
  int* tiles = q.window<int>(rank, shape.expert_tiles);
  int* memory = reinterpret_cast<int*>(bits) + L * kWords;
  const ExpertSums sums{memory, memory + L};
  const HeldSlots held{memory + 2 * L, reinterpret_cast<float*>(memory + 2 * L + kHeldSlots)};
  LayoutTile tile{};
  if (num_tiles > 0) {
    if (await_posted(q, rank, kSignalMeta)) {
      tile = load_tile(q, rank, header, starts);
      copy_weights(q, rank, tile, held);
      const bool twice = mark_held<kWords>(q, rank, tile, starts, bits, held);
      if (twice && threadIdx.x == 0) atomicOr(&call.status->flags, static_cast<std::uint32_t>(kStatusDuplicateId));
      write_counts<kWords>(bits, L, tiles + static_cast<std::int64_t>(blockIdx.x) * L);
    } else {
      mark_lost(q, rank, call);
    }
  }
  counted.arrive(), counted.wait();
  if (threadIdx.x == 0) header.valid = __ldcg(&header_of(call)->valid);  // 0: some CTA has lost a peer
  __syncthreads();
  if (header.valid == 0) num_tiles = 0;
  if (twice_waited != 0) {
    int* totals = handle_part<int>(call, shape.h_expert_counts);
    scan_shared(tiles, num_tiles, L, totals, parts);
    scanned.arrive(), scanned.wait();
    for (int e = static_cast<int>(threadIdx.x); e < L; e += kLayoutThreads) {
      sums.before[e] = num_tiles > 0 ? __ldcg(tiles + static_cast<std::int64_t>(blockIdx.x) * L + e) : 0, sums.total[e] = __ldcg(totals + e);
    }
    __syncthreads();
  } else {
    sum_all(tiles, num_tiles, L, sums);
  }
  add_offsets(q, call, max(1, num_tiles), sums, parts[0]);
  int* row_slot_offsets = handle_part<int>(call, shape.h_row_slot_offsets);
  if (blockIdx.x == 0 && threadIdx.x == 0) row_slot_offsets[num_tiles > 0 ? header.R : 0] = num_tiles > 0 ? header.S : 0;
  if (num_tiles > 0) scatter<kWords>(q, rank, call, tile, starts, bits, sums, held);
}

template <class Body>
auto with_kernel(const ExchangeShape& shape, const Body& body) {
  return body(shape.layout_rows == kLayoutTile ? exchange_layout_fused<kLayoutTile / 32> : exchange_layout_fused<1>);
}

std::size_t fused_smem(const ExchangeShape& shape) { return layout_smem(shape) + static_cast<std::size_t>(shape.L) * 8 + kHeldSlots * 8; }

}  // namespace

int layout_fused_ctas(const ExchangeShape& shape, int num_sms) {
  if (fused_smem(shape) > 128 * 1024) return 0;
  int blocks = 0;
  with_kernel(shape, [&](auto kernel) {
    if (fused_smem(shape) > kPlainSharedBytes) {
      (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(fused_smem(shape)));
    }
    (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kLayoutThreads, fused_smem(shape));
  });
  return blocks * num_sms;
}

void launch_layout_fused(const ExchangeParams& q, bool overlap, cudaStream_t stream) {
  const int tiles = layout_tiles_of(q.shape), twice_waited = static_cast<std::int64_t>(tiles) * q.shape.L > kOwnSums ? 1 : 0;
  with_kernel(q.shape, [&](auto kernel) { launch_ranks(kernel, tiles, kLayoutThreads, fused_smem(q.shape), overlap, stream, q, twice_waited); });
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// Dispatch with the copy engine of the SMs (sm_90): rows pass through shared memory, one bulk load and one bulk store for each destination.
//
// Grid (ctas, ranks), `warps` warps a CTA, each on its own: a ring of `stages` buffers, an item is a piece of a token's row with the token's
// entries beside it (loaded by the same barrier). Lane d stores to destination d. A stage is loaded again once the stores of the item that
// used it have read it; half a ring of items lies between. a: rows, b: scales or null. Handshake, bytes and end as dispatch_push.
// args.remote_only: rows of the own rank stay where they are, and the warp that completes a chunk of tokens tells all ranks (permute_arriving).
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"

namespace waybill::cuda {
namespace {

constexpr int kMaxStages = 8;
constexpr int kMaxWarps = 16;

// A stage: piece of the row, the scales (with piece 0), entries.
struct StageLayout {
  std::uint32_t scales, entries, bytes;
  WB_HD StageLayout(const DispatchArgs& args, int D) {
    scales = static_cast<std::uint32_t>(args.chunk_bytes);
    entries = scales + static_cast<std::uint32_t>(args.part[1].bytes);
    bytes = (entries + static_cast<std::uint32_t>(D) * 16 + 127) / 128 * 128;
  }
};

struct Item {
  std::int64_t t;
  std::int32_t offset, bytes;  // of the row
};

__device__ __forceinline__ Item item_at(const DispatchArgs& args, std::int64_t index) {
  Item item{index / args.chunks, static_cast<std::int32_t>(index % args.chunks) * args.chunk_bytes, 0};
  item.bytes = min(args.chunk_bytes, args.part[0].bytes - item.offset);
  return item;
}

// One lane.
__device__ __forceinline__ void load_item(const RankCall& call, const ExchangeShape& shape, const DispatchArgs& args, const StageLayout& layout,
                                          const Item& item, unsigned char* stage, std::uint64_t* full) {
  const auto scale_bytes = item.offset == 0 ? static_cast<std::uint32_t>(args.part[1].bytes) : 0u;
  const auto entry_bytes = static_cast<std::uint32_t>(shape.D) * 16, bytes = static_cast<std::uint32_t>(item.bytes);
  ptx::mbarrier_arrive_expect(full, bytes + scale_bytes + entry_bytes);
  ptx::bulk_load(stage + layout.entries, handle_part<RowEntry>(call, shape.h_entries) + item.t * shape.D, entry_bytes, full);
  ptx::bulk_load(stage, static_cast<const unsigned char*>(call.a) + item.t * args.part[0].stride + item.offset, bytes, full);
  if (scale_bytes > 0) ptx::bulk_load(stage + layout.scales, static_cast<const unsigned char*>(call.b) + item.t * args.part[1].stride, scale_bytes, full);
}

__device__ __forceinline__ void store_item(const ExchangeParams& q, const DispatchArgs& args, const StageLayout& layout, const Item& item,
                                           const unsigned char* stage, int rank) {
  const auto* entries = reinterpret_cast<const RowEntry*>(stage + layout.entries);
  for (int d = static_cast<int>(threadIdx.x) & 31; d < q.shape.D; d += 32) {
    const RowEntry entry = entries[d];
    if (entry.rank < 0) break;
    if (args.remote_only != 0 && entry.rank == rank) continue;
    const auto place = static_cast<std::int64_t>(entry.row);
    ptx::bulk_store(q.window<unsigned char>(entry.rank, args.part[0].window) + place * args.part[0].bytes + item.offset, stage,
                    static_cast<std::uint32_t>(item.bytes));
    if (item.offset == 0 && args.part[1].bytes > 0) {
      ptx::bulk_store(q.window<unsigned char>(entry.rank, args.part[1].window) + place * args.part[1].bytes, stage + layout.scales,
                      static_cast<std::uint32_t>(args.part[1].bytes));
    }
  }
  ptx::bulk_commit();
}

// Until at most half a ring of items still reads shared memory.
__device__ __forceinline__ void wait_half(int stages) {
  switch (stages / 2) {
    case 1:
      return ptx::bulk_wait_read<1>();
    case 2:
      return ptx::bulk_wait_read<2>();
    case 3:
      return ptx::bulk_wait_read<3>();
    default:
      return ptx::bulk_wait_read<4>();
  }
}

// Until at most half a ring of items and one more are not yet written.
__device__ __forceinline__ void wait_written_but_half(int stages) {
  switch (stages / 2) {
    case 1:
      return ptx::bulk_wait<2>();
    case 2:
      return ptx::bulk_wait<3>();
    case 3:
      return ptx::bulk_wait<4>();
    default:
      return ptx::bulk_wait<5>();
  }
}

// The chunk of tokens whose items the warp has pushed, and how many of them are known to be written: items are counted when half a ring of
// others has been pushed behind them, so that nothing waits for the link.
class ChunkCount {
 public:
  __device__ __forceinline__ ChunkCount(const ExchangeParams& q, const RankCall& call, const DispatchArgs& args, int rank)
      : q_(q), args_(args), rank_(rank), T_(call.T), epoch_(open_epoch(q, rank, kSignalChunks)) {}
  // Item `index` was pushed half a ring ago.
  __device__ __forceinline__ void pushed(std::int64_t index) {
    const int chunk = static_cast<int>(index / args_.chunks) >> q_.shape.chunk_shift;
    if (chunk != chunk_ && items_ > 0) {
      wait_written_but_half(args_.stages);
      tell();
    }
    chunk_ = chunk, ++items_;
  }
  // All that was pushed is written.
  __device__ __forceinline__ void end() {
    if (items_ > 0) tell();
  }

 private:
  __device__ __forceinline__ void tell() {
    const int first = chunk_ << q_.shape.chunk_shift, tokens = min(1 << q_.shape.chunk_shift, T_ - first);
    ptx::fence_async_proxy_all();
    __syncwarp();
    finish_chunk_parts(q_, rank_, kChunkRows, -1, chunk_, items_, tokens * args_.chunks, epoch_);
    items_ = 0;
  }
  const ExchangeParams& q_;
  const DispatchArgs& args_;
  int rank_, T_;
  std::uint32_t epoch_;
  int chunk_ = 0, items_ = 0;
};

__device__ __forceinline__ void push_rows(const ExchangeParams& q, const RankCall& call, int rank, const DispatchArgs& args, unsigned char* ring,
                                          std::uint64_t* full) {
  const int lane = static_cast<int>(threadIdx.x) & 31, stages = args.stages, half = stages / 2;
  const StageLayout layout(args, q.shape.D);
  const std::int64_t items = static_cast<std::int64_t>(call.T) * args.chunks, step = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x >> 5) * gridDim.x + blockIdx.x;
  if (lane == 0) {
    for (int s = 0; s < stages && first + s * step < items; ++s)
      load_item(call, q.shape, args, layout, item_at(args, first + s * step), ring + s * layout.bytes, full + s);
  }
  ChunkCount count(q, call, args, rank);
  int stage = 0, old = stages - half;  // old: stage of the item `half` before this one
  std::uint32_t parity = 0;
  for (std::int64_t index = first, n = 0; index < items; index += step, ++n) {
    ptx::mbarrier_wait(full + stage, parity);
    store_item(q, args, layout, item_at(args, index), ring + stage * layout.bytes, rank);
    if (args.remote_only != 0 && n >= half) count.pushed(index - half * step);
    const std::int64_t next = index + (stages - half) * step;
    if (n >= half && next < items) {
      wait_half(stages);
      __syncwarp();
      if (lane == 0) load_item(call, q.shape, args, layout, item_at(args, next), ring + old * layout.bytes, full + old);
    }
    if (++stage == stages) stage = 0, parity ^= 1u;
    if (++old == stages) old = 0;
  }
  ptx::bulk_wait_all();
  if (args.remote_only != 0) {
    const std::int64_t num = first < items ? (items - first + step - 1) / step : 0;  // the last `half` of the warp's items are not counted yet
    for (std::int64_t n = num > half ? num - half : 0; n < num; ++n) count.pushed(first + n * step);
    count.end();
  }
  ptx::fence_async_proxy_all();
}

__global__ void __launch_bounds__(kMaxWarps * 32) exchange_dispatch_bulk(const __grid_constant__ ExchangeParams q, const __grid_constant__ DispatchArgs args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char smem[];  // [warps][stages][stage]
  __shared__ std::uint64_t full[kMaxWarps][kMaxStages];
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], warp = static_cast<int>(threadIdx.x) >> 5;
  const StageLayout layout(args, q.shape.D);
  if ((threadIdx.x & 31) == 0) {
    for (int s = 0; s < args.stages; ++s) ptx::mbarrier_init(&full[warp][s], 1);
    ptx::mbarrier_init_fence();
    ptx::fence_async_proxy();
  }
  __syncwarp();
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return;
  const std::uint32_t ready = open_epoch(q, rank, kSignalReady);
  bool ok = true;
  if (args.handshake != 0) {
    // Rows may go to the window of partials: peers must have read what it held.
    if (blockIdx.x == 0 && await_posted(q, rank, kSignalPulled)) post_signal(q, rank, kSignalReady, ready);
    ok = await_signal(q, rank, kSignalReady, ready);
    if (!ok) mark_lost(q, rank, call);
  }
  if (ok) push_rows(q, call, rank, args, smem + static_cast<std::size_t>(warp) * static_cast<std::size_t>(args.stages) * layout.bytes, full[warp]);
  if (!last_cta(q, rank, kTicketDispatch)) return;
  if (args.handshake != 0) close_epoch(q, rank, kSignalReady, ready);
  if (args.remote_only != 0) close_epoch(q, rank, kSignalChunks, open_epoch(q, rank, kSignalChunks));
  post_and_await(q, rank, call, kSignalRows);
#endif
}

}  // namespace

const void* dispatch_bulk_kernel() { return reinterpret_cast<const void*>(&exchange_dispatch_bulk); }

std::size_t dispatch_bulk_smem(const DispatchArgs& args, int D, int warps) {
  return static_cast<std::size_t>(warps) * static_cast<std::size_t>(args.stages) * StageLayout(args, D).bytes;
}

void launch_dispatch_bulk(const ExchangeParams& q, const DispatchArgs& args, int ctas, int warps, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_dispatch_bulk, ctas, warps * 32, dispatch_bulk_smem(args, q.shape.D, warps), overlap, stream, q, args);
}

}  // namespace waybill::cuda

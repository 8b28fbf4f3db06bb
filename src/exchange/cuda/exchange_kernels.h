// SPDX-License-Identifier: Apache-2.0
// Launchers of the exchange kernels, one a file. All are queued on `stream`; ctas: CTAs of each rank of the launch. They check nothing:
// DeviceExchange does. overlap: see launch_kernel() in core/cuda/launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/cuda/launch.h"
#include "exchange/cuda/exchange_params.h"

namespace waybill::cuda {

// Rows of one tensor in a push: [rows, bytes]. bytes and strides are multiples of 16.
struct RowPart {
  std::uint64_t window;  // where rows arrive: the same offset in every arena
  std::int64_t stride;   // bytes between rows of the source
  std::int32_t bytes;    // 0: no such part
  std::int32_t unused;
};

struct DispatchArgs {
  RowPart part[2];         // payload (call.a), scales (call.b)
  std::int32_t handshake;  // 1: wait for kSignalReady of every rank before writing
  // Bulk kernel: a row travels in `chunks` pieces of chunk_bytes (the last may be shorter) through `stages` buffers a warp.
  std::int32_t chunks, chunk_bytes, stages;
  std::int32_t remote_only;  // 1: rows for other ranks only, and each chunk of tokens is told when it is there (bulk kernel)
};

enum class RowType : std::int32_t { kF32 = 0, kBF16 = 1 };

struct CombineArgs {
  std::uint64_t window;     // partials [row_budget, H] of this rank, or slots [T_max * D, H] (push)
  std::uint64_t slots;      // push: where partials go
  std::int64_t out_stride;  // elements
  std::int32_t H;
  std::int32_t from_slots;  // 1: read own slots instead of the peers' partials
};

enum PermutePart : std::int32_t {
  kPermuteAll = 0,
  kPermuteOwn = 1,       // rows that this rank sent to itself, read from x [T, H]
  kPermuteOthers = 2,    // the rest, and the padding
  kPermuteArriving = 3,  // own rows from x (call.b), then the others chunk by chunk as a dispatch in chunks brings them, and the padding
};

// Local steps. rows and z have R rows, y has S_padded.
struct RowsArgs {
  std::int64_t row_stride, slot_stride;  // elements; multiples of 16 bytes
  std::int32_t H;
  std::int32_t weighted;
  std::int32_t await_pulled;  // 1: z lies in a window that peers may still read
  std::int32_t part;          // permute: a PermutePart
  std::int32_t parts = 0;     // permute: items a row is split into; 0: by the number of rows
};

struct ReduceCombineArgs {
  CombineArgs combine;
  std::int64_t slot_stride;  // of y, elements
  std::int32_t weighted;
  std::int32_t combine_ctas, combine_stages, reduce_stages;
};

// One rank: expert order to tokens.
struct ReduceHomeArgs {
  std::int64_t slot_stride, out_stride, base_stride;  // elements
  std::int32_t H;                                     // columns
  std::int32_t stages;                                // of the ring, 2 KB each a warp
};

void launch_plan_count(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream);
void launch_plan_fill(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream);
// Both in one launch of num_tiles CTAs a rank, all of which must be resident: how many CTAs the GPU holds.
int plan_fused_ctas(const ExchangeShape& shape, int num_sms);
void launch_plan_fused(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream);
int plan_fused_ctas_i16(const ExchangeShape& shape, int num_sms);
void launch_plan_fused_i16(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream);
void launch_layout_count(const ExchangeParams& q, bool overlap, cudaStream_t stream);
void launch_layout_scan(const ExchangeParams& q, bool overlap, cudaStream_t stream);
void launch_layout_scatter(const ExchangeParams& q, bool overlap, cudaStream_t stream);
// The three in one launch of layout_tiles_of(shape) CTAs a rank, all of which must be resident: how many CTAs the GPU holds.
int layout_fused_ctas(const ExchangeShape& shape, int num_sms);
void launch_layout_fused(const ExchangeParams& q, bool overlap, cudaStream_t stream);
inline int layout_tiles_of(const ExchangeShape& shape) {
  const int tiles = (shape.row_budget + shape.layout_rows - 1) / shape.layout_rows;
  return tiles > 0 ? tiles : 1;
}

void launch_dispatch_push(const ExchangeParams& q, const DispatchArgs& args, int ctas, bool overlap, cudaStream_t stream);
void launch_dispatch_bulk(const ExchangeParams& q, const DispatchArgs& args, int ctas, int warps, bool overlap, cudaStream_t stream);
void launch_dispatch_pull(const ExchangeParams& q, const DispatchArgs& args, std::uint64_t source_window, int ctas, bool overlap, cudaStream_t stream);
// wire: type of the partials, out: of the result.
void launch_combine_pull(const ExchangeParams& q, const CombineArgs& args, RowType wire, RowType out, int ctas, bool overlap, cudaStream_t stream);
// D <= 32. stages <= 16 a warp, warps <= 16.
void launch_combine_bulk(const ExchangeParams& q, const CombineArgs& args, RowType wire, RowType out, int ctas, int warps, int stages, bool overlap,
                         cudaStream_t stream);
void launch_combine_push(const ExchangeParams& q, const CombineArgs& args, RowType wire, int ctas, bool overlap, cudaStream_t stream);
void launch_slot_values_gather(const ExchangeParams& q, bool overlap, cudaStream_t stream);
void launch_slot_values_return(const ExchangeParams& q, int ctas, bool overlap, cudaStream_t stream);

void launch_permute(const ExchangeParams& q, const RowsArgs& args, int element_bytes, int ctas, bool overlap, cudaStream_t stream);
void launch_unpermute_reduce(const ExchangeParams& q, const RowsArgs& args, RowType y, RowType z, int ctas, bool overlap, cudaStream_t stream);
// Rows of up to kMaxRingSlots slots.
inline constexpr int kMaxRingSlots = 64;
void launch_unpermute_bulk(const ExchangeParams& q, const RowsArgs& args, RowType y, RowType z, int ctas, int stages, bool overlap, cudaStream_t stream);
// y: type of the expert rows and of the result. D <= 32, min(K, L) <= 64.
void launch_reduce_combine(const ExchangeParams& q, const ReduceCombineArgs& args, RowType y, RowType wire, int ctas, bool overlap, cudaStream_t stream);
// Rows of up to kMaxRingSlots slots; base f32. The second: any.
void launch_reduce_home(const ExchangeParams& q, const ReduceHomeArgs& args, RowType y, RowType out, int ctas, bool overlap, cudaStream_t stream);
void launch_reduce_home_plain(const ExchangeParams& q, const ReduceHomeArgs& args, RowType y, RowType out, int ctas, bool overlap, cudaStream_t stream);
void launch_unpermute_backward(const ExchangeParams& q, const RowsArgs& args, RowType y, RowType dz, int ctas, bool overlap, cudaStream_t stream);

// Kernels whose CTAs wait for peers before they go on, with their threads and dynamic shared memory: how many fit on a GPU at a time.
inline constexpr int kRowThreads = 512, kPullThreads = 384;
const void* dispatch_push_kernel();
const void* dispatch_bulk_kernel();
const void* dispatch_pull_kernel();
const void* combine_pull_kernel(RowType wire, RowType out);
const void* combine_bulk_kernel(RowType wire, RowType out);
const void* combine_push_kernel();
const void* reduce_combine_kernel(RowType y, RowType wire);
const void* slot_values_return_kernel(int id_bytes);
// Dynamic shared memory of the bulk kernels.
std::size_t dispatch_bulk_smem(const DispatchArgs& args, int D, int warps);
std::size_t combine_bulk_smem(int warps, int stages);
std::size_t unpermute_bulk_smem(int stages);
std::size_t reduce_combine_smem(const ReduceCombineArgs& args);

// Dynamic shared memory that needs no attribute beside the kernels' static share of the 48 KB.
inline constexpr std::size_t kPlainSharedBytes = 32 * 1024;

// Queues kernel(args...) on a grid of (ctas, ranks of the launch).
template <class... Params, class... Args>
void launch_ranks(void (*kernel)(ExchangeParams, Params...), int ctas, int threads, std::size_t smem, bool overlap, cudaStream_t stream,
                  const ExchangeParams& q, const Args&... args) {
  static_assert((std::is_same_v<Params, Args> && ...), "the arguments are passed by address: their types must be the kernel's");
  if (smem > kPlainSharedBytes) (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(q.ranks.count));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = overlap && dependent_launches().load(std::memory_order_relaxed) ? 1 : 0;
  const void* pointers[] = {static_cast<const void*>(&q), static_cast<const void*>(&args)...};
  (void)cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), const_cast<void**>(pointers));
}

}  // namespace waybill::cuda

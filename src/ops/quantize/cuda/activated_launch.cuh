// SPDX-License-Identifier: Apache-2.0
// How the quantisers of an activation's result and of its gradient are launched: which kernel a call's formats take, and its grid. `Kernels` names them:
// kernel<format, divides, block>(), of tiles also kSlots of 32 KiB and kCtas an SM.
#pragma once

#include <algorithm>

#include "ops/quantize/cuda/activated_source.h"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"

namespace waybill::cuda {
namespace activated_rows {

inline constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256, kPieces = 2;  // pieces of a lane under way

template <class Kernels, ElementFormat kFormat, bool kDivides, int kBlock>
void launch_one(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream) {
  const bool needs_groups = out.group_scales != nullptr || out.swizzled != nullptr;
  const int segments = (call.source.F + kWarpColumns - 1) / kWarpColumns;
  const std::int64_t units = call.x.rows * segments, per_cta = kWarps * kPieces;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((units + per_cta - 1) / per_cta, needs_groups ? num_sms() * 8 : 1 << 30));
  const auto shared = static_cast<unsigned>(needs_groups ? GroupTable::bytes(call.x.groups, 1) : 0u);
  const auto kernel = Kernels::template kernel<kFormat, kDivides, kBlock>();
  allow_shared(kernel, shared);
  kernel<<<ctas, kThreads, shared, stream>>>(call.x, call.source, out, segments, needs_groups);
}

template <class Kernels, ElementFormat kFormat>
void launch_fp8(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream) {
  if (out.block_columns == 32) return launch_one<Kernels, kFormat, false, 32>(call, out, stream);
  out.scale == ScaleFormat::kF32 ? launch_one<Kernels, kFormat, true, 128>(call, out, stream) : launch_one<Kernels, kFormat, false, 128>(call, out, stream);
}

template <class Kernels>
void launch(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream) {
  if (call.x.rows == 0 || call.x.columns == 0 || call.x.groups == 0) return;
  if (out.element == ElementFormat::kE4M3) launch_fp8<Kernels, ElementFormat::kE4M3>(call, out, stream);
  if (out.element == ElementFormat::kE5M2) launch_fp8<Kernels, ElementFormat::kE5M2>(call, out, stream);
  if (out.element == ElementFormat::kE2M1) launch_one<Kernels, ElementFormat::kE2M1, true, 16>(call, out, stream);
}

}  // namespace activated_rows

namespace activated_tiles {

inline constexpr int kThreads = 256, kTile = 128, kSlotBytes = kTile * kTile * 2;

template <class Kernels, ElementFormat kFormat, bool kDivides, int kBlock>
void launch_one(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  const std::int64_t units = (call.x.rows / kTile + call.x.groups) * ((call.source.F + kTile - 1) / kTile);
  const auto kernel = Kernels::template kernel<kFormat, kDivides, kBlock>();
  const std::size_t bytes = Kernels::kSlots * kSlotBytes + GroupTable::bytes(call.x.groups, kBlock == 128 ? 1 : 2);
  allow_shared(kernel, bytes);
  kernel<<<persistent_ctas(units, Kernels::kCtas), kThreads, static_cast<unsigned>(bytes), stream>>>(call.x, call.source, rows, columns);
}

template <class Kernels, ElementFormat kFormat>
void launch_of(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  if (columns.block_rows == 32) return launch_one<Kernels, kFormat, false, 32>(call, rows, columns, stream);
  columns.scale == ScaleFormat::kF32 ? launch_one<Kernels, kFormat, true, 128>(call, rows, columns, stream)
                                     : launch_one<Kernels, kFormat, false, 128>(call, rows, columns, stream);
}

template <class Kernels>
void launch(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  if (call.x.rows == 0 || call.x.columns == 0 || call.x.groups == 0) return;
  columns.element == ElementFormat::kE4M3 ? launch_of<Kernels, ElementFormat::kE4M3>(call, rows, columns, stream)
                                          : launch_of<Kernels, ElementFormat::kE5M2>(call, rows, columns, stream);
}

}  // namespace activated_tiles
}  // namespace waybill::cuda

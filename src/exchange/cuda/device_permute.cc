// SPDX-License-Identifier: Apache-2.0
// Steps of DeviceExchange between rows and expert order.
#include <algorithm>
#include <cmath>

#include "core/cuda/cuda_error.h"
#include "exchange/cuda/device_rows.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t kPiece = 1024, kMostPermuteCtas = 1 << 20;

}  // namespace

DeviceExchange::Expected DeviceExchange::expect(const DeviceHandle& handle) const {
  const double P = params_.shape.P, K = params_.shape.K;
  std::int64_t most = 0;
  for (const std::int64_t T : handle.T_) most = std::max(most, T);
  const double rows = static_cast<double>(most) * P * (1.0 - std::pow(1.0 - 1.0 / P, K));
  return {std::min(budget_.rows, static_cast<std::int64_t>(std::ceil(rows))), most * params_.shape.K};
}

void DeviceExchange::permute(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> rows, std::span<const DeviceRows> y, cudaStream_t stream,
                             std::int64_t columns) const {
  permute_part(handle, dtype, rows, y, kPermuteAll, columns > 0 ? columns : config_.H, stream);
}
void DeviceExchange::permute_own(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::span<const DeviceRows> y, cudaStream_t stream,
                                 std::int64_t columns) const {
  check_one_node("permute_own()");
  permute_part(handle, dtype, x, y, kPermuteOwn, columns > 0 ? columns : config_.H, stream);
}
void DeviceExchange::permute_others(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> rows, std::span<const DeviceRows> y,
                                    cudaStream_t stream) const {
  check_one_node("permute_others()");
  permute_part(handle, dtype, rows, y, kPermuteOthers, config_.H, stream);
}

void DeviceExchange::permute_arriving(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::span<const DeviceRows> rows,
                                      std::span<const DeviceRows> y, cudaStream_t stream) const {
  check_one_node("permute_arriving()");
  check_rows("permute_arriving: x", x, num_ranks(), config_.H, size_bytes(dtype));
  check_rows("permute_arriving: rows", rows, num_ranks(), config_.H, size_bytes(dtype));
  check_rows("permute_arriving: y", y, num_ranks(), config_.H, size_bytes(dtype));
  const std::int64_t row_stride = rows[0].stride == 0 ? config_.H : rows[0].stride;
  WB_CHECK((x[0].stride == 0 ? config_.H : x[0].stride) == row_stride, "permute_arriving: x and rows need one stride, got {} and {}", x[0].stride, row_stride);
  // They wait for dispatch_chunks() of all ranks, this one's included: its CTAs need SMs that these leave alone.
  const int left = (num_sms_ - chunk_ctas(config_.H * static_cast<std::int64_t>(size_bytes(dtype))) * num_ranks()) / num_ranks();
  WB_CHECK(supports_chunks() && left >= 1, "permute_arriving needs what dispatch_chunks() needs, and an SM beside it: {} ranks on {} SMs", num_ranks(),
           num_sms_);
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < rows.size(); ++i) q.call[i].a = rows[i].data, q.call[i].b = x[i].data, q.call[i].c = y[i].data;
  const RowsArgs args{row_stride, y[0].stride == 0 ? config_.H : y[0].stride, static_cast<std::int32_t>(config_.H), 0, 0, kPermuteArriving, 0};
  const int ctas = tuning_.arriving_ctas > 0 ? std::min(tuning_.arriving_ctas, left) : left;
  launch_permute(q, args, static_cast<int>(size_bytes(dtype)), ctas, false, stream);
  check_launch("exchange_permute_arriving");
}

void DeviceExchange::permute_part(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> rows, std::span<const DeviceRows> y, PermutePart part,
                                  std::int64_t columns, cudaStream_t stream) const {
  check_rows("permute: rows", rows, num_ranks(), columns, size_bytes(dtype));
  check_rows("permute: y", y, num_ranks(), columns, size_bytes(dtype));
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < rows.size(); ++i) q.call[i].a = rows[i].data, q.call[i].c = y[i].data;
  RowsArgs args{rows[0].stride == 0 ? columns : rows[0].stride,
                y[0].stride == 0 ? columns : y[0].stride,
                static_cast<std::int32_t>(columns),
                0,
                0,
                part,
                tuning_.permute_parts};
  int ctas = local_ctas();
  if ((part != kPermuteOwn || params_.shape.P == 1) && tuning_.local_ctas == 0) {
    // A warp for every 1 or 2 KB of a row, about 8 KB to write: SMs differ in what they can do, and the GPU then shares the work out as they end. Own rows of
    // several ranks move beside a dispatch: few CTAs, which leave the memory to it.
    const Expected expected = expect(handle);
    const auto row_bytes = columns * static_cast<std::int64_t>(size_bytes(dtype)), item_bytes = expected.slots >= 6 * expected.rows ? kPiece : 2 * kPiece;
    if (args.parts == 0) args.parts = static_cast<int>((row_bytes + item_bytes - 1) / item_bytes);
    const std::int64_t moved = part == kPermuteOthers ? expected.rows - expected.rows / params_.shape.P : expected.rows;
    ctas = std::max(ctas, static_cast<int>(std::min(moved * args.parts / (kRowThreads / 32) + 1, kMostPermuteCtas)));
  }
  launch_permute(q, args, static_cast<int>(size_bytes(dtype)), ctas, tuning_.overlap_launches, stream);
  check_launch("exchange_permute");
}

void DeviceExchange::unpermute_reduce(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, bool weighted, DType z_dtype,
                                      std::span<const DeviceRows> z, bool z_in_window, cudaStream_t stream, std::int64_t columns) const {
  if (columns == 0) columns = config_.H;
  const RowType from = row_type("unpermute_reduce: y", dtype), to = row_type("unpermute_reduce: z", z_dtype);
  check_rows("unpermute_reduce: y", y, num_ranks(), columns, size_bytes(dtype));
  check_rows("unpermute_reduce: z", z, num_ranks(), columns, size_bytes(z_dtype));
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < y.size(); ++i) q.call[i].a = y[i].data, q.call[i].c = z[i].data;
  const RowsArgs args{z[0].stride == 0 ? columns : z[0].stride,
                      y[0].stride == 0 ? columns : y[0].stride,
                      static_cast<std::int32_t>(columns),
                      weighted ? 1 : 0,
                      z_in_window ? 1 : 0,
                      0};
  if ((tuning_.reduce == ReducePath::kAuto || tuning_.reduce == ReducePath::kBulk) && ring_holds_slots()) {
    launch_unpermute_bulk(q, args, from, to, local_ctas(1), std::clamp(tuned(columns * static_cast<std::int64_t>(size_bytes(dtype))).reduce_stages, 1, 6),
                          tuning_.overlap_launches, stream);
    return check_launch("exchange_unpermute_bulk");
  }
  launch_unpermute_reduce(q, args, from, to, local_ctas(1), tuning_.overlap_launches, stream);
  check_launch("exchange_unpermute_reduce");
}

void DeviceExchange::list_tokens() {
  WB_CHECK(params_.shape.P == 1 && num_nodes() == 1, "list_tokens: rows are tokens on one rank alone, this group has {} on {} nodes", params_.shape.P,
           num_nodes());
  params_.call[0].lists_tokens = 1;
}

void DeviceExchange::reduce_home(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, DType out_dtype, std::span<const DeviceRows> out,
                                 cudaStream_t stream, std::span<const void* const> base, std::int64_t columns, int num_sms) const {
  WB_CHECK(params_.shape.P == 1 && num_nodes() == 1, "reduce_home: nothing is summed over ranks; this group has {} on {} nodes", params_.shape.P, num_nodes());
  if (columns == 0) columns = config_.H;
  const RowType from = row_type("reduce_home: y", dtype), to = row_type("reduce_home: out", out_dtype);
  check_rows("reduce_home: y", y, 1, columns, size_bytes(dtype));
  check_rows("reduce_home: out", out, 1, columns, size_bytes(out_dtype));
  ExchangeParams q = with(handle);
  q.call[0].a = y[0].data, q.call[0].c = out[0].data;
  set_base(q, base);
  const ReduceHomeArgs args{y[0].stride == 0 ? columns : y[0].stride, out[0].stride == 0 ? columns : out[0].stride, config_.H,
                            static_cast<std::int32_t>(columns), std::clamp(tuned(columns * static_cast<std::int64_t>(size_bytes(dtype))).reduce_stages, 1, 6)};
  const int ctas = num_sms > 0 ? std::min(num_sms, local_ctas(1)) : local_ctas(1);
  if (ring_holds_slots()) {
    launch_reduce_home(q, args, from, to, ctas, tuning_.overlap_launches, stream);
    return check_launch("exchange_reduce_home");
  }
  launch_reduce_home_plain(q, args, from, to, 4 * ctas, tuning_.overlap_launches, stream);
  check_launch("exchange_reduce_home_plain");
}

void DeviceExchange::unpermute_backward(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, bool weighted, DType dz_dtype,
                                        std::span<const DeviceRows> dz, std::span<const DeviceRows> dy, std::span<float* const> d_weights,
                                        cudaStream_t stream) const {
  const RowType from = row_type("unpermute_backward: y", dtype), gradient = row_type("unpermute_backward: dz", dz_dtype);
  const auto count = static_cast<std::size_t>(num_ranks());
  WB_CHECK(d_weights.empty() || d_weights.size() == count, "unpermute_backward: {} ranks of this launch, got {} d_weights", count, d_weights.size());
  check_rows("unpermute_backward: dz", dz, num_ranks(), config_.H, size_bytes(dz_dtype));
  check_rows("unpermute_backward: dy", dy, num_ranks(), config_.H, size_bytes(dtype));
  if (!d_weights.empty()) check_rows("unpermute_backward: y", y, num_ranks(), config_.H, size_bytes(dtype));
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < count; ++i) {
    q.call[i].a = d_weights.empty() ? nullptr : y[i].data, q.call[i].b = dz[i].data, q.call[i].c = dy[i].data;
    q.call[i].d = d_weights.empty() ? nullptr : d_weights[i];
  }
  const RowsArgs args{
      dz[0].stride == 0 ? config_.H : dz[0].stride, dy[0].stride == 0 ? config_.H : dy[0].stride, static_cast<std::int32_t>(config_.H), weighted ? 1 : 0, 0, 0};
  launch_unpermute_backward(q, args, from, gradient, local_ctas(), tuning_.overlap_launches, stream);
  check_launch("exchange_unpermute_backward");
}

}  // namespace waybill::cuda

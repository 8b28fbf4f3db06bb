// SPDX-License-Identifier: Apache-2.0
// dispatch: rows are packed per destination rank and sent once; rows of the own rank are copied straight to their place.
#include <cstring>

#include "exchange/impl.h"
#include "exchange/tuning_table.h"

namespace waybill {
namespace {

void gather_rows(const RoutePlan& plan, std::int64_t begin, std::int64_t end, const TensorView& x, std::byte* target, ThreadPool* pool) {
  const std::size_t row_bytes = static_cast<std::size_t>(x.shape[1]) * size_bytes(x.dtype);
  parallel_for(pool, end - begin, cpu_tuning().copy_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      std::memcpy(target + static_cast<std::size_t>(i) * row_bytes, row_pointer(x, plan.row_token[static_cast<std::size_t>(begin + i)]), row_bytes);
    }
  });
}

}  // namespace

std::unique_ptr<ExchangeRequest> Exchange::Impl::dispatch_start(const DispatchHandle& handle, const TensorView& x, Tensor& rows) {
  const RoutePlan& plan = handle.plan;
  const ReceiveLayout& layout = handle.layout;
  check_rows("dispatch: x", x, plan.T, config.H);
  if (config.mode == ExchangeMode::kCaptured) rows.resize(x.dtype, {budget.rows, config.H});  // one size at every step
  rows.resize(x.dtype, {layout.R(), config.H});
  if (!handle.valid) return nullptr;
  if (two_level) return node_dispatch_start(handle, x);

  const std::size_t row_bytes = static_cast<std::size_t>(config.H) * size_bytes(x.dtype);
  const std::int64_t own_begin = plan.row_offsets[rank()], own_end = plan.row_offsets[rank() + 1];
  const std::int64_t remote = plan.num_rows() - (own_end - own_begin);
  std::byte* outgoing = send_bytes(static_cast<std::size_t>(remote) * row_bytes);
  auto* arrived = static_cast<std::byte*>(rows.view().data);
  for (std::size_t p = 0; p < P(); ++p) {
    const std::int64_t begin = plan.row_offsets[p], end = plan.row_offsets[p + 1];
    std::byte* place = arrived + static_cast<std::size_t>(layout.row_offsets[p]) * row_bytes;
    if (p == rank()) {
      send[p] = receive[p] = {};
      gather_rows(plan, begin, end, x, place, pool);
      continue;
    }
    gather_rows(plan, begin, end, x, outgoing, pool);
    send[p] = {outgoing, static_cast<std::size_t>(end - begin) * row_bytes};
    receive[p] = {place, static_cast<std::size_t>(layout.row_offsets[p + 1] - layout.row_offsets[p]) * row_bytes};
    outgoing += send[p].bytes;
  }
  return start_rows("dispatch rows", bytes.payload);
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// combine: each rank's partial sums come back in the order the rows were sent and are added per token, in rank order, in fp32.
#include <algorithm>
#include <cstring>
#include <vector>

#include "exchange/impl.h"
#include "exchange/row_sums.h"

namespace waybill {
namespace {

constexpr std::int64_t kConvertGrain = 1 << 14;

// Partial sums of this rank's rows, in plan order. Own rows are read in place; the others lie in the receive buffer.
struct Partials {
  const std::byte* remote = nullptr;  // rows of other ranks in plan order, without the own ones
  const float* own = nullptr;         // z rows of the own rank
  std::int64_t own_begin = 0, own_end = 0;
  std::int64_t H = 0;
  bool rounded = false;  // bf16 wire: remote rows are bf16, own rows are rounded when they are read

  const std::byte* remote_row(std::int64_t row, std::size_t element) const {
    return remote + static_cast<std::size_t>((row < own_begin ? row : row - (own_end - own_begin)) * H) * element;
  }

  // sum = row, or sum += row.
  template <bool kFirst>
  void add(std::int64_t row, float* sum) const {
    if (row >= own_begin && row < own_end) {
      const float* z = own + (row - own_begin) * H;
      if (!rounded) return add_row<kFirst>(z, H, sum);
      for (std::int64_t h = 0; h < H; ++h) sum[h] = kFirst ? static_cast<float>(bf16(z[h])) : sum[h] + static_cast<float>(bf16(z[h]));
    } else if (rounded) {
      add_row<kFirst>(reinterpret_cast<const bf16*>(remote_row(row, sizeof(bf16))), H, sum);
    } else {
      add_row<kFirst>(reinterpret_cast<const float*>(remote_row(row, sizeof(float))), H, sum);
    }
  }
};

void fill_zero(const TensorView& out) {
  const std::size_t row_bytes = static_cast<std::size_t>(out.shape[1]) * size_bytes(out.dtype);
  for (std::int64_t t = 0; t < out.shape[0]; ++t) std::memset(row_pointer(out, t), 0, row_bytes);
}

void round_rows(const float* source, std::int64_t count, bf16* target, ThreadPool* pool) {
  parallel_for(pool, count, kConvertGrain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) target[i] = bf16(source[i]);
  });
}

}  // namespace

std::unique_ptr<ExchangeRequest> Exchange::Impl::combine_start(const DispatchHandle& handle, const TensorView& z, const TensorView& out) {
  check_rows("combine: out", out, handle.plan.T, config.H);
  check_rows("combine: z", z, handle.layout.R(), config.H);
  WB_CHECK(z.dtype == DType::kF32 && z.is_contiguous(), "combine: z must be contiguous f32 [{}, {}], got {}", handle.layout.R(), config.H, z.describe());
  if (handle.valid) return two_level ? node_combine_start(handle, z) : flat_combine_start(handle, z);
  fill_zero(out);
  return nullptr;
}

std::unique_ptr<ExchangeRequest> Exchange::Impl::flat_combine_start(const DispatchHandle& handle, const TensorView& z) {
  const RoutePlan& plan = handle.plan;
  const ReceiveLayout& layout = handle.layout;
  const std::size_t row_bytes = static_cast<std::size_t>(config.H) * (rounded() ? sizeof(bf16) : sizeof(float));
  const auto* sums = static_cast<const float*>(z.data);
  const std::int64_t own = plan.row_offsets[rank() + 1] - plan.row_offsets[rank()];
  std::byte* outgoing = rounded() ? send_bytes(static_cast<std::size_t>(layout.R() - own) * row_bytes) : nullptr;
  std::byte* incoming = receive_bytes(static_cast<std::size_t>(plan.num_rows() - own) * row_bytes);
  for (std::size_t p = 0; p < P(); ++p) {
    send[p] = receive[p] = {};
    if (p == rank()) continue;
    const std::int64_t begin = layout.row_offsets[p], count = layout.row_offsets[p + 1] - begin;
    send[p].bytes = static_cast<std::size_t>(count) * row_bytes;
    if (rounded()) {
      round_rows(sums + begin * config.H, count * config.H, reinterpret_cast<bf16*>(outgoing), pool);
      send[p].data = outgoing;
      outgoing += send[p].bytes;
    } else if (count > 0) {
      send[p].data = const_cast<float*>(sums + begin * config.H);
    }
    receive[p] = {incoming, static_cast<std::size_t>(plan.row_offsets[p + 1] - plan.row_offsets[p]) * row_bytes};
    incoming += receive[p].bytes;
  }
  return start_rows("combine rows", bytes.combined);
}

void Exchange::Impl::flat_combine_finish(const DispatchHandle& handle, const TensorView& z, const TensorView& out) {
  const RoutePlan& plan = handle.plan;
  const std::int64_t own_begin = plan.row_offsets[rank()], own_end = plan.row_offsets[rank() + 1];
  const float* own = own_end > own_begin ? static_cast<const float*>(z.data) + handle.layout.row_offsets[rank()] * config.H : nullptr;
  const Partials partials{static_cast<const std::byte*>(receive_buffer.view().data), own, own_begin, own_end, config.H, rounded()};
  sum_lists(plan.token_offsets, plan.token_rows, out, pool,
            [&](std::int64_t row, bool is_first, float* sum) { is_first ? partials.add<true>(row, sum) : partials.add<false>(row, sum); });
}

void Exchange::Impl::return_slot_values(const DispatchHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times) {
  const RoutePlan& plan = handle.plan;
  const ReceiveLayout& layout = handle.layout;
  std::fill(d_weights, d_weights + plan.T * plan.K, 0.0f);
  if (!handle.valid) return;
  auto* outgoing = reinterpret_cast<float*>(send_bytes(static_cast<std::size_t>(layout.S()) * sizeof(float)));
  auto* incoming = reinterpret_cast<float*>(receive_bytes(static_cast<std::size_t>(plan.num_slots()) * sizeof(float)));
  for (std::int64_t j = 0; j < layout.S(); ++j) outgoing[j] = slot_values[layout.slot_position[static_cast<std::size_t>(j)]];
  for (std::size_t p = 0; p < P(); ++p) {
    const auto slot = [&](std::size_t row_offset) { return layout.row_slot_offsets[static_cast<std::size_t>(layout.row_offsets[row_offset])]; };
    const auto plan_slot = [&](std::size_t row_offset) { return plan.slot_offsets[static_cast<std::size_t>(plan.row_offsets[row_offset])]; };
    send[p] = {outgoing + slot(p), static_cast<std::size_t>(slot(p + 1) - slot(p)) * sizeof(float)};
    receive[p] = {incoming + plan_slot(p), static_cast<std::size_t>(plan_slot(p + 1) - plan_slot(p)) * sizeof(float)};
    if (p != rank()) bytes.weights += static_cast<std::int64_t>(send[p].bytes);
  }
  all_to_all("combine slot values", Phase::kCombine, times);
  for (std::size_t row = 0; row < plan.row_token.size(); ++row) {
    float* target = d_weights + static_cast<std::int64_t>(plan.row_token[row]) * plan.K;
    for (std::int64_t j = plan.slot_offsets[row]; j < plan.slot_offsets[row + 1]; ++j) target[plan.slot_k[static_cast<std::size_t>(j)]] = incoming[j];
  }
}

}  // namespace waybill

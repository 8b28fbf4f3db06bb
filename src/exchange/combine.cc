// SPDX-License-Identifier: Apache-2.0
// combine: each rank's partial sums come back in the order the rows were sent and are added per token, in rank order, in fp32.
#include <algorithm>
#include <cstring>
#include <vector>

#include "exchange/impl.h"

namespace waybill {
namespace {

constexpr std::int64_t kTokenGrain = 32;
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

  template <bool kFirst>
  static void put(float* sum, std::int64_t h, float value) {
    sum[h] = kFirst ? value : sum[h] + value;
  }

  // sum = row, or sum += row.
  template <bool kFirst>
  void add(std::int64_t row, float* sum) const {
    if (row >= own_begin && row < own_end) {
      const float* z = own + (row - own_begin) * H;
      if (rounded) {
        for (std::int64_t h = 0; h < H; ++h) put<kFirst>(sum, h, bf16(z[h]));
      } else {
        for (std::int64_t h = 0; h < H; ++h) put<kFirst>(sum, h, z[h]);
      }
    } else if (rounded) {
      const auto* z = reinterpret_cast<const bf16*>(remote_row(row, sizeof(bf16)));
      for (std::int64_t h = 0; h < H; ++h) put<kFirst>(sum, h, z[h]);
    } else {
      const auto* z = reinterpret_cast<const float*>(remote_row(row, sizeof(float)));
      for (std::int64_t h = 0; h < H; ++h) put<kFirst>(sum, h, z[h]);
    }
  }
};

// A token's sum starts with its first rank's partial, so that it is exact where only one rank has a part.
void sum_token(const RoutePlan& plan, const Partials& partials, std::int64_t t, float* sum) {
  const std::int64_t begin = plan.token_offsets[static_cast<std::size_t>(t)], end = plan.token_offsets[static_cast<std::size_t>(t) + 1];
  if (begin == end) {
    std::fill(sum, sum + partials.H, 0.0f);
    return;
  }
  partials.add<true>(plan.token_rows[static_cast<std::size_t>(begin)], sum);
  for (std::int64_t i = begin + 1; i < end; ++i) partials.add<false>(plan.token_rows[static_cast<std::size_t>(i)], sum);
}

void sum_tokens(const RoutePlan& plan, const Partials& partials, const TensorView& out, ThreadPool* pool) {
  parallel_for(pool, plan.T, kTokenGrain, [&](std::int64_t first, std::int64_t last) {
    if (out.dtype == DType::kF32) {
      for (std::int64_t t = first; t < last; ++t) sum_token(plan, partials, t, reinterpret_cast<float*>(row_pointer(out, t)));
      return;
    }
    std::vector<float> sum(static_cast<std::size_t>(partials.H));
    for (std::int64_t t = first; t < last; ++t) {
      sum_token(plan, partials, t, sum.data());
      auto* target = reinterpret_cast<bf16*>(row_pointer(out, t));
      for (std::int64_t h = 0; h < partials.H; ++h) target[h] = bf16(sum[static_cast<std::size_t>(h)]);
    }
  });
}

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

void Exchange::Impl::combine(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) {
  const RoutePlan& plan = handle.plan;
  const ReceiveLayout& layout = handle.layout;
  check_rows("combine: out", out, plan.T, config.H);
  check_rows("combine: z", z, layout.R(), config.H);
  WB_CHECK(z.dtype == DType::kF32 && z.is_contiguous(), "combine: z must be contiguous f32 [{}, {}], got {}", layout.R(), config.H, z.describe());
  if (!handle.valid) {
    fill_zero(out);
    return;
  }
  const bool rounded = config.combine_wire == CombineWire::kBF16 && P() > 1;
  const std::size_t element = rounded ? sizeof(bf16) : sizeof(float);
  const std::size_t row_bytes = static_cast<std::size_t>(config.H) * element;
  const auto* sums = static_cast<const float*>(z.data);
  const std::int64_t own_begin = plan.row_offsets[rank()], own_end = plan.row_offsets[rank() + 1];
  const std::int64_t own_source = layout.row_offsets[rank()];
  const std::int64_t sent_rows = layout.R() - (own_end - own_begin);

  std::byte* outgoing = rounded ? send_bytes(static_cast<std::size_t>(sent_rows) * row_bytes) : nullptr;
  std::byte* incoming = receive_bytes(static_cast<std::size_t>(plan.num_rows() - (own_end - own_begin)) * row_bytes);
  const std::byte* remote = incoming;
  for (std::size_t p = 0; p < P(); ++p) {
    send[p] = receive[p] = {};
    if (p == rank()) continue;
    const std::int64_t begin = layout.row_offsets[p], count = layout.row_offsets[p + 1] - begin;
    send[p].bytes = static_cast<std::size_t>(count) * row_bytes;
    if (rounded) {
      round_rows(sums + begin * config.H, count * config.H, reinterpret_cast<bf16*>(outgoing), pool);
      send[p].data = outgoing;
      outgoing += send[p].bytes;
    } else if (count > 0) {
      send[p].data = const_cast<float*>(sums + begin * config.H);
    }
    receive[p] = {incoming, static_cast<std::size_t>(plan.row_offsets[p + 1] - plan.row_offsets[p]) * row_bytes};
    incoming += receive[p].bytes;
  }
  all_to_all("combine rows", Phase::kCombine, times);
  bytes.combined += sent_rows * static_cast<std::int64_t>(row_bytes);
  const Partials partials{remote, own_end > own_begin ? sums + own_source * config.H : nullptr, own_begin, own_end, config.H, rounded};
  sum_tokens(plan, partials, out, pool);
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

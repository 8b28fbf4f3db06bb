// SPDX-License-Identifier: Apache-2.0
// The two-level exchange. dispatch: a row goes once to the gateway of every node that needs it, which passes it on to the node's ranks.
// combine: a node's ranks give their partial sums to the gateway, which adds them in rank order and sends one row home; the source
// adds the nodes in node order. Both steps are collectives of the whole group, so that a failure anywhere reaches every rank.
#include <cstring>

#include "exchange/impl.h"
#include "exchange/row_sums.h"

namespace waybill {
namespace {

// target[i] = source row index_of(i), for i in [0, count).
template <class Index>
void gather(std::int64_t count, std::size_t row_bytes, std::byte* target, ThreadPool* pool, const Index& row_at) {
  parallel_for(pool, count, cpu_tuning().copy_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) std::memcpy(target + static_cast<std::size_t>(i) * row_bytes, row_at(i), row_bytes);
  });
}

std::size_t bytes_of(std::int64_t rows, std::size_t row_bytes) { return static_cast<std::size_t>(rows) * row_bytes; }

}  // namespace

// Rows of this rank that come through gateway g: those of the sources it serves, in rank order.
template <class Body>
void Exchange::Impl::for_sources_of(std::size_t gateway, const Body& body) const {
  const int node = nodes.node(static_cast<int>(rank()));
  for (std::size_t s = 0; s < P(); ++s) {
    if (nodes.gateway(static_cast<int>(s), node) == static_cast<int>(gateway)) body(s);
  }
}

std::int64_t Exchange::Impl::rows_through(const ReceiveLayout& layout, std::size_t gateway) const {
  std::int64_t rows = 0;
  for_sources_of(gateway, [&](std::size_t s) { rows += layout.row_offsets[s + 1] - layout.row_offsets[s]; });
  return rows;
}

std::unique_ptr<ExchangeRequest> Exchange::Impl::node_dispatch_start(const DispatchHandle& handle, const TensorView& x) {
  const NodePlan& plan = handle.nodes;
  const std::size_t row_bytes = bytes_of(config.H, size_bytes(x.dtype));
  const std::int64_t own = plan.send_offsets[rank() + 1] - plan.send_offsets[rank()];
  std::byte* outgoing = send_bytes(bytes_of(plan.send_offsets[P()] - own, row_bytes));
  std::byte* arrived = buffer_bytes(node_buffer, bytes_of(plan.num_arrived(), row_bytes));
  for (std::size_t p = 0; p < P(); ++p) {
    const std::int64_t begin = plan.send_offsets[p], count = plan.send_offsets[p + 1] - begin;
    std::byte* place = arrived + bytes_of(plan.arrive_offsets[p], row_bytes);
    gather(count, row_bytes, p == rank() ? place : outgoing, pool,
           [&](std::int64_t i) { return row_pointer(x, plan.send_token[static_cast<std::size_t>(begin + i)]); });
    send[p] = receive[p] = {};
    if (p == rank()) continue;
    send[p] = {outgoing, bytes_of(count, row_bytes)};
    receive[p] = {place, bytes_of(plan.arrive_offsets[p + 1] - plan.arrive_offsets[p], row_bytes)};
    outgoing += send[p].bytes;
  }
  return start_rows("dispatch rows between nodes", bytes.payload);
}

void Exchange::Impl::node_dispatch_finish(const DispatchHandle& handle, const TensorView& rows, PhaseTimes* times) {
  const NodePlan& plan = handle.nodes;
  const ReceiveLayout& layout = handle.layout;
  const std::size_t row_bytes = bytes_of(config.H, size_bytes(rows.dtype));
  const auto* arrived = static_cast<const std::byte*>(node_buffer.view().data);
  std::byte* outgoing = send_bytes(bytes_of(plan.forward_offsets[P()], row_bytes));
  std::byte* incoming = receive_bytes(bytes_of(layout.R(), row_bytes));
  std::vector<const std::byte*> staged(P());
  for (std::size_t p = 0; p < P(); ++p) {
    const std::int64_t begin = plan.forward_offsets[p], count = plan.forward_offsets[p + 1] - begin;
    staged[p] = p == rank() ? outgoing : incoming;
    gather(count, row_bytes, outgoing, pool,
           [&](std::int64_t i) { return arrived + bytes_of(plan.forward_rows[static_cast<std::size_t>(begin + i)], row_bytes); });
    send[p] = receive[p] = {};
    if (p != rank()) {
      send[p] = {outgoing, bytes_of(count, row_bytes)};
      receive[p] = {incoming, bytes_of(rows_through(layout, p), row_bytes)};
      incoming += receive[p].bytes;
    }
    outgoing += bytes_of(count, row_bytes);
  }
  wait_rows(*start_rows("dispatch rows inside the nodes", bytes.payload), Phase::kDispatch, times);
  auto* target = static_cast<std::byte*>(rows.data);
  for (std::size_t g = 0; g < P(); ++g) {
    for_sources_of(g, [&](std::size_t s) {
      const std::size_t count = bytes_of(layout.row_offsets[s + 1] - layout.row_offsets[s], row_bytes);
      if (count > 0) std::memcpy(target + bytes_of(layout.row_offsets[s], row_bytes), staged[g], count);
      staged[g] += count;
    });
  }
}

std::unique_ptr<ExchangeRequest> Exchange::Impl::node_combine_start(const DispatchHandle& handle, const TensorView& z) {
  const NodePlan& plan = handle.nodes;
  const ReceiveLayout& layout = handle.layout;
  const std::size_t row_bytes = bytes_of(config.H, sizeof(float));
  std::byte* outgoing = send_bytes(bytes_of(layout.R(), row_bytes));
  std::byte* returned = receive_bytes(bytes_of(plan.forward_offsets[P()], row_bytes));
  const auto* sums = static_cast<const std::byte*>(z.data);
  for (std::size_t p = 0; p < P(); ++p) {
    std::byte* place = returned + bytes_of(plan.forward_offsets[p], row_bytes);
    std::byte* target = p == rank() ? place : outgoing;
    const std::byte* first = target;
    for_sources_of(p, [&](std::size_t s) {
      const std::size_t count = bytes_of(layout.row_offsets[s + 1] - layout.row_offsets[s], row_bytes);
      if (count > 0) std::memcpy(target, sums + bytes_of(layout.row_offsets[s], row_bytes), count);
      target += count;
    });
    send[p] = receive[p] = {};
    if (p == rank()) continue;
    send[p] = {outgoing, static_cast<std::size_t>(target - first)};
    receive[p] = {place, bytes_of(plan.forward_offsets[p + 1] - plan.forward_offsets[p], row_bytes)};
    outgoing = target;
  }
  return start_rows("combine rows inside the nodes", bytes.combined);
}

void Exchange::Impl::node_combine_finish(const DispatchHandle& handle, const TensorView& out, PhaseTimes* times) {
  const NodePlan& plan = handle.nodes;
  const DType wire = config.combine_wire == CombineWire::kBF16 && nodes.num_nodes() > 1 ? DType::kBF16 : DType::kF32;
  const std::int64_t H = config.H;
  const std::size_t row_bytes = bytes_of(H, size_bytes(wire));
  // The node's sums of every arrived row, by source.
  const auto* returned = static_cast<const float*>(receive_buffer.view().data);
  node_buffer.resize(wire, {plan.num_arrived(), H});
  sum_lists(plan.row_forward_offsets, plan.row_forwards, node_buffer, pool, [&](std::int64_t forward, bool is_first, float* sum) {
    is_first ? add_row<true>(returned + forward * H, H, sum) : add_row<false>(returned + forward * H, H, sum);
  });
  const auto* partials = static_cast<std::byte*>(node_buffer.view().data);
  std::byte* incoming = send_bytes(bytes_of(plan.send_offsets[P()], row_bytes));
  for (std::size_t p = 0; p < P(); ++p) {
    send[p] = {const_cast<std::byte*>(partials) + bytes_of(plan.arrive_offsets[p], row_bytes),
               bytes_of(plan.arrive_offsets[p + 1] - plan.arrive_offsets[p], row_bytes)};
    receive[p] = {incoming + bytes_of(plan.send_offsets[p], row_bytes), bytes_of(plan.send_offsets[p + 1] - plan.send_offsets[p], row_bytes)};
  }
  wait_rows(*start_rows("combine rows between nodes", bytes.combined), Phase::kCombine, times);
  sum_lists(plan.token_offsets, plan.token_rows, out, pool, [&](std::int64_t row, bool is_first, float* sum) {
    const std::byte* partial = incoming + bytes_of(row, row_bytes);
    if (wire == DType::kF32) {
      const auto* values = reinterpret_cast<const float*>(partial);
      is_first ? add_row<true>(values, H, sum) : add_row<false>(values, H, sum);
    } else {
      const auto* values = reinterpret_cast<const bf16*>(partial);
      is_first ? add_row<true>(values, H, sum) : add_row<false>(values, H, sum);
    }
  });
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/node_exchange.h"

#include <algorithm>
#include <cmath>

#include "core/cuda/cuda_error.h"
#include "exchange/cuda/device_rows.h"

namespace waybill::cuda {
namespace {

template <class T>
T* part_of(const DeviceBuffer& buffer, std::size_t elements) {
  return buffer.as<T>() + elements;
}

}  // namespace

ExchangeConfig node_config(const ExchangeConfig& config, int N) {
  WB_CHECK(N >= 1 && config.E % N == 0, "a two-level exchange needs equally many experts a node, got E = {} on {} nodes", config.E, N);
  WB_CHECK(config.K <= config.E / N, "a two-level exchange on GPUs takes up to E / nodes = {} experts a token, got K = {}", config.E / N, config.K);
  WB_CHECK(config.T_max > 0, "a two-level exchange on GPUs needs T_max, got {}", config.T_max);
  ExchangeConfig inside = config;
  inside.E = config.E / N, inside.T_max = config.T_max * N;
  inside.combine_wire = CombineWire::kF32, inside.hierarchy = Hierarchy::kFlat;
  if (config.receive_factor > 0) {  // the same number of slots: half a slot less is rounded up to it, whatever the factor
    const double slots = std::ceil(config.receive_factor * static_cast<double>(config.T_max) * static_cast<double>(config.K));  // as receive_budget() does
    inside.receive_factor = (slots - 0.5) / (static_cast<double>(inside.T_max) * static_cast<double>(config.K));
  }
  return inside;
}

NodePlan::NodePlan(const ExchangeConfig& config, int N) {
  const auto parts = static_cast<std::uint64_t>(N) * static_cast<std::uint64_t>(config.T_max), routes = parts * static_cast<std::uint64_t>(config.K);
  bytes = 0;
  const auto take = [this](std::uint64_t size) {
    const std::uint64_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  position = take(parts * 4), token = take(parts * 4), headers = take(2 * static_cast<std::uint64_t>(N) * sizeof(ChunkHeader));
  verdicts = take(static_cast<std::uint64_t>(N) * sizeof(HandleHeader)), ids = take(routes * size_bytes(route_id_dtype(config.E / N)));
  // Rows, values of routes, or a plan's ids and weights.
  scratch_bytes = static_cast<std::size_t>(parts) * static_cast<std::size_t>(std::max(config.H * 4, config.K * 8));
}

NodeExchange::NodeExchange(const ExchangeConfig& config, Rail& rail, const LocalRanks& ranks, int device, const ExchangeWindows& windows,
                           const ExchangeTuning& tuning)
    : DeviceExchange(node_config(config, rail.num_nodes()), block_placement(config.E / rail.num_nodes(), ranks.table.size), ranks, device, windows, tuning),
      group_(config),
      rail_(rail),
      device_(device),
      layout_(config, rail.num_nodes()) {
  validate(config, rail.num_nodes() * rail.ranks_per_node());
  WB_CHECK(ranks.table.size == rail.ranks_per_node(), "the launch's node has {} ranks, the rail says {}", ranks.table.size, rail.ranks_per_node());
  for (int i = 0; i < ranks.count; ++i) {
    rows_.push_back(
        Rows{DeviceBuffer(layout_.scratch_bytes, device), DeviceBuffer(layout_.scratch_bytes, device), DeviceBuffer(layout_.scratch_bytes, device)});
  }
}

DType NodeExchange::wire() const { return group_.combine_wire == CombineWire::kBF16 && num_nodes() > 1 ? DType::kBF16 : DType::kF32; }

DeviceHandle NodeExchange::make_handle() const {
  DeviceHandle handle = DeviceExchange::make_handle();
  for (int i = 0; i < num_ranks(); ++i) handle.between_.emplace_back(layout_.bytes, device_);
  handle.own_T_.assign(handle.between_.size(), 0);
  return handle;
}

// ids and weights of the routes are the caller's to fill in.
NodeArgs NodeExchange::args(const DeviceHandle& handle, std::size_t i) const {
  WB_CHECK(handle.between_.size() == rows_.size(), "exchange: the handle is for {} ranks of a group of several nodes, the launch has {}",
           handle.between_.size(), rows_.size());
  const auto N = static_cast<std::size_t>(num_nodes()), routes = N * part_rows() * static_cast<std::size_t>(group_.K);
  const auto* base = handle.between_[i].as<unsigned char>();
  const auto at = [&](std::uint64_t offset) { return const_cast<unsigned char*>(base) + offset; };
  return NodeArgs{num_nodes(),
                  node(),
                  static_cast<std::int32_t>(handle.own_T_[i]),
                  static_cast<std::int32_t>(group_.T_max),
                  static_cast<std::int32_t>(group_.K),
                  static_cast<std::int32_t>(group_.E),
                  static_cast<std::int32_t>(size_bytes(route_id_dtype(group_.E))),
                  static_cast<std::int32_t>(size_bytes(route_id_dtype(group_.E / num_nodes()))),
                  nullptr,
                  nullptr,
                  reinterpret_cast<std::int32_t*>(at(layout_.position)),
                  reinterpret_cast<std::int32_t*>(at(layout_.token)),
                  reinterpret_cast<ChunkHeader*>(at(layout_.headers)),
                  rows_[i].send.data(),
                  part_of<float>(rows_[i].send, routes),
                  &reinterpret_cast<const DeviceControl*>(params().ranks.table.base[rank(static_cast<int>(i))])->poison,
                  params().call[i].status,
                  at(layout_.ids),
                  rows_[i].all.as<float>()};
}

void NodeExchange::add_messages(std::vector<RailMessage>& messages, std::size_t i, const void* send, void* receive, std::size_t bytes,
                                std::size_t send_stride) const {
  for (int m = 0; m < num_nodes(); ++m) {
    if (m == node()) continue;
    const auto part = static_cast<std::size_t>(m);
    messages.push_back({rank(static_cast<int>(i)), m, static_cast<const unsigned char*>(send) + part * send_stride,
                        static_cast<unsigned char*>(receive) + part * bytes, bytes});
  }
}

void NodeExchange::send_between_nodes(std::span<const void* const> send, std::span<void* const> receive, std::size_t bytes, cudaStream_t stream) const {
  WB_CHECK(send.size() == rows_.size() && receive.size() == rows_.size(), "send_between_nodes: {} ranks of this launch, got {} to send, {} to receive",
           rows_.size(), send.size(), receive.size());
  std::vector<RailMessage> messages;
  for (std::size_t i = 0; i < send.size(); ++i) add_messages(messages, i, send[i], receive[i], bytes, 0);
  rail_.exchange(messages, stream);
}

void NodeExchange::plan(DeviceHandle& handle, std::span<const DeviceRoute> routes, cudaStream_t stream) const {
  WB_CHECK(routes.size() == rows_.size() && handle.between_.size() == rows_.size(), "plan: {} ranks of this launch, got {} routes and a handle of {}",
           rows_.size(), routes.size(), handle.between_.size());
  for (std::size_t i = 0; i < routes.size(); ++i) {
    WB_CHECK(routes[i].T >= 0 && routes[i].T <= group_.T_max, "plan: T = {} tokens on rank {} of the node are outside [0, T_max = {}]", routes[i].T,
             rank(static_cast<int>(i)), group_.T_max);
    WB_CHECK(routes[i].T == 0 || (routes[i].ids != nullptr && routes[i].weights != nullptr), "plan: rank {} of the node brings {} tokens and no ids or weights",
             rank(static_cast<int>(i)), routes[i].T);
  }
  const int N = num_nodes();
  const DeviceGuard guard(device_);
  const std::size_t routes_of_part = part_rows() * static_cast<std::size_t>(group_.K);
  std::vector<RailMessage> messages;
  std::vector<DeviceRoute> inside;
  std::vector<NodeArgs> all;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    handle.own_T_[i] = routes[i].T;
    NodeArgs a = args(handle, i);
    a.ids = routes[i].ids, a.weights = routes[i].weights;
    launch_node_routes(a, stream);
    check_launch("exchange_node_routes");
    const std::size_t id_bytes = routes_of_part * static_cast<std::size_t>(a.node_id_bytes);
    add_messages(messages, i, a.send_header, a.send_header + N, sizeof(ChunkHeader), sizeof(ChunkHeader));
    add_messages(messages, i, a.send_ids, a.node_ids, id_bytes, id_bytes);
    add_messages(messages, i, a.send_weights, a.node_weights, routes_of_part * 4, routes_of_part * 4);
    inside.push_back({a.node_ids, a.node_weights, N * group_.T_max});
    all.push_back(a);
  }
  rail_.exchange(messages, stream);
  for (const NodeArgs& a : all) {
    launch_node_trim(a, a.send_header + N, stream);
    check_launch("exchange_node_trim");
  }
  DeviceExchange::plan(handle, inside, stream);
  share_verdict(handle, stream);
}

// Ranks of a node have one verdict; a node that was exceeded makes the plan invalid on all.
void NodeExchange::share_verdict(const DeviceHandle& handle, cudaStream_t stream) const {
  if (num_nodes() == 1) return;
  std::vector<const void*> send;
  std::vector<void*> receive;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    send.push_back(header(handle, static_cast<int>(i))), receive.push_back(handle.between_[i].as<unsigned char>() + layout_.verdicts);
  }
  send_between_nodes(send, receive, sizeof(HandleHeader), stream);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    launch_node_verdict(args(handle, i), static_cast<const HandleHeader*>(receive[i]), static_cast<HandleHeader*>(const_cast<void*>(send[i])), stream);
    check_launch("exchange_node_verdict");
  }
}

void NodeExchange::dispatch(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, const Scales& scales, bool after_plan,
                            cudaStream_t stream) const {
  if (scales.bytes > 0) check_one_node("dispatch() of rows with scales");
  const std::size_t bytes = static_cast<std::size_t>(group_.H) * size_bytes(dtype);
  WB_CHECK(size_bytes(dtype) <= 4 && bytes % 16 == 0, "dispatch: rows of H = {} {} are not multiples of 16 bytes", group_.H, to_string(dtype));
  check_rows("dispatch: x", x, num_ranks(), group_.H, size_bytes(dtype));
  const DeviceGuard guard(device_);
  std::vector<RailMessage> messages;
  std::vector<DeviceRows> inside;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::int64_t stride = (x[i].stride == 0 ? group_.H : x[i].stride) * static_cast<std::int64_t>(size_bytes(dtype));
    launch_node_rows(args(handle, i), x[i].data, stride, static_cast<std::int32_t>(bytes), rows_[i].send.data(),
                     part_of<unsigned char>(rows_[i].all, static_cast<std::size_t>(node()) * part_rows() * bytes), stream);
    check_launch("exchange_node_rows");
    add_messages(messages, i, rows_[i].send.data(), rows_[i].all.data(), part_rows() * bytes, part_rows() * bytes);
    inside.push_back({rows_[i].all.data(), 0});
  }
  rail_.exchange(messages, stream);
  DeviceExchange::dispatch(handle, dtype, inside, window, Scales{}, after_plan, stream);
}

void NodeExchange::combine(const DeviceHandle& handle, std::uint64_t window, DType out_dtype, std::span<const DeviceRows> out, cudaStream_t stream,
                           std::span<const void* const> base) const {
  const RowType to = row_type("combine: out", out_dtype), from = row_type("combine", wire());
  check_rows("combine: out", out, num_ranks(), group_.H, size_bytes(out_dtype));
  check_bases(base, num_ranks());
  const DeviceGuard guard(device_);
  const std::size_t part = part_rows() * static_cast<std::size_t>(group_.H) * size_bytes(wire());
  std::vector<DeviceRows> sums;
  std::vector<RailMessage> messages;
  for (std::size_t i = 0; i < out.size(); ++i) {
    sums.push_back({rows_[i].all.data(), 0});
    add_messages(messages, i, rows_[i].all.data(), rows_[i].returned.data(), part, part);
  }
  DeviceExchange::combine(handle, window, wire(), sums, stream);
  rail_.exchange(messages, stream);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const NodeSum sum{part_of<unsigned char>(rows_[i].all, static_cast<std::size_t>(node()) * part),
                      rows_[i].returned.data(),
                      base.empty() ? nullptr : base[i],
                      const_cast<HandleHeader*>(header(handle, static_cast<int>(i))),
                      out[i].data,
                      out[i].stride == 0 ? group_.H : out[i].stride,
                      static_cast<std::int32_t>(group_.H)};
    launch_node_sum(args(handle, i), sum, from, to, stream);
    check_launch("exchange_node_sum");
  }
}

void NodeExchange::return_slot_values(const DeviceHandle& handle, std::span<const DeviceRoute> routes, std::span<const float* const> values,
                                      std::span<float* const> d_weights, cudaStream_t stream) const {
  WB_CHECK(routes.size() == rows_.size() && d_weights.size() == rows_.size(), "return_slot_values: {} ranks of this launch, got {} routes, {} d_weights",
           rows_.size(), routes.size(), d_weights.size());
  const DeviceGuard guard(device_);
  const std::size_t part = part_rows() * static_cast<std::size_t>(group_.K) * 4;
  std::vector<NodeArgs> all;
  std::vector<DeviceRoute> within;
  std::vector<float*> inside;
  std::vector<RailMessage> messages;
  for (std::size_t i = 0; i < d_weights.size(); ++i) {
    all.push_back(args(handle, i));
    WB_CHECK(routes[i].T == all[i].T, "return_slot_values: the plan was made for T = {} tokens, the route has {}", all[i].T, routes[i].T);
    all[i].ids = routes[i].ids;
    within.push_back({all[i].node_ids, nullptr, num_nodes() * group_.T_max});
    inside.push_back(rows_[i].send.as<float>());
    add_messages(messages, i, inside[i], rows_[i].returned.data(), part, part);
  }
  DeviceExchange::return_slot_values(handle, within, values, inside, stream);
  rail_.exchange(messages, stream);
  for (std::size_t i = 0; i < d_weights.size(); ++i) {
    launch_node_values(all[i], inside[i], rows_[i].returned.as<float>(), d_weights[i], stream);
    check_launch("exchange_node_values");
  }
}

void NodeExchange::save(const DeviceHandle& handle, void* to, cudaStream_t stream) const {
  DeviceExchange::save(handle, to, stream);
  WB_TRY_CUDA(cudaMemcpyAsync(static_cast<unsigned char*>(to) + DeviceExchange::handle_bytes(), handle.between_.at(0).data(), layout_.bytes,
                              cudaMemcpyDeviceToDevice, stream));
}

void NodeExchange::restore(DeviceHandle& handle, const void* from, std::int64_t T, cudaStream_t stream) const {
  DeviceExchange::restore(handle, from, num_nodes() * group_.T_max, stream);
  handle.own_T_.at(0) = T;
  WB_TRY_CUDA(cudaMemcpyAsync(handle.between_.at(0).data(), static_cast<const unsigned char*>(from) + DeviceExchange::handle_bytes(), layout_.bytes,
                              cudaMemcpyDeviceToDevice, stream));
}

}  // namespace waybill::cuda

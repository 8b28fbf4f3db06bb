// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/node_exchange.h"

#include <algorithm>

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
  inside.E = config.E / N, inside.T_max = config.T_max * N, inside.receive_factor = config.receive_factor / N;
  inside.combine_wire = CombineWire::kF32, inside.hierarchy = Hierarchy::kFlat;
  return inside;
}

NodeExchange::NodeExchange(const ExchangeConfig& config, Rail& rail, const LocalRanks& ranks, int device, const ExchangeWindows& windows,
                           const ExchangeTuning& tuning)
    : config_(config), rail_(rail), device_(device) {
  validate(config, rail.num_nodes() * rail.ranks_per_node());
  const ExchangeConfig inside = node_config(config, rail.num_nodes());
  WB_CHECK(ranks.table.size == rail.ranks_per_node(), "the launch's node has {} ranks, the rail says {}", ranks.table.size, rail.ranks_per_node());
  node_ = std::make_unique<DeviceExchange>(inside, block_placement(inside.E, ranks.table.size), ranks, device, windows, tuning);
  const std::size_t row = static_cast<std::size_t>(config.H) * 4, parts = static_cast<std::size_t>(rail.num_nodes()) * part_rows();
  for (int i = 0; i < ranks.count; ++i) {
    const std::size_t bytes = parts * std::max(row, static_cast<std::size_t>(config.K) * 4);  // rows, or values of routes
    rows_.push_back(Rows{DeviceBuffer(bytes, device), DeviceBuffer(bytes, device), DeviceBuffer(bytes, device)});
  }
}

DType NodeExchange::wire() const { return config_.combine_wire == CombineWire::kBF16 && rail_.num_nodes() > 1 ? DType::kBF16 : DType::kF32; }

NodeHandle NodeExchange::make_handle() const {
  NodeHandle handle;
  handle.inside = node_->make_handle();
  const auto N = static_cast<std::size_t>(rail_.num_nodes()), parts = N * part_rows(), routes = parts * static_cast<std::size_t>(config_.K);
  for (int i = 0; i < node_->num_ranks(); ++i) {
    const auto buffer = [&](std::size_t bytes) { return DeviceBuffer(bytes, device_); };
    handle.ranks_.push_back({buffer(parts * 4), buffer(parts * 4), buffer(2 * N * sizeof(ChunkHeader)), buffer(routes * 4), buffer(routes * 4),
                             buffer(routes * 4), buffer(routes * 4)});
  }
  handle.args_.resize(handle.ranks_.size());
  return handle;
}

void NodeExchange::add_messages(std::vector<RailMessage>& messages, std::size_t i, const void* send, void* receive, std::size_t bytes) const {
  for (int m = 0; m < rail_.num_nodes(); ++m) {
    if (m == rail_.node()) continue;
    const std::size_t at = static_cast<std::size_t>(m) * bytes;
    messages.push_back({node_->rank(static_cast<int>(i)), m, static_cast<const unsigned char*>(send) + at, static_cast<unsigned char*>(receive) + at, bytes});
  }
}

void NodeExchange::plan(NodeHandle& handle, std::span<const DeviceRoute> routes, cudaStream_t stream) const {
  WB_CHECK(routes.size() == handle.ranks_.size(), "plan: {} ranks of this launch, got {} routes", handle.ranks_.size(), routes.size());
  const int N = rail_.num_nodes();
  const DeviceGuard guard(device_);
  std::vector<RailMessage> messages;
  std::vector<DeviceRoute> inside;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    WB_CHECK(routes[i].T >= 0 && routes[i].T <= config_.T_max, "plan: T = {} tokens on rank {} of the node are outside [0, T_max = {}]", routes[i].T,
             node_->rank(static_cast<int>(i)), config_.T_max);
    const NodeHandle::Rank& r = handle.ranks_[i];
    NodeArgs& args = handle.args_[i];
    args = NodeArgs{N,
                    rail_.node(),
                    static_cast<std::int32_t>(routes[i].T),
                    static_cast<std::int32_t>(config_.T_max),
                    static_cast<std::int32_t>(config_.K),
                    static_cast<std::int32_t>(config_.E),
                    static_cast<std::int32_t>(size_bytes(route_id_dtype(config_.E))),
                    static_cast<std::int32_t>(size_bytes(route_id_dtype(config_.E / N))),
                    routes[i].ids,
                    routes[i].weights,
                    r.position.as<std::int32_t>(),
                    r.token.as<std::int32_t>(),
                    r.headers.as<ChunkHeader>(),
                    r.send_ids.data(),
                    r.send_weights.as<float>(),
                    r.ids.data(),
                    r.weights.as<float>()};
    launch_node_routes(args, stream);
    check_launch("exchange_node_routes");
    const std::size_t routes_of_part = part_rows() * static_cast<std::size_t>(config_.K);
    add_messages(messages, i, args.send_header, args.send_header + N, sizeof(ChunkHeader));
    add_messages(messages, i, args.send_ids, args.node_ids, routes_of_part * static_cast<std::size_t>(args.node_id_bytes));
    add_messages(messages, i, args.send_weights, args.node_weights, routes_of_part * 4);
    inside.push_back({args.node_ids, args.node_weights, N * config_.T_max});
  }
  rail_.exchange(messages, stream);
  for (const NodeArgs& args : handle.args_) {
    launch_node_trim(args, args.send_header + N, stream);
    check_launch("exchange_node_trim");
  }
  node_->plan(handle.inside, inside, stream);
}

void NodeExchange::dispatch(const NodeHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, bool after_plan,
                            cudaStream_t stream) const {
  const std::size_t bytes = static_cast<std::size_t>(config_.H) * size_bytes(dtype);
  WB_CHECK(size_bytes(dtype) <= 4 && bytes % 16 == 0, "dispatch: rows of H = {} {} are not multiples of 16 bytes", config_.H, to_string(dtype));
  check_rows("dispatch: x", x, node_->num_ranks(), config_.H, size_bytes(dtype));
  const DeviceGuard guard(device_);
  std::vector<RailMessage> messages;
  std::vector<DeviceRows> inside;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::int64_t stride = (x[i].stride == 0 ? config_.H : x[i].stride) * static_cast<std::int64_t>(size_bytes(dtype));
    launch_node_rows(handle.args_[i], x[i].data, stride, static_cast<std::int32_t>(bytes), rows_[i].send.data(),
                     part_of<unsigned char>(rows_[i].all, static_cast<std::size_t>(rail_.node()) * part_rows() * bytes), stream);
    check_launch("exchange_node_rows");
    add_messages(messages, i, rows_[i].send.data(), rows_[i].all.data(), part_rows() * bytes);
    inside.push_back({rows_[i].all.data(), 0});
  }
  rail_.exchange(messages, stream);
  node_->dispatch(handle.inside, dtype, inside, window, after_plan, stream);
}

void NodeExchange::combine(const NodeHandle& handle, std::uint64_t window, DType out_dtype, std::span<const DeviceRows> out, cudaStream_t stream) const {
  const auto type = [](DType dtype) { return dtype == DType::kF32 ? RowType::kF32 : RowType::kBF16; };
  WB_CHECK(out_dtype == DType::kF32 || out_dtype == DType::kBF16, "combine: out must be f32 or bf16, got {}", to_string(out_dtype));
  check_rows("combine: out", out, node_->num_ranks(), config_.H, size_bytes(out_dtype));
  const DeviceGuard guard(device_);
  const std::size_t part = part_rows() * static_cast<std::size_t>(config_.H) * size_bytes(wire());
  std::vector<DeviceRows> sums;
  std::vector<RailMessage> messages;
  for (std::size_t i = 0; i < out.size(); ++i) {
    sums.push_back({rows_[i].all.data(), 0});
    add_messages(messages, i, rows_[i].all.data(), rows_[i].returned.data(), part);
  }
  node_->combine(handle.inside, window, wire(), sums, stream);
  rail_.exchange(messages, stream);
  for (std::size_t i = 0; i < out.size(); ++i) {
    launch_node_sum(handle.args_[i], type(wire()), type(out_dtype), part_of<unsigned char>(rows_[i].all, static_cast<std::size_t>(rail_.node()) * part),
                    rows_[i].returned.data(), out[i].data, out[i].stride == 0 ? config_.H : out[i].stride, static_cast<std::int32_t>(config_.H), stream);
    check_launch("exchange_node_sum");
  }
}

void NodeExchange::return_slot_values(const NodeHandle& handle, std::span<const float* const> values, std::span<float* const> d_weights,
                                      cudaStream_t stream) const {
  WB_CHECK(d_weights.size() == handle.ranks_.size(), "return_slot_values: {} ranks of this launch, got {} d_weights", handle.ranks_.size(), d_weights.size());
  const DeviceGuard guard(device_);
  const std::size_t part = part_rows() * static_cast<std::size_t>(config_.K) * 4;
  std::vector<DeviceRoute> routes;
  std::vector<float*> inside;
  std::vector<RailMessage> messages;
  for (std::size_t i = 0; i < d_weights.size(); ++i) {
    routes.push_back({handle.args_[i].node_ids, handle.args_[i].node_weights, rail_.num_nodes() * config_.T_max});
    inside.push_back(rows_[i].send.as<float>());
    add_messages(messages, i, inside[i], rows_[i].returned.data(), part);
  }
  node_->return_slot_values(handle.inside, routes, values, inside, stream);
  rail_.exchange(messages, stream);
  for (std::size_t i = 0; i < d_weights.size(); ++i) {
    launch_node_values(handle.args_[i], inside[i], rows_[i].returned.as<float>(), d_weights[i], stream);
    check_launch("exchange_node_values");
  }
}

}  // namespace waybill::cuda

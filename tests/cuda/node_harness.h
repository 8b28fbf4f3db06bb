// SPDX-License-Identifier: Apache-2.0
// Two-level exchange on the ranks of one node: plan to combine with identity experts, and what the CPU engine makes of the same group.
#pragma once

#include <memory>

#include "cuda/exchange_harness.h"
#include "cuda/local_rails.h"
#include "exchange/cuda/make_exchange.h"

namespace waybill::cuda {

inline constexpr std::int64_t kNodeTokens = 1100;  // more than a CTA of node_routes takes at a time

inline ts::Group two_level_group(int P, std::uint64_t seed) {
  std::vector<std::int64_t> T;
  for (int p = 0; p < P; ++p) T.push_back(p % 4 == 3 ? 0 : kNodeTokens - 17 * (p % 3));
  return ts::random_group(T, 5, 16 * P, 64, ts::RandomRoute{.seed = seed, .drop = 0.2}, false);
}

inline std::vector<ts::RankResult> run_two_level_on_cpu(const ts::Group& group, ExchangeConfig config, int ranks_per_node) {
  config.hierarchy = Hierarchy::kTwoLevel;
  return ts::run_group(group, config, {.weighted = true, .ranks_per_node = ranks_per_node});
}

class NodeGpu {
 public:
  using At = std::function<void*(int index, std::uint64_t offset)>;  // of a rank of this launch
  NodeGpu(const ExchangeConfig& config, Rail& rail, const LocalRanks& ranks, int device, const BookWindow& book, const At& at)
      : config_(config), stream_(device) {
    config_.hierarchy = Hierarchy::kTwoLevel;
    const int G = rail.ranks_per_node(), P = rail.num_nodes() * G;
    const ExchangeConfig inside = windows_config(config_, {P, rail.num_nodes()});
    const ExchangeWindows windows = book_exchange_windows(inside, G, book);
    const auto row = static_cast<std::size_t>(config.H) * 4, T = static_cast<std::size_t>(config.T_max), K = static_cast<std::size_t>(config.K);
    rows_window_ = book("rows", row_window_bytes(inside, G, row)), z_window_ = book("partials", row_window_bytes(inside, G, row));
    // Few CTAs: kernels of several nodes may wait on one GPU.
    ExchangeTuning tuning;
    tuning.dispatch_ctas = tuning.combine_ctas = tuning.value_ctas = 4, tuning.fused_plan = false;
    exchange_ = make_exchange(config_, block_placement(config.E, P), &rail, ranks, device, windows, tuning);
    handle_ = exchange_->make_handle();
    for (int i = 0; i < ranks.count; ++i) {
      Rank r;
      r.ids = DeviceBuffer(T * K * 4, device), r.weights = DeviceBuffer(T * K * 4, device), r.d_weights = DeviceBuffer(T * K * 4, device);
      r.x = DeviceBuffer(T * row, device), r.out = DeviceBuffer(T * row, device);
      r.y = DeviceBuffer(static_cast<std::size_t>(exchange_->budget().padded_slots) * row, device);
      routes_.push_back({r.ids.data(), r.weights.as<float>(), 0}), x_.push_back({r.x.data(), 0}), y_.push_back({r.y.data(), 0});
      out_.push_back({r.out.data(), 0}), d_weights_.push_back(r.d_weights.as<float>());
      rows_.push_back({at(i, rows_window_), 0}), z_.push_back({at(i, z_window_), 0});
      values_.push_back(exchange_->slot_weights(handle_, i));
      ranks_.push_back(std::move(r));
    }
  }
  // Rank `rank` of the group is number i of this launch.
  void upload(std::size_t i, const ts::Group& group, int rank) {
    const RouteView& route = group.routes[static_cast<std::size_t>(rank)].view();
    const ts::Floats& x = group.x[static_cast<std::size_t>(rank)];
    Rank& r = ranks_[i];
    const auto routes = static_cast<std::size_t>(route.T * route.K);
    r.ids.upload(route.ids, routes * size_bytes(route.id_dtype), stream_), r.weights.upload(route.weights, routes * 4, stream_);
    r.x.upload(x.data(), x.size() * 4, stream_), r.out.fill(0xff, stream_), r.y.fill(0xff, stream_), r.d_weights.fill(0xff, stream_);
    routes_[i].T = route.T;
    stream_.synchronize();
  }
  void queue(cudaStream_t s) {
    exchange_->plan(handle_, routes_, s);
    exchange_->layout(handle_, s);
    exchange_->dispatch(handle_, DType::kF32, x_, rows_window_, true, s);
    exchange_->permute(handle_, DType::kF32, rows_, y_, s);
    exchange_->unpermute_reduce(handle_, DType::kF32, y_, true, exchange_->partials(), z_, true, s);
    exchange_->combine(handle_, z_window_, DType::kF32, out_, s);
    exchange_->return_slot_values(handle_, routes_, values_, d_weights_, s);
  }
  ts::Floats out(std::size_t i) { return download(ranks_[i].out, static_cast<std::size_t>(routes_[i].T * config_.H)); }
  ts::Floats d_weights(std::size_t i) { return download(ranks_[i].d_weights, static_cast<std::size_t>(routes_[i].T * config_.K)); }
  std::int64_t rows(std::size_t i) { return exchange_->read(handle_, static_cast<int>(i), stream_).layout.R(); }
  bool is_valid(std::size_t i) { return exchange_->read(handle_, static_cast<int>(i), stream_).valid; }
  StatusWord status(std::size_t i) { return exchange_->status(static_cast<int>(i), stream_); }
  const CudaStream& stream() const { return stream_; }

 private:
  struct Rank {
    DeviceBuffer ids, weights, x, y, out, d_weights;
  };
  ts::Floats download(const DeviceBuffer& from, std::size_t count) {
    ts::Floats values(count);
    stream_.synchronize();
    if (count > 0) from.download(values.data(), count * 4, stream_);
    stream_.synchronize();
    return values;
  }

  ExchangeConfig config_;
  CudaStream stream_;
  std::uint64_t rows_window_ = 0, z_window_ = 0;
  std::unique_ptr<DeviceExchange> exchange_;
  DeviceHandle handle_;
  std::vector<Rank> ranks_;
  std::vector<DeviceRoute> routes_;
  std::vector<DeviceRows> x_, y_, rows_, z_, out_;
  std::vector<const float*> values_;
  std::vector<float*> d_weights_;
};

}  // namespace waybill::cuda

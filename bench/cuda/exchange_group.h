// SPDX-License-Identifier: Apache-2.0
// P = 2 ranks on two GPUs (or virtual ranks on one) with everything that the exchange benchmark moves, and the timing of captured steps.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "bench/loads.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/graph.h"
#include "exchange/cuda/device_exchange.h"
#include "fabric/cuda_local/local_ranks.h"

namespace waybill::cuda {

struct ExchangeShapeCase {
  std::int64_t T, H, K, E;
  std::int64_t scale_bytes = 0;  // f8 rows with scales
  double fill = 1;               // share of the K routes that are there (the rest is -1)
  std::string load = {};         // of bench/shapes/loads.toml (W5: T tokens, all at rank 1; W9: few; else T a rank); empty: uniform
  std::size_t extra_bytes = 0;   // size of `extra_window`
};

// Where the ranks of this process keep their windows: cuda_local, or the nccl engine with one rank a process.
class BenchArena {
 public:
  virtual ~BenchArena() = default;
  virtual std::uint64_t window(const std::string& name, std::size_t bytes) = 0;
  virtual void* at(int rank, std::uint64_t offset) const = 0;  // ranks of this process only
  virtual LocalRanks ranks(int device) const = 0;
  virtual std::string first_error() const = 0;
  virtual void line_up() const {}  // ranks of other processes: all have come this far
};
using MakeArena = std::function<std::unique_ptr<BenchArena>(std::size_t bytes)>;

class CudaLocalArena final : public BenchArena {
 public:
  CudaLocalArena(int P, const std::vector<int>& devices, std::size_t bytes) : group_(P, devices, bytes) {}
  std::uint64_t window(const std::string& name, std::size_t bytes) override { return group_.window(name, bytes); }
  void* at(int rank, std::uint64_t offset) const override { return group_.at<void>(rank, offset); }
  LocalRanks ranks(int device) const override { return local_ranks(group_, device); }
  std::string first_error() const override { return group_.first_error(); }

 private:
  CudaLocalGroup group_;
};

// Microseconds a step: the slower device's.
struct StepTime {
  double p50 = 0, p10 = 0, p90 = 0;
};

class ExchangeGroup {
 public:
  static constexpr int kSets = 4;  // routes and rows that steps rotate over

  ExchangeGroup(ExchangeGroup&&) = delete;
  ExchangeGroup(const ExchangeShapeCase& c, int P, const std::vector<int>& devices)
      : ExchangeGroup(c, P, devices, [&](std::size_t bytes) { return std::make_unique<CudaLocalArena>(P, devices, bytes); }) {}
  ExchangeGroup(const ExchangeShapeCase& c, int P, const std::vector<int>& devices, const MakeArena& make_arena) : c_(c), P_(P) {
    config_.H = c.H, config_.E = c.E, config_.K = c.K, config_.T_max = c.T;
    config_.combine_wire = CombineWire::kBF16;
    const auto row = static_cast<std::size_t>(c.H) * 2;
    const std::size_t rows_bytes = row_window_bytes(config_, P, row + static_cast<std::size_t>(c.scale_bytes));
    const std::size_t z_bytes = row_window_bytes(config_, P, P > 1 ? row : 2 * row);
    const std::size_t slots_bytes = slot_window_bytes(config_, P, row);
    group_ = make_arena(exchange_window_bytes(config_, P) + rows_bytes + z_bytes + slots_bytes + static_cast<std::size_t>(c.T) * row + c.extra_bytes + 16384);
    windows_ = book_exchange_windows(config_, P, [&](const std::string& name, std::size_t bytes) { return group_->window(name, bytes); });
    rows_window = group_->window("rows", rows_bytes), z_window = group_->window("partials", z_bytes);
    slots_window = group_->window("slots", slots_bytes), x_window = group_->window("x", static_cast<std::size_t>(c.T) * row);
    if (c.extra_bytes > 0) extra_window = group_->window("extra", c.extra_bytes);
    scale_window = rows_window + row_window_bytes(config_, P, static_cast<std::size_t>(c.H));
    for (const int device : devices) {
      const DeviceGuard guard(device);  // for the part's events
      parts.push_back(std::make_unique<Part>(*this, device));
    }
    group_->line_up();  // before a kernel posts to a rank whose control words are not cleared yet
  }

  struct Part {
    Part(ExchangeGroup& owner, int on)
        : device(on), stream(on), side(on), exchange(owner.config_, block_placement(owner.c_.E, owner.P_), owner.group_->ranks(on), on, owner.windows_) {
      const DeviceGuard guard(device);
      handle = exchange.make_handle();
      const ExchangeShapeCase& c = owner.c_;
      const auto H = static_cast<std::size_t>(c.H), T = static_cast<std::size_t>(c.T), K = static_cast<std::size_t>(c.K);
      const auto slots = static_cast<std::size_t>(exchange.budget().padded_slots);
      routes.resize(kSets), x.resize(kSets);
      for (int i = 0; i < exchange.num_ranks(); ++i) {
        const int rank = exchange.rank(i);
        memory.emplace_back(std::max<std::size_t>(slots * H * 2, 16), device), y.push_back({memory.back().data(), 0});
        memory.emplace_back(T * H * 4, device), out.push_back({memory.back().data(), 0});
        memory.emplace_back(T * K * 4, device), d_weights.push_back(memory.back().as<float>());
        memory.emplace_back(std::max<std::size_t>(T * static_cast<std::size_t>(c.scale_bytes), 16), device), scales.push_back({memory.back().data(), 0});
        rows.push_back({owner.group_->at(rank, owner.rows_window), 0}), z.push_back({owner.group_->at(rank, owner.z_window), 0});
        values.push_back(exchange.slot_weights(handle, i));
        for (int s = 0; s < kSets; ++s) {
          const std::vector<std::int16_t> ids = owner.ids_of(s, rank);
          const std::vector<float> weights(ids.size(), 1.0f / static_cast<float>(c.K));
          memory.emplace_back(ids.size() * 2 + 16, device), memory.back().upload(ids.data(), ids.size() * 2);
          const void* d_ids = memory.back().data();
          memory.emplace_back(ids.size() * 4 + 16, device), memory.back().upload(weights.data(), ids.size() * 4);
          routes[static_cast<std::size_t>(s)].push_back({d_ids, memory.back().as<float>(), static_cast<std::int64_t>(ids.size()) / c.K});
          const std::vector<std::uint16_t> stamps = owner.stamps(s, rank);
          memory.emplace_back(stamps.size() * 2, device), memory.back().upload(stamps.data(), stamps.size() * 2);
          x[static_cast<std::size_t>(s)].push_back({memory.back().data(), 0});
          if (s == 0) host_ids.push_back(ids);
        }
        WB_TRY_CUDA(cudaMemcpy(owner.group_->at(rank, owner.x_window), x[0].back().data, T * H * 2, cudaMemcpyDeviceToDevice));
      }
      WB_TRY_CUDA(cudaDeviceSynchronize());
    }
    int device;
    CudaStream stream, side;
    DeviceExchange exchange;
    DeviceHandle handle;
    std::vector<DeviceBuffer> memory;
    std::vector<std::vector<DeviceRoute>> routes;  // [set][rank]
    std::vector<std::vector<DeviceRows>> x;
    std::vector<DeviceRows> y, out, rows, z, scales;
    std::vector<float*> d_weights;
    std::vector<const float*> values;
    std::vector<std::vector<std::int16_t>> host_ids;  // of set 0
    CudaEvent forked{false}, joined{false};
  };

  // What a step may be made of; i selects the set.
  void plan(Part& p, int i, cudaStream_t s) const { p.exchange.plan(p.handle, p.routes[static_cast<std::size_t>(i % kSets)], s); }
  // The plan of ranks that bring no tokens: what stands behind it consists of its signals.
  void plan_without_tokens(Part& p, cudaStream_t s) const {
    std::vector<DeviceRoute> routes = p.routes[0];
    for (DeviceRoute& route : routes) route.T = 0;
    p.exchange.plan(p.handle, routes, s);
  }
  void layout(Part& p, cudaStream_t s) const { p.exchange.layout(p.handle, s); }
  void dispatch(Part& p, int i, bool after_plan, cudaStream_t s) const {
    const auto& x = p.x[static_cast<std::size_t>(i % kSets)];
    if (c_.scale_bytes == 0) return p.exchange.dispatch(p.handle, DType::kBF16, x, rows_window, after_plan, s);
    p.exchange.dispatch(p.handle, DType::kF8E4M3, x, rows_window, {p.scales, c_.scale_bytes, scale_window}, after_plan, s);
  }
  // layout beside dispatch, on another stream.
  void dispatch_and_layout(Part& p, int i, cudaStream_t s) const {
    p.forked.record(s);
    p.forked.wait_on(p.side);
    layout(p, p.side);
    dispatch(p, i, true, s);
    p.joined.record(p.side);
    p.joined.wait_on(s);
  }
  // x to expert rows with the own half permuted while the link is busy.
  void dispatch_and_permute(Part& p, int i, cudaStream_t s) const {
    p.forked.record(s);
    p.forked.wait_on(p.side);
    layout(p, p.side);
    dispatch(p, i, true, s);
    p.exchange.permute_own(p.handle, DType::kBF16, p.x[static_cast<std::size_t>(i % kSets)], p.y, p.side);
    p.joined.record(p.side);
    p.joined.wait_on(s);
    p.exchange.permute_others(p.handle, DType::kBF16, p.rows, p.y, s);
  }
  // The same in chunks of tokens: one permute that follows what arrives.
  void dispatch_and_permute_chunks(Part& p, int i, cudaStream_t s) const {
    const auto& x = p.x[static_cast<std::size_t>(i % kSets)];
    p.forked.record(s);
    p.forked.wait_on(p.side);
    layout(p, p.side);
    p.exchange.dispatch_chunks(p.handle, DType::kBF16, x, rows_window, true, s);
    p.exchange.permute_arriving(p.handle, DType::kBF16, x, p.rows, p.y, p.side);
    p.joined.record(p.side);
    p.joined.wait_on(s);
  }
  void dispatch_chunks_alone(Part& p, int i, cudaStream_t s) const {
    const auto& x = p.x[static_cast<std::size_t>(i % kSets)];
    p.exchange.dispatch_chunks(p.handle, DType::kBF16, x, rows_window, true, s);
    p.exchange.permute_arriving(p.handle, DType::kBF16, x, p.rows, p.y, s);
  }
  void reduce_and_combine(Part& p, cudaStream_t s) const { p.exchange.reduce_and_combine(p.handle, DType::kBF16, p.y, false, z_window, p.out, s); }
  void permute(Part& p, cudaStream_t s) const { p.exchange.permute(p.handle, DType::kBF16, p.rows, p.y, s); }
  void unpermute(Part& p, cudaStream_t s) const { p.exchange.unpermute_reduce(p.handle, DType::kBF16, p.y, false, p.exchange.wire(), p.z, true, s); }
  void combine(Part& p, cudaStream_t s) const { p.exchange.combine(p.handle, z_window, DType::kBF16, p.out, s); }
  void combine_push(Part& p, cudaStream_t s) const { p.exchange.combine_push(p.handle, z_window, slots_window, DType::kBF16, p.out, s); }
  void return_values(Part& p, cudaStream_t s) const { p.exchange.return_slot_values(p.handle, p.routes[0], p.values, p.d_weights, s); }

  using Step = std::function<void(Part&, int, cudaStream_t)>;

  // A step on set 0 on all devices, and what went wrong.
  std::string run(const Step& step, int i = 0) {
    for (auto& p : parts) {
      const DeviceGuard guard(p->device);
      step(*p, i, p->stream);
    }
    for (auto& p : parts) p->stream.synchronize();
    return group_->first_error();
  }

  // Identity experts on integer stamps: every token comes back times its routes, exactly.
  bool check() {
    if (c_.scale_bytes > 0) return check_bytes();
    return check_step(
               [&](Part& p, int i, cudaStream_t s) { plan(p, i, s), layout(p, s), dispatch(p, i, true, s), permute(p, s), unpermute(p, s), combine(p, s); }) &&
           check_step([&](Part& p, int i, cudaStream_t s) { plan(p, i, s), dispatch_and_permute(p, i, s), unpermute(p, s), combine_push(p, s); }) &&
           (!parts[0]->exchange.supports_chunks() ||
            check_step([&](Part& p, int i, cudaStream_t s) { plan(p, i, s), dispatch_and_permute_chunks(p, i, s), reduce_and_combine(p, s); }));
  }
  bool check_step(const Step& step) {
    for (auto& p : parts) {
      const DeviceGuard guard(p->device);
      for (const DeviceRows& out : p->out) WB_TRY_CUDA(cudaMemset(out.data, 0xff, static_cast<std::size_t>(c_.T * c_.H) * 2));
      for (const DeviceRows& y : p->y) WB_TRY_CUDA(cudaMemset(y.data, 0xff, static_cast<std::size_t>(p->exchange.budget().padded_slots * c_.H) * 2));
      WB_TRY_CUDA(cudaDeviceSynchronize());
    }
    const std::string error = run(step);
    if (!error.empty()) return fmt::print("{}\n", error), false;
    for (auto& p : parts) {
      const DeviceGuard guard(p->device);
      for (int i = 0; i < p->exchange.num_ranks(); ++i) {
        const auto n = static_cast<std::size_t>(i);
        std::vector<std::uint16_t> out(static_cast<std::size_t>(c_.T * c_.H));
        WB_TRY_CUDA(cudaMemcpy(out.data(), p->out[n].data, out.size() * 2, cudaMemcpyDeviceToHost));
        const std::vector<std::uint16_t> x = stamps(0, p->exchange.rank(i));
        for (std::int64_t t = 0; t < static_cast<std::int64_t>(p->host_ids[n].size()) / c_.K; ++t) {
          const auto* ids = p->host_ids[n].data() + t * c_.K;
          const auto routes = static_cast<float>(std::count_if(ids, ids + c_.K, [](std::int16_t id) { return id >= 0; }));
          for (std::int64_t h = 0; h < c_.H; ++h) {
            const auto at = static_cast<std::size_t>(t * c_.H + h);
            const float want = routes * bf16::to_float(x[at]), got = bf16::to_float(out[at]);
            if (want != got) return fmt::print("rank {}, token {}, column {}: {} instead of {}\n", p->exchange.rank(i), t, h, got, want), false;
          }
        }
      }
    }
    return true;
  }

  // Median over replays of (graph of `steps` steps / steps), the slower device's.
  StepTime time(const Step& step, int steps, int replays) {
    std::vector<GraphExec> graphs;
    for (auto& p : parts) {
      const DeviceGuard guard(p->device);
      graphs.push_back(GraphExec::capture(p->stream, [&](cudaStream_t s) {
        for (int i = 0; i < steps; ++i) step(*p, i, s);
      }));
    }
    std::vector<std::unique_ptr<CudaEvent>> from, to;
    for (auto& p : parts) {
      const DeviceGuard guard(p->device);
      from.push_back(std::make_unique<CudaEvent>()), to.push_back(std::make_unique<CudaEvent>());
    }
    std::vector<double> us;
    group_->line_up();
    for (int r = 0; r < replays + 3; ++r) {
      for (std::size_t d = 0; d < parts.size(); ++d) {
        const DeviceGuard guard(parts[d]->device);
        // A plan of set 0 lines the ranks up, and leaves the steps that do not plan what they work on.
        plan(*parts[d], 0, parts[d]->stream), layout(*parts[d], parts[d]->stream);
        from[d]->record(parts[d]->stream), graphs[d].launch(parts[d]->stream), to[d]->record(parts[d]->stream);
      }
      double slowest = 0;
      for (std::size_t d = 0; d < parts.size(); ++d) {
        to[d]->synchronize();
        slowest = std::max(slowest, static_cast<double>(to[d]->elapsed_us_since(*from[d])) / steps);
      }
      if (r >= 3) us.push_back(slowest);
    }
    std::sort(us.begin(), us.end());
    const auto at = [&](double q) { return us[static_cast<std::size_t>(q * static_cast<double>(us.size() - 1) + 0.5)]; };
    return {at(0.5), at(0.1), at(0.9)};
  }

  ExchangeTuning tuning() const { return parts[0]->exchange.tuning(); }
  void set_tuning(const ExchangeTuning& t) {
    for (auto& p : parts) p->exchange.tuning() = t;
  }
  // What a rank of this process sends to others, of set 0.
  struct Remote {
    std::int64_t rows = 0, slots = 0;
  };
  Remote remote() const {  // the rank with the most rows
    Remote busiest;
    for (const auto& p : parts) {
      for (int i = 0; i < p->exchange.num_ranks(); ++i) {
        const Remote own = remote(p->exchange.rank(i), p->host_ids[static_cast<std::size_t>(i)]);
        if (own.rows >= busiest.rows) busiest = own;
      }
    }
    return busiest;
  }
  // After a plan and layout: what the rank of this process with the most slots received.
  ReceiveLayout received() {
    run([&](Part& p, int i, cudaStream_t s) { plan(p, i, s), layout(p, s); });
    ReceiveLayout fullest;
    for (auto& p : parts) {
      const DeviceGuard guard(p->device);
      for (int i = 0; i < p->exchange.num_ranks(); ++i) {
        ReceiveLayout layout = p->exchange.read(p->handle, i, p->stream).layout;
        if (layout.row_offsets.empty() || fullest.row_offsets.empty() || layout.S() > fullest.S()) fullest = std::move(layout);
      }
    }
    return fullest;
  }
  const ExchangeShapeCase& shape() const { return c_; }
  const BenchArena& arena() const { return *group_; }

  std::vector<std::unique_ptr<Part>> parts;
  std::uint64_t rows_window = 0, z_window = 0, slots_window = 0, x_window = 0, scale_window = 0, extra_window = 0;

 private:
  Remote remote(int self, const std::vector<std::int16_t>& ids) const {
    Remote sent;
    const std::int64_t L = c_.E / P_;
    for (std::size_t t = 0; t < ids.size(); t += static_cast<std::size_t>(c_.K)) {
      std::vector<bool> hit(static_cast<std::size_t>(P_));
      for (std::size_t k = t; k < t + static_cast<std::size_t>(c_.K); ++k) {
        if (ids[k] < 0) continue;
        hit[static_cast<std::size_t>(ids[k] / L)] = true;
        sent.slots += ids[k] / L != self ? 1 : 0;
      }
      for (int p = 0; p < P_; ++p) sent.rows += p != self && hit[static_cast<std::size_t>(p)] ? 1 : 0;
    }
    return sent;
  }
  std::vector<std::int16_t> ids_of_rows(const std::vector<std::int32_t>& ids, std::int64_t begin, std::int64_t end) const {
    std::vector<std::int16_t> rows;
    for (std::int64_t i = begin * c_.K; i < end * c_.K; ++i) rows.push_back(static_cast<std::int16_t>(ids[static_cast<std::size_t>(i)]));
    return rows;
  }
  // [tokens of the rank * K]
  std::vector<std::int16_t> ids_of(int set, int rank) const {
    if (c_.load.empty()) return random_ids(static_cast<std::uint64_t>(set * 131 + rank));
    const WorkloadConfig config = bench::workload_of(c_.load, c_.load == "W5" ? c_.T : P_ * c_.T, c_.K, c_.E, set);
    const std::vector<std::int64_t> bounds = workload_bounds(config, P_);
    const std::vector<std::int32_t> all = workload_ids(config);
    const std::int64_t begin = bounds[static_cast<std::size_t>(rank)], end = bounds[static_cast<std::size_t>(rank) + 1];
    WB_CHECK(end - begin <= c_.T, "load {}: rank {} has {} tokens, {} at most", c_.load, rank, end - begin, c_.T);
    return ids_of_rows(all, begin, end);
  }
  std::vector<std::int16_t> random_ids(std::uint64_t seed) const {
    std::vector<std::int16_t> ids(static_cast<std::size_t>(c_.T * c_.K), -1);
    std::mt19937_64 random(seed);
    std::vector<std::int16_t> deck(static_cast<std::size_t>(c_.E));
    for (std::size_t e = 0; e < deck.size(); ++e) deck[e] = static_cast<std::int16_t>(e);
    const double wanted = c_.fill * static_cast<double>(c_.K);
    double given = 0;
    for (std::int64_t t = 0; t < c_.T; ++t) {
      const auto count = static_cast<std::int64_t>(wanted * static_cast<double>(t + 1) - given);
      given += static_cast<double>(count);
      for (std::int64_t k = 0; k < count; ++k) {  // the deck stays shuffled from token to token
        std::swap(deck[static_cast<std::size_t>(k)], deck[static_cast<std::size_t>(k) + random() % static_cast<std::uint64_t>(c_.E - k)]);
        ids[static_cast<std::size_t>(t * c_.K + k)] = deck[static_cast<std::size_t>(k)];
      }
    }
    return ids;
  }
  // Integers |x| <= 7 as bf16: sums of 36 are exact. Rows differ.
  std::vector<std::uint16_t> stamps(int set, int rank) const {
    constexpr std::int64_t kPeriod = 1009;
    std::vector<std::uint16_t> base(static_cast<std::size_t>(c_.H + kPeriod)), x(static_cast<std::size_t>(c_.T * c_.H));
    std::mt19937 random(static_cast<unsigned>(set * 977 + rank));
    for (std::uint16_t& value : base) value = bf16::from_float(static_cast<float>(static_cast<int>(random() % 15) - 7));
    for (std::int64_t t = 0; t < c_.T; ++t) std::memcpy(x.data() + t * c_.H, base.data() + t * 37 % kPeriod, static_cast<std::size_t>(c_.H) * 2);
    return x;
  }
  // f8: the bytes of rank 0's first and last received rows are those of their tokens.
  bool check_bytes() {
    const std::string error = run([&](Part& p, int i, cudaStream_t s) { plan(p, i, s), layout(p, s), dispatch(p, i, true, s); });
    if (!error.empty()) return fmt::print("{}\n", error), false;
    const ReceiveLayout layout = parts[0]->exchange.read(parts[0]->handle, 0, parts[0]->stream).layout;
    const int rank = parts[0]->exchange.rank(0);
    for (int source = 0; source < P_; ++source) {  // the first token of each source that has a route to this rank
      const std::vector<std::int16_t> ids = random_ids(static_cast<std::uint64_t>(source));
      std::int64_t token = 0;
      while (std::none_of(ids.begin() + token * c_.K, ids.begin() + (token + 1) * c_.K, [&](std::int16_t id) { return id >= 0 && id / (c_.E / P_) == rank; }))
        ++token;
      const std::vector<std::uint16_t> x = stamps(0, source);
      std::vector<unsigned char> got(static_cast<std::size_t>(c_.H));
      WB_TRY_CUDA(cudaMemcpy(got.data(),
                             static_cast<unsigned char*>(group_->at(rank, rows_window)) + layout.row_offsets[static_cast<std::size_t>(source)] * c_.H,
                             got.size(), cudaMemcpyDeviceToHost));
      if (std::memcmp(got.data(), reinterpret_cast<const unsigned char*>(x.data()) + token * c_.H, got.size()) != 0)
        return fmt::print("wrong bytes from rank {}\n", source), false;
    }
    return true;
  }

  ExchangeShapeCase c_;
  int P_;
  ExchangeConfig config_;
  std::unique_ptr<BenchArena> group_;
  ExchangeWindows windows_;
};

}  // namespace waybill::cuda

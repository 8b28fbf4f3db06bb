// SPDX-License-Identifier: Apache-2.0
// Runs one step of a group's exchange on virtual ranks over one or more GPUs and keeps what every rank saw, as tests/exchange/group.h does
// for the CPU engine.
#pragma once

#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>

#include "cuda/router_harness.h"
#include "exchange/cuda/device_exchange.h"
#include "exchange/group.h"
#include "fabric/cuda_local/local_ranks.h"

namespace waybill::cuda {

namespace ts = waybill::testing_support;

struct GpuOptions {
  std::vector<int> devices{0};
  // Of a GPU, each for an equal share of its ranks, on streams of their own: ranks that come early and late on one GPU. Their kernels wait for each other, so
  // that all of them must fit on it: see two_launches().
  int launches = 1;
  int combine_sms = 0;  // of reduce_and_combine, for all ranks of a launch; 0: all
  DType x_dtype = DType::kF32, out_dtype = DType::kF32;
  bool weighted = false, push_combine = false, pull_dispatch = false, handshake = false, split_permute = false;
  bool chunks = false, fused_combine = false;  // permute beside dispatch, combine beside the reduction
  // Called before every step of a rank's stream.
  std::function<void(cudaStream_t)> delay;
  ExchangeTuning tuning;
  std::chrono::milliseconds timeout{5000};
  std::vector<int> absent;  // ranks that never come
};

inline int num_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Two launches on one GPU, small enough for both: at most 16 CTAs a kernel that waits for the other launch, or 56 SMs.
inline GpuOptions two_launches(int P) {
  GpuOptions options;
  const int ctas = std::max(1, 32 / P);
  options.launches = 2, options.combine_sms = 56;
  options.tuning.dispatch_ctas = options.tuning.chunk_ctas = options.tuning.combine_ctas = options.tuning.value_ctas = options.tuning.arriving_ctas = ctas;
  options.tuning.fused_plan = options.tuning.fused_layout = false, options.tuning.local_ctas = 32;
  options.tuning.fused_combine_ctas = 8;
  options.tuning.overlap_launches = false;  // kernels that start early and wait for the one before would fill the GPU
  return options;
}

// A group with all of its memory. The arenas, windows and handles are made once; step() may run any number of times.
class GpuGroup {
  struct RankMemory {
    DeviceBuffer ids, weights, x, y, out, d_weights;
  };
  struct Part {
    Part(const ExchangeConfig& config, const ExpertPlacement& placement, const LocalRanks& present, int on, const ExchangeWindows& windows,
         const ExchangeTuning& tuning)
        : device(on), stream(on), side(on), exchange(config, placement, present, on, windows, tuning), handle(exchange.make_handle()) {}
    int device;
    CudaStream stream, side;
    CudaEvent forked{false}, joined{false};
    DeviceExchange exchange;
    DeviceHandle handle;
    std::vector<RankMemory> ranks;
    std::vector<DeviceRoute> routes;
    std::vector<DeviceRows> x, rows, y, z, out;
    std::vector<const float*> values;
    std::vector<float*> d_weights;
  };

 public:
  GpuGroup(const ExchangeConfig& config, const ExpertPlacement& placement, const GpuOptions& options)
      : config_(with_tokens(config)),
        P_(placement.P),
        options_(options),
        wire_(config.combine_wire == CombineWire::kBF16 && P_ > 1 ? DType::kBF16 : DType::kF32) {
    const auto H = static_cast<std::size_t>(config_.H);
    const std::size_t x_row = H * size_bytes(options.x_dtype), z_row = H * size_bytes(wire_);
    const std::size_t rows_bytes = row_window_bytes(config_, P_, x_row), z_bytes = row_window_bytes(config_, P_, z_row);
    const std::size_t slots_bytes = options.push_combine ? slot_window_bytes(config_, P_, z_row) : 0;
    const std::size_t x_bytes = options.pull_dispatch ? static_cast<std::size_t>(config_.T_max) * x_row : 0;
    const std::size_t arena = exchange_window_bytes(config_, P_) + rows_bytes + z_bytes + slots_bytes + x_bytes + 8192;
    group_ = std::make_unique<CudaLocalGroup>(P_, options.devices, arena, options.timeout);
    windows_ = book_exchange_windows(config_, P_, [&](const std::string& name, std::size_t bytes) { return group_->window(name, bytes); });
    rows_window_ = group_->window("rows", rows_bytes), z_window_ = group_->window("partials", z_bytes);
    if (options.push_combine) slots_window_ = group_->window("slots", slots_bytes);
    if (options.pull_dispatch) x_window_ = group_->window("x", x_bytes);
    for (std::size_t n = 0; n < options.devices.size() * static_cast<std::size_t>(options.launches); ++n) {
      const std::size_t d = n / static_cast<std::size_t>(options.launches);
      const int launch = static_cast<int>(n) % options.launches;
      LocalRanks ranks = local_ranks(*group_, options.devices[d]), present = ranks;
      present.count = 0;
      for (int i = ranks.count * launch / options.launches; i < ranks.count * (launch + 1) / options.launches; ++i) {
        if (std::find(options.absent.begin(), options.absent.end(), ranks.rank[i]) == options.absent.end()) present.rank[present.count++] = ranks.rank[i];
      }
      const DeviceGuard guard(options.devices[d]);  // for the part's events
      parts_.push_back(std::make_unique<Part>(config_, placement, present, options.devices[d], windows_, options.tuning));
    }
    for (auto& part : parts_) allocate(*part);
  }

  // Poisons every output, uploads the routes and rows.
  void upload(const ts::Group& group) {
    for (auto& part : parts_) {
      const DeviceGuard guard(part->device);
      for (std::size_t i = 0; i < part->ranks.size(); ++i) {
        RankMemory& m = part->ranks[i];
        const auto p = static_cast<std::size_t>(part->exchange.rank(static_cast<int>(i)));
        const RouteView& route = group.routes[p].view();
        const auto routes = static_cast<std::size_t>(route.T * route.K);
        m.ids.upload(route.ids, routes * size_bytes(route.id_dtype), part->stream), m.weights.upload(route.weights, routes * 4, part->stream);
        const Tensor x = ts::to_tensor(group.x[p], route.T, config_.H, options_.x_dtype);
        void* target = options_.pull_dispatch ? group_->at<unsigned char>(static_cast<int>(p), x_window_) : m.x.data();
        if (route.T > 0) {
          WB_TRY_CUDA(cudaMemcpyAsync(target, x.view().data, static_cast<std::size_t>(route.T * config_.H) * size_bytes(options_.x_dtype),
                                      cudaMemcpyHostToDevice, part->stream));
        }
        part->routes[i] = DeviceRoute{m.ids.data(), m.weights.as<float>(), route.T};
        part->stream.synchronize();
      }
    }
    poison();
  }
  void poison() {
    for (auto& part : parts_) {
      const DeviceGuard guard(part->device);
      for (RankMemory& m : part->ranks) m.out.fill(0xff, part->stream), m.y.fill(0xff, part->stream), m.d_weights.fill(0xff, part->stream);
      for (int i = 0; i < part->exchange.num_ranks(); ++i) {
        const int rank = part->exchange.rank(i);
        const std::size_t row = static_cast<std::size_t>(config_.H);
        WB_TRY_CUDA(
            cudaMemsetAsync(group_->at<void*>(rank, rows_window_), 0xff, row_window_bytes(config_, P_, row * size_bytes(options_.x_dtype)), part->stream));
        WB_TRY_CUDA(cudaMemsetAsync(group_->at<void*>(rank, z_window_), 0xff, row_window_bytes(config_, P_, row * size_bytes(wire_)), part->stream));
      }
      part->stream.synchronize();
    }
  }

  // Queues the step of one device, or only its beginning: a rank that is lost on the way.
  enum class Until { kPlan, kRows, kEnd };
  void queue(std::size_t index, cudaStream_t stream, Until until = Until::kEnd) {
    Part& part = *parts_[index];
    const DeviceGuard guard(part.device);
    DeviceExchange& e = part.exchange;
    const auto delay = [&] {
      if (options_.delay) options_.delay(stream);
    };
    delay();
    e.plan(part.handle, part.routes, stream);
    if (until == Until::kPlan) return;
    delay();
    if (options_.chunks) {
      queue_chunks(part, stream);
    } else {
      queue_dispatch(part, stream);
    }
    if (until == Until::kRows) return;
    delay();
    if (options_.fused_combine) {
      e.reduce_and_combine(part.handle, options_.x_dtype, part.y, options_.weighted, z_window_, part.out, stream, {},
                           options_.combine_sms > 0 ? std::max(2, options_.combine_sms / e.num_ranks()) : 0);
    } else {
      e.unpermute_reduce(part.handle, options_.x_dtype, part.y, options_.weighted, wire_, part.z, true, stream);
      delay();
      if (options_.push_combine) {
        e.combine_push(part.handle, z_window_, slots_window_, options_.out_dtype, part.out, stream);
      } else {
        e.combine(part.handle, z_window_, options_.out_dtype, part.out, stream);
      }
    }
    delay();
    e.return_slot_values(part.handle, part.routes, part.values, part.d_weights, stream);
  }
  void queue_chunks(Part& part, cudaStream_t stream) {
    DeviceExchange& e = part.exchange;
    part.forked.record(stream);
    part.forked.wait_on(part.side);
    e.layout(part.handle, part.side);
    e.dispatch_chunks(part.handle, options_.x_dtype, part.x, rows_window_, !options_.handshake, stream);
    e.permute_arriving(part.handle, options_.x_dtype, part.x, part.rows, part.y, part.side);
    part.joined.record(part.side);
    part.joined.wait_on(stream);
  }
  void queue_dispatch(Part& part, cudaStream_t stream) {
    DeviceExchange& e = part.exchange;
    e.layout(part.handle, stream);
    if (options_.pull_dispatch) {
      e.dispatch_pull(part.handle, options_.x_dtype, x_window_, rows_window_, stream);
    } else {
      e.dispatch(part.handle, options_.x_dtype, part.x, rows_window_, !options_.handshake, stream);
    }
    if (options_.split_permute) {
      e.permute_own(part.handle, options_.x_dtype, part.x, part.y, stream);
      e.permute_others(part.handle, options_.x_dtype, part.rows, part.y, stream);
    } else {
      e.permute(part.handle, options_.x_dtype, part.rows, part.y, stream);
    }
  }
  void step() {
    for (std::size_t d = 0; d < parts_.size(); ++d) queue(d, parts_[d]->stream);
    synchronize();
  }
  void capture() {
    graphs_.clear();
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      const DeviceGuard guard(parts_[d]->device);
      graphs_.push_back(GraphExec::capture(parts_[d]->stream, [&](cudaStream_t s) { queue(d, s); }));
    }
  }
  void replay() {
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      const DeviceGuard guard(parts_[d]->device);
      graphs_[d].launch(parts_[d]->stream);
    }
  }
  void synchronize() {
    for (auto& part : parts_) part->stream.synchronize();
  }

  ts::RankResult result(int rank) {
    for (auto& part : parts_) {
      for (std::size_t i = 0; i < part->ranks.size(); ++i) {
        if (part->exchange.rank(static_cast<int>(i)) == rank) return read(*part, i);
      }
    }
    ADD_FAILURE() << "no rank " << rank;
    return {};
  }
  StatusWord status(int rank) { return result(rank).status; }
  HostHandle handle(int rank) {
    for (auto& part : parts_) {
      for (int i = 0; i < part->exchange.num_ranks(); ++i) {
        if (part->exchange.rank(i) == rank) return part->exchange.read(part->handle, i, part->stream);
      }
    }
    return {};
  }
  CudaLocalGroup& group() { return *group_; }
  std::uint32_t epoch(int rank, ExchangeSignal signal) {
    std::uint32_t value = 0;
    WB_TRY_CUDA(cudaMemcpy(&value, &group_->at<ExchangeControl>(rank, windows_.control)->epoch[signal], 4, cudaMemcpyDeviceToHost));
    return value;
  }
  DeviceExchange& exchange(std::size_t device = 0) { return parts_[device]->exchange; }
  const CudaStream& stream(std::size_t device = 0) { return parts_[device]->stream; }
  DeviceHandle& device_handle(std::size_t device = 0) { return parts_[device]->handle; }
  std::uint64_t rows_window() const { return rows_window_; }
  std::uint64_t z_window() const { return z_window_; }

 private:
  static ExchangeConfig with_tokens(ExchangeConfig config) {
    config.T_max = std::max<std::int64_t>(config.T_max, 1);
    return config;
  }
  void allocate(Part& part) {
    const auto H = static_cast<std::size_t>(config_.H), T = static_cast<std::size_t>(config_.T_max), K = static_cast<std::size_t>(config_.K);
    for (int i = 0; i < part.exchange.num_ranks(); ++i) {
      const int rank = part.exchange.rank(i);
      RankMemory m;
      m.ids = DeviceBuffer(T * K * 4, part.device), m.weights = DeviceBuffer(T * K * 4, part.device), m.d_weights = DeviceBuffer(T * K * 4, part.device);
      m.x = DeviceBuffer(T * H * 4, part.device), m.out = DeviceBuffer(T * H * 4, part.device);
      m.y = DeviceBuffer(static_cast<std::size_t>(part.exchange.budget().padded_slots) * H * size_bytes(options_.x_dtype), part.device);
      part.x.push_back({m.x.data(), 0}), part.y.push_back({m.y.data(), 0}), part.out.push_back({m.out.data(), 0});
      part.rows.push_back({group_->at<void>(rank, rows_window_), 0}), part.z.push_back({group_->at<void>(rank, z_window_), 0});
      part.values.push_back(part.exchange.slot_weights(part.handle, i)), part.d_weights.push_back(m.d_weights.as<float>());
      part.routes.push_back(DeviceRoute{m.ids.data(), m.weights.as<float>(), 0});
      part.ranks.push_back(std::move(m));
    }
  }
  ts::Floats download(const void* from, std::int64_t rows, std::int64_t columns, DType dtype) {
    Tensor host(dtype, {rows, columns});
    if (rows > 0) WB_TRY_CUDA(cudaMemcpy(host.view().data, from, static_cast<std::size_t>(rows * columns) * size_bytes(dtype), cudaMemcpyDeviceToHost));
    return ts::to_floats(host);
  }
  ts::RankResult read(Part& part, std::size_t i) {
    const DeviceGuard guard(part.device);
    const int rank = part.exchange.rank(static_cast<int>(i));
    ts::RankResult result;
    const HostHandle host = part.exchange.read(part.handle, static_cast<int>(i), part.stream);
    result.handle.valid = host.valid, result.handle.layout = host.layout;
    result.handle.max_slot_demand = host.max_slot_demand, result.handle.max_row_demand = host.max_row_demand;
    const std::int64_t R = host.layout.R(), T = part.routes[i].T;
    result.rows = download(group_->at<void>(rank, rows_window_), R, config_.H, options_.x_dtype);
    result.z = download(group_->at<void>(rank, z_window_), R, config_.H, wire_);
    result.out = download(part.ranks[i].out.data(), T, config_.H, options_.out_dtype);
    result.d_weights = download(part.ranks[i].d_weights.data(), T, config_.K, DType::kF32);
    result.status = part.exchange.status(static_cast<int>(i), part.stream);
    return result;
  }

  ExchangeConfig config_;
  int P_;
  GpuOptions options_;
  DType wire_;
  std::unique_ptr<CudaLocalGroup> group_;
  ExchangeWindows windows_;
  std::uint64_t rows_window_ = 0, z_window_ = 0, slots_window_ = 0, x_window_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<GraphExec> graphs_;
};

inline void expect_same_layout(const ReceiveLayout& want, const ReceiveLayout& got, const std::string& what) {
  ASSERT_EQ(want.row_offsets, got.row_offsets) << what;
  ASSERT_EQ(want.row_slot_offsets, got.row_slot_offsets) << what;
  ASSERT_EQ(want.expert_counts, got.expert_counts) << what;
  ASSERT_EQ(want.expert_offsets, got.expert_offsets) << what;
  ASSERT_EQ(want.slot_row, got.slot_row) << what;
  ASSERT_EQ(want.slot_position, got.slot_position) << what;
  ASSERT_TRUE(ts::same_bits(want.slot_weight, got.slot_weight)) << what;
}

// Everything but bytes and times.
inline void expect_same_result(const ts::RankResult& want, const ts::RankResult& got, const std::string& what) {
  ASSERT_EQ(want.handle.valid, got.handle.valid) << what;
  expect_same_layout(want.handle.layout, got.handle.layout, what);
  ASSERT_EQ(want.rows, got.rows) << what;
  ASSERT_EQ(want.out, got.out) << what;
  ASSERT_EQ(want.d_weights, got.d_weights) << what;
  ASSERT_EQ(want.status.flags, got.status.flags) << what;
  ASSERT_EQ(want.status.num_bad_ids, got.status.num_bad_ids) << what;
}

inline std::vector<std::int64_t> ragged_tokens(int P, std::int64_t most) {
  std::vector<std::int64_t> T;
  for (int p = 0; p < P; ++p) T.push_back(p % 4 == 1 ? 0 : (p % 4 == 2 ? 1 : most - p % 3 * (most / 5)));
  return T;
}

inline ExchangeConfig config_of(const ts::Group& group) {
  ExchangeConfig config = group.config();
  for (const Route& route : group.routes) config.T_max = std::max(config.T_max, route.T());
  return config;
}

// dispatch_chunks() leaves the place of a rank's own rows as it was (poison); they are then taken for right.
inline void expect_own_rows_untouched(const ts::RankResult& want, ts::RankResult& got, int rank, std::int64_t H) {
  const auto& offsets = want.handle.layout.row_offsets;
  for (std::int64_t i = offsets[static_cast<std::size_t>(rank)] * H; i < offsets[static_cast<std::size_t>(rank) + 1] * H; ++i) {
    ASSERT_TRUE(std::isnan(got.rows.at(static_cast<std::size_t>(i)))) << rank;
    got.rows[static_cast<std::size_t>(i)] = want.rows.at(static_cast<std::size_t>(i));
  }
}

// Runs the group on both engines, twice on the GPU.
inline void compare(const ts::Group& group, const ExchangeConfig& config, const GpuOptions& options, const std::string& what) {
  ts::RunOptions cpu;
  cpu.x_dtype = options.x_dtype, cpu.out_dtype = options.out_dtype, cpu.weighted = options.weighted;
  const std::vector<ts::RankResult> want = ts::run_group(group, config, cpu);
  GpuGroup gpu(config, group.placement, options);
  for (int round = 0; round < 2; ++round) {
    gpu.upload(group);
    gpu.step();
    ASSERT_EQ(gpu.group().first_error(), "") << what;
    for (int p = 0; p < group.placement.P; ++p) {
      ts::RankResult got = gpu.result(p);
      if (options.chunks) expect_own_rows_untouched(want[static_cast<std::size_t>(p)], got, p, config.H);
      if (round == 1) got.status.num_bad_ids /= 2;  // sticky
      expect_same_result(want[static_cast<std::size_t>(p)], got, what + ", rank " + std::to_string(p) + ", round " + std::to_string(round));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// The design that the sparse layer replaces: a [T, E] map on every rank, probability rows, scans, a permuted copy of the rows, grouped matmuls. A token
// is sent once per rank, as in the sparse layer. Sizes come from the same budgets; nothing is read by the host.
#include <algorithm>

#include "bench/cuda/moe/experts.h"
#include "bench/cuda/moe/map_kernels.h"
#include "core/cuda/cuda_error.h"
#include "waybill/exchange.h"
#include "waybill/gate.h"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kBarrierPhase = 310;

bool is_fast(const StackOptions& options, const Problem& problem) { return options.change >= MapChange::kFastTopK || problem.load() != "natural"; }

MapShape map_shape(const StackOptions& options, Problem& problem) {
  const Shape& c = problem.shape();
  MapShape s{};
  s.P = problem.P(), s.E = static_cast<std::int32_t>(c.E), s.L = static_cast<std::int32_t>(problem.L()), s.K = static_cast<std::int32_t>(c.K);
  s.H = static_cast<std::int32_t>(c.H), s.T_max = static_cast<std::int32_t>(problem.T_max());
  WB_CHECK(s.P <= kMaxMapPeers && s.L % 4 == 0 && s.K <= 128 && c.E <= kMaxExpertsInt16, "the dense-map stack takes P <= {}, L in fours, K <= 128",
           kMaxMapPeers);
  for (int r = 0; r < s.P; ++r) s.T[r] = static_cast<std::int32_t>(problem.rank(r).T);
  ExchangeConfig config;
  config.H = c.H, config.E = c.E, config.K = c.K, config.T_max = problem.T_max(), config.mode = ExchangeMode::kCaptured;
  config.receive_factor = options.receive_factor;
  const ReceiveBudget budget = receive_budget(config, s.P);
  s.row_capacity = static_cast<std::int32_t>(budget.rows), s.slot_capacity = static_cast<std::int32_t>(budget.slots);
  s.width = options.change >= MapChange::kLocalSlice ? s.L : s.E;
  return s;
}

class MapStack final : public Stack {
 public:
  MapStack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase)
      : problem_(problem),
        shape_(map_shape(options, problem)),
        fast_(is_fast(options, problem)),
        compact_(options.change >= MapChange::kCompactRoutes),
        ranks_(local_ranks(windows.group, device)),
        on_phase_(std::move(on_phase)) {
    WB_TRY_CUDA(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device));
    const auto tokens = static_cast<std::size_t>(shape_.P * shape_.T_max), rows = static_cast<std::size_t>(shape_.row_capacity);
    const auto row_bytes = static_cast<std::size_t>(shape_.H) * 2, wide = static_cast<std::size_t>(shape_.width) * 4;
    shape_.map = windows.book("map", tokens * static_cast<std::size_t>(shape_.E)),
    shape_.ids = windows.book("map ids", tokens * static_cast<std::size_t>(shape_.K) * 2);
    shape_.rows = windows.book("map rows", rows * row_bytes), shape_.d_rows = windows.book("map d_rows", rows * row_bytes);
    shape_.partials = windows.book("map partials", rows * row_bytes);
    shape_.probabilities = windows.book("map probabilities", rows * wide), shape_.d_probabilities = windows.book("map d_probabilities", rows * wide);
    for (RankTensors* t : problem.on(device)) parts_.push_back(std::make_unique<Part>(*this, windows.group, *t));
  }

  void forward(cudaStream_t stream) override {
    for (auto& p : parts_) choose(*p, stream);
    on_phase_(Phase::kPlan, stream);
    for (auto& p : parts_) compact_ ? send_ids(*p, stream) : send_map(*p, stream);
    barrier(stream);
    for (auto& p : parts_) {
      if (compact_) rebuild_map(*p, stream);
      launch_map_plan(p->peers, shape_, p->plan, stream);
    }
    on_phase_(Phase::kDispatch, stream);
    for (auto& p : parts_) launch_map_push(p->peers, shape_, p->plan, p->tensors.x.data, p->probabilities.as<float>(), shape_.rows, num_sms_, stream);
    barrier(stream);
    for (auto& p : parts_) launch_map_permute(p->peers, shape_, p->plan, shape_.rows, p->slots.data(), true, num_sms_, stream);
    for (auto& p : parts_) p->experts.forward(p->expert_rows(), nullptr, on_phase_, stream);
    on_phase_(Phase::kCombine, stream);
    for (auto& p : parts_) launch_map_reduce(p->peers, shape_, p->plan, p->y.data(), num_sms_, stream);
    barrier(stream);
    for (auto& p : parts_) launch_map_combine(p->peers, shape_, p->plan, nullptr, p->tensors.out.data, num_sms_, stream);
    on_phase_(Phase::kOther, stream);
  }

  void backward(cudaStream_t stream) override {
    on_phase_(Phase::kDispatch, stream);
    for (auto& p : parts_) launch_map_push(p->peers, shape_, p->plan, p->tensors.d_out.data, nullptr, shape_.d_rows, num_sms_, stream);
    barrier(stream);
    for (auto& p : parts_) launch_map_permute(p->peers, shape_, p->plan, shape_.d_rows, p->dy.data(), false, num_sms_, stream);
    for (auto& p : parts_) p->experts.backward(p->expert_rows(), nullptr, on_phase_, stream);
    on_phase_(Phase::kCombine, stream);
    for (auto& p : parts_) {
      launch_map_reduce(p->peers, shape_, p->plan, p->y.data(), num_sms_, stream);
      launch_map_return(p->peers, shape_, p->plan, p->d_slot_weight.as<float>(), num_sms_, stream);
    }
    barrier(stream);
    for (auto& p : parts_) launch_map_collect(p->peers, shape_, p->plan, p->d_probabilities.as<float>(), num_sms_, stream);
    for (auto& p : parts_) router_gradients(*p, stream);
    on_phase_(Phase::kCombine, stream);
    for (auto& p : parts_) launch_map_combine(p->peers, shape_, p->plan, p->d_x.as<float>(), p->tensors.dx.data, num_sms_, stream);
    on_phase_(Phase::kOther, stream);
  }

  std::string fault(cudaStream_t stream) override {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    for (auto& p : parts_) {
      std::int32_t overflow = 0;
      WB_TRY_CUDA(cudaMemcpy(&overflow, p->plan.overflow, 4, cudaMemcpyDeviceToHost));
      if (overflow != 0) return fmt::format("rank {}: more rows or slots than the budget of {} slots", p->tensors.rank, shape_.slot_capacity);
    }
    return {};
  }
  std::int64_t computed_rows() const override { return problem_.routes() / problem_.P(); }
  StepCounts step_counts(cudaStream_t stream) override {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    StepCounts sum;
    for (auto& p : parts_) {
      std::int32_t rows = 0;
      WB_TRY_CUDA(cudaMemcpy(&rows, p->plan.num_rows, 4, cudaMemcpyDeviceToHost));
      const double T = static_cast<double>(p->tensors.T), E = shape_.E, K = shape_.K, R = rows;
      sum.route_bytes += shape_.P * T * (compact_ ? 2 * K : E), sum.weight_bytes += 2 * R * shape_.width * 4;
      sum.slots_visited += 5 * R * shape_.L, sum.scores_visited += T * E * (fast_ ? 1 : K);
    }
    const auto n = static_cast<double>(parts_.size());
    return {sum.route_bytes / n, sum.weight_bytes / n, sum.slots_visited / n, sum.scores_visited / n};
  }

 private:
  struct Part {
    Part(MapStack& owner, CudaLocalGroup& group, RankTensors& t)
        : tensors(t), shape(owner.shape_), peers(group.peers(t.rank)), experts(owner.problem_, t, owner.shape_.slot_capacity) {
      const auto n = [](std::int64_t v) { return static_cast<std::size_t>(v); };
      const std::int64_t all = std::int64_t{shape.P} * shape.T_max, E = shape.E, L = shape.L;
      const std::int64_t token_tiles = (all + kMapTile - 1) / kMapTile, row_tiles = (shape.row_capacity + kMapTile - 1) / kMapTile;
      logits = make(n(t.T * E * 4)), d_logits = make(n(t.T * E * 4)), probabilities = make(n(t.T * E * 4)), d_probabilities = make(n(t.T * E * 4));
      ids = make(n(t.T * shape.K * 2)), weights = make(n(t.T * shape.K * 4)), counts = make(n(E * 4)), d_x = make(n(t.T * shape.H * 4));
      const auto slot_bytes = n(std::int64_t{shape.slot_capacity} * shape.H * 2);
      slots = make(slot_bytes), y = make(slot_bytes), dy = make(slot_bytes), d_slot_weight = make(n(shape.slot_capacity) * 4);
      const auto ints = [&](std::int64_t count) {
        memory.push_back(make(n(count) * 4));
        return memory.back().as<std::int32_t>();
      };
      plan.hits = reinterpret_cast<std::uint32_t*>(ints(all)), plan.tile_hits = ints(token_tiles * shape.P), plan.row_of = ints(all * shape.P);
      plan.row_token = ints(shape.row_capacity), plan.num_rows = ints(1), plan.expert_tiles = ints(L * row_tiles), plan.expert_rows = ints(L);
      plan.offsets = ints(L + 1), plan.slot_map = ints(std::int64_t{shape.row_capacity} * L), plan.overflow = ints(1);
      plan.slot_weight = reinterpret_cast<float*>(ints(shape.slot_capacity));
      WB_TRY_CUDA(cudaMemset(plan.overflow, 0, 4));
      own_map = group.at<std::uint8_t>(t.rank, shape.map);
      own_ids = group.at<std::int16_t>(t.rank, shape.ids);
      for (int p = 0; p < shape.P; ++p) peer_maps.push_back(group.at<std::uint8_t>(p, shape.map)), peer_ids.push_back(group.at<std::int16_t>(p, shape.ids));
    }
    DeviceBuffer make(std::size_t bytes) const { return DeviceBuffer(std::max<std::size_t>(bytes, 16), tensors.device); }
    Device device() const { return {DeviceType::kCuda, tensors.device}; }
    Stream on(cudaStream_t stream) const { return {device(), stream}; }
    TensorView floats(const DeviceBuffer& b, std::int64_t columns) const { return {b.data(), DType::kF32, {tensors.T, columns}, device()}; }
    RouterInputs router_inputs() const {
      RouterInputs in;
      in.logits = floats(logits, shape.E), in.replay_ids = tensors.ids;
      return in;
    }
    RouteView route() const {
      RouteView r;
      r.T = tensors.T, r.K = shape.K, r.E = shape.E, r.id_dtype = DType::kI16;
      r.ids = ids.data(), r.weights = weights.as<float>(), r.counts = counts.as<std::int32_t>(), r.device = device();
      return r;
    }
    ExpertRows expert_rows() const {
      return {plan.offsets, shape.slot_capacity, slots.data(), y.data(), dy.data(), y.data(), plan.slot_weight, d_slot_weight.as<float>()};
    }
    std::int64_t first_token() const { return std::int64_t{tensors.rank} * shape.T_max; }
    std::uint8_t* map_of_own_tokens() const { return own_map + first_token() * shape.E; }
    RankTensors& tensors;
    MapShape shape;
    DevPeers peers;
    Experts experts;
    MapPlan plan{};
    DeviceBuffer logits, d_logits, probabilities, d_probabilities, ids, weights, counts, d_x, slots, y, dy, d_slot_weight;
    std::vector<DeviceBuffer> memory;
    std::uint8_t* own_map = nullptr;
    std::int16_t* own_ids = nullptr;
    std::vector<std::uint8_t*> peer_maps;
    std::vector<std::int16_t*> peer_ids;
  };

  void barrier(cudaStream_t stream) const { launch_group_barrier_kernel(ranks_, kBarrierPhase, 1, stream); }

  void choose(Part& p, cudaStream_t stream) const {
    on_phase_(Phase::kGate, stream);
    gate_forward(p.tensors.x, p.tensors.weights.gate, p.floats(p.logits, shape_.E), p.on(stream));
    on_phase_(Phase::kRouter, stream);
    const auto T = static_cast<int>(p.tensors.T);
    if (!fast_) {
      launch_map_top_k(p.logits.as<float>(), T, shape_.E, shape_.K, p.map_of_own_tokens(), p.probabilities.as<float>(), stream);
      return;
    }
    RouterOutputs out;
    out.route = p.route();
    router_forward(problem_.router(), p.router_inputs(), out, p.on(stream));
    const auto cells = static_cast<std::size_t>(p.tensors.T * shape_.E);
    WB_TRY_CUDA(cudaMemsetAsync(p.probabilities.data(), 0, cells * 4, stream));
    if (!compact_) WB_TRY_CUDA(cudaMemsetAsync(p.map_of_own_tokens(), 0, cells, stream));
    launch_map_scatter(p.ids.as<std::int16_t>(), p.weights.as<float>(), p.tensors.T * shape_.K, shape_.E, shape_.K, compact_ ? nullptr : p.map_of_own_tokens(),
                       p.probabilities.as<float>(), stream);
  }
  // By the copy engine.
  void send_map(Part& p, cudaStream_t stream) const {
    for (int peer = 0; peer < shape_.P; ++peer) {
      if (peer == p.tensors.rank) continue;
      WB_TRY_CUDA(cudaMemcpyAsync(p.peer_maps[static_cast<std::size_t>(peer)] + p.first_token() * shape_.E, p.map_of_own_tokens(),
                                  static_cast<std::size_t>(p.tensors.T * shape_.E), cudaMemcpyDeviceToDevice, stream));
    }
  }
  void send_ids(Part& p, cudaStream_t stream) const {
    for (int peer = 0; peer < shape_.P; ++peer) {
      WB_TRY_CUDA(cudaMemcpyAsync(p.peer_ids[static_cast<std::size_t>(peer)] + p.first_token() * shape_.K, p.ids.data(),
                                  static_cast<std::size_t>(p.tensors.T * shape_.K) * 2, cudaMemcpyDeviceToDevice, stream));
    }
  }
  void rebuild_map(Part& p, cudaStream_t stream) const {
    const std::int64_t all = std::int64_t{shape_.P} * shape_.T_max;
    WB_TRY_CUDA(cudaMemsetAsync(p.own_map, 0, static_cast<std::size_t>(all * shape_.E), stream));
    for (int source = 0; source < shape_.P; ++source) {
      const std::int64_t first = std::int64_t{source} * shape_.T_max;
      launch_map_scatter(p.own_ids + first * shape_.K, nullptr, std::int64_t{shape_.T[source]} * shape_.K, shape_.E, shape_.K, p.own_map + first * shape_.E,
                         nullptr, stream);
    }
  }
  void router_gradients(Part& p, cudaStream_t stream) const {
    on_phase_(Phase::kRouter, stream);
    const auto T = static_cast<int>(p.tensors.T);
    if (fast_) {
      // Gradients of the routes' weights; d_x, written after them, has room.
      float* d_weights = p.d_x.as<float>();
      launch_map_gather(p.ids.as<std::int16_t>(), p.d_probabilities.as<float>(), p.tensors.T * shape_.K, shape_.E, shape_.K, d_weights, stream);
      router_backward(problem_.router(), {}, p.router_inputs(), p.route(), d_weights, {}, 1.0f, p.floats(p.d_logits, shape_.E), p.on(stream));
    } else {
      launch_map_router_backward(p.logits.as<float>(), p.map_of_own_tokens(), p.probabilities.as<float>(), p.d_probabilities.as<float>(), T, shape_.E,
                                 p.d_logits.as<float>(), stream);
    }
    on_phase_(Phase::kGate, stream);
    gate_backward(p.tensors.x, p.tensors.weights.gate, p.floats(p.d_logits, shape_.E), p.floats(p.d_x, shape_.H), p.tensors.gradients.gate, false,
                  p.on(stream));
  }

  Problem& problem_;
  MapShape shape_;
  bool fast_, compact_;
  LocalRanks ranks_;
  OnPhase on_phase_;
  int num_sms_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace

std::size_t map_arena_bytes(const StackOptions& options, Problem& problem) {
  const MapShape s = map_shape(options, problem);
  const auto tokens = static_cast<std::size_t>(s.P * s.T_max), rows = static_cast<std::size_t>(s.row_capacity);
  return tokens * static_cast<std::size_t>(s.E + 2 * s.K) + rows * (3 * static_cast<std::size_t>(s.H) * 2 + 8 * static_cast<std::size_t>(s.width)) +
         sizeof(DeviceControl) + 16384;
}

std::unique_ptr<Stack> make_map_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase) {
  return std::make_unique<MapStack>(options, problem, windows, device, std::move(on_phase));
}

std::size_t arena_bytes(const StackOptions& options, Problem& problem) {
  if (options.kind == "sparse") return sparse_arena_bytes(options, problem);
  return options.kind == "dense-map" ? map_arena_bytes(options, problem) : slot_arena_bytes(options, problem);
}

std::unique_ptr<Stack> make_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase) {
  if (options.kind == "sparse") return make_sparse_stack(options, problem, windows, device, std::move(on_phase));
  if (options.kind == "dense-map") return make_map_stack(options, problem, windows, device, std::move(on_phase));
  WB_CHECK(options.kind == "loop" || options.kind == "padded" || options.kind == "capacity",
           "no stack '{}': known are sparse, dense-map, loop, padded, capacity", options.kind);
  return make_slot_stack(options, problem, windows, device, std::move(on_phase));
}

}  // namespace waybill::cuda::moe_bench

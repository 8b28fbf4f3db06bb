// SPDX-License-Identifier: Apache-2.0
// Runs the MoE layer of a group of ranks on one or more GPUs over a batch that is split by tokens, and collects what tests/moe/harness.h collects of
// the layer on the CPU.
#pragma once

#include <thread>

#include "core/cuda/graph.h"
#include "cuda/device_tensor.h"
#include "cuda/local_rails.h"
#include "cuda/router_harness.h"
#include "fabric/cuda_local/local_ranks.h"
#include "moe/cuda/device_moe.h"
#include "moe/harness.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"

namespace waybill::cuda {

namespace mt = waybill::test;

struct MoeGpuOptions {
  std::vector<int> devices{0};
  DType out_dtype = DType::kF32, gradient_dtype = DType::kF32;
  bool accumulate = false;
  DeviceMoeOptions layer{};
  int nodes = 1;  // virtual ones, all on devices[0]: rails between them, a host thread each; no capture
  std::chrono::milliseconds timeout{5000};
  // Of every forward.
  std::uint64_t rounding_seed = 0;
  const std::uint64_t* rounding_seed_device = nullptr;
  bool weights_unchanged = false;
};

inline void register_moe_kernels() { register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm(); }

inline void round_to_bf16(std::vector<float>& values) {
  for (float& v : values) v = static_cast<float>(bf16(v));
}

// Of order 1 after every matmul, and exact in bf16.
inline mt::Weights<float> bf16_weights(const MoeConfig& c, std::uint64_t seed, bool router_bias = false) {
  mt::Weights<float> w = mt::random_weights(c, seed, router_bias);
  const auto scale = [](std::vector<float>& v, std::int64_t width) {
    for (float& x : v) x *= 3.0f / std::sqrt(static_cast<float>(width));
    round_to_bf16(v);
  };
  scale(w.gate, c.H), scale(w.w1, c.row_width()), scale(w.w2, c.F);  // biases are f32 on the GPU
  scale(w.shared_w1, c.H), scale(w.shared_w2, std::max<std::int64_t>(c.shared_F, 1)), scale(w.latent_down, c.H),
      scale(w.latent_up, std::max<std::int64_t>(c.latent, 1));
  return w;
}
inline mt::Batch bf16_batch(const MoeConfig& c, const std::vector<std::int64_t>& tokens, std::uint64_t seed) {
  mt::Batch batch = mt::random_batch(c, tokens, seed);
  round_to_bf16(batch.x), round_to_bf16(batch.d_out);
  return batch;
}

inline MoeConfig gpu_config(std::int64_t E, std::int64_t K, std::int64_t T_max, std::int64_t H = 64, std::int64_t F = 48) {
  MoeConfig c;
  c.H = H, c.F = F, c.E = E, c.K = K, c.T_max = T_max;
  c.recipe.kind = Recipe::kBF16;
  c.combine_wire = CombineWire::kBF16;
  return c;
}

class GpuMoe {
 public:
  GpuMoe(const MoeConfig& config, int P, const mt::Weights<float>& weights, const MoeGpuOptions& options)
      : c_(config), P_(P), options_(options), whole_(weights) {
    register_moe_kernels();
    if (options.nodes > 1) {
      make_nodes(weights);
      return;
    }
    groups_.push_back(std::make_unique<CudaLocalGroup>(P, options.devices, DeviceMoeLayer::arena_bytes(config, P, options.layer), options.timeout));
    CudaLocalGroup& group = *groups_[0];
    std::vector<std::uint64_t> booked;
    for (std::size_t d = 0; d < options.devices.size(); ++d) {
      std::size_t next = 0;  // the ranks of one process share the offsets: book once
      const auto book = [&](const std::string& name, std::size_t bytes) {
        if (next == booked.size()) booked.push_back(group.window(name, bytes));
        return booked[next++];
      };
      parts_.push_back(std::make_unique<Part>(config, local_ranks(group, options.devices[d]), options.devices[d], book, options.layer));
      allocate(*parts_.back(), weights);
    }
  }

  void upload(const mt::Batch& batch) {
    batch_ = batch;
    for (auto& part : parts_) {
      const DeviceGuard guard(part->device);
      for (std::size_t i = 0; i < part->ranks.size(); ++i) upload(*part, i);
      WB_TRY_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    }
  }
  // The caller's own routing [T, E] instead of the router's, from the next upload on; empty: none.
  void set_map(const std::vector<float>& map) { map_ = map; }
  std::vector<float> d_map() {
    std::vector<float> all(map_.size());
    for (auto& part : parts_) {
      for (std::size_t i = 0; i < part->ranks.size(); ++i) {
        const int rank = part->rank_of(i);
        const std::vector<float> own = part->ranks[i].d_map.get(batch_.tokens[static_cast<std::size_t>(rank)]);
        std::copy(own.begin(), own.end(), all.begin() + first_of(rank) * c_.E);
      }
    }
    return all;
  }
  void zero_gradients() {
    for (auto& part : parts_) {
      for (Rank& m : part->ranks) {
        for (DeviceTensor* g : m.gradient_tensors()) WB_TRY_CUDA(cudaMemset(g->view.data, 0, g->memory.bytes()));
      }
      const DeviceGuard guard(part->device);
      WB_TRY_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    }
  }

  void forward(std::size_t index, cudaStream_t stream, bool training = true) {
    Part& p = *parts_[index];
    DeviceMoeForward options;
    options.training = training;
    options.padding_masks = p.masks, options.replay_ids = p.replays, options.dense_maps = p.maps;
    options.token_offset = p.first;
    options.rounding_seed = options_.rounding_seed, options.rounding_seed_device = options_.rounding_seed_device;
    options.weights_unchanged = options_.weights_unchanged && has_run_, has_run_ = true;
    const auto masked = std::accumulate(batch_.mask.begin(), batch_.mask.end(), std::int64_t{0});
    options.valid_tokens = static_cast<double>(batch_.T() - masked), options.loss_sequences = num_sequences();
    p.layer.forward(p.parameters, p.x, p.out, p.step, options, stream);
  }
  void forward_with(const DeviceMoeForward& options) {  // of the first GPU's ranks, on its stream
    Part& p = *parts_[0];
    p.layer.forward(p.parameters, p.x, p.out, p.step, options, p.stream);
  }
  void backward(std::size_t index, cudaStream_t stream) {
    Part& p = *parts_[index];
    p.layer.backward(p.parameters, p.gradients, p.x, p.d_out, p.dx, p.step,
                     DeviceMoeBackward{.accumulate = options_.accumulate, .loss_scale = batch_.loss_scale, .d_dense_maps = p.d_maps}, stream);
  }
  void step() {
    on_every_device([&](std::size_t d, cudaStream_t stream) { forward(d, stream), backward(d, stream); });
  }
  void evaluate() {
    on_every_device([&](std::size_t d, cudaStream_t stream) { forward(d, stream, false); });
  }
  void capture() {
    graphs_.clear();
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      const DeviceGuard guard(parts_[d]->device);
      graphs_.push_back(GraphExec::capture(parts_[d]->stream, [&](cudaStream_t s) { forward(d, s), backward(d, s); }));
    }
  }
  void replay() {
    on_every_device([&](std::size_t d, cudaStream_t stream) { graphs_[d].launch(stream); });
  }
  // x and d_out alone, for replays of a captured step: sizes, masks and replayed ids are those of the capture.
  void upload_rows(const mt::Batch& batch) {
    batch_.x = batch.x, batch_.d_out = batch.d_out;
    for (auto& part : parts_) {
      const DeviceGuard guard(part->device);
      for (std::size_t i = 0; i < part->ranks.size(); ++i) upload_rows(*part, i);
    }
  }

  mt::Result result() {
    mt::Result r = mt::empty_result(c_, P_, whole_, batch_);
    for (auto& part : parts_) {
      const DeviceGuard guard(part->device);
      for (std::size_t i = 0; i < part->ranks.size(); ++i) collect(*part, i, r);
    }
    return r;
  }
  DeviceMoeReport report(int rank) {
    for (auto& part : parts_) {
      for (std::size_t i = 0; i < part->ranks.size(); ++i) {
        if (part->rank_of(i) == rank) return part->step.report(static_cast<int>(i));
      }
    }
    return {};
  }
  std::vector<std::int32_t> total_counts(int rank) {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(c_.E));
    for (auto& part : parts_) {
      for (std::size_t i = 0; i < part->ranks.size(); ++i) {
        if (part->rank_of(i) != rank) continue;
        WB_TRY_CUDA(cudaMemcpy(counts.data(), part->step.total_counts(static_cast<int>(i)), counts.size() * 4, cudaMemcpyDeviceToHost));
      }
    }
    return counts;
  }
  StatusWord status(int rank) {
    for (auto& part : parts_) {
      for (std::size_t i = 0; i < part->ranks.size(); ++i) {
        if (part->rank_of(i) == rank) return part->layer.status(static_cast<int>(i), part->stream);
      }
    }
    return {};
  }
  void clear_status() {
    for (auto& part : parts_) part->layer.clear_status(part->stream), part->stream.synchronize();
  }
  std::string first_error() {
    std::string text;
    for (auto& group : groups_) text += group->first_error();
    return text;
  }
  DeviceMoeLayer& layer(std::size_t device = 0) { return parts_[device]->layer; }
  const DeviceMoeStep& step_of(std::size_t device = 0) { return parts_[device]->step; }
  const CudaStream& stream(std::size_t device = 0) { return parts_[device]->stream; }

 private:
  // With at least one token that is not padding.
  double num_sequences() const {
    if (c_.sequence_length == 0 || batch_.mask.empty()) return 0;
    double count = 0;
    for (auto t = batch_.mask.begin(); t < batch_.mask.end(); t += c_.sequence_length)
      count += std::find(t, t + c_.sequence_length, 0) != t + c_.sequence_length;
    return count;
  }

  struct Rank {
    DeviceTensor gate, bias, w1, w2, b1, b2, shared_w1, shared_w2, latent_down, latent_up;
    DeviceTensor g_gate, g_w1, g_w2, g_b1, g_b2, g_shared_w1, g_shared_w2, g_latent_down, g_latent_up;
    DeviceTensor x, d_out, out, dx, map, d_map;
    DeviceBuffer mask, replay;
    std::vector<DeviceTensor*> gradient_tensors() {
      std::vector<DeviceTensor*> all;
      for (DeviceTensor* g : {&g_gate, &g_w1, &g_w2, &g_b1, &g_b2, &g_shared_w1, &g_shared_w2, &g_latent_down, &g_latent_up}) {
        if (g->view) all.push_back(g);
      }
      return all;
    }
  };
  struct Part {
    Part(const MoeConfig& config, const LocalRanks& local, int on, const BookWindow& book, const DeviceMoeOptions& options)
        : device(on), stream(on), layer(config, local, on, book, options), step(layer.make_step()), ranks(static_cast<std::size_t>(local.count)) {}
    int rank_of(std::size_t i) { return first_rank + layer.exchange().rank(static_cast<int>(i)); }
    int device;
    CudaStream stream;
    DeviceMoeLayer layer;
    DeviceMoeStep step;
    std::vector<Rank> ranks;
    std::vector<MoeTensors> parameters, gradients;
    std::vector<TensorView> x, out, d_out, dx, masks, replays, maps, d_maps;
    std::int64_t first = 0;
    int first_rank = 0;  // of its node
  };

  // A group, a layer and a rail end a node. Few CTAs a kernel: those of several nodes wait on one GPU.
  void make_nodes(const mt::Weights<float>& weights) {
    const int device = options_.devices[0], per_node = P_ / options_.nodes;
    if (c_.hierarchy == Hierarchy::kFlat) c_.hierarchy = Hierarchy::kAuto;
    rails_ = std::make_unique<LocalRails>(options_.nodes, per_node, device);
    for (int n = 0; n < options_.nodes; ++n) {
      rail_ends_.push_back(std::make_unique<LocalRails::Node>(*rails_, n));
      DeviceMoeOptions layer = options_.layer;
      layer.nodes = options_.nodes, layer.rail = rail_ends_.back().get();
      layer.exchange.dispatch_ctas = layer.exchange.combine_ctas = layer.exchange.value_ctas = 4;
      layer.exchange.fused_plan = layer.exchange.fused_layout = false;
      const std::vector<int> devices{device};
      groups_.push_back(std::make_unique<CudaLocalGroup>(per_node, devices, DeviceMoeLayer::arena_bytes(c_, P_, layer), options_.timeout));
      CudaLocalGroup& group = *groups_.back();
      parts_.push_back(std::make_unique<Part>(
          c_, local_ranks(group, device), device, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); }, layer));
      parts_.back()->first_rank = n * per_node;
      allocate(*parts_.back(), weights);
    }
  }

  // One host thread a device: a kernel that waits for a peer must not keep the peer's launches from coming.
  template <class Body>
  void on_every_device(const Body& body) {
    std::vector<std::string> errors(parts_.size());
    std::vector<std::thread> threads;
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      threads.emplace_back([&, d] {
        try {
          const DeviceGuard guard(parts_[d]->device);
          body(d, parts_[d]->stream.get());
          parts_[d]->stream.synchronize();
        } catch (const std::exception& error) {
          errors[d] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) ASSERT_EQ(error, "");
  }

  void allocate(Part& p, const mt::Weights<float>& weights) {
    const DeviceGuard guard(p.device);
    const std::int64_t L = c_.L(P_), W = c_.row_width();
    const auto make = [&](DeviceTensor& t, DType dtype, std::initializer_list<std::int64_t> shape) { t = DeviceTensor(dtype, shape, p.device); };
    for (std::size_t i = 0; i < p.ranks.size(); ++i) {
      Rank& m = p.ranks[i];
      const mt::RankWeights local = mt::slice(c_, P_, p.rank_of(i), weights);
      const auto both = [&](DeviceTensor& w, DeviceTensor& g, DType gradient, std::initializer_list<std::int64_t> shape, const std::vector<float>& values) {
        make(w, DType::kBF16, shape), make(g, gradient, shape);
        w.set(values);
      };
      both(m.gate, m.g_gate, DType::kF32, {c_.E, c_.H}, local.w.gate);
      both(m.w1, m.g_w1, options_.gradient_dtype, {L, c_.inner_width(), W}, local.w.w1);
      both(m.w2, m.g_w2, options_.gradient_dtype, {L, W, c_.local_F()}, local.w.w2);
      const auto single = [&](DeviceTensor& b, DeviceTensor& g, std::int64_t width, const std::vector<float>& values) {
        make(b, DType::kF32, {L, width}), make(g, DType::kF32, {L, width});
        b.set(values);
      };
      if (c_.expert_bias) single(m.b1, m.g_b1, c_.inner_width(), local.w.b1), single(m.b2, m.g_b2, W, local.w.b2);
      if (!local.w.bias.empty()) make(m.bias, DType::kF32, {c_.E}), m.bias.set(local.w.bias);
      if (c_.shared_F > 0) both(m.shared_w1, m.g_shared_w1, options_.gradient_dtype, {c_.shared_inner_width(), c_.H}, local.w.shared_w1);
      if (c_.shared_F > 0) both(m.shared_w2, m.g_shared_w2, options_.gradient_dtype, {c_.H, c_.shared_F}, local.w.shared_w2);
      if (c_.latent > 0) both(m.latent_down, m.g_latent_down, options_.gradient_dtype, {c_.latent, c_.H}, local.w.latent_down);
      if (c_.latent > 0) both(m.latent_up, m.g_latent_up, options_.gradient_dtype, {c_.H, c_.latent}, local.w.latent_up);
      make(m.x, DType::kBF16, {c_.T_max, c_.H}), make(m.d_out, DType::kBF16, {c_.T_max, c_.H});
      make(m.out, options_.out_dtype, {c_.T_max, c_.H}), make(m.dx, options_.out_dtype, {c_.T_max, c_.H});
      m.mask = DeviceBuffer(static_cast<std::size_t>(c_.T_max) + 16, p.device);
      m.replay = DeviceBuffer(static_cast<std::size_t>(c_.T_max * c_.K) * 4 + 16, p.device);
      MoeTensors w, g;
      w.gate = m.gate.view, w.router_bias = m.bias.view, w.w1 = m.w1.view, w.w2 = m.w2.view, w.b1 = m.b1.view, w.b2 = m.b2.view, w.shared_w1 = m.shared_w1.view,
      w.shared_w2 = m.shared_w2.view;
      w.latent_down = m.latent_down.view, w.latent_up = m.latent_up.view;
      g.gate = m.g_gate.view, g.w1 = m.g_w1.view, g.w2 = m.g_w2.view, g.b1 = m.g_b1.view, g.b2 = m.g_b2.view, g.shared_w1 = m.g_shared_w1.view,
      g.shared_w2 = m.g_shared_w2.view;
      g.latent_down = m.g_latent_down.view, g.latent_up = m.g_latent_up.view;
      p.parameters.push_back(w), p.gradients.push_back(g);
    }
    p.x.resize(p.ranks.size()), p.out = p.d_out = p.dx = p.x;
  }

  std::int64_t first_of(int rank) const { return std::accumulate(batch_.tokens.begin(), batch_.tokens.begin() + rank, std::int64_t{0}); }
  template <class T>
  std::vector<T> cut(const std::vector<T>& v, int rank, std::int64_t width) const {
    const std::int64_t first = first_of(rank), T_own = batch_.tokens[static_cast<std::size_t>(rank)];
    return v.empty() ? v : std::vector<T>(v.begin() + first * width, v.begin() + (first + T_own) * width);
  }
  void upload_rows(Part& p, std::size_t i) {
    const int rank = p.rank_of(i);
    Rank& m = p.ranks[i];
    WB_TRY_CUDA(cudaMemset(m.out.view.data, 0xff, m.out.memory.bytes()));
    WB_TRY_CUDA(cudaMemset(m.dx.view.data, 0xff, m.dx.memory.bytes()));
    if (!options_.accumulate) {
      for (DeviceTensor* g : m.gradient_tensors()) WB_TRY_CUDA(cudaMemset(g->view.data, 0xff, g->memory.bytes()));
    }
    m.x.set(cut(batch_.x, rank, c_.H)), m.d_out.set(cut(batch_.d_out, rank, c_.H));  // waits for what was set above, too
  }
  void upload(Part& p, std::size_t i) {
    const int rank = p.rank_of(i);
    Rank& m = p.ranks[i];
    const std::int64_t T = batch_.tokens[static_cast<std::size_t>(rank)];
    upload_rows(p, i);
    p.x[i] = m.x.rows(T), p.d_out[i] = m.d_out.rows(T), p.out[i] = m.out.rows(T), p.dx[i] = m.dx.rows(T);
    if (i == 0) p.first = first_of(rank), p.masks.clear(), p.replays.clear(), p.maps.clear(), p.d_maps.clear();
    const Device device = m.mask.device();
    if (!batch_.mask.empty()) {
      const std::vector<std::uint8_t> mask = cut(batch_.mask, rank, 1);
      m.mask.upload(mask.data(), mask.size());
      p.masks.push_back(TensorView(m.mask.data(), DType::kU8, {T}, device));
    }
    if (!batch_.replay.empty()) {
      const std::vector<std::int32_t> ids = cut(batch_.replay, rank, c_.K);
      m.replay.upload(ids.data(), ids.size() * 4);
      p.replays.push_back(TensorView(m.replay.data(), DType::kI32, {T, c_.K}, device));
    }
    if (!map_.empty()) {
      if (!m.map.view) m.map = DeviceTensor(DType::kF32, {c_.T_max, c_.E}, p.device), m.d_map = DeviceTensor(DType::kF32, {c_.T_max, c_.E}, p.device);
      m.map.set(cut(map_, rank, c_.E));
      p.maps.push_back(m.map.rows(T)), p.d_maps.push_back(m.d_map.rows(T));
    }
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }

  void collect(Part& p, std::size_t i, mt::Result& r) {
    const int rank = p.rank_of(i);
    const auto me = static_cast<std::size_t>(rank);
    const std::int64_t T = batch_.tokens[me], first = first_of(rank);
    Rank& m = p.ranks[i];
    const std::vector<float> out = m.out.get(T), dx = m.dx.get(T);
    std::copy(out.begin(), out.end(), r.out.begin() + first * c_.H), std::copy(dx.begin(), dx.end(), r.dx.begin() + first * c_.H);
    const DeviceRoute route = p.step.route(static_cast<int>(i));
    std::vector<std::int16_t> ids(static_cast<std::size_t>(T * c_.K));
    WB_TRY_CUDA(cudaMemcpy(ids.data(), route.ids, ids.size() * 2, cudaMemcpyDeviceToHost));
    std::copy(ids.begin(), ids.end(), r.ids.begin() + first * c_.K);
    WB_TRY_CUDA(cudaMemcpy(r.weights.data() + first * c_.K, route.weights, ids.size() * 4, cudaMemcpyDeviceToHost));
    mt::RankWeights local = mt::slice(c_, P_, rank, whole_);
    const auto get = [](const DeviceTensor& t, std::vector<float>& to) {
      if (t.view) to = t.get();
    };
    get(m.g_gate, local.w.gate), get(m.g_w1, local.w.w1), get(m.g_w2, local.w.w2), get(m.g_b1, local.w.b1), get(m.g_b2, local.w.b2),
        get(m.g_shared_w1, local.w.shared_w1), get(m.g_shared_w2, local.w.shared_w2), get(m.g_latent_down, local.w.latent_down),
        get(m.g_latent_up, local.w.latent_up);
    mt::exchange_slice(c_, P_, rank, r.gradients, local.w, /*add=*/true);
    mt::detail::add_to(r.gradients.gate, local.w.gate);
    mt::detail::add_to(r.gradients.shared_w1, local.w.shared_w1), mt::detail::add_to(r.gradients.shared_w2, local.w.shared_w2);
    mt::detail::add_to(r.gradients.latent_down, local.w.latent_down), mt::detail::add_to(r.gradients.latent_up, local.w.latent_up);
    const DeviceMoeReport report = p.step.report(static_cast<int>(i));
    r.slots[me] = report.slots, r.rows[me] = report.rows, r.valid[me] = report.valid != 0;
    r.dropped += report.dropped_routes, r.dense_forwards += report.dense_map_forwards;
    r.losses.aux += report.aux_loss, r.losses.sequence += report.sequence_loss, r.losses.z += report.z_loss, r.global_loss += report.global_loss;
    r.status[me] = p.layer.status(static_cast<int>(i), p.stream);
  }

  MoeConfig c_;
  int P_;
  MoeGpuOptions options_;
  mt::Weights<float> whole_;
  mt::Batch batch_;
  std::vector<float> map_;
  std::vector<std::unique_ptr<CudaLocalGroup>> groups_;  // one a node
  std::unique_ptr<LocalRails> rails_;
  std::vector<std::unique_ptr<LocalRails::Node>> rail_ends_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<GraphExec> graphs_;
  bool has_run_ = false;
};

// ||a - b|| / ||b||
inline double norm_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  if (a.size() != b.size()) return HUGE_VAL;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d, norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::isfinite(difference) ? (norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference)) : HUGE_VAL;
}

// bf16 operands and intermediate results (h, a, y, partials, their gradients), fp32 sums: six roundings of 2^-9 each at most on a path.
inline constexpr double kNormBound = 1.0 / 128, kGateBound = 1.0 / 64, kMaxBound = 1.0 / 32;

inline void expect_close(const std::vector<float>& got, const std::vector<float>& want, double bound, const std::string& what) {
  EXPECT_LE(norm_error(got, want), bound) << what;
  EXPECT_LE(mt::relative_error(got, want), kMaxBound) << what;
}

inline void expect_same_bits(const mt::Result& a, const mt::Result& b, const std::string& what) {
  EXPECT_TRUE(mt::same_bits(a.out, b.out)) << what << ": out";
  EXPECT_TRUE(mt::same_bits(a.dx, b.dx)) << what << ": dx";
  EXPECT_TRUE(mt::same_bits(a.weights, b.weights)) << what << ": routing weights";
  EXPECT_EQ(a.ids, b.ids) << what;
  EXPECT_TRUE(mt::same_bits(a.gradients, b.gradients)) << what << ": gradients";
}

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// The designs that send a row once per expert:
//   loop      exact sizes, one call of every matmul an expert on a tensor of its own; the host reads the counts once a step
//   padded    a batched matmul in which every local expert has the rows of the fullest; the host reads the counts once a step
//   capacity  a fixed budget of rows an expert and source rank, what does not fit is dropped and counted; nothing is read by the host
// Rows go straight to their place in expert order on the expert's rank, and the token's rank adds them up by reading: no sort of rows on either side.
#include <algorithm>
#include <cmath>

#include "bench/cuda/moe/experts.h"
#include "bench/cuda/moe/slot_kernels.h"
#include "core/cuda/cuda_error.h"
#include "waybill/gate.h"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kBarrierPhase = 300;

SlotShape slot_shape(const StackOptions& options, const Problem& problem) {
  const Shape& c = problem.shape();
  SlotShape s{};
  s.P = problem.P(), s.E = static_cast<std::int32_t>(c.E), s.L = static_cast<std::int32_t>(problem.L()), s.K = static_cast<std::int32_t>(c.K);
  s.H = static_cast<std::int32_t>(c.H);
  s.layout = options.kind == "loop" ? SlotLayout::kTight : (options.kind == "padded" ? SlotLayout::kPadded : SlotLayout::kCapacity);
  for (int r = 0; r < s.P; ++r) s.longest = std::max(s.longest, static_cast<std::int32_t>(problem.longest_expert(r)));
  s.capacity = static_cast<std::int32_t>(
      std::ceil(options.capacity_factor * static_cast<double>(problem.T_max()) * static_cast<double>(c.K) / static_cast<double>(c.E)));
  return s;
}

// Rows of the largest rank: what an allocator would be asked for in this step.
std::int64_t slot_rows(const SlotShape& s, const Problem& problem) {
  if (s.layout == SlotLayout::kTight) return problem.hottest_rank_rows();
  return static_cast<std::int64_t>(s.L) * (s.layout == SlotLayout::kPadded ? s.longest : s.P * s.capacity);
}

class SlotStack final : public Stack {
 public:
  SlotStack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase)
      : problem_(problem),
        shape_(slot_shape(options, problem)),
        rows_(slot_rows(shape_, problem)),
        ranks_(local_ranks(windows.group, device)),
        on_phase_(std::move(on_phase)) {
    WB_CHECK(problem.shape().E <= kMaxExpertsInt16, "the slot stacks take int16 ids");
    WB_TRY_CUDA(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device));
    const auto rows = static_cast<std::size_t>(rows_), row_bytes = static_cast<std::size_t>(shape_.H) * 2;
    shape_.counts = windows.book("slot counts", static_cast<std::size_t>(shape_.P * shape_.E) * 4);
    shape_.rows = windows.book("slot rows", rows * row_bytes), shape_.y = windows.book("slot y", rows * row_bytes);
    shape_.dy = windows.book("slot dy", rows * row_bytes);
    shape_.weight = windows.book("slot weight", rows * 4), shape_.d_weight = windows.book("slot d_weight", rows * 4);
    for (RankTensors* t : problem.on(device)) parts_.push_back(std::make_unique<Part>(*this, windows.group, *t));
  }

  void forward(cudaStream_t stream) override {
    for (auto& p : parts_) choose(*p, stream);
    on_phase_(Phase::kPlan, stream);
    for (auto& p : parts_) count(*p, stream);
    barrier(stream);
    for (auto& p : parts_) {
      launch_slot_places(p->peers, p->shape, p->begin.as<std::int32_t>(), p->local_offsets.as<std::int32_t>(), p->local_rows.as<std::int32_t>(), stream);
      if (has_host_read()) WB_TRY_CUDA(cudaMemcpyAsync(p->host_rows, p->local_rows.data(), p->local_rows.bytes(), cudaMemcpyDeviceToHost, stream));
    }
    if (has_host_read()) read_counts(stream);
    on_phase_(Phase::kDispatch, stream);
    for (auto& p : parts_) push(*p, p->tensors.x, true, shape_.rows, stream);
    barrier(stream);
    for (auto& p : parts_) p->experts.forward(p->expert_rows(*this), one_by_one(*p), on_phase_, stream);
    on_phase_(Phase::kCombine, stream);
    barrier(stream);
    for (auto& p : parts_) pull(*p, nullptr, p->tensors.out, stream);
    on_phase_(Phase::kOther, stream);
  }

  void backward(cudaStream_t stream) override {
    on_phase_(Phase::kDispatch, stream);
    for (auto& p : parts_) push(*p, p->tensors.d_out, false, shape_.dy, stream);
    barrier(stream);
    for (auto& p : parts_) p->experts.backward(p->expert_rows(*this), one_by_one(*p), on_phase_, stream);
    on_phase_(Phase::kCombine, stream);
    barrier(stream);
    for (auto& p : parts_) launch_slot_values(p->peers, p->shape, p->ids.as<std::int16_t>(), p->place.as<std::int32_t>(), p->d_weights.as<float>(), stream);
    on_phase_(Phase::kRouter, stream);
    for (auto& p : parts_) {
      router_backward(problem_.router(), {}, p->router_inputs(), p->route(), p->d_weights.as<float>(), {}, 1.0f, p->d_logits_view(), p->on(stream));
    }
    on_phase_(Phase::kGate, stream);
    for (auto& p : parts_)
      gate_backward(p->tensors.x, p->tensors.weights.gate, p->d_logits_view(), p->d_x_view(), p->tensors.gradients.gate, false, p->on(stream));
    on_phase_(Phase::kCombine, stream);
    for (auto& p : parts_) pull(*p, p->d_x.as<float>(), p->tensors.dx, stream);
    on_phase_(Phase::kOther, stream);
  }

  int host_waits() const override { return has_host_read() ? 1 : 0; }
  std::string fault(cudaStream_t stream) override {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    return {};
  }
  std::int64_t dropped(cudaStream_t stream) override {
    if (shape_.layout != SlotLayout::kCapacity) return 0;
    std::int64_t sum = 0;
    for (auto& p : parts_) {
      std::vector<std::int32_t> place(p->place.bytes() / 4);
      WB_TRY_CUDA(cudaStreamSynchronize(stream));
      WB_TRY_CUDA(cudaMemcpy(place.data(), p->place.data(), p->place.bytes(), cudaMemcpyDeviceToHost));
      sum += std::count(place.begin(), place.end(), -1);
    }
    return sum;
  }
  const std::int32_t* places(int index) const override { return has_host_read() ? nullptr : parts_[static_cast<std::size_t>(index)]->place.as<std::int32_t>(); }
  std::int64_t computed_rows() const override { return shape_.layout == SlotLayout::kTight ? problem_.routes() / problem_.P() : rows_; }

 private:
  struct Part {
    Part(SlotStack& owner, CudaLocalGroup& group, RankTensors& t)
        : tensors(t), shape(owner.shape_), peers(group.peers(t.rank)), experts(owner.problem_, t, owner.rows_) {
      shape.T = static_cast<std::int32_t>(t.T);
      const auto make = [&](std::size_t bytes) { return DeviceBuffer(std::max<std::size_t>(bytes, 16), t.device); };
      const auto routes = static_cast<std::size_t>(t.T * shape.K), E = static_cast<std::size_t>(shape.E), L = static_cast<std::size_t>(shape.L);
      logits = make(static_cast<std::size_t>(t.T) * E * 4), d_logits = make(logits.bytes()), ids = make(routes * 2), weights = make(routes * 4),
      counts = make(E * 4);
      sorted = make(routes * 2), numbers = make(routes * 4), order = make(routes * 4), place = make(routes * 4), d_weights = make(routes * 4);
      offsets = make((E + 1) * 4), begin = make(E * 4), local_offsets = make((L + 1) * 4), local_rows = make(static_cast<std::size_t>(shape.P) * L * 4);
      d_x = make(static_cast<std::size_t>(t.T * shape.H) * 4);
      while ((1 << end_bit) <= shape.E) ++end_bit;
      std::size_t temp_bytes = 0;
      sort_routes(nullptr, nullptr, nullptr, nullptr, t.T * shape.K, end_bit, nullptr, temp_bytes, nullptr);
      temp = make(temp_bytes);
      launch_iota(numbers.as<std::int32_t>(), t.T * shape.K, nullptr);
      WB_TRY_CUDA(cudaDeviceSynchronize());
      WB_TRY_CUDA(cudaMallocHost(reinterpret_cast<void**>(&host_rows), local_rows.bytes()));
      own_windows = group.at<unsigned char>(t.rank, 0);
    }
    ~Part() { WB_TRY_CUDA_NOEXCEPT(cudaFreeHost(host_rows)); }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
    Stream on(cudaStream_t stream) const { return {Device{DeviceType::kCuda, tensors.device}, stream}; }
    TensorView view(const DeviceBuffer& b, DType dtype, std::initializer_list<std::int64_t> dims) const {
      return {b.data(), dtype, dims, Device{DeviceType::kCuda, tensors.device}};
    }
    TensorView logits_view() const { return view(logits, DType::kF32, {tensors.T, shape.E}); }
    TensorView d_logits_view() const { return view(d_logits, DType::kF32, {tensors.T, shape.E}); }
    TensorView d_x_view() const { return view(d_x, DType::kF32, {tensors.T, shape.H}); }
    RouterInputs router_inputs() const {
      RouterInputs in;
      in.logits = logits_view(), in.replay_ids = tensors.ids;
      return in;
    }
    RouteView route() const {
      RouteView r;
      r.T = tensors.T, r.K = shape.K, r.E = shape.E, r.id_dtype = DType::kI16;
      r.ids = ids.data(), r.weights = weights.as<float>(), r.counts = counts.as<std::int32_t>(), r.device = Device{DeviceType::kCuda, tensors.device};
      return r;
    }
    ExpertRows expert_rows(const SlotStack& owner) const {
      const SlotShape& s = shape;
      return {local_offsets.as<std::int32_t>(),
              owner.rows_,
              own_windows + s.rows,
              own_windows + s.y,
              own_windows + s.dy,
              own_windows + s.y,
              reinterpret_cast<const float*>(own_windows + s.weight),
              reinterpret_cast<float*>(own_windows + s.d_weight)};
    }
    RankTensors& tensors;
    SlotShape shape;
    DevPeers peers;
    Experts experts;
    DeviceBuffer logits, d_logits, ids, weights, counts, sorted, numbers, order, place, d_weights, offsets, begin, local_offsets, local_rows, d_x, temp;
    int end_bit = 1;
    std::int32_t* host_rows = nullptr;
    unsigned char* own_windows = nullptr;
    std::vector<std::int64_t> expert_counts;
  };

  bool has_host_read() const { return shape_.layout != SlotLayout::kCapacity; }
  const std::vector<std::int64_t>* one_by_one(const Part& p) const { return shape_.layout == SlotLayout::kTight ? &p.expert_counts : nullptr; }
  void barrier(cudaStream_t stream) const { launch_group_barrier_kernel(ranks_, kBarrierPhase, 1, stream); }

  void choose(Part& p, cudaStream_t stream) const {
    on_phase_(Phase::kGate, stream);
    gate_forward(p.tensors.x, p.tensors.weights.gate, p.logits_view(), p.on(stream));
    on_phase_(Phase::kRouter, stream);
    RouterOutputs out;
    out.route = p.route();
    router_forward(problem_.router(), p.router_inputs(), out, p.on(stream));
  }
  void count(Part& p, cudaStream_t stream) const {
    std::size_t temp_bytes = p.temp.bytes();
    sort_routes(p.ids.as<std::int16_t>(), p.sorted.as<std::uint16_t>(), p.numbers.as<std::int32_t>(), p.order.as<std::int32_t>(), p.tensors.T * p.shape.K,
                p.end_bit, p.temp.data(), temp_bytes, stream);
    launch_slot_count(p.peers, p.shape, p.sorted.as<std::uint16_t>(), p.offsets.as<std::int32_t>(), stream);
  }
  void read_counts(cudaStream_t stream) {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    for (auto& p : parts_) {
      p->expert_counts.assign(static_cast<std::size_t>(shape_.L), 0);
      for (int source = 0; source < shape_.P; ++source) {
        for (int l = 0; l < shape_.L; ++l) p->expert_counts[static_cast<std::size_t>(l)] += p->host_rows[source * shape_.L + l];
      }
    }
  }
  void push(Part& p, const TensorView& x, bool is_forward, std::uint64_t to, cudaStream_t stream) const {
    if (shape_.layout != SlotLayout::kTight) launch_slot_clear(p.peers, p.shape, p.local_rows.as<std::int32_t>(), to, is_forward, num_sms_, stream);
    launch_slot_push(p.peers, p.shape, p.sorted.as<std::uint16_t>(), p.order.as<std::int32_t>(), p.offsets.as<std::int32_t>(), p.begin.as<std::int32_t>(),
                     x.data, is_forward ? p.weights.as<float>() : nullptr, is_forward ? p.place.as<std::int32_t>() : nullptr, to, num_sms_, stream);
  }
  void pull(Part& p, const float* addend, const TensorView& out, cudaStream_t stream) const {
    launch_slot_pull(p.peers, p.shape, p.ids.as<std::int16_t>(), p.place.as<std::int32_t>(), shape_.y, addend, out.data, num_sms_, stream);
  }

  Problem& problem_;
  SlotShape shape_;
  std::int64_t rows_;
  LocalRanks ranks_;
  OnPhase on_phase_;
  int num_sms_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace

std::size_t slot_arena_bytes(const StackOptions& options, Problem& problem) {
  const SlotShape s = slot_shape(options, problem);
  const auto rows = static_cast<std::size_t>(slot_rows(s, problem));
  return rows * (3 * static_cast<std::size_t>(s.H) * 2 + 8) + static_cast<std::size_t>(s.P * s.E) * 4 + sizeof(DeviceControl) + 16384;
}

std::unique_ptr<Stack> make_slot_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase) {
  return std::make_unique<SlotStack>(options, problem, windows, device, std::move(on_phase));
}

}  // namespace waybill::cuda::moe_bench

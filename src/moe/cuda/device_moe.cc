// SPDX-License-Identifier: Apache-2.0
#include "moe/cuda/device_moe.h"

#include <nvtx3/nvToolsExt.h>

#include "core/cuda/cuda_error.h"
#include "core/cuda/dense_matmul.h"
#include "core/cuda/num_sms.h"
#include "core/cuda/work_room.h"
#include "moe/cuda/device_moe_impl.h"
#include "moe/etp.h"

namespace waybill::cuda {

PinnedReports::PinnedReports(int count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(DeviceMoeReport);
  WB_TRY_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&data_), bytes, cudaHostAllocPortable));
  for (int i = 0; i < count; ++i) data_[i] = DeviceMoeReport{};
}
PinnedReports::~PinnedReports() {
  if (data_ != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaFreeHost(data_));
}

DeviceMoeStep::DeviceMoeStep() = default;
DeviceMoeStep::~DeviceMoeStep() = default;
DeviceMoeStep::DeviceMoeStep(DeviceMoeStep&&) noexcept = default;
DeviceMoeStep& DeviceMoeStep::operator=(DeviceMoeStep&&) noexcept = default;

const DeviceMoeReport& DeviceMoeStep::report(int index) const { return *saved_->reports.at(index); }
const DeviceHandle& DeviceMoeStep::handle() const { return saved_->handle; }
DeviceRoute DeviceMoeStep::route(int index) const { return saved_->routes.at(static_cast<std::size_t>(index)); }
const std::int32_t* DeviceMoeStep::counts(int index) const { return saved_->at<std::int32_t>(static_cast<std::size_t>(index), saved_->layout.counts); }
const std::int32_t* DeviceMoeStep::total_counts(int index) const {
  return saved_->has_totals ? saved_->at<std::int32_t>(static_cast<std::size_t>(index), saved_->layout.totals) : nullptr;
}

const std::int32_t* DeviceMoeStep::global_counts(int index) const {
  return saved_->has_global ? saved_->at<std::int32_t>(static_cast<std::size_t>(index), saved_->layout.global_totals) : nullptr;
}

std::uint32_t DeviceMoeStep::dense_map_reasons() const { return saved_->reasons; }

DeviceMoeLayer::Impl::Impl(const MoeConfig& layer_config, const LocalRanks& launch, int device, const BookWindow& book, const DeviceMoeOptions& given)
    : config(layer_config),
      options(decided(layer_config, launch.table.size * given.nodes, given)),
      where{DeviceType::kCuda, device},
      P(launch.table.size * given.nodes),
      ranks(launch),
      side(device),
      beside(device) {
  const int rail_nodes = options.rail == nullptr ? 1 : options.rail->num_nodes(), per_node = launch.table.size;
  WB_CHECK(rail_nodes == options.nodes, "the layer was asked for {} nodes, its rail joins {}", options.nodes, rail_nodes);
  check_device_moe(config, P, options);
  prepare_dense_matmul(device);
  config.router.E = config.E, config.router.K = config.K;
  L = config.L(P);
  const RankGroup group{P, options.nodes};
  const ExchangeConfig exchange_config = device_exchange_config(config), windows_of = windows_config(exchange_config, group);
  const MapRoom map_room = device_map_room(config, options);
  const ExchangeWindows exchange_windows = book_exchange_windows(windows_of, per_node, book, map_room);
  const auto W = static_cast<std::size_t>(config.row_width());
  if (has_partials(config, group)) {
    windows.partials = windows.gradients =
        book("moe partials and gradients", row_window_bytes(windows_of, per_node, W * size_bytes(partials_dtype(config, group))));
  }
  if (num_totals(config) > 0) windows.counts = book("moe counts", counts_window_bytes(config, per_node));
  if (looks_for_duplicates(config, options)) windows.votes = book("moe votes", static_cast<std::size_t>(2 * per_node) * 4);
  for (int i = 0; i < num_row_windows(config, group, options); ++i) step_windows.push_back(book("moe rows", row_window_bytes(windows_of, per_node, W * 2)));
  if (options.resend_rows || is_home(config, group)) {
    step_windows.assign(static_cast<std::size_t>(options.num_steps), windows.partials);
  } else if (config.recompute > Recompute::kActivation) {
    shared_rows_window = step_windows[0];
    step_windows.assign(static_cast<std::size_t>(options.num_steps), shared_rows_window);
  }
  ExpertPlacement placement{exchange_config.E, P, nullptr, nullptr};
  if (config.expert_tensor_parallel > 1) {
    moe::make_etp_tables(config.E, P, config.expert_tensor_parallel, rank_table, local_table);
    placement.rank_table = rank_table.data(), placement.local_table = local_table.data();
  }
  exchange = make_exchange(exchange_config, placement, options.rail, ranks, device, exchange_windows, options.exchange, map_room);
  if (home()) exchange->list_tokens();
  sm_count = num_sms(device);
  const DeviceGuard guard(device);  // events belong to the device that is current
  forked = std::make_unique<CudaEvent>(/*timing=*/false), joined = std::make_unique<CudaEvent>(/*timing=*/false);
  S = exchange->budget().padded_slots, R = exchange->budget().rows;
  step_parts = step_layout(config, P, options), scratch_parts = scratch_layout(config, P, options);
  for (int i = 0; i < ranks.count; ++i) scratch.emplace_back(scratch_parts.bytes, device), status.emplace_back(device);
  if (config.recipe.is_blocked()) make_recipe();
  if (!options.exact_sizes) return;
  const SlotBytes most = bytes_of_slots(config, S, options);
  for (int i = 0; i < ranks.count; ++i) {
    slot_memory.push_back({GrowableBuffer(keeps_h() ? 0 : most.h, device), GrowableBuffer(keeps_a() ? 0 : most.a, device), GrowableBuffer(most.y, device),
                           GrowableBuffer(most.x, device)});
    const SlotBytes least = bytes_of_slots(config, 1, options);  // as make_slot_memory() says
    if (!keeps_h()) slot_memory.back().h.grow(least.h);
    if (combines_beside(config, options) || blocks_at_home()) slot_memory.back().y.grow(least.y);
  }
}

// Work of a phase beside the caller's stream; the end: kOther.
void DeviceMoeLayer::Impl::mark_beside(Phase phase, cudaStream_t stream) {
  if (options.on_phase && !Rehearsal::is_on()) options.on_phase(phase, stream);
}

// A range of each phase for profilers; it costs nothing where none listens.
void DeviceMoeLayer::Impl::mark(Phase phase, cudaStream_t stream) {
  if (Rehearsal::is_on()) return;
  if (in_range) nvtxRangePop();
  in_range = phase != Phase::kOther;
  if (in_range) nvtxRangePushA(to_string(phase));
  if (options.on_phase) options.on_phase(phase, stream);
}

DeviceMoeLayer::DeviceMoeLayer(const MoeConfig& config, const LocalRanks& ranks, int device, const BookWindow& book, const DeviceMoeOptions& options)
    : impl_(std::make_unique<Impl>(config, ranks, device, book, options)) {}
DeviceMoeLayer::~DeviceMoeLayer() = default;

const MoeConfig& DeviceMoeLayer::config() const { return impl_->config; }
ReceiveBudget DeviceMoeLayer::budget() const { return impl_->exchange->budget(); }
DeviceExchange& DeviceMoeLayer::exchange() { return *impl_->exchange; }
int DeviceMoeLayer::num_ranks() const { return impl_->ranks.count; }
int DeviceMoeLayer::host_waits() const { return impl_->options.exact_sizes ? 1 : 0; }
std::int64_t DeviceMoeLayer::num_dense_map_forwards() const { return impl_->dense_forwards; }

DeviceMoeStep DeviceMoeLayer::make_step() {
  WB_CHECK(!impl_->step_windows.empty(), "make_step: all of the {} steps that the layer was made for are taken", impl_->options.num_steps);
  const int device = impl_->where.index;
  const DeviceGuard guard(device);
  DeviceMoeStep step;
  step.saved_ = std::make_unique<DeviceMoeStep::Saved>();
  DeviceMoeStep::Saved& saved = *step.saved_;
  saved.handle = impl_->exchange->make_handle();
  for (std::size_t i = 0; i < impl_->count(); ++i) saved.memory.emplace_back(impl_->step_parts.bytes, device);
  saved.rows_window = impl_->step_windows.back(), impl_->step_windows.pop_back();
  saved.reports = PinnedReports(impl_->ranks.count);
  saved.routes.resize(impl_->count()), saved.sent.resize(impl_->count());
  if (impl_->options.exact_sizes) impl_->make_slot_memory(saved);
  saved.layout = impl_->step_parts, saved.layer = impl_.get(), saved.has_totals = num_totals(impl_->config) > 0;
  saved.has_global = impl_->config.global_coefficient != 0;
  return step;
}

void DeviceMoeLayer::forward(std::span<const MoeTensors> parameters, std::span<const TensorView> x, std::span<const TensorView> out, DeviceMoeStep& step,
                             const DeviceMoeForward& options, cudaStream_t stream) {
  WB_CHECK(step.saved_ != nullptr, "forward: the step was not made by make_step()");
  DeviceMoeStep::Saved& saved = *step.saved_;
  const Impl::Forward f{parameters, x, out, saved, options, stream};
  impl_->check_forward(f);
  const DeviceGuard guard(impl_->where.index);
  impl_->set_totals(f);
  saved.seed = {options.rounding_seed, options.rounding_seed_device};
  saved.padding_masks.assign(options.padding_masks.begin(), options.padding_masks.end());
  for (std::size_t i = 0; i < impl_->count(); ++i) {
    impl_->set_routes(saved, i, x[i].shape[0]);
  }
  // At once: a room that grew from operation to operation would leave smaller ones behind.
  if (options.training)
    work_room(impl_->where.index, stream).reserve(operations_bytes(impl_->config, impl_->S, impl_->sm_count), /*zero=*/false, impl_->where.index, stream);
  impl_->prepare(f);
  impl_->forward(f);
}

void DeviceMoeLayer::add_losses(std::span<const MoeTensors> parameters, DeviceMoeStep& step, const std::int32_t* counts, const DeviceMoeForward& options,
                                cudaStream_t stream) {
  WB_CHECK(step.saved_ != nullptr && step.saved_->layer == impl_.get() && step.saved_->ready && step.saved_->awaits_losses,
           "add_losses: a step of this layer that a training forward with later_losses filled is needed");
  WB_CHECK(parameters.size() == impl_->count(), "add_losses: {} ranks of this launch, got {} parameters", impl_->count(), parameters.size());
  const DeviceGuard guard(impl_->where.index);
  impl_->add_losses({parameters, {}, {}, *step.saved_, options, stream}, counts);
}
std::int64_t DeviceMoeLayer::num_counts() const { return num_totals(impl_->config); }
bool DeviceMoeLayer::adds_losses() const { return has_losses(impl_->config); }

void DeviceMoeLayer::backward(std::span<const MoeTensors> parameters, std::span<const MoeTensors> gradients, std::span<const TensorView> x,
                              std::span<const TensorView> d_out, std::span<const TensorView> dx, DeviceMoeStep& step, const DeviceMoeBackward& options,
                              cudaStream_t stream) {
  WB_CHECK(step.saved_ != nullptr, "backward: the step was not made by make_step()");
  const Impl::Backward b{parameters, gradients, x, d_out, dx, *step.saved_, options, stream};
  impl_->check_backward(b);
  const DeviceGuard guard(impl_->where.index);
  impl_->backward(b);
}

StatusWord DeviceMoeLayer::status(int index, cudaStream_t stream) const {
  StatusWord word = impl_->exchange->status(index, stream);
  const DeviceGuard guard(impl_->where.index);
  word.merge(impl_->status.at(static_cast<std::size_t>(index)).read(stream));
  return word;
}

void DeviceMoeLayer::clear_status(cudaStream_t stream) const {
  impl_->exchange->clear_status(stream);
  const DeviceGuard guard(impl_->where.index);
  for (const DeviceStatus& word : impl_->status) word.clear(stream);
}

}  // namespace waybill::cuda

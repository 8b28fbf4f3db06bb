// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/device_exchange.h"

#include <algorithm>

#include "core/cuda/cuda_error.h"
#include "exchange/cuda/device_rows.h"
#include "exchange/cuda/exchange_shape.h"

namespace waybill::cuda {

namespace {

constexpr int kLateRowBytes = 8192;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

DeviceBuffer upload_table(const std::int32_t* table, std::int64_t E, int device) {
  if (table == nullptr) return {};
  const DeviceGuard guard(device);
  DeviceBuffer buffer(static_cast<std::size_t>(E) * 4, device);
  buffer.upload(table, buffer.bytes());
  WB_TRY_CUDA(cudaStreamSynchronize(nullptr));
  return buffer;
}

}  // namespace

DeviceExchange::DeviceExchange(const ExchangeConfig& config, const ExpertPlacement& placement, const LocalRanks& ranks, int device,
                               const ExchangeWindows& windows, const ExchangeTuning& tuning, const MapRoom& map)
    : config_(config), map_(map), map_windows_(windows.map), device_(device), tuning_(tuning) {
  const int P = ranks.table.size;
  check_device_config(config, P, map);
  validate(placement);
  WB_CHECK(placement.E == config.E && placement.P == P, "exchange: the placement is for E = {}, P = {}, the exchange has E = {}, P = {}", placement.E,
           placement.P, config.E, P);
  WB_CHECK(ranks.count >= 1, "exchange: a launch stands for at least one rank, got {}", ranks.count);
  budget_ = receive_budget(config, P);
  budget_.padded_slots = std::max(budget_.padded_slots, map.padded_slots);
  num_sms_ = attribute(cudaDevAttrMultiProcessorCount, device), max_smem_ = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  compute_major_ = attribute(cudaDevAttrComputeCapabilityMajor, device);
  params_.ranks = ranks;
  ExchangeShape& s = params_.shape;
  s = make_shape(config, P, map);
  handle_bytes_ = lay_out_handle(s);
  s.control = windows.control, s.counts = windows.counts, s.row_meta = windows.row_meta, s.slot_ids = windows.slot_ids;
  s.slot_weights = windows.slot_weights, s.slot_values = windows.slot_values, s.tile_counts = windows.tile_counts, s.expert_tiles = windows.expert_tiles;
  rank_table_ = upload_table(placement.rank_table, placement.E, device), local_table_ = upload_table(placement.local_table, placement.E, device);
  s.rank_table = rank_table_.as<std::int32_t>(), s.local_table = local_table_.as<std::int32_t>();
  {
    const DeviceGuard guard(device);
    plan_fused_ctas_ = s.K <= kMaxPlanK ? plan_fused_ctas(s, num_sms_) : 0;
    layout_fused_ctas_ = layout_fused_ctas(s, num_sms_);
  }
  for (int i = 0; i < ranks.count; ++i) {
    status_.emplace_back(device);
    params_.call[i].status = status_.back().device_ptr();
  }
  reset();
}

void DeviceExchange::reset() const {
  const DeviceGuard guard(device_);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < params_.ranks.count; ++i) {
    WB_TRY_CUDA(cudaMemset(params_.ranks.table.base[params_.ranks.rank[i]] + params_.shape.control, 0, sizeof(ExchangeControl)));
  }
  WB_TRY_CUDA(cudaDeviceSynchronize());
}

DeviceHandle DeviceExchange::make_handle() const {
  DeviceHandle handle;
  const DeviceGuard guard(device_);
  for (int i = 0; i < num_ranks(); ++i) {
    handle.memory_.emplace_back(handle_bytes_, device_);
    WB_TRY_CUDA(cudaMemset(handle.memory_.back().data(), 0, sizeof(HandleHeader)));  // invalid until plan() has run
  }
  WB_TRY_CUDA(cudaDeviceSynchronize());
  handle.T_.assign(handle.memory_.size(), 0);
  return handle;
}

ExchangeParams DeviceExchange::with(const DeviceHandle& handle) const {
  WB_CHECK(handle.memory_.size() == static_cast<std::size_t>(num_ranks()), "exchange: the handle is for {} ranks, the launch has {}", handle.memory_.size(),
           num_ranks());
  ExchangeParams q = params_;
  q.shape.send_weights = tuning_.send_weights ? 1 : 0;
  for (int i = 0; i < num_ranks(); ++i) {
    q.call[i].handle = handle.memory_[static_cast<std::size_t>(i)].as<unsigned char>();
    q.call[i].T = static_cast<std::int32_t>(handle.T_[static_cast<std::size_t>(i)]);
  }
  return q;
}

// CTAs a rank of a kernel whose CTAs wait for peers: all of them must be resident together.
int DeviceExchange::spinning_ctas(const void* kernel, int threads, std::size_t smem, int wanted) const {
  const DeviceGuard guard(device_);
  if (smem > kPlainSharedBytes) WB_TRY_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)));
  int blocks = 0;
  WB_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, smem));
  const int ctas = std::min(wanted, blocks * num_sms_ / num_ranks());
  WB_CHECK(ctas >= 1, "{} ranks wait for each other on cuda:{}, which holds {} CTAs of {} threads at a time", num_ranks(), device_, blocks * num_sms_, threads);
  return ctas;
}

// Of all ranks together, `per_sm` an SM unless the tuning says otherwise.
int DeviceExchange::local_ctas(int per_sm) const {
  const int all = tuning_.local_ctas > 0 ? tuning_.local_ctas : per_sm * num_sms_;
  return std::max(1, all / num_ranks());
}

RowTuning DeviceExchange::tuned(std::int64_t row_bytes) const {
  RowTuning t = tuning_for(tuning_table(), row_bytes);
  const auto take = [](int& value, int given) { value = given != 0 ? given : value; };
  take(t.dispatch_ctas, tuning_.dispatch_ctas), take(t.chunk_ctas, tuning_.chunk_ctas);
  take(t.combine_ctas, tuning_.combine_ctas), take(t.combine_warps, tuning_.combine_warps), take(t.combine_stages, tuning_.combine_stages);
  take(t.reduce_stages, tuning_.reduce_stages), take(t.fused_combine_ctas, tuning_.fused_combine_ctas), take(t.fused_stages, tuning_.fused_stages);
  return t;
}

void DeviceExchange::check_one_node(const char* call) const {
  if (num_nodes() > 1) WB_FAIL(ErrorCode::kUnsupported, "{} goes within one NVLink domain, this group has {} nodes", call, num_nodes());
}

RowType DeviceExchange::row_type(const char* what, DType dtype) const {
  WB_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "{} must be f32 or bf16, got {}", what, to_string(dtype));
  return dtype == DType::kF32 ? RowType::kF32 : RowType::kBF16;
}

void DeviceExchange::plan(DeviceHandle& handle, std::span<const DeviceRoute> routes, cudaStream_t stream) const {
  WB_CHECK(config_.K <= kMaxPlanK, "plan: compact plans take up to {} experts a token, got K = {}: use plan_map()", kMaxPlanK, config_.K);
  WB_CHECK(routes.size() == static_cast<std::size_t>(num_ranks()), "plan: {} ranks of this launch, got {} routes", num_ranks(), routes.size());
  std::int64_t most = 0;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    WB_CHECK(routes[i].T >= 0 && routes[i].T <= config_.T_max, "plan: T = {} tokens on rank {} are outside [0, T_max = {}]", routes[i].T,
             rank(static_cast<int>(i)), config_.T_max);
    WB_CHECK(routes[i].T == 0 || (routes[i].ids != nullptr && routes[i].weights != nullptr), "plan: rank {} brings {} tokens and no ids or weights",
             rank(static_cast<int>(i)), routes[i].T);
    most = std::max(most, routes[i].T);
  }
  for (std::size_t i = 0; i < routes.size(); ++i) handle.T_.at(i) = routes[i].T;
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < routes.size(); ++i) q.call[i].a = routes[i].ids, q.call[i].b = routes[i].weights;
  const int tiles = std::max(1, static_cast<int>((most + kPlanTile - 1) / kPlanTile));
  if (tuning_.fused_plan && tiles * num_ranks() <= plan_fused_ctas_) {
    launch_plan_fused(q, tiles, tuning_.overlap_launches, stream);
    return check_launch("exchange_plan_fused");
  }
  launch_plan_count(q, tiles, tuning_.overlap_launches, stream);
  check_launch("exchange_plan_count");
  launch_plan_fill(q, tiles, tuning_.overlap_launches, stream);
  check_launch("exchange_plan_fill");
}

void DeviceExchange::layout(const DeviceHandle& handle, cudaStream_t stream) const {
  const ExchangeParams q = with(handle);
  // At most half of what the GPU holds: the CTAs wait for each other, and others' kernels run beside them.
  if (tuning_.fused_layout && !map_.enabled && 2 * layout_tiles_of(q.shape) * num_ranks() <= layout_fused_ctas_) {
    launch_layout_fused(q, tuning_.overlap_launches, stream);
    return check_launch("exchange_layout_fused");
  }
  launch_layout_count(q, tuning_.overlap_launches, stream);
  check_launch("exchange_layout_count");
  launch_layout_scan(q, tuning_.overlap_launches, stream);
  check_launch("exchange_layout_scan");
  launch_layout_scatter(q, tuning_.overlap_launches, stream);
  check_launch("exchange_layout_scatter");
}

DispatchArgs DeviceExchange::dispatch_args(DType dtype, std::span<const DeviceRows> x, std::uint64_t window, const Scales& scales) const {
  const std::size_t element = size_bytes(dtype);
  WB_CHECK(dtype == DType::kF32 || dtype == DType::kBF16 || element == 1, "dispatch: rows must be f32, bf16 or f8, got {}", to_string(dtype));
  const std::int64_t bytes = config_.H * static_cast<std::int64_t>(element);
  WB_CHECK(bytes % 16 == 0 && bytes <= 1 << 20, "dispatch: rows of {} bytes (H = {} {}) are not multiples of 16 up to 1 MiB", bytes, config_.H,
           to_string(dtype));
  check_rows("dispatch: x", x, num_ranks(), config_.H, element);
  DispatchArgs args{};
  args.part[0] = RowPart{window, (x[0].stride == 0 ? config_.H : x[0].stride) * static_cast<std::int64_t>(element), static_cast<std::int32_t>(bytes), 0};
  if (scales.bytes > 0) {
    WB_CHECK(scales.bytes % 16 == 0 && scales.bytes <= 16384, "dispatch: rows of scales have {} bytes; multiples of 16 up to 16384 are taken", scales.bytes);
    check_rows("dispatch: scales", scales.rows, num_ranks(), scales.bytes, 1);
    args.part[1] = RowPart{scales.window, scales.rows[0].stride == 0 ? scales.bytes : scales.rows[0].stride, static_cast<std::int32_t>(scales.bytes), 0};
  }
  return args;
}

void DeviceExchange::dispatch(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, bool after_plan,
                              cudaStream_t stream) const {
  dispatch(handle, dtype, x, window, Scales{}, after_plan, stream);
}

void DeviceExchange::dispatch(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, const Scales& scales,
                              bool after_plan, cudaStream_t stream) const {
  DispatchArgs args = dispatch_args(dtype, x, window, scales);
  args.handshake = after_plan ? 0 : 1;
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < x.size(); ++i) q.call[i].a = x[i].data, q.call[i].b = scales.bytes > 0 ? scales.rows[i].data : nullptr;
  const int ctas = tuned(args.part[0].bytes).dispatch_ctas;
  if (tuning_.dispatch == DispatchPath::kBulk || (tuning_.dispatch == DispatchPath::kAuto && compute_major_ >= 9)) return queue_dispatch(q, args, ctas, stream);
  launch_dispatch_push(q, args, spinning_ctas(dispatch_push_kernel(), kRowThreads, 0, ctas), tuning_.overlap_launches, stream);
  check_launch("exchange_dispatch_push");
}

bool DeviceExchange::supports_chunks() const { return num_nodes() == 1 && compute_major_ >= 9 && 2 * num_ranks() <= num_sms_; }

// At most half of the SMs, so that permute_arriving() has the others.
int DeviceExchange::chunk_ctas(std::int64_t row_bytes) const { return std::max(1, std::min(tuned(row_bytes).chunk_ctas, num_sms_ / 2 / num_ranks())); }

void DeviceExchange::dispatch_chunks(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, bool after_plan,
                                     cudaStream_t stream) const {
  check_one_node("dispatch_chunks()");
  WB_CHECK(supports_chunks(), "dispatch_chunks needs compute capability 9 and at most half as many ranks as SMs; got {} and {} ranks on {} SMs", compute_major_,
           num_ranks(), num_sms_);
  DispatchArgs args = dispatch_args(dtype, x, window, Scales{});
  args.handshake = after_plan ? 0 : 1, args.remote_only = 1;
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < x.size(); ++i) q.call[i].a = x[i].data;
  queue_dispatch(q, args, chunk_ctas(args.part[0].bytes), stream);
}

void DeviceExchange::queue_dispatch(const ExchangeParams& q, DispatchArgs args, int wanted, cudaStream_t stream) const {
  // Rows in as few pieces as buffers of 8 KB allow; 128 to 192 KB in flight a CTA.
  const int most = tuning_.bulk_chunk_bytes > 0 ? tuning_.bulk_chunk_bytes : 8192, bytes = args.part[0].bytes;
  args.chunks = (bytes + most - 1) / most;
  args.chunk_bytes = ((bytes + args.chunks - 1) / args.chunks + 15) / 16 * 16;
  args.stages = tuning_.bulk_stages > 0 ? tuning_.bulk_stages : (args.chunk_bytes <= 1024 ? 8 : (args.chunk_bytes > 4096 ? 6 : 4));
  int warps = tuning_.bulk_warps > 0 ? tuning_.bulk_warps : std::clamp(32768 / args.chunk_bytes, 4, 16);
  const auto room = static_cast<std::size_t>(max_smem_ - 4096);
  while (warps > 1 && dispatch_bulk_smem(args, q.shape.D, warps) > room) --warps;
  const std::size_t smem = dispatch_bulk_smem(args, q.shape.D, warps);
  // Large rows never beside the end of the kernel before: CTAs that start where that one leaves room sit close together, and few of them fill the link then.
  // Nor chunks, beside which a permute starts.
  const bool starts_early = tuning_.early_dispatch > 0 || (tuning_.early_dispatch == 0 && bytes < kLateRowBytes && args.remote_only == 0);
  launch_dispatch_bulk(q, args, spinning_ctas(dispatch_bulk_kernel(), warps * 32, smem, wanted), warps, tuning_.overlap_launches && starts_early, stream);
  check_launch("exchange_dispatch_bulk");
}

void DeviceExchange::dispatch_pull(const DeviceHandle& handle, DType dtype, std::uint64_t x_window, std::uint64_t window, cudaStream_t stream) const {
  check_one_node("dispatch_pull()");
  const std::vector<DeviceRows> rows(static_cast<std::size_t>(num_ranks()));
  const DispatchArgs args = dispatch_args(dtype, rows, window, Scales{});
  launch_dispatch_pull(with(handle), args, x_window, spinning_ctas(dispatch_pull_kernel(), kRowThreads, 0, tuned(args.part[0].bytes).dispatch_ctas),
                       tuning_.overlap_launches, stream);
  check_launch("exchange_dispatch_pull");
}

DType DeviceExchange::partials() const { return config_.combine_wire == CombineWire::kBF16 && params_.shape.P > 1 ? DType::kBF16 : DType::kF32; }

void DeviceExchange::set_base(ExchangeParams& q, std::span<const void* const> base) const {
  check_bases(base, num_ranks());
  for (std::size_t i = 0; i < base.size(); ++i) q.call[i].d = const_cast<void*>(base[i]);
}

void DeviceExchange::combine(const DeviceHandle& handle, std::uint64_t window, DType out_dtype, std::span<const DeviceRows> out, cudaStream_t stream,
                             std::span<const void* const> base) const {
  const RowType to = row_type("combine: out", out_dtype), from = row_type("combine", partials());
  check_rows("combine: out", out, num_ranks(), config_.H, size_bytes(out_dtype));
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < out.size(); ++i) q.call[i].c = out[i].data;
  set_base(q, base);
  const CombineArgs args{window, 0, out[0].stride == 0 ? config_.H : out[0].stride, static_cast<std::int32_t>(config_.H), 0};
  const RowTuning t = tuned(config_.H * static_cast<std::int64_t>(size_bytes(partials())));
  // The bulk kernel holds a token's destinations in one warp.
  if ((tuning_.combine == CombinePath::kBulk || (tuning_.combine == CombinePath::kAuto && compute_major_ >= 9)) && q.shape.D <= 32) {
    const int stages = std::min(t.combine_stages, 16);
    int warps = std::min(t.combine_warps, 16);
    while (warps > 1 && combine_bulk_smem(warps, stages) > static_cast<std::size_t>(max_smem_ - 4096)) --warps;
    const int ctas = spinning_ctas(combine_bulk_kernel(from, to), warps * 32, combine_bulk_smem(warps, stages), t.combine_ctas);
    launch_combine_bulk(q, args, from, to, ctas, warps, stages, tuning_.overlap_launches, stream);
    return check_launch("exchange_combine_bulk");
  }
  const int ctas = spinning_ctas(combine_pull_kernel(from, to), kPullThreads, 0, t.combine_ctas);
  launch_combine_pull(q, args, from, to, ctas, tuning_.overlap_launches, stream);
  check_launch("exchange_combine_pull");
}

// A row has at most min(K, L) slots, of a map L.
bool DeviceExchange::ring_holds_slots() const {
  return compute_major_ >= 9 && (map_.enabled ? params_.shape.L : std::min(params_.shape.K, params_.shape.L)) <= kMaxRingSlots;
}

void DeviceExchange::reduce_and_combine(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> y, bool weighted, std::uint64_t window,
                                        std::span<const DeviceRows> out, cudaStream_t stream, std::span<const void* const> base, int num_sms) const {
  const RowType type = row_type("reduce_and_combine: y", dtype), from = row_type("reduce_and_combine", partials());
  check_rows("reduce_and_combine: y", y, num_ranks(), config_.H, size_bytes(dtype));
  check_rows("reduce_and_combine: out", out, num_ranks(), config_.H, size_bytes(dtype));
  ExchangeParams q = with(handle);
  const RowTuning t = tuned(config_.H * static_cast<std::int64_t>(size_bytes(dtype)));
  ReduceCombineArgs args{CombineArgs{window, 0, out[0].stride == 0 ? config_.H : out[0].stride, static_cast<std::int32_t>(config_.H), 0},
                         y[0].stride == 0 ? config_.H : y[0].stride,
                         weighted ? 1 : 0,
                         0,
                         std::clamp(t.fused_stages, 1, 6),
                         std::clamp(t.reduce_stages, 1, 6)};
  const bool one_launch = num_nodes() == 1 && t.fused_combine_ctas > 0 && ring_holds_slots() && q.shape.D <= 32;
  const int wanted = num_sms > 0 ? std::min(num_sms, num_sms_) : num_sms_;
  const int ctas = one_launch ? spinning_ctas(reduce_combine_kernel(type, from), kRowThreads, reduce_combine_smem(args), wanted) : 0;
  if (ctas < 2) {
    std::vector<DeviceRows> z;
    for (int i = 0; i < num_ranks(); ++i) z.push_back({params_.ranks.table.base[rank(i)] + window, 0});
    unpermute_reduce(handle, dtype, y, weighted, partials(), z, true, stream);
    return combine(handle, window, dtype, out, stream, base);
  }
  for (std::size_t i = 0; i < y.size(); ++i) q.call[i].a = y[i].data, q.call[i].c = out[i].data;
  set_base(q, base);
  args.combine_ctas = std::clamp(t.fused_combine_ctas, 1, ctas - 1);
  if (num_ranks() > 1) args.combine_ctas = std::min(args.combine_ctas, std::max(1, ctas / 4));
  if (wanted < num_sms_) args.combine_ctas = std::min(args.combine_ctas, std::max(1, ctas / 3));  // a slot is read for each, a partial for each rank
  launch_reduce_combine(q, args, type, from, ctas, tuning_.overlap_launches, stream);
  check_launch("exchange_reduce_combine");
}

void DeviceExchange::combine_push(const DeviceHandle& handle, std::uint64_t window, std::uint64_t slots, DType out_dtype, std::span<const DeviceRows> out,
                                  cudaStream_t stream) const {
  check_one_node("combine_push()");
  const RowType to = row_type("combine: out", out_dtype), from = row_type("combine", partials());
  check_rows("combine: out", out, num_ranks(), config_.H, size_bytes(out_dtype));
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < out.size(); ++i) q.call[i].c = out[i].data;
  const CombineArgs args{window, slots, out[0].stride == 0 ? config_.H : out[0].stride, static_cast<std::int32_t>(config_.H), 1};
  launch_combine_push(q, args, from,
                      spinning_ctas(combine_push_kernel(), kRowThreads, 0, tuned(config_.H * static_cast<std::int64_t>(size_bytes(partials()))).combine_ctas),
                      tuning_.overlap_launches, stream);
  check_launch("exchange_combine_push");
  launch_combine_pull(q, args, from, to, local_ctas(), tuning_.overlap_launches, stream);
  check_launch("exchange_combine_pull");
}

void DeviceExchange::return_slot_values(const DeviceHandle& handle, std::span<const DeviceRoute> routes, std::span<const float* const> values,
                                        std::span<float* const> d_weights, cudaStream_t stream) const {
  const auto count = static_cast<std::size_t>(num_ranks());
  WB_CHECK(routes.size() == count && values.size() == count && d_weights.size() == count,
           "return_slot_values: {} ranks of this launch, got {} routes, {} values, {} d_weights", count, routes.size(), values.size(), d_weights.size());
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < count; ++i) q.call[i].a = values[i];
  launch_slot_values_gather(q, tuning_.overlap_launches, stream);
  check_launch("exchange_slot_values_gather");
  for (std::size_t i = 0; i < count; ++i) {
    WB_CHECK(routes[i].T == q.call[i].T, "return_slot_values: the plan was made for T = {} tokens, the route has {}", q.call[i].T, routes[i].T);
    q.call[i].a = routes[i].ids, q.call[i].c = d_weights[i];
  }
  const int ctas = spinning_ctas(slot_values_return_kernel(q.shape.id_bytes), kRowThreads, 0, tuning_.value_ctas);
  launch_slot_values_return(q, ctas, tuning_.overlap_launches, stream);
  check_launch("exchange_slot_values_return");
}

void DeviceExchange::send_between_nodes(std::span<const void* const>, std::span<void* const>, std::size_t, cudaStream_t) const {}

template <class T>
const T* DeviceExchange::part(const DeviceHandle& handle, int index, std::uint64_t offset) const {
  return reinterpret_cast<const T*>(handle.memory_.at(static_cast<std::size_t>(index)).as<unsigned char>() + offset);
}
const HandleHeader* DeviceExchange::header(const DeviceHandle& handle, int index) const { return part<HandleHeader>(handle, index, 0); }
const std::int32_t* DeviceExchange::expert_offsets(const DeviceHandle& handle, int index) const {
  return part<std::int32_t>(handle, index, params_.shape.h_expert_offsets);
}
const std::int32_t* DeviceExchange::expert_counts(const DeviceHandle& handle, int index) const {
  return part<std::int32_t>(handle, index, params_.shape.h_expert_counts);
}
const std::int32_t* DeviceExchange::slot_rows(const DeviceHandle& handle, int index) const {
  return part<std::int32_t>(handle, index, params_.shape.h_slot_row);
}
const float* DeviceExchange::slot_weights(const DeviceHandle& handle, int index) const { return part<float>(handle, index, params_.shape.h_slot_weight); }

const unsigned long long* DeviceExchange::wait_ns(int index) const {
  WB_CHECK(index >= 0 && index < num_ranks(), "wait_ns: rank {} of a launch of {}", index, num_ranks());
  return reinterpret_cast<const ExchangeControl*>(params_.ranks.table.base[rank(index)] + params_.shape.control)->wait_ns;
}

HostHandle DeviceExchange::read(const DeviceHandle& handle, int index, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  const ExchangeShape& s = params_.shape;
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
  const auto download = [&](void* to, std::uint64_t offset, std::size_t bytes) {
    if (bytes > 0) WB_TRY_CUDA(cudaMemcpy(to, part<unsigned char>(handle, index, offset), bytes, cudaMemcpyDeviceToHost));
  };
  const auto ints = [&](std::uint64_t offset, std::int64_t count) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    download(values.data(), offset, values.size() * 4);
    return values;
  };
  const auto wide = [&](std::uint64_t offset, std::int64_t count) {
    const std::vector<std::int32_t> values = ints(offset, count);
    return std::vector<std::int64_t>(values.begin(), values.end());
  };
  HandleHeader header;
  download(&header, 0, sizeof(header));
  HostHandle host;
  host.valid = header.valid != 0, host.max_slot_demand = header.max_slot_demand, host.max_row_demand = header.max_row_demand;
  host.layout.P = s.P, host.layout.L = s.L;
  host.entries.resize(static_cast<std::size_t>(handle.T_.at(static_cast<std::size_t>(index)) * s.D));
  if (!host.valid) {
    host.layout.row_offsets.assign(static_cast<std::size_t>(s.P) + 1, 0), host.layout.row_slot_offsets = {0};
    host.layout.expert_offsets.assign(static_cast<std::size_t>(s.L) + 1, 0), host.layout.expert_counts.assign(static_cast<std::size_t>(s.L), 0);
    return host;
  }
  download(host.entries.data(), s.h_entries, host.entries.size() * sizeof(RowEntry));
  host.layout.row_offsets = wide(s.h_row_offsets, s.P + 1), host.layout.row_slot_offsets = wide(s.h_row_slot_offsets, header.R + 1);
  host.layout.slot_position = wide(s.h_slot_position, header.S);
  host.layout.expert_offsets = ints(s.h_expert_offsets, s.L + 1), host.layout.expert_counts = ints(s.h_expert_counts, s.L);
  host.layout.slot_row = ints(s.h_slot_row, header.S_padded);
  host.layout.slot_weight.resize(static_cast<std::size_t>(header.S_padded));
  download(host.layout.slot_weight.data(), s.h_slot_weight, host.layout.slot_weight.size() * 4);
  return host;
}

StatusWord DeviceExchange::status(int index, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  return status_.at(static_cast<std::size_t>(index)).read(stream);
}

void DeviceExchange::clear_status(cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  for (const DeviceStatus& status : status_) status.clear(stream);
}

}  // namespace waybill::cuda

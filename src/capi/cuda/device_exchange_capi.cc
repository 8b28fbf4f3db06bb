// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on GPUs: one rank of one process; every call plans its batch again. As pairs the transfer runs on a stream of its own.
#include "capi/cuda/in_flight.h"
#include "capi/cuda/process_memory.h"
#include "capi/handles.h"
#include "core/cuda/cuda_error.h"
#include "exchange/cuda/make_exchange.h"
#include "moe/cuda/slot_sizes.h"
#include "waybill/group_rows.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

constexpr std::size_t kArenaControl = 128 * 1024;  // what a group keeps at the start of its arenas

std::size_t arena_bytes(const ExchangeConfig& config, int P) {
  return most_bytes(config, P, [&](int nodes) {
    const ExchangeConfig inside = cuda::windows_config(config, {P, nodes});
    const std::size_t rows = cuda::row_window_bytes(inside, P / nodes, static_cast<std::size_t>(config.H) * 4);
    return cuda::exchange_window_bytes(inside, P / nodes) + 2 * (rows + 256) + kArenaControl;
  });
}

}  // namespace

struct wb_device_exchange {
  wb_device_exchange(const ExchangeConfig& given, int device, std::unique_ptr<ProcessMemory> windows)
      : config(given),
        where{DeviceType::kCuda, device},
        memory(std::move(windows)),
        ranks{memory->size(), memory->num_nodes()},
        inside(cuda::windows_config(given, ranks)),
        exchange(cuda::make_exchange(given, block_placement(given.E, memory->size()), memory->rail(), memory->ranks(), device,
                                     cuda::book_exchange_windows(inside, ranks.per_node(), book()), tuning_beside(memory->ranks_on_device()))),
        rows_window(memory->window("rows", row_bytes())),
        partials_window(memory->window("partials", row_bytes())),
        handle(exchange->make_handle()),
        d_slots(static_cast<std::size_t>(exchange->budget().padded_slots) * 4, device) {
    // Streams are not made while a peer's kernel may wait for this rank.
    if (memory->is_local_group()) begun = std::make_unique<InFlight>(device);
    memory->everybody_is_ready();
  }
  cuda::BookWindow book() {
    return [this](const std::string& name, std::size_t bytes) { return memory->window(name, bytes); };
  }
  std::size_t row_bytes() const { return cuda::row_window_bytes(inside, ranks.per_node(), static_cast<std::size_t>(config.H) * 4); }
  std::int64_t L() const { return config.E / memory->size(); }
  cuda::DeviceRows at(std::uint64_t window) const {
    const cuda::LocalRanks local = memory->ranks();
    return {local.table.base[local.rank[0]] + window, 0};
  }
  // Offsets of the experts' groups; the layout must have been queued.
  TensorView offsets() const { return TensorView(const_cast<std::int32_t*>(exchange->expert_offsets(handle, 0)), DType::kI32, {L() + 1}, where); }

  // Checked before anything is queued: [rows, H] of f32 (or bf16, where that is allowed), on the exchange's device.
  TensorView checked_rows(const wb_tensor* tensor, std::int64_t count, bool or_bf16, const char* name) const {
    const TensorView view = to_view(tensor, name, Memory::kAny);
    WB_CHECK(view.rank == 2 && view.shape[0] == count && view.shape[1] == config.H && view.device == where && view.is_contiguous() &&
                 (view.dtype == DType::kF32 || (or_bf16 && view.dtype == DType::kBF16)),
             "{} must be contiguous f32{} [{}, {}] on {}, got {}", name, or_bf16 ? " or bf16" : "", count, config.H, to_string(where), view.describe());
    return view;
  }
  void clear_rest(const TensorView& slots, cudaStream_t stream) const { group_rows({{}, offsets(), slots, slots.shape[0]}, Stream{where, stream, nullptr}); }

  ExchangeConfig config;
  Device where;
  std::unique_ptr<ProcessMemory> memory;
  cuda::RankGroup ranks;
  ExchangeConfig inside;  // of a node
  std::unique_ptr<cuda::DeviceExchange> exchange;
  std::uint64_t rows_window, partials_window;
  cuda::DeviceHandle handle;
  cuda::DeviceBuffer d_slots;                      // f32 [S]
  std::unique_ptr<waybill::capi::InFlight> begun;  // made by the first start
};

namespace {

// A planned batch: what every call starts with.
struct Batch {
  wb_device_exchange& own;
  cuda::DeviceRoute route[1];
  cudaStream_t stream;
  std::int64_t T;

  Batch(wb_device_exchange* handle, const wb_route* given, const wb_stream* on) : own(required(handle, "exchange")), stream(nullptr), T(0) {
    own.memory->check("exchange");
    const RouteView view = to_route(given, "route", Memory::kAny);
    WB_CHECK(
        view.device == own.where && view.K == own.config.K && view.E == own.config.E && view.T <= own.config.T_max && view.id_dtype == route_id_dtype(view.E),
        "route has T = {}, K = {}, E = {} on {}; the exchange takes T <= {}, K = {}, E = {} on {}, ids {}", view.T, view.K, view.E, to_string(view.device),
        own.config.T_max, own.config.K, own.config.E, to_string(own.where), to_string(route_id_dtype(own.config.E)));
    T = view.T;
    route[0] = {view.ids, view.weights, view.T};
    stream = static_cast<cudaStream_t>(stream_on(on, own.where, "the exchange").native);
  }
  TensorView rows(const wb_tensor* tensor, std::int64_t count, bool or_bf16, const char* name) const { return own.checked_rows(tensor, count, or_bf16, name); }
  std::int64_t slots() const { return own.exchange->budget().padded_slots; }
  void plan() {
    own.memory->meet(stream);
    order_behind_transfers(own.where.index, stream);
    plan_on(stream);
  }
  void plan_on(cudaStream_t queue) {
    own.exchange->plan(own.handle, route, queue);
    own.exchange->layout(own.handle, queue);
  }
};

// From the rows in the window to the slots, their sizes and whether the budgets held.
void write_slots(const wb_device_exchange& own, const TensorView& to, std::int32_t* sizes, std::int32_t* valid, cudaStream_t stream) {
  const cuda::DeviceRows received[] = {own.at(own.rows_window)}, sorted[] = {{to.data, 0}};
  own.exchange->permute(own.handle, to.dtype, received, sorted, stream);
  own.clear_rest(to, stream);
  cuda::launch_slot_sizes(own.exchange->header(own.handle, 0), own.exchange->expert_offsets(own.handle, 0), static_cast<std::int32_t>(own.L()), sizes, valid,
                          stream);
  cuda::check_launch("exchange_slot_sizes");
}

// Before the operands of a start: what was begun before has let go of them, whether its done came or not.
InFlight& begin(Batch& batch) {
  wb_device_exchange& own = batch.own;
  // A call queues behind all transfers of its GPU, here also behind those of ranks that wait for it.
  WB_CHECK(own.memory->ranks_on_device() == 1, "start and done need a GPU for each rank, {} ranks of the group share cuda:{}", own.memory->ranks_on_device(),
           own.where.index);
  own.memory->meet(batch.stream);
  if (own.begun == nullptr) own.begun = std::make_unique<InFlight>(own.where.index);
  if (own.begun->reserve(own.config, batch.stream)) own.exchange->tuning().fused_plan = false;  // a kernel of another stream may wait for peers, too
  own.begun->kind = InFlight::Kind::kNone;
  order_behind_transfers(own.where.index, batch.stream);
  own.begun->finished.wait_on(batch.stream);
  return *own.begun;
}

// What a done finishes; `name` of its start is in the error. The done lets go of it (kind = kNone) once its own arguments are right.
InFlight& begun(wb_device_exchange& own, InFlight::Kind kind, const char* name) {
  WB_CHECK(own.begun != nullptr && own.begun->kind == kind, "nothing was begun by {} on this exchange", name);
  return *own.begun;
}

void copy(const cuda::ScratchBuffer& to, const void* from, std::int64_t count, DType dtype, cudaStream_t stream) {
  WB_TRY_CUDA(cudaMemcpyAsync(to.data(), from, static_cast<std::size_t>(count) * size_bytes(dtype), cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

wb_status wb_device_exchange_create(const wb_exchange_config* config, int32_t device, const wb_process_group* group, wb_device_exchange** exchange) noexcept {
  return guarded([&] {
    wb_device_exchange*& target = required(exchange, "exchange");
    const wb_process_group ranks = checked_group(group, device);
    const cuda::DeviceGuard guard(device);
    const ExchangeConfig given = to_exchange_config(config);
    target = new wb_device_exchange(
        given, device, make_process_memory(device, ranks.size > 1 ? &ranks : nullptr, arena_bytes(given, ranks.size), given.hierarchy != Hierarchy::kFlat));
  });
}

wb_status wb_device_exchange_create_local(const wb_exchange_config* config, int32_t P, const int32_t* devices, wb_device_exchange** exchanges) noexcept {
  return guarded([&] {
    const ExchangeConfig given = to_exchange_config(config);
    make_local_ranks(
        P, devices, exchanges, [&](int ranks) { return arena_bytes(given, ranks); },
        [&](int device, std::unique_ptr<ProcessMemory> memory) { return std::make_unique<wb_device_exchange>(given, device, std::move(memory)); });
  });
}

void wb_device_exchange_destroy(wb_device_exchange* exchange) noexcept { delete exchange; }

wb_status wb_device_exchange_dispatch(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* x, const wb_tensor* slots, int32_t* sizes,
                                      int32_t* valid, const wb_stream* stream) noexcept {
  return guarded([&] {
    Batch batch(exchange, route, stream);
    wb_device_exchange& own = batch.own;
    const TensorView from = batch.rows(x, batch.T, true, "x"), to = batch.rows(slots, batch.slots(), true, "slots");
    WB_CHECK(from.dtype == to.dtype, "x is {}, slots {}", to_string(from.dtype), to_string(to.dtype));
    (void)required(sizes, "sizes"), (void)required(valid, "valid");
    const cuda::DeviceGuard guard(own.where.index);
    const cuda::DeviceRows sent[] = {{from.data, 0}};
    batch.plan();
    own.exchange->dispatch(own.handle, from.dtype, sent, own.rows_window, /*after_plan=*/true, batch.stream);
    write_slots(own, to, sizes, valid, batch.stream);
  });
}

wb_status wb_device_exchange_dispatch_start(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* x, const wb_stream* stream) noexcept {
  return guarded([&] {
    Batch batch(exchange, route, stream);
    wb_device_exchange& own = batch.own;
    const TensorView from = batch.rows(x, batch.T, true, "x");
    const cuda::DeviceGuard guard(own.where.index);
    InFlight& to = begin(batch);
    const std::int64_t routes = batch.T * own.config.K;
    copy(to.x, from.data, from.size(), from.dtype, batch.stream);
    copy(to.ids, batch.route[0].ids, routes, route_id_dtype(own.config.E), batch.stream);
    copy(to.weights, batch.route[0].weights, routes, DType::kF32, batch.stream);
    to.ready.record(batch.stream);
    to.ready.wait_on(to.stream), to.read.wait_on(to.stream);
    batch.route[0] = {to.ids.data(), to.weights.as<float>(), batch.T};
    const cuda::DeviceRows sent[] = {{to.x.data(), 0}};
    batch.plan_on(to.stream);
    own.exchange->dispatch(own.handle, from.dtype, sent, own.rows_window, /*after_plan=*/true, to.stream);
    to.finished.record(to.stream);
    to.kind = InFlight::Kind::kDispatch, to.dtype = from.dtype, to.T = batch.T;
  });
}

wb_status wb_device_exchange_dispatch_done(wb_device_exchange* exchange, const wb_tensor* slots, int32_t* sizes, int32_t* valid,
                                           const wb_stream* stream) noexcept {
  return guarded([&] {
    wb_device_exchange& own = required(exchange, "exchange");
    own.memory->check("exchange");
    const TensorView to = own.checked_rows(slots, own.exchange->budget().padded_slots, true, "slots");
    (void)required(sizes, "sizes"), (void)required(valid, "valid");
    const auto queue = static_cast<cudaStream_t>(stream_on(stream, own.where, "the exchange").native);
    const cuda::DeviceGuard guard(own.where.index);
    InFlight& from = begun(own, InFlight::Kind::kDispatch, "wb_device_exchange_dispatch_start");
    WB_CHECK(to.dtype == from.dtype, "slots is {}, x of the start was {}", to_string(to.dtype), to_string(from.dtype));
    from.kind = InFlight::Kind::kNone;
    from.finished.wait_on(queue);
    write_slots(own, to, sizes, valid, queue);
    from.read.record(queue);
  });
}

wb_status wb_device_exchange_combine(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* y, int32_t weighted, const wb_tensor* out,
                                     const wb_stream* stream) noexcept {
  return guarded([&] {
    Batch batch(exchange, route, stream);
    wb_device_exchange& own = batch.own;
    const TensorView from = batch.rows(y, batch.slots(), true, "y"), to = batch.rows(out, batch.T, false, "out");
    const cuda::DeviceGuard guard(own.where.index);
    const cuda::DeviceRows sorted[] = {{from.data, 0}}, partials[] = {own.at(own.partials_window)}, sums[] = {{to.data, 0}};
    batch.plan();
    own.exchange->unpermute_reduce(own.handle, from.dtype, sorted, weighted != 0, own.exchange->partials(), partials, /*z_in_window=*/true, batch.stream);
    own.exchange->combine(own.handle, own.partials_window, DType::kF32, sums, batch.stream);
  });
}

wb_status wb_device_exchange_combine_start(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* y, const wb_stream* stream) noexcept {
  return guarded([&] {
    Batch batch(exchange, route, stream);
    wb_device_exchange& own = batch.own;
    const TensorView from = batch.rows(y, batch.slots(), true, "y");
    const cuda::DeviceGuard guard(own.where.index);
    InFlight& to = begin(batch);
    // The local sums on the caller's stream, so that y is not copied; what crosses the links on the other.
    to.read.wait_on(batch.stream);
    const cuda::DeviceRows sorted[] = {{from.data, 0}}, partials[] = {own.at(own.partials_window)}, sums[] = {{to.out.data(), 0}};
    batch.plan_on(batch.stream);
    own.exchange->unpermute_reduce(own.handle, from.dtype, sorted, /*weighted=*/true, own.exchange->partials(), partials, /*z_in_window=*/true, batch.stream);
    to.ready.record(batch.stream);
    to.ready.wait_on(to.stream);
    own.exchange->combine(own.handle, own.partials_window, DType::kF32, sums, to.stream);
    to.finished.record(to.stream);
    to.kind = InFlight::Kind::kCombine, to.T = batch.T;
  });
}

wb_status wb_device_exchange_combine_done(wb_device_exchange* exchange, const wb_tensor* out, const wb_stream* stream) noexcept {
  return guarded([&] {
    wb_device_exchange& own = required(exchange, "exchange");
    own.memory->check("exchange");
    const auto queue = static_cast<cudaStream_t>(stream_on(stream, own.where, "the exchange").native);
    InFlight& from = begun(own, InFlight::Kind::kCombine, "wb_device_exchange_combine_start");
    const TensorView to = own.checked_rows(out, from.T, false, "out");
    const cuda::DeviceGuard guard(own.where.index);
    from.kind = InFlight::Kind::kNone;
    from.finished.wait_on(queue);
    if (to.size() > 0) WB_TRY_CUDA(cudaMemcpyAsync(to.data, from.out.data(), static_cast<std::size_t>(to.size()) * 4, cudaMemcpyDeviceToDevice, queue));
    from.read.record(queue);
  });
}

wb_status wb_device_exchange_combine_backward(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* d_out, const wb_tensor* y,
                                              const wb_tensor* dy, float* d_weights, const wb_stream* stream) noexcept {
  return guarded([&] {
    Batch batch(exchange, route, stream);
    wb_device_exchange& own = batch.own;
    const TensorView from = batch.rows(d_out, batch.T, false, "d_out"), of = batch.rows(y, batch.slots(), true, "y"),
                     to = batch.rows(dy, batch.slots(), true, "dy");
    WB_CHECK(of.dtype == to.dtype, "y is {}, dy {}", to_string(of.dtype), to_string(to.dtype));
    WB_CHECK(batch.T == 0 || d_weights != nullptr, "d_weights is null");
    const cuda::DeviceGuard guard(own.where.index);
    const cuda::DeviceRows sent[] = {{from.data, 0}}, received[] = {own.at(own.rows_window)}, sorted[] = {{of.data, 0}}, gradient[] = {{to.data, 0}};
    auto* const values = own.d_slots.as<float>();
    float* const slot_values[] = {values};
    const float* const returned[] = {values};
    float* const weights[] = {d_weights};
    batch.plan();
    own.exchange->dispatch(own.handle, DType::kF32, sent, own.rows_window, /*after_plan=*/true, batch.stream);
    own.exchange->unpermute_backward(own.handle, of.dtype, sorted, /*weighted=*/true, DType::kF32, received, gradient, slot_values, batch.stream);
    own.clear_rest(to, batch.stream);
    own.exchange->return_slot_values(own.handle, batch.route, returned, weights, batch.stream);
  });
}

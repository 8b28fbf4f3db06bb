// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on GPUs: they queue on XLA's stream, wait for nothing and plan again at every call. The exchanges are made by Python when a program is
// traced (wbx_make_device_exchange); a program that comes from a cache makes that of a single process by itself.
//
// The start/done pairs have an exchange of their own, which holds one call in flight. A done takes it where it is the one of this execution with the same
// operands: their memory is a done's operand too, so no other live array has it. A start that finds a call of this execution in flight queues nothing and
// spoils that one; a done that finds no start does the whole call. Both depend on the program alone, so that all processes choose alike.
#include "device_registry.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::Result<ffi::Buffer<ffi::F32>>;
using I32Result = ffi::Result<ffi::Buffer<ffi::S32>>;

struct Call {
  Place at;
  wb_device_exchange* exchange = nullptr;
  wb_route route{};

  ffi::Error read(void* stream, std::int32_t ordinal, const Any& ids, const F32& weights, std::int64_t E, std::int64_t P, const Groups& groups,
                  const Bytes& bytes, bool of_pairs = false) {
    wb_exchange_config config{};
    if (!read_config(bytes, config)) return refuse("the exchange's config has another size");
    std::int32_t device = 0;
    ffi::Error error = DeviceExchanges::instance().find(config, static_cast<std::int32_t>(P), groups, ordinal, of_pairs ? 1 : 0, &exchange, &device);
    if (error.failure()) return error;
    at = Place(device, stream);
    route = to_route(E, ids, weights, nullptr, at);
    return ffi::Error::Success();
  }
};

ffi::Error dispatch(void* stream, std::int32_t device, Any x, Any ids, F32 weights, AnyResult slots, I32Result sizes, I32Result valid, std::int64_t E,
                    std::int64_t P, Groups groups, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config); error.failure()) return error;
  const wb_tensor from = to_tensor(x, call.at), to = to_tensor(*slots, call.at);
  return to_error(wb_device_exchange_dispatch(call.exchange, &call.route, &from, &to, sizes->typed_data(), valid->typed_data(), call.at.stream()));
}

ffi::Error combine(void* stream, std::int32_t device, Any y, Any ids, F32 weights, F32Result out, std::int64_t E, std::int64_t P, bool weighted, Groups groups,
                   Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config); error.failure()) return error;
  const wb_tensor from = to_tensor(y, call.at), to = to_tensor(*out, call.at);
  return to_error(wb_device_exchange_combine(call.exchange, &call.route, &from, weighted ? 1 : 0, &to, call.at.stream()));
}

ffi::Error combine_backward(void* stream, std::int32_t device, F32 d_out, Any y, Any ids, F32 weights, AnyResult dy, F32Result d_weights, std::int64_t E,
                            std::int64_t P, Groups groups, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config); error.failure()) return error;
  const wb_tensor from = to_tensor(d_out, call.at), of = to_tensor(y, call.at), to = to_tensor(*dy, call.at);
  return to_error(wb_device_exchange_combine_backward(call.exchange, &call.route, &from, &of, &to, d_weights->typed_data(), call.at.stream()));
}

// ---- start and done ---------------------------------------------------------------------------------------------------

struct InFlight {
  std::int64_t run = 0;
  const char* op = nullptr;  // null: none
  const void *rows = nullptr, *ids = nullptr, *weights = nullptr;
  bool operator==(const InFlight&) const = default;
};

struct AllInFlight {
  std::mutex mutex;
  std::map<const wb_device_exchange*, InFlight> calls;
  std::int64_t num_done = 0, num_begun = 0;  // done calls so far; those of them that found their start

  static AllInFlight& instance() {
    static AllInFlight* const all = new AllInFlight;
    return *all;
  }
  // Whether a start may queue its call; what an earlier execution left behind is dropped.
  bool begin(const wb_device_exchange* exchange, const InFlight& call) {
    const std::lock_guard lock(mutex);
    InFlight& current = calls[exchange];
    if (current.op != nullptr && current.run == call.run) {
      current.rows = nullptr;  // no done takes it: with two in flight operands do not tell which is meant
      return false;
    }
    current = call;
    return true;
  }
  bool take(const wb_device_exchange* exchange, const InFlight& call) {
    const std::lock_guard lock(mutex);
    InFlight& current = calls[exchange];
    const bool found = current == call;
    if (found) current = {};
    ++num_done, num_begun += found ? 1 : 0;
    return found;
  }
};

constexpr char kDispatch[] = "dispatch", kCombine[] = "combine";

InFlight in_flight(const ffi::RunId& run, const char* op, const Any& rows, const Any& ids, const F32& weights) {
  return {run.run_id, op, rows.untyped_data(), ids.untyped_data(), weights.untyped_data()};
}

// The handle that a start gives is an operand of its done and has no contents.
ffi::Error dispatch_start(void* stream, std::int32_t device, ffi::RunId run, Any x, Any ids, F32 weights, AnyResult, std::int64_t E, std::int64_t P,
                          Groups groups, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config, true); error.failure()) return error;
  if (!AllInFlight::instance().begin(call.exchange, in_flight(run, kDispatch, x, ids, weights))) return ffi::Error::Success();
  const wb_tensor from = to_tensor(x, call.at);
  return to_error(wb_device_exchange_dispatch_start(call.exchange, &call.route, &from, call.at.stream()));
}

ffi::Error dispatch_done(void* stream, std::int32_t device, ffi::RunId run, Any x, Any ids, F32 weights, Any, AnyResult slots, I32Result sizes, I32Result valid,
                         std::int64_t E, std::int64_t P, Groups groups, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config, true); error.failure()) return error;
  if (!AllInFlight::instance().take(call.exchange, in_flight(run, kDispatch, x, ids, weights))) {
    return dispatch(stream, device, x, ids, weights, slots, sizes, valid, E, P, groups, config);
  }
  const wb_tensor to = to_tensor(*slots, call.at);
  return to_error(wb_device_exchange_dispatch_done(call.exchange, &to, sizes->typed_data(), valid->typed_data(), call.at.stream()));
}

ffi::Error combine_start(void* stream, std::int32_t device, ffi::RunId run, Any y, Any ids, F32 weights, AnyResult, std::int64_t E, std::int64_t P,
                         Groups groups, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config, true); error.failure()) return error;
  if (!AllInFlight::instance().begin(call.exchange, in_flight(run, kCombine, y, ids, weights))) return ffi::Error::Success();
  const wb_tensor from = to_tensor(y, call.at);
  return to_error(wb_device_exchange_combine_start(call.exchange, &call.route, &from, call.at.stream()));
}

ffi::Error combine_done(void* stream, std::int32_t device, ffi::RunId run, Any y, Any ids, F32 weights, Any, F32Result out, std::int64_t E, std::int64_t P,
                        Groups groups, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, groups, config, true); error.failure()) return error;
  if (!AllInFlight::instance().take(call.exchange, in_flight(run, kCombine, y, ids, weights))) {
    return combine(stream, device, y, ids, weights, out, E, P, true, groups, config);
  }
  const wb_tensor to = to_tensor(*out, call.at);
  return to_error(wb_device_exchange_combine_done(call.exchange, &to, call.at.stream()));
}

auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>(); }

}  // namespace

// Not in command buffers: the transfer's stream joins at the done only.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    wbx_device_dispatch_start_cuda, dispatch_start,
    on_cuda().Ctx<ffi::RunId>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<Any>().Attr<std::int64_t>("E").Attr<std::int64_t>("P").Attr<Groups>("groups").Attr<Bytes>(
        "config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_device_dispatch_done_cuda, dispatch_done,
                              on_cuda()
                                  .Ctx<ffi::RunId>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<F32>()
                                  .Arg<Any>()
                                  .Ret<Any>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<std::int64_t>("E")
                                  .Attr<std::int64_t>("P")
                                  .Attr<Groups>("groups")
                                  .Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    wbx_device_combine_start_cuda, combine_start,
    on_cuda().Ctx<ffi::RunId>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<Any>().Attr<std::int64_t>("E").Attr<std::int64_t>("P").Attr<Groups>("groups").Attr<Bytes>(
        "config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_device_combine_done_cuda, combine_done,
                              on_cuda()
                                  .Ctx<ffi::RunId>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<F32>()
                                  .Arg<Any>()
                                  .Ret<F32>()
                                  .Attr<std::int64_t>("E")
                                  .Attr<std::int64_t>("P")
                                  .Attr<Groups>("groups")
                                  .Attr<Bytes>("config"));

#define WB_FFI_DEVICE_OP(name, arguments) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_device_##name##_cuda, name, on_cuda() arguments, {ffi::Traits::kCmdBufferCompatible})

WB_FFI_DEVICE_OP(dispatch, .Arg<Any>()
                               .Arg<Any>()
                               .Arg<F32>()
                               .Ret<Any>()
                               .Ret<ffi::Buffer<ffi::S32>>()
                               .Ret<ffi::Buffer<ffi::S32>>()
                               .Attr<std::int64_t>("E")
                               .Attr<std::int64_t>("P")
                               .Attr<Groups>("groups")
                               .Attr<Bytes>("config"));
WB_FFI_DEVICE_OP(combine, .Arg<Any>()
                              .Arg<Any>()
                              .Arg<F32>()
                              .Ret<F32>()
                              .Attr<std::int64_t>("E")
                              .Attr<std::int64_t>("P")
                              .Attr<bool>("weighted")
                              .Attr<Groups>("groups")
                              .Attr<Bytes>("config"));
WB_FFI_DEVICE_OP(
    combine_backward,
    .Arg<F32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<Any>().Ret<F32>().Attr<std::int64_t>("E").Attr<std::int64_t>("P").Attr<Groups>("groups").Attr<Bytes>(
        "config"));

#undef WB_FFI_DEVICE_OP

}  // namespace waybill::jax

// For Python (ctypes): a wb_status. Collective over the group's processes; waits for the device. index 1: the one of the start/done pairs.
extern "C" __attribute__((visibility("default"))) int wbx_make_device_exchange(const wb_exchange_config* config, std::int32_t P, std::int32_t device,
                                                                               std::int32_t index, const wb_process_group* group) {
  wb_device_exchange* exchange = nullptr;
  return waybill::jax::DeviceExchanges::instance().get(*config, P, device, index, group, true, &exchange);
}

// For Python (ctypes): a wb_status. All P exchanges of a group within this process, as wbx_make_local_layer.
extern "C" __attribute__((visibility("default"))) int wbx_make_local_exchange(const wb_exchange_config* config, std::int32_t P, const std::int32_t* ordinals,
                                                                              const std::int32_t* devices, std::int32_t index) {
  return waybill::jax::DeviceExchanges::instance().make_local(*config, P, ordinals, devices, index);
}

// For Python (ctypes): done calls on GPUs so far, and those of them that found their start.
extern "C" __attribute__((visibility("default"))) void wbx_device_pair_counts(std::int64_t* done, std::int64_t* begun) {
  auto& all = waybill::jax::AllInFlight::instance();
  const std::lock_guard lock(all.mutex);
  *done = all.num_done, *begun = all.num_begun;
}

// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on GPUs: they queue on XLA's stream, wait for nothing and plan again at every call. The exchanges are made by Python when a program is
// traced (wbx_make_device_exchange); a program that comes from a cache makes that of a single process by itself.
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

  ffi::Error read(void* stream, std::int32_t device, const Any& ids, const F32& weights, std::int64_t E, std::int64_t P, const Bytes& bytes) {
    at = Place(device, stream);
    wb_exchange_config config{};
    if (!read_config(bytes, config)) return refuse("the exchange's config has another size");
    WB_FFI_TRY(DeviceExchanges::instance().get(config, static_cast<std::int32_t>(P), device, nullptr, P == 1, &exchange));
    if (exchange == nullptr) return refuse("this process has not made the exchange of this program; trace it here");
    route = to_route(E, ids, weights, nullptr, at);
    return ffi::Error::Success();
  }
};

ffi::Error dispatch(void* stream, std::int32_t device, Any x, Any ids, F32 weights, AnyResult slots, I32Result sizes, I32Result valid, std::int64_t E,
                    std::int64_t P, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, config); error.failure()) return error;
  const wb_tensor from = to_tensor(x, call.at), to = to_tensor(*slots, call.at);
  return to_error(wb_device_exchange_dispatch(call.exchange, &call.route, &from, &to, sizes->typed_data(), valid->typed_data(), call.at.stream()));
}

ffi::Error combine(void* stream, std::int32_t device, Any y, Any ids, F32 weights, F32Result out, std::int64_t E, std::int64_t P, bool weighted, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, config); error.failure()) return error;
  const wb_tensor from = to_tensor(y, call.at), to = to_tensor(*out, call.at);
  return to_error(wb_device_exchange_combine(call.exchange, &call.route, &from, weighted ? 1 : 0, &to, call.at.stream()));
}

ffi::Error combine_backward(void* stream, std::int32_t device, F32 d_out, Any y, Any ids, F32 weights, AnyResult dy, F32Result d_weights, std::int64_t E,
                            std::int64_t P, Bytes config) {
  Call call;
  if (ffi::Error error = call.read(stream, device, ids, weights, E, P, config); error.failure()) return error;
  const wb_tensor from = to_tensor(d_out, call.at), of = to_tensor(y, call.at), to = to_tensor(*dy, call.at);
  return to_error(wb_device_exchange_combine_backward(call.exchange, &call.route, &from, &of, &to, d_weights->typed_data(), call.at.stream()));
}

auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>(); }

}  // namespace

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
                               .Attr<Bytes>("config"));
WB_FFI_DEVICE_OP(combine,
                 .Arg<Any>().Arg<Any>().Arg<F32>().Ret<F32>().Attr<std::int64_t>("E").Attr<std::int64_t>("P").Attr<bool>("weighted").Attr<Bytes>("config"));
WB_FFI_DEVICE_OP(combine_backward,
                 .Arg<F32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<Any>().Ret<F32>().Attr<std::int64_t>("E").Attr<std::int64_t>("P").Attr<Bytes>("config"));

#undef WB_FFI_DEVICE_OP

}  // namespace waybill::jax

// For Python (ctypes): a wb_status. Collective over the group's processes; waits for the device.
extern "C" __attribute__((visibility("default"))) int wbx_make_device_exchange(const wb_exchange_config* config, std::int32_t P, std::int32_t device,
                                                                               const wb_process_group* group) {
  wb_device_exchange* exchange = nullptr;
  return waybill::jax::DeviceExchanges::instance().get(*config, P, device, group, true, &exchange);
}

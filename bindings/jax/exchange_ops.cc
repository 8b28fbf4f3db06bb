// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine. Pure functions of their arrays: each plans its batch again from the compact routes (2 to 6 bytes a route to its
// rank), so that no state lives between calls and XLA may repeat, drop or reorder them. The start/done forms keep what has travelled in between; a
// done that finds nothing does the whole call.
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>

#include "ffi_support.h"
#include "meeting.h"
#include "process_mesh.h"
#include "workers.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::Result<ffi::Buffer<ffi::F32>>;
using I32Result = ffi::Result<ffi::Buffer<ffi::S32>>;
using U32 = ffi::Buffer<ffi::U32>;
using U32Result = ffi::Result<ffi::Buffer<ffi::U32>>;

// A number for one execution of a call. It takes the call's operands, unread: so XLA can merge two of them only where it could merge the calls.
ffi::Error ticket(ffi::RemainingArgs, U32Result ticket, std::string_view, Bytes) {
  static std::atomic<std::uint64_t> next{1};
  const std::uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  ticket->typed_data()[0] = ProcessMesh::instance().my_index();
  ticket->typed_data()[1] = static_cast<std::uint32_t>(number);
  ticket->typed_data()[2] = static_cast<std::uint32_t>(number >> 32);
  return ffi::Error::Success();
}

// What every call of this file is given.
struct Call {
  Invitation invitation;
  wb_exchange_config config{};
  wb_route route{};
  bool config_fits = false;

  Call(const char* op, const U32& place, const Any& ids, const F32& weights, std::int64_t E, std::int64_t P, const Bytes& bytes)
      : invitation(Invitation::read(op + std::string(bytes.begin(), bytes.end()), place, P)),
        route(to_route(E, ids, weights)),
        config_fits(read_config(bytes, config)) {}
};

// A planned batch on one rank; destroys its plan before it leaves the meeting.
class Batch {
 public:
  ffi::Error open(const Call& call) {
    if (!call.config_fits) return refuse("the exchange's config has another size");
    if (ffi::Error error = Seat::take(call.invitation, seat_); error.failure()) return error;
    return seat_->done(try_open(call));
  }
  ~Batch() { wb_dispatch_destroy(dispatch_); }
  ffi::Error done(wb_status status) { return seat_->done(status); }

  wb_exchange* exchange() const { return exchange_; }
  wb_dispatch* dispatch() const { return dispatch_; }
  const wb_dispatch_info& info() const { return info_; }

 private:
  wb_status try_open(const Call& call) {
    if (wb_status status = seat_->exchange(call.config, &exchange_); status != WB_OK) return status;
    if (wb_status status = wb_exchange_plan(exchange_, &call.route, &dispatch_); status != WB_OK) return status;
    return wb_dispatch_get_info(dispatch_, &info_);
  }
  std::unique_ptr<Seat> seat_;
  wb_exchange* exchange_ = nullptr;
  wb_dispatch* dispatch_ = nullptr;
  wb_dispatch_info info_{sizeof(wb_dispatch_info)};
};

std::size_t bytes_of(const wb_tensor& tensor) {
  std::size_t count = tensor.dtype == WB_F32 || tensor.dtype == WB_I32 ? 4 : 2;
  for (int axis = 0; axis < tensor.rank; ++axis) count *= static_cast<std::size_t>(tensor.shape[axis]);
  return count;
}

// The used part of a buffer that XLA sized for the worst case.
wb_tensor head(wb_tensor tensor, std::int64_t rows) {
  tensor.shape[0] = rows;
  return tensor;
}

// The results of a dispatch.
struct SlotArrays {
  wb_tensor slots;  // [S_max, H]
  std::int32_t* sizes;
  std::int32_t* valid;
};

ffi::Error write_slots(Batch& batch, const wb_tensor& rows, const SlotArrays& to) {
  const wb_dispatch_info& info = batch.info();
  if (info.S_padded > to.slots.shape[0]) {
    batch.done(WB_INTERNAL);
    return refuse("a receive layout of " + std::to_string(info.S_padded) + " slots passes the buffer of " + std::to_string(to.slots.shape[0]));
  }
  const wb_tensor used = head(to.slots, info.S_padded), rest = head(to.slots, to.slots.shape[0] - info.S_padded);
  std::memset(static_cast<char*>(to.slots.data) + bytes_of(used), 0, bytes_of(rest));
  if (wb_status status = wb_permute(batch.dispatch(), &rows, &used, nullptr); status != WB_OK) return batch.done(status);
  for (std::int64_t e = 0; e < info.L; ++e) to.sizes[e] = info.valid != 0 ? info.expert_offsets[e + 1] - info.expert_offsets[e] : 0;
  *to.valid = info.valid;
  return ffi::Error::Success();
}

// x [T, H] -> slots [S_max, H] by local expert. Slots that no route fills are 0 with row -1 and weight 0.
ffi::Error run_dispatch(const Call& call, const wb_tensor& x, const SlotArrays& to) {
  Batch batch;
  if (ffi::Error error = batch.open(call); error.failure()) return error;
  wb_tensor rows{};
  if (wb_status status = wb_exchange_dispatch(batch.exchange(), batch.dispatch(), &x, &rows); status != WB_OK) return batch.done(status);
  return write_slots(batch, rows, to);
}

ffi::Future dispatch(U32 place, Any x, Any ids, F32 weights, AnyResult slots, I32Result sizes, I32Result valid, std::int64_t E, std::int64_t P, Bytes config) {
  return launch(P == 1, [call = Call("dispatch", place, ids, weights, E, P, config), from = to_tensor(x),
                         to = SlotArrays{to_tensor(*slots), sizes->typed_data(), valid->typed_data()}] { return run_dispatch(call, from, to); });
}

// y [S_max, H] -> out [T, H] fp32: slots of a row in order k, then ranks in rank order.
ffi::Error run_combine(const Call& call, const wb_tensor& y, const wb_tensor& out, bool weighted) {
  Batch batch;
  if (ffi::Error error = batch.open(call); error.failure()) return error;
  const wb_tensor from = head(y, batch.info().S_padded);
  std::vector<float> memory(static_cast<std::size_t>(batch.info().R * out.shape[1]));
  wb_tensor z = head(out, batch.info().R);
  z.data = memory.data();
  if (wb_status status = wb_unpermute_reduce(batch.dispatch(), &from, weighted ? 1 : 0, &z, nullptr); status != WB_OK) return batch.done(status);
  return batch.done(wb_exchange_combine(batch.exchange(), batch.dispatch(), &z, &out));
}

ffi::Future combine(U32 place, Any y, Any ids, F32 weights, F32Result out, std::int64_t E, std::int64_t P, bool weighted, Bytes config) {
  return launch(P == 1, [call = Call("combine", place, ids, weights, E, P, config), from = to_tensor(y), to = to_tensor(*out), weighted] {
    return run_combine(call, from, to, weighted);
  });
}

// Backward of the weighted combine: d_out [T, H] -> dy [S_max, H], d_weights [T, K].
ffi::Error run_combine_backward(const Call& call, const wb_tensor& d_out, const wb_tensor& y, const wb_tensor& dy, float* d_weights) {
  std::memset(dy.data, 0, bytes_of(dy));
  Batch batch;
  if (ffi::Error error = batch.open(call); error.failure()) return error;
  wb_tensor dz{};
  if (wb_status status = wb_exchange_dispatch(batch.exchange(), batch.dispatch(), &d_out, &dz); status != WB_OK) return batch.done(status);
  const std::int64_t slots = batch.info().S_padded;
  const wb_tensor used_y = head(y, slots), used_dy = head(dy, slots);
  std::vector<float> d_slot(static_cast<std::size_t>(slots));
  if (wb_status status = wb_unpermute_reduce_backward(batch.dispatch(), &used_y, 1, &dz, &used_dy, d_slot.data(), nullptr); status != WB_OK) {
    return batch.done(status);
  }
  return batch.done(wb_exchange_return_slot_values(batch.exchange(), batch.dispatch(), d_slot.data(), d_weights));
}

ffi::Future combine_backward(U32 place, F32 d_out, Any y, Any ids, F32 weights, AnyResult dy, F32Result d_weights, std::int64_t E, std::int64_t P,
                             Bytes config) {
  return launch(P == 1, [call = Call("combine_backward", place, ids, weights, E, P, config), from = to_tensor(d_out), of = to_tensor(y), to = to_tensor(*dy),
                         d = d_weights->typed_data()] { return run_combine_backward(call, from, of, to, d); });
}

// ---- start and done ---------------------------------------------------------------------------------------------------

// A call between its start and its done. It owns copies of its operands: XLA may use their memory again when start has returned.
struct Pending {
  std::vector<std::byte> rows, ids;
  std::vector<float> weights;
  std::optional<Call> call;
  wb_tensor operand{};

  Batch batch;  // of a dispatch: its rows wait here for done
  wb_tensor received{};
  std::vector<float> out;  // of a combine [T, H]

  std::mutex mutex;
  bool finished = false;
  ffi::Error error = ffi::Error::Success();
  std::function<void()> then;  // done has come before the end

  Pending(Call given, const wb_tensor& from) : call(std::move(given)), operand(from) {
    const auto keep = [](std::vector<std::byte>& memory, void*& data, std::size_t bytes) {
      memory.resize(bytes);
      if (bytes > 0) std::memcpy(memory.data(), data, bytes);
      data = memory.data();
    };
    wb_route& route = call->route;
    const auto routes = static_cast<std::size_t>(route.T * route.K);
    keep(rows, operand.data, bytes_of(operand));
    keep(ids, route.ids, routes * (route.id_dtype == WB_I16 ? 2 : 4));
    weights.assign(route.weights, route.weights + routes);
    route.weights = weights.data();
  }
};

struct PendingCalls {
  std::mutex mutex;
  std::uint64_t next = 1;
  std::map<std::uint64_t, std::shared_ptr<Pending>> calls;
  std::int64_t num_done = 0, num_ready = 0;  // done calls so far; those of them that found the background part finished

  static PendingCalls& instance() {
    static PendingCalls* const all = new PendingCalls;
    return *all;
  }
  std::shared_ptr<Pending> take(const U32& handle) {
    const std::lock_guard lock(mutex);
    const auto found = calls.find(handle.typed_data()[0] | static_cast<std::uint64_t>(handle.typed_data()[1]) << 32);
    if (found == calls.end()) return nullptr;
    std::shared_ptr<Pending> pending = std::move(found->second);
    calls.erase(found);
    return pending;
  }
};

// Gives `pending` a number and runs `work` on a thread of its own.
ffi::Error begin(std::shared_ptr<Pending> pending, U32Result handle, std::function<ffi::Error(Pending&)> work) {
  PendingCalls& all = PendingCalls::instance();
  {
    const std::lock_guard lock(all.mutex);
    const std::uint64_t number = all.next++;
    all.calls.emplace(number, pending);
    handle->typed_data()[0] = static_cast<std::uint32_t>(number);
    handle->typed_data()[1] = static_cast<std::uint32_t>(number >> 32);
  }
  Workers::instance().run([pending = std::move(pending), work = std::move(work)] {
    ffi::Error error = work(*pending);
    std::unique_lock lock(pending->mutex);
    pending->error = std::move(error);
    pending->finished = true;
    const std::function<void()> then = std::move(pending->then);
    lock.unlock();
    if (then) then();
  });
  return ffi::Error::Success();
}

// Completes with `deliver`, at once or when the background part has ended.
ffi::Future end(std::shared_ptr<Pending> pending, std::function<ffi::Error(Pending&)> deliver) {
  ffi::Promise promise;
  ffi::Future future(promise);
  auto finish = [pending, deliver = std::move(deliver), promise]() mutable {
    complete(promise, pending->error.failure() ? std::move(pending->error) : deliver(*pending));
  };
  std::unique_lock lock(pending->mutex);
  {
    PendingCalls& all = PendingCalls::instance();
    const std::lock_guard counting(all.mutex);
    ++all.num_done;
    all.num_ready += pending->finished ? 1 : 0;
  }
  if (!pending->finished) {
    pending->then = finish;
    return future;
  }
  lock.unlock();
  finish();
  return future;
}

ffi::Error dispatch_start(U32 place, Any x, Any ids, F32 weights, U32Result handle, std::int64_t E, std::int64_t P, Bytes config) {
  return begin(std::make_shared<Pending>(Call("dispatch", place, ids, weights, E, P, config), to_tensor(x)), handle, [](Pending& own) {
    if (ffi::Error error = own.batch.open(*own.call); error.failure()) return error;
    return own.batch.done(wb_exchange_dispatch(own.batch.exchange(), own.batch.dispatch(), &own.operand, &own.received));
  });
}

ffi::Future dispatch_done(U32 place, Any x, Any ids, F32 weights, U32 handle, AnyResult slots, I32Result sizes, I32Result valid, std::int64_t E, std::int64_t P,
                          Bytes config) {
  const std::shared_ptr<Pending> pending = PendingCalls::instance().take(handle);
  if (pending == nullptr) return dispatch(place, x, ids, weights, slots, sizes, valid, E, P, config);  // rematerialised without its start
  return end(pending,
             [to = SlotArrays{to_tensor(*slots), sizes->typed_data(), valid->typed_data()}](Pending& own) { return write_slots(own.batch, own.received, to); });
}

ffi::Error combine_start(U32 place, Any y, Any ids, F32 weights, U32Result handle, std::int64_t E, std::int64_t P, Bytes config) {
  return begin(std::make_shared<Pending>(Call("combine", place, ids, weights, E, P, config), to_tensor(y)), handle, [](Pending& own) {
    wb_tensor out = own.operand;
    out.shape[0] = own.call->route.T;
    out.dtype = WB_F32;
    own.out.resize(static_cast<std::size_t>(out.shape[0] * out.shape[1]));
    out.data = own.out.data();
    return run_combine(*own.call, own.operand, out, true);
  });
}

ffi::Future combine_done(U32 place, Any y, Any ids, F32 weights, U32 handle, F32Result out, std::int64_t E, std::int64_t P, Bytes config) {
  const std::shared_ptr<Pending> pending = PendingCalls::instance().take(handle);
  if (pending == nullptr) return combine(place, y, ids, weights, out, E, P, true, config);
  return end(pending, [to = out->typed_data()](Pending& own) {
    if (!own.out.empty()) std::memcpy(to, own.out.data(), own.out.size() * sizeof(float));
    return ffi::Error::Success();
  });
}

}  // namespace

// clang-format off
#define WB_EXCHANGE_ATTRS .Attr<std::int64_t>("E").Attr<std::int64_t>("P")
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_ticket, ticket,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::Buffer<ffi::U32>>().Attr<std::string_view>("op").Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_dispatch, dispatch,
                              ffi::Ffi::Bind().Arg<U32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<Any>().Ret<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>()
                              WB_EXCHANGE_ATTRS.Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_combine, combine,
                              ffi::Ffi::Bind().Arg<U32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<F32>()
                              WB_EXCHANGE_ATTRS.Attr<bool>("weighted").Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_combine_backward, combine_backward,
                              ffi::Ffi::Bind().Arg<U32>().Arg<F32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<Any>().Ret<F32>()
                              WB_EXCHANGE_ATTRS.Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_dispatch_start, dispatch_start,
                              ffi::Ffi::Bind().Arg<U32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<U32>() WB_EXCHANGE_ATTRS.Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_dispatch_done, dispatch_done,
                              ffi::Ffi::Bind().Arg<U32>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<U32>().Ret<Any>().Ret<ffi::Buffer<ffi::S32>>()
                              .Ret<ffi::Buffer<ffi::S32>>() WB_EXCHANGE_ATTRS.Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_combine_start, combine_start,
                              ffi::Ffi::Bind().Arg<U32>().Arg<Any>().Arg<Any>().Arg<F32>().Ret<U32>() WB_EXCHANGE_ATTRS.Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_combine_done, combine_done,
                              ffi::Ffi::Bind().Arg<U32>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<U32>().Ret<F32>() WB_EXCHANGE_ATTRS.Attr<Bytes>("config"));
#undef WB_EXCHANGE_ATTRS
// clang-format on

}  // namespace waybill::jax

// For Python (ctypes): calls that wait for their done; done calls so far, and those of them that had nothing to wait for.
extern "C" __attribute__((visibility("default"))) void wbx_pending_counts(std::int64_t* waiting, std::int64_t* done, std::int64_t* ready) {
  auto& all = waybill::jax::PendingCalls::instance();
  const std::lock_guard lock(all.mutex);
  *waiting = static_cast<std::int64_t>(all.calls.size());
  *done = all.num_done;
  *ready = all.num_ready;
}

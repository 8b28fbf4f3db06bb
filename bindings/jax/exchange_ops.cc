// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine. Pure functions of their arrays: each plans its batch again from the compact routes (2 to 6 bytes a route to its
// rank), so that no state lives between calls and XLA may repeat, drop or reorder them.
#include "ffi_support.h"
#include "meeting.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::Result<ffi::Buffer<ffi::F32>>;
using I32 = ffi::Buffer<ffi::S32>;
using I32Result = ffi::Result<ffi::Buffer<ffi::S32>>;

// A planned batch on one rank; destroys its plan before it leaves the meeting.
class Batch {
 public:
  // where [2]: group, rank.
  ffi::Error open(std::int64_t run_id, const I32& where, std::int64_t P, std::int64_t call, const Bytes& bytes, const char* op, const wb_route& route) {
    wb_exchange_config config{};
    if (!read_config(bytes, config)) return refuse("the exchange's config has another size");
    CallSite site{run_id, std::string(op) + std::to_string(call) + std::string(bytes.begin(), bytes.end()), where.typed_data()[0], where.typed_data()[1],
                  static_cast<std::int32_t>(P)};
    WB_FFI_TRY(Seat::take(site, seat_));
    if (wb_status status = try_open(config, route); status != WB_OK) return to_error(seat_->done(status));
    return ffi::Error::Success();
  }
  ~Batch() { wb_dispatch_destroy(dispatch_); }
  ffi::Error done(wb_status status) { return to_error(seat_->done(status)); }

  wb_exchange* exchange() const { return exchange_; }
  wb_dispatch* dispatch() const { return dispatch_; }
  const wb_dispatch_info& info() const { return info_; }

 private:
  wb_status try_open(const wb_exchange_config& config, const wb_route& route) {
    if (wb_status status = seat_->exchange(config, &exchange_); status != WB_OK) return status;
    if (wb_status status = wb_exchange_plan(exchange_, &route, &dispatch_); status != WB_OK) return status;
    return wb_dispatch_get_info(dispatch_, &info_);
  }
  std::unique_ptr<Seat> seat_;
  wb_exchange* exchange_ = nullptr;
  wb_dispatch* dispatch_ = nullptr;
  wb_dispatch_info info_{sizeof(wb_dispatch_info)};
};

std::size_t bytes_of(const wb_tensor& tensor) {
  const std::size_t element = tensor.dtype == WB_F32 ? 4 : 2;
  std::size_t count = 1;
  for (int axis = 0; axis < tensor.rank; ++axis) count *= static_cast<std::size_t>(tensor.shape[axis]);
  return count * element;
}

// The used part of a buffer that XLA sized for the worst case.
wb_tensor head(wb_tensor tensor, std::int64_t rows) {
  tensor.shape[0] = rows;
  return tensor;
}

// x [T, H] -> slots [S_max, H] by local expert. Slots that no route fills are 0 with row -1 and weight 0.
ffi::Error dispatch(ffi::RunId run, I32 where, Any x, Any ids, F32 weights, AnyResult slots, I32Result sizes, I32Result valid, std::int64_t E, std::int64_t P,
                    std::int64_t call, Bytes config) {
  const wb_tensor from = to_tensor(x), to = to_tensor(*slots);
  std::memset(to.data, 0, bytes_of(to));
  std::memset(sizes->untyped_data(), 0, sizes->size_bytes());
  Batch batch;
  if (ffi::Error error = batch.open(run.run_id, where, P, call, config, "dispatch", to_route(E, ids, weights)); error.failure()) return error;
  const wb_dispatch_info& info = batch.info();
  *valid->typed_data() = info.valid;
  if (info.S_padded > to.shape[0]) {
    batch.done(WB_INTERNAL);
    return refuse("a receive layout of " + std::to_string(info.S_padded) + " slots passes the buffer of " + std::to_string(to.shape[0]));
  }
  wb_tensor rows{};
  if (wb_status status = wb_exchange_dispatch(batch.exchange(), batch.dispatch(), &from, &rows); status != WB_OK) return batch.done(status);
  const wb_tensor used = head(to, info.S_padded);
  if (wb_status status = wb_permute(batch.dispatch(), &rows, &used, nullptr); status != WB_OK) return batch.done(status);
  for (std::int64_t e = 0; e < info.L && info.valid != 0; ++e) sizes->typed_data()[e] = info.expert_offsets[e + 1] - info.expert_offsets[e];
  return ffi::Error::Success();
}

// y [S_max, H] -> out [T, H] fp32: slots of a row in order k, then ranks in rank order.
ffi::Error combine(ffi::RunId run, I32 where, Any y, Any ids, F32 weights, F32Result out, std::int64_t E, std::int64_t P, std::int64_t call, bool weighted,
                   Bytes config) {
  Batch batch;
  if (ffi::Error error = batch.open(run.run_id, where, P, call, config, "combine", to_route(E, ids, weights)); error.failure()) return error;
  const wb_tensor from = head(to_tensor(y), batch.info().S_padded), to = to_tensor(*out);
  std::vector<float> memory(static_cast<std::size_t>(batch.info().R * to.shape[1]));
  wb_tensor z = head(to, batch.info().R);
  z.data = memory.data();
  if (wb_status status = wb_unpermute_reduce(batch.dispatch(), &from, weighted ? 1 : 0, &z, nullptr); status != WB_OK) return batch.done(status);
  return batch.done(wb_exchange_combine(batch.exchange(), batch.dispatch(), &z, &to));
}

// Backward of the weighted combine: d_out [T, H] -> dy [S_max, H], d_weights [T, K].
ffi::Error combine_backward(ffi::RunId run, I32 where, F32 d_out, Any y, Any ids, F32 weights, AnyResult dy, F32Result d_weights, std::int64_t E,
                            std::int64_t P, std::int64_t call, Bytes config) {
  const wb_tensor to = to_tensor(*dy), from = to_tensor(d_out);
  std::memset(to.data, 0, bytes_of(to));
  Batch batch;
  if (ffi::Error error = batch.open(run.run_id, where, P, call, config, "combine_backward", to_route(E, ids, weights)); error.failure()) return error;
  wb_tensor dz{};
  if (wb_status status = wb_exchange_dispatch(batch.exchange(), batch.dispatch(), &from, &dz); status != WB_OK) return batch.done(status);
  const std::int64_t slots = batch.info().S_padded;
  const wb_tensor used_y = head(to_tensor(y), slots), used_dy = head(to, slots);
  std::vector<float> d_slot(static_cast<std::size_t>(slots));
  if (wb_status status = wb_unpermute_reduce_backward(batch.dispatch(), &used_y, 1, &dz, &used_dy, d_slot.data(), nullptr); status != WB_OK) {
    return batch.done(status);
  }
  return batch.done(wb_exchange_return_slot_values(batch.exchange(), batch.dispatch(), d_slot.data(), d_weights->typed_data()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_dispatch, dispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<I32>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<F32>()
                                  .Ret<Any>()
                                  .Ret<I32>()
                                  .Ret<I32>()
                                  .Attr<std::int64_t>("E")
                                  .Attr<std::int64_t>("P")
                                  .Attr<std::int64_t>("call")
                                  .Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_combine, combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<I32>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<std::int64_t>("E")
                                  .Attr<std::int64_t>("P")
                                  .Attr<std::int64_t>("call")
                                  .Attr<bool>("weighted")
                                  .Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_combine_backward, combine_backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<F32>()
                                  .Ret<Any>()
                                  .Ret<F32>()
                                  .Attr<std::int64_t>("E")
                                  .Attr<std::int64_t>("P")
                                  .Attr<std::int64_t>("call")
                                  .Attr<Bytes>("config"));

}  // namespace waybill::jax

// SPDX-License-Identifier: Apache-2.0
// The whole MoE block, forward and backward.
#include "ffi_support.h"
#include "meeting.h"
#include "saved_steps.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// Parameters come in this order, those that `given` names by bit; kHasMask: a padding mask follows.
constexpr std::int64_t kNumParameters = 10;
constexpr std::int64_t kRouterBias = 1;
constexpr std::int64_t kHasMask = kNumParameters;

wb_tensor* field(wb_moe_tensors& tensors, std::int64_t index) {
  wb_tensor* const fields[kNumParameters] = {&tensors.gate, &tensors.router_bias, &tensors.w1,        &tensors.w2,          &tensors.b1,
                                             &tensors.b2,   &tensors.shared_w1,   &tensors.shared_w2, &tensors.latent_down, &tensors.latent_up};
  return fields[index];
}

// The operands of both directions. where [3]: group, rank, seed of the recipe's random numbers.
struct Operands {
  I32 const& where;
  F32 const& x;
  ffi::RemainingArgs const& rest;
  std::int64_t given;

  std::size_t read(wb_moe_tensors& parameters, wb_moe_forward_options& options) const {
    std::size_t position = 0;
    options.rounding_seed = static_cast<std::uint32_t>(where.typed_data()[2]);
    parameters.struct_size = sizeof(parameters);
    for (std::int64_t i = 0; i < kNumParameters; ++i) {
      if ((given >> i & 1) != 0) *field(parameters, i) = to_tensor(*rest.get<Any>(position++));
    }
    if ((given >> kHasMask & 1) != 0) options.padding_mask = to_tensor(*rest.get<Any>(position++));
    return position;
  }
};

struct Site {
  std::int64_t run_id, P, call;
  const Bytes& bytes;
};

ffi::Error take_seat(const Site& site, const char* direction, const I32& where, wb_moe_config& config, std::unique_ptr<Seat>& seat, wb_moe_layer** layer) {
  if (!read_config(site.bytes, config)) return refuse("the block's config has another size");
  WB_FFI_TRY(Seat::take(CallSite{site.run_id, direction + std::to_string(site.call) + std::string(site.bytes.begin(), site.bytes.end()), where.typed_data()[0],
                                 where.typed_data()[1], static_cast<std::int32_t>(site.P)},
                        seat));
  return to_error(seat->done(seat->layer(config, layer)));
}

void write_results(const wb_moe_step_info& info, AnyResult ids, AnyResult weights, AnyResult counts, AnyResult losses, AnyResult status) {
  std::memcpy(ids->untyped_data(), info.route.ids, ids->size_bytes());
  std::memcpy(weights->untyped_data(), info.route.weights, weights->size_bytes());
  for (std::int64_t e = 0; e < info.E; ++e) data_of<std::int32_t>(*counts)[e] = static_cast<std::int32_t>(info.expert_counts[e]);
  const double values[4] = {info.aux, info.sequence, info.global, info.z};
  for (int i = 0; i < 4; ++i) data_of<float>(*losses)[i] = static_cast<float>(values[i]);
  const std::int64_t words[6] = {info.valid, info.status.slot_demand, info.status.slot_capacity, info.rows, info.slots, info.status.flags};
  for (int i = 0; i < 6; ++i) data_of<std::int32_t>(*status)[i] = static_cast<std::int32_t>(words[i]);
}

// token [2] uint32: what the backward finds the saved step by.
ffi::Error forward(ffi::RunId run, I32 where, F32 x, ffi::RemainingArgs rest, AnyResult out, AnyResult ids, AnyResult weights, AnyResult counts,
                   AnyResult losses, AnyResult status, AnyResult token, std::int64_t given, std::int64_t P, std::int64_t call, std::int64_t keep, bool training,
                   Bytes bytes) {
  wb_moe_config config{};
  std::unique_ptr<Seat> seat;
  wb_moe_layer* layer = nullptr;
  if (ffi::Error error = take_seat({run.run_id, P, call, bytes}, "forward", where, config, seat, &layer); error.failure()) return error;
  wb_moe_tensors parameters{};
  wb_moe_forward_options options{};
  WB_FFI_TRY(seat->done(wb_moe_forward_options_init(&options, sizeof(options))));
  options.training = training ? 1 : 0;
  Operands{where, x, rest, given}.read(parameters, options);
  wb_moe_step* step = nullptr;
  WB_FFI_TRY(seat->done(SavedSteps::instance().take_spare(&step)));
  const wb_tensor from = to_tensor(x), to = to_tensor(*out);
  if (wb_status code = wb_moe_forward(layer, &parameters, &from, &options, &to, step); code != WB_OK) {
    ffi::Error error = to_error(seat->done(code));
    wb_moe_step_destroy(step);
    return error;
  }
  wb_moe_step_info info{};
  info.struct_size = sizeof(info);
  WB_FFI_TRY(seat->done(wb_moe_step_get_info(step, &info)));
  write_results(info, ids, weights, counts, losses, status);
  const std::uint64_t kept = SavedSteps::instance().keep(step, training ? static_cast<std::size_t>(keep) : 0);
  data_of<std::uint32_t>(*token)[0] = static_cast<std::uint32_t>(kept);
  data_of<std::uint32_t>(*token)[1] = static_cast<std::uint32_t>(kept >> 32);
  return ffi::Error::Success();
}

// The saved step, or the forward again with the same routes. Collective: all ranks have their step, or all compute.
wb_status find_step(Seat& seat, wb_moe_layer* layer, std::uint64_t token, const wb_moe_tensors& parameters, const wb_tensor& x, wb_moe_forward_options options,
                    const wb_route& route, wb_moe_step** step) {
  *step = SavedSteps::instance().take(token);
  std::int64_t found = *step != nullptr ? 1 : 0;
  if (seat.size() > 1) {
    if (wb_status status = wb_fabric_all_reduce_i64(seat.fabric(), &found, 1); status != WB_OK) return status;
  }
  if (found == seat.size()) return WB_OK;
  if (*step == nullptr) {
    if (wb_status status = SavedSteps::instance().take_spare(step); status != WB_OK) return status;
  }
  options.replay = &route;
  std::vector<float> memory(static_cast<std::size_t>(x.shape[0] * x.shape[1]));
  wb_tensor out = x;
  out.data = memory.data();
  return wb_moe_forward(layer, &parameters, &x, &options, &out, *step);
}

// rest: parameters, mask, ids, weights, token, d_out, d_loss. Results: dx, then a gradient for each given parameter but the router bias.
ffi::Error backward(ffi::RunId run, I32 where, F32 x, ffi::RemainingArgs rest, ffi::RemainingRets results, std::int64_t given, std::int64_t P,
                    std::int64_t call, Bytes bytes) {
  wb_moe_config config{};
  std::unique_ptr<Seat> seat;
  wb_moe_layer* layer = nullptr;
  if (ffi::Error error = take_seat({run.run_id, P, call, bytes}, "backward", where, config, seat, &layer); error.failure()) return error;
  wb_moe_tensors parameters{}, gradients{};
  gradients.struct_size = sizeof(gradients);
  wb_moe_forward_options options{};
  WB_FFI_TRY(seat->done(wb_moe_forward_options_init(&options, sizeof(options))));
  std::size_t position = Operands{where, x, rest, given}.read(parameters, options);
  const Any ids = *rest.get<Any>(position), weights = *rest.get<Any>(position + 1), token = *rest.get<Any>(position + 2), d_out = *rest.get<Any>(position + 3),
            d_loss = *rest.get<Any>(position + 4);
  std::size_t result = 1;
  for (std::int64_t i = 0; i < kNumParameters; ++i) {
    if ((given >> i & 1) == 0 || i == kRouterBias) continue;
    AnyResult gradient = *results.get<Any>(result++);
    std::memset(gradient->untyped_data(), 0, gradient->size_bytes());
    *field(gradients, i) = to_tensor(*gradient);
  }
  const wb_tensor from = to_tensor(x), d_out_view = to_tensor(d_out), dx = to_tensor(**results.get<Any>(0));
  const std::uint32_t* words = data_of<std::uint32_t>(token);
  wb_moe_step* step = nullptr;
  const wb_route route = to_route(config.router.E, ids, weights);
  wb_status status = find_step(*seat, layer, words[0] | static_cast<std::uint64_t>(words[1]) << 32, parameters, from, options, route, &step);
  if (status == WB_OK) status = wb_moe_backward(layer, &parameters, &gradients, &from, &d_out_view, &dx, step, data_of<float>(d_loss)[0]);
  ffi::Error error = to_error(seat->done(status));
  SavedSteps::instance().give_back(step);
  return error;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_moe_forward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Attr<std::int64_t>("given")
                                  .Attr<std::int64_t>("P")
                                  .Attr<std::int64_t>("call")
                                  .Attr<std::int64_t>("keep")
                                  .Attr<bool>("training")
                                  .Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_moe_backward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::int64_t>("given")
                                  .Attr<std::int64_t>("P")
                                  .Attr<std::int64_t>("call")
                                  .Attr<Bytes>("config"));

}  // namespace waybill::jax

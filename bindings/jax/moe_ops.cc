// SPDX-License-Identifier: Apache-2.0
// The whole MoE block, forward and backward.
#include "ffi_support.h"
#include "meeting.h"
#include "saved_steps.h"
#include "workers.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using U32 = ffi::Buffer<ffi::U32>;

// Parameters come in this order, those that `given` names by bit; kHasMask: a padding mask follows.
constexpr std::int64_t kNumParameters = 10;
constexpr std::int64_t kRouterBias = 1;
constexpr std::int64_t kHasMask = kNumParameters;

wb_tensor* field(wb_moe_tensors& tensors, std::int64_t index) {
  wb_tensor* const fields[kNumParameters] = {&tensors.gate, &tensors.router_bias, &tensors.w1,        &tensors.w2,          &tensors.b1,
                                             &tensors.b2,   &tensors.shared_w1,   &tensors.shared_w2, &tensors.latent_down, &tensors.latent_up};
  return fields[index];
}

// The operands of both directions, read when the handler is called: XLA's argument objects end with it, the arrays do not.
struct Operands {
  Invitation invitation;
  wb_moe_config config{};
  bool config_fits = false;
  wb_moe_tensors parameters{};
  wb_moe_forward_options options{};
  wb_tensor x{};
  std::size_t num_read = 0;  // of the remaining arguments

  // place: that of the call, then the seed of the recipe's random numbers.
  Operands(const char* direction, const U32& place, const F32& rows, const ffi::RemainingArgs& rest, std::int64_t given, std::int64_t P, const Bytes& bytes)
      : invitation(Invitation::read(direction + std::string(bytes.begin(), bytes.end()), place, P)),
        config_fits(read_config(bytes, config)),
        x(to_tensor(rows)) {
    (void)wb_moe_forward_options_init(&options, sizeof(options));
    options.rounding_seed = place.typed_data()[1 + 3 * P];
    parameters.struct_size = sizeof(parameters);
    for (std::int64_t i = 0; i < kNumParameters; ++i) {
      if ((given >> i & 1) != 0) *field(parameters, i) = to_tensor(*rest.get<Any>(num_read++));
    }
    if ((given >> kHasMask & 1) != 0) options.padding_mask = to_tensor(*rest.get<Any>(num_read++));
  }

  ffi::Error take_seat(std::unique_ptr<Seat>& seat, wb_moe_layer** layer) const {
    if (!config_fits) return refuse("the block's config has another size");
    if (ffi::Error error = Seat::take(invitation, seat); error.failure()) return error;
    return seat->done(seat->layer(config, layer));
  }
};

struct ForwardResults {
  wb_tensor out;
  void* ids;
  float* weights;
  std::int32_t* counts;
  float* losses;
  std::int32_t* status;
  std::uint32_t* token;  // [2]: what the backward finds the saved step by
};

void write_results(const wb_moe_step_info& info, const ForwardResults& to) {
  const auto routes = static_cast<std::size_t>(info.route.T * info.route.K);
  if (routes > 0) std::memcpy(to.ids, info.route.ids, routes * (info.route.id_dtype == WB_I16 ? 2 : 4));
  if (routes > 0) std::memcpy(to.weights, info.route.weights, routes * sizeof(float));
  for (std::int64_t e = 0; e < info.E; ++e) to.counts[e] = static_cast<std::int32_t>(info.expert_counts[e]);
  const double values[4] = {info.aux, info.sequence, info.global, info.z};
  for (int i = 0; i < 4; ++i) to.losses[i] = static_cast<float>(values[i]);
  const std::int64_t words[6] = {info.valid, info.status.slot_demand, info.status.slot_capacity, info.rows, info.slots, info.status.flags};
  for (int i = 0; i < 6; ++i) to.status[i] = static_cast<std::int32_t>(words[i]);
}

ffi::Error run_forward(const Operands& given, const ForwardResults& to, std::size_t keep) {
  std::unique_ptr<Seat> seat;
  wb_moe_layer* layer = nullptr;
  if (ffi::Error error = given.take_seat(seat, &layer); error.failure()) return error;
  wb_moe_step* step = nullptr;
  if (wb_status status = SavedSteps::instance().take_spare(&step); status != WB_OK) return seat->done(status);
  wb_moe_step_info info{};
  info.struct_size = sizeof(info);
  wb_status status = wb_moe_forward(layer, &given.parameters, &given.x, &given.options, &to.out, step);
  if (status == WB_OK) status = wb_moe_step_get_info(step, &info);
  if (status != WB_OK) {
    ffi::Error error = seat->done(status);
    wb_moe_step_destroy(step);
    return error;
  }
  write_results(info, to);
  const std::uint64_t token = SavedSteps::instance().keep(step, keep);
  to.token[0] = static_cast<std::uint32_t>(token);
  to.token[1] = static_cast<std::uint32_t>(token >> 32);
  return ffi::Error::Success();
}

ffi::Future forward(U32 place, F32 x, ffi::RemainingArgs rest, AnyResult out, AnyResult ids, AnyResult weights, AnyResult counts, AnyResult losses,
                    AnyResult status, AnyResult token, std::int64_t given, std::int64_t P, std::int64_t keep, bool training, Bytes bytes) {
  Operands operands("forward", place, x, rest, given, P, bytes);
  operands.options.training = training ? 1 : 0;
  const ForwardResults to{to_tensor(*out),
                          ids->untyped_data(),
                          data_of<float>(*weights),
                          data_of<std::int32_t>(*counts),
                          data_of<float>(*losses),
                          data_of<std::int32_t>(*status),
                          data_of<std::uint32_t>(*token)};
  return launch(P == 1, [operands = std::move(operands), to, keep = training ? static_cast<std::size_t>(keep) : 0] { return run_forward(operands, to, keep); });
}

struct BackwardOperands {
  wb_route route;
  std::uint64_t token;
  wb_tensor d_out;
  float d_loss;
  wb_moe_tensors gradients;
  wb_tensor dx;
};

// The saved step, or the forward again with the same routes. Collective: all ranks have their step, or all compute.
wb_status find_step(Seat& seat, wb_moe_layer* layer, const Operands& given, const BackwardOperands& back, wb_moe_step** step) {
  *step = SavedSteps::instance().take(back.token);
  std::int64_t found = *step != nullptr ? 1 : 0;
  if (seat.size() > 1) {
    if (wb_status status = wb_fabric_all_reduce_i64(seat.fabric(), &found, 1); status != WB_OK) return status;
  }
  if (found == seat.size()) return WB_OK;
  if (*step == nullptr) {
    if (wb_status status = SavedSteps::instance().take_spare(step); status != WB_OK) return status;
  }
  wb_moe_forward_options options = given.options;
  options.replay = &back.route;
  std::vector<float> memory(static_cast<std::size_t>(given.x.shape[0] * given.x.shape[1]));
  wb_tensor out = given.x;
  out.data = memory.data();
  return wb_moe_forward(layer, &given.parameters, &given.x, &options, &out, *step);
}

ffi::Error run_backward(const Operands& given, const BackwardOperands& back) {
  std::unique_ptr<Seat> seat;
  wb_moe_layer* layer = nullptr;
  if (ffi::Error error = given.take_seat(seat, &layer); error.failure()) return error;
  wb_moe_step* step = nullptr;
  wb_status status = find_step(*seat, layer, given, back, &step);
  if (status == WB_OK) {
    status = wb_moe_backward(layer, &given.parameters, &back.gradients, &given.x, &back.d_out, &back.dx, step, back.d_loss);
  }
  ffi::Error error = seat->done(status);
  SavedSteps::instance().give_back(step);
  return error;
}

// rest: parameters, mask, ids, weights, token, d_out, d_loss. Results: dx, then a gradient for each given parameter but the router bias.
ffi::Future backward(U32 place, F32 x, ffi::RemainingArgs rest, ffi::RemainingRets results, std::int64_t given, std::int64_t P, Bytes bytes) {
  Operands operands("backward", place, x, rest, given, P, bytes);
  const std::size_t first = operands.num_read;
  const auto argument = [&](std::size_t index) { return *rest.get<Any>(first + index); };
  const Any token = argument(2);
  const std::uint32_t* words = data_of<std::uint32_t>(token);
  BackwardOperands back{to_route(operands.config.router.E, argument(0), argument(1)),
                        words[0] | static_cast<std::uint64_t>(words[1]) << 32,
                        to_tensor(argument(3)),
                        data_of<float>(argument(4))[0],
                        {},
                        to_tensor(**results.get<Any>(0))};
  back.gradients.struct_size = sizeof(back.gradients);
  std::size_t result = 1;
  for (std::int64_t i = 0; i < kNumParameters; ++i) {
    if ((given >> i & 1) == 0 || i == kRouterBias) continue;
    AnyResult gradient = *results.get<Any>(result++);
    std::memset(gradient->untyped_data(), 0, gradient->size_bytes());
    *field(back.gradients, i) = to_tensor(*gradient);
  }
  return launch(P == 1, [operands = std::move(operands), back] { return run_backward(operands, back); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_moe_forward, forward,
                              ffi::Ffi::Bind()
                                  .Arg<U32>()
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
                                  .Attr<std::int64_t>("keep")
                                  .Attr<bool>("training")
                                  .Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    wbx_moe_backward, backward,
    ffi::Ffi::Bind().Arg<U32>().Arg<F32>().RemainingArgs().RemainingRets().Attr<std::int64_t>("given").Attr<std::int64_t>("P").Attr<Bytes>("config"));

}  // namespace waybill::jax

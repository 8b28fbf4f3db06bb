// SPDX-License-Identifier: Apache-2.0
// Structs of any content through the C ABI: every call ends in a status, a failure has a text, and nothing outside the caller's memory
// is touched (the memory is exactly as large as the structs say).
#include <cstdint>
#include <cstdlib>
#include <new>

#include "fuzz_input.h"
#include "fuzz_memory.h"

// A size that no machine should be asked for is out of memory, as it would be without the sanitizer, which ends the program instead.
void* operator new(std::size_t bytes) {
  void* data = bytes <= (std::size_t{1} << 26) ? std::malloc(bytes > 0 ? bytes : 1) : nullptr;
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes > 0 ? bytes : 1); }
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace {

using waybill::fuzz::Input;
using waybill::fuzz::Memory;

void expect(wb_status status) {
  if (status < WB_OK || status > WB_CUDA || status == WB_INTERNAL) std::abort();
  if (status != WB_OK && wb_last_error()[0] == '\0') std::abort();
}

std::int64_t size_from(Input& input, std::int64_t usual) {
  static const std::int64_t odd[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 16, 33, -1, 32768, 65536, INT32_MAX, std::int64_t{1} << 33, std::int64_t{1} << 60, INT64_MIN};
  return input.take<std::uint8_t>() < 240 ? usual : input.pick(odd);
}

template <class T>
void bend_bytes(Input& input, T& value) {
  if (input.take<std::uint8_t>() < 248) return;
  reinterpret_cast<unsigned char*>(&value)[input.take<std::uint16_t>() % sizeof(T)] = input.take<std::uint8_t>();
}

// Sizes that most structs of an input share.
struct Sizes {
  std::int64_t T, K, E, H, F;
  explicit Sizes(Input& input) : T(input.pick(6)), K(1 + input.pick(3)), E(K + input.pick(6)), H(1 + input.pick(9)), F(1 + input.pick(5)) {}
};

wb_router_config router_config(Input& input, const Sizes& n) {
  wb_router_config config{};
  expect(wb_router_config_init(&config, sizeof config));
  config.E = size_from(input, n.E);
  config.K = size_from(input, n.K);
  config.score = input.pick(4);
  config.renormalise = input.pick(2);
  config.sequence_length = size_from(input, n.T);
  if (input.pick(4) == 0) config.num_groups = size_from(input, 1 + input.pick(4)), config.num_kept_groups = size_from(input, 1);
  if (input.pick(4) == 0) config.aux_coefficient = config.sequence_coefficient = config.z_coefficient = input.take<float>();
  if (input.pick(8) == 0) config.offset_alignment = size_from(input, 4);
  bend_bytes(input, config);
  return config;
}

wb_route route(Input& input, Memory& memory, const Sizes& n) {
  wb_route result{};
  result.struct_size = sizeof result;
  result.T = size_from(input, n.T);
  result.K = size_from(input, n.K);
  result.E = size_from(input, n.E);
  result.id_dtype = input.pick(2) == 0 ? WB_I16 : WB_I32;
  const __int128 slots = static_cast<__int128>(result.T > 0 ? result.T : 0) * (result.K > 0 ? result.K : 0);
  const bool is_small = slots <= 1024;
  result.ids = is_small ? memory.array<char>(input, slots, result.id_dtype == WB_I16 ? 2 : 4) : nullptr;
  result.weights = is_small ? memory.floats(input, slots) : nullptr;
  if (result.ids != nullptr && input.pick(4) != 0) {  // valid routes, so that there is work to do
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(slots); ++i) {
      const std::int64_t id = result.E > 0 ? (i / result.K + i % result.K) % result.E : 0;
      if (result.id_dtype == WB_I16)
        static_cast<std::int16_t*>(result.ids)[i] = static_cast<std::int16_t>(id);
      else
        static_cast<std::int32_t*>(result.ids)[i] = static_cast<std::int32_t>(id);
    }
  }
  if (input.pick(4) == 0) result.counts = memory.array<std::int32_t>(input, result.E);
  if (input.pick(16) == 0) result.id_dtype = input.take<std::int8_t>();
  if (result.id_dtype == WB_I32 && result.ids != nullptr) result.ids = memory.array<char>(input, slots, 4);
  if (input.pick(16) == 0) result.device_type = input.take<std::int8_t>();
  if (input.pick(32) == 0) result.struct_size = input.take<std::uint64_t>();
  return result;
}

wb_stream stream_from(Input& input) {
  wb_stream stream{};
  stream.struct_size = input.pick(16) == 0 ? input.take<std::uint8_t>() : sizeof stream;
  if (input.pick(16) == 0) stream.device_type = input.take<std::int8_t>();
  return stream;
}

void fuzz_route(Input& input, Memory& memory) {
  const Sizes n(input);
  const wb_route given = route(input, memory, n);
  expect(wb_route_validate(&given, input.take<std::uint8_t>()));
  wb_route_stats stats{};
  stats.struct_size = input.pick(8) == 0 ? input.take<std::uint8_t>() : sizeof stats;
  expect(wb_route_get_stats(&given, static_cast<std::int32_t>(size_from(input, 1)), &stats));
}

void fuzz_router(Input& input, Memory& memory) {
  const Sizes n(input);
  const wb_router_config config = router_config(input, n);
  wb_router_inputs inputs{};
  inputs.struct_size = sizeof inputs;
  inputs.logits = memory.tensor(input, input.pick(4) == 0 ? WB_BF16 : WB_F32, {n.T, n.E});
  if (input.pick(4) == 0) inputs.expert_bias = memory.tensor(input, WB_F32, {n.E});
  if (input.pick(4) == 0) inputs.expert_mask = memory.tensor(input, WB_U8, {n.E});
  if (input.pick(4) == 0) inputs.padding_mask = memory.tensor(input, WB_U8, {n.T});
  if (input.pick(4) == 0) inputs.replay_ids = memory.tensor(input, input.pick(2) == 0 ? WB_I16 : WB_I32, {n.T, n.K});
  if (input.pick(4) == 0) inputs.aux_counts = memory.array<std::int32_t>(input, config.E);
  if (input.pick(8) == 0) inputs.token_offset = size_from(input, 3);
  if (input.pick(8) == 0) inputs.aux_tokens = inputs.loss_tokens = inputs.num_sequences = input.take<double>();
  const wb_stream stream = stream_from(input);
  wb_step_status status{};
  expect(wb_step_status_init(&status, sizeof status));
  wb_router_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.route = route(input, memory, n);
  if (input.pick(4) == 0) outputs.counts_unbiased = memory.array<std::int32_t>(input, config.E);
  if (input.pick(4) == 0) outputs.offsets = memory.array<std::int32_t>(input, static_cast<__int128>(config.E) + 1);
  if (input.pick(4) == 0) outputs.aligned_offsets = memory.array<std::int32_t>(input, static_cast<__int128>(config.E) + 1);
  if (input.pick(2) == 0) outputs.status = &status;
  expect(wb_router_forward(&config, &inputs, &outputs, input.pick(2) == 0 ? &stream : nullptr));
  double losses[3];
  expect(wb_router_losses(&config, &inputs, &outputs.route, losses, &stream));
  const __int128 slots = static_cast<__int128>(outputs.route.T) * outputs.route.K;
  const float* d_weights = memory.floats(input, slots);
  const wb_tensor d_logits = memory.tensor(input, WB_F32, {n.T, n.E});
  expect(wb_router_backward(&config, &inputs, &outputs.route, d_weights, input.take<float>(), &d_logits, &stream));
}

void fuzz_gemm(Input& input, Memory& memory) {
  const std::int64_t L = 1 + input.pick(4), S = input.pick(9), N = 1 + input.pick(9), C = 1 + input.pick(9);
  wb_grouped_gemm_args args{};
  args.struct_size = sizeof args;
  args.weights_are_lcn = input.pick(2);
  args.accumulate = input.pick(2);
  const std::int32_t dtype = input.pick(2) == 0 ? WB_F32 : WB_BF16;
  args.a = memory.tensor(input, dtype, {S, C});
  args.weights = args.weights_are_lcn != 0 ? memory.tensor(input, dtype, {L, C, N}) : memory.tensor(input, dtype, {L, N, C});
  args.y = memory.tensor(input, dtype, {S, N});
  args.offsets = memory.tensor(input, WB_I32, {L + 1});
  const bool is_plain = args.offsets.rank == 1 && args.offsets.dtype == WB_I32 && args.offsets.shape[0] == L + 1 && args.offsets.stride[0] <= 1;
  if (args.offsets.data != nullptr && is_plain && input.pick(8) != 0) {
    for (std::int64_t i = 0; i <= L; ++i) static_cast<std::int32_t*>(args.offsets.data)[i] = static_cast<std::int32_t>(S * i / L);
  }
  if (input.pick(4) == 0) args.a_rows = memory.tensor(input, WB_I32, {S});
  if (input.pick(4) == 0) args.bias = memory.tensor(input, WB_F32, {L, N});
  const wb_stream stream = stream_from(input);
  const int product = input.pick(3);
  expect(product == 0 ? wb_grouped_gemm(&args, &stream) : product == 1 ? wb_grouped_gemm_dgrad(&args, &stream) : wb_grouped_gemm_wgrad(&args, &stream));
}

// One rank: what a batch goes through.
void fuzz_exchange(Input& input, Memory& memory, wb_fabric* fabric) {
  const Sizes n(input);
  wb_exchange_config config{};
  expect(wb_exchange_config_init(&config, sizeof config));
  config.H = size_from(input, n.H);
  config.E = size_from(input, n.E);
  config.K = size_from(input, n.K);
  config.T_max = size_from(input, n.T);
  config.alignment = size_from(input, 1 + input.pick(4));
  config.mode = input.pick(2);
  config.combine_wire = input.pick(2);
  config.debug_checks = input.pick(2);
  config.hierarchy = input.pick(3);
  if (input.pick(4) == 0) config.receive_factor = input.take<double>();
  bend_bytes(input, config);
  wb_exchange* exchange = nullptr;
  expect(wb_exchange_create(&config, fabric, &exchange));
  const wb_route given = route(input, memory, n);
  wb_dispatch* dispatch = nullptr;
  expect(wb_exchange_plan(exchange, &given, &dispatch));
  wb_dispatch_info info{};
  info.struct_size = sizeof info;
  expect(wb_dispatch_get_info(dispatch, &info));
  const wb_tensor x = memory.tensor(input, input.pick(3) == 0 ? WB_BF16 : WB_F32, {n.T, n.H});
  wb_tensor rows{};
  expect(wb_exchange_dispatch(exchange, dispatch, &x, &rows));
  if (input.pick(8) == 0) rows = memory.tensor(input, WB_F32, {info.R, n.H});
  const wb_tensor y = memory.tensor(input, rows.dtype, {info.S_padded, n.H}), z = memory.tensor(input, WB_F32, {info.R, n.H});
  const wb_tensor out = memory.tensor(input, WB_F32, {n.T, n.H}), dy = memory.tensor(input, WB_F32, {info.S_padded, n.H});
  const wb_stream stream = stream_from(input);
  expect(wb_permute(dispatch, &rows, &y, &stream));
  expect(wb_unpermute_reduce(dispatch, &y, input.pick(2), &z, &stream));
  float* slot_values = memory.floats(input, info.S_padded);
  expect(
      wb_unpermute_reduce_backward(dispatch, input.pick(4) == 0 ? nullptr : &y, input.pick(2), &z, &dy, input.pick(2) == 0 ? slot_values : nullptr, &stream));
  expect(wb_exchange_combine(exchange, dispatch, &z, &out));
  float* d_weights = memory.floats(input, static_cast<__int128>(given.T) * given.K);
  expect(wb_exchange_return_slot_values(exchange, dispatch, slot_values, d_weights));
  wb_exchange_bytes bytes{};
  bytes.struct_size = sizeof bytes;
  expect(wb_exchange_get_bytes(exchange, &bytes));
  wb_dispatch_destroy(dispatch);
  wb_exchange_destroy(exchange);
}

wb_moe_tensors moe_tensors(Input& input, Memory& memory, const Sizes& n, const wb_moe_config& config) {
  wb_moe_tensors t{};
  t.struct_size = sizeof t;
  const std::int64_t I = config.activation == WB_RELU_SQUARED ? n.F : 2 * n.F;
  t.gate = memory.tensor(input, WB_F32, {n.E, n.H});
  t.w1 = memory.tensor(input, WB_F32, {n.E, I, n.H});
  t.w2 = memory.tensor(input, WB_F32, {n.E, n.H, n.F});
  if (config.expert_bias != 0) t.b1 = memory.tensor(input, WB_F32, {n.E, I}), t.b2 = memory.tensor(input, WB_F32, {n.E, n.H});
  if (config.bias_update_rate != 0) t.router_bias = memory.tensor(input, WB_F32, {n.E});
  if (config.shared_F != 0) {
    const std::int64_t inner = config.activation == WB_RELU_SQUARED ? n.F : 2 * n.F;
    t.shared_w1 = memory.tensor(input, WB_F32, {inner, n.H});
    t.shared_w2 = memory.tensor(input, WB_F32, {n.H, n.F});
  }
  return t;
}

// Widths that the recipe's blocks fit, where they were usual ones.
void widen(Sizes& n, wb_moe_config& config) {
  const std::int64_t block = config.recipe == WB_RECIPE_MXFP8 ? 32 : 16;
  if (config.H == n.H) config.H = block;
  if (config.F == n.F) config.F = block;
  if (config.shared_F == n.F) config.shared_F = block;
  n.H = n.F = block;
}

void fuzz_moe(Input& input, Memory& memory, wb_fabric* fabric) {
  Sizes n(input);
  wb_moe_config config{};
  expect(wb_moe_config_init(&config, sizeof config));
  config.router = router_config(input, n);
  config.H = size_from(input, n.H);
  config.F = size_from(input, n.F);
  config.activation = input.pick(3);
  config.expert_bias = input.pick(2);
  config.shared_F = input.pick(3) == 0 ? size_from(input, n.F) : 0;
  config.recompute = input.pick(3);
  config.mode = input.pick(2);
  config.T_max = size_from(input, n.T);
  config.debug_checks = input.pick(2);
  const int mix = input.take<std::uint8_t>();
  config.hierarchy = mix % 3;
  config.overlap_shared = input.pick(2);
  config.recipe = mix / 3 % 5;
  if (config.recipe >= WB_RECIPE_FP8) {
    config.scale_rule = mix / 15 % 2;
    config.power_of_two_scales = config.stochastic_rounding = config.hadamard = mix / 30 % 2;
    widen(n, config);
  }
  if (input.pick(4) == 0) config.capacity_factor = input.take<float>();
  if (input.pick(4) == 0) config.force_dense_map = 1;
  if (input.pick(8) == 0) config.bias_update_rate = 0.01f;
  bend_bytes(input, config);
  wb_moe_layer* layer = nullptr;
  wb_moe_step* step = nullptr;
  expect(wb_moe_layer_create(&config, fabric, fabric, nullptr, &layer));
  expect(wb_moe_step_create(&step));
  const wb_moe_tensors parameters = moe_tensors(input, memory, n, config), gradients = moe_tensors(input, memory, n, config);
  const wb_tensor x = memory.tensor(input, WB_F32, {n.T, n.H}), out = memory.tensor(input, WB_F32, {n.T, n.H});
  wb_moe_forward_options options{};
  expect(wb_moe_forward_options_init(&options, sizeof options));
  if (input.pick(4) == 0) options.padding_mask = memory.tensor(input, WB_U8, {n.T});
  const wb_route replay = route(input, memory, n);
  if (input.pick(4) == 0) options.replay = &replay;
  options.training = input.pick(8) == 0 ? 0 : 1;
  bend_bytes(input, options.loss_tokens);
  expect(wb_moe_forward(layer, &parameters, &x, &options, &out, step));
  wb_moe_step_info info{};
  info.struct_size = sizeof info;
  expect(wb_moe_step_get_info(step, &info));
  const wb_tensor d_out = memory.tensor(input, WB_F32, {n.T, n.H}), dx = memory.tensor(input, WB_F32, {n.T, n.H});
  expect(wb_moe_backward(layer, &parameters, &gradients, &x, &d_out, &dx, step, 1.0f));
  wb_moe_step_destroy(step);
  wb_moe_layer_destroy(layer);
}

std::int64_t num_blocks(std::int64_t size, std::int64_t block) { return size / block + (size % block > 0 ? 1 : 0); }

// A tensor in blocks and back. Its groups are equal parts, mostly.
void fuzz_quantize(Input& input, Memory& memory) {
  wb_quant_config config{};
  expect(wb_quant_config_init(&config, sizeof config));
  config.element = input.pick(3);
  config.scale = input.pick(4);
  config.rule = input.pick(2);
  config.stochastic = input.pick(2);
  config.seed = input.take<std::uint64_t>();
  static const std::int64_t blocks[][2] = {{1, 32}, {32, 1}, {1, 128}, {128, 1}, {128, 128}, {1, 16}, {16, 1}, {16, 16}};
  const int form = input.pick(8);
  config.block_rows = size_from(input, blocks[form][0]);
  config.block_columns = size_from(input, blocks[form][1]);
  bend_bytes(input, config);
  const std::int64_t L = 1 + input.pick(3), S = input.pick(40), C = size_from(input, 16 * (1 + input.pick(5)));
  const std::int64_t rows = config.block_rows > 0 ? config.block_rows : 1, columns = config.block_columns > 0 ? config.block_columns : 1;
  std::int64_t scale_rows = 0;
  const bool is_grouped = input.pick(2) != 0;
  wb_tensor offsets{};
  if (is_grouped) {
    offsets = memory.tensor(input, WB_I32, {L + 1});
    const bool is_plain = offsets.data != nullptr && offsets.rank == 1 && offsets.dtype == WB_I32 && offsets.shape[0] == L + 1 && offsets.stride[0] <= 1;
    for (std::int64_t i = 0; i <= L && is_plain && i * S / L <= S; ++i) static_cast<std::int32_t*>(offsets.data)[i] = static_cast<std::int32_t>(S * i / L);
    for (std::int64_t g = 0; g < L; ++g) scale_rows += num_blocks(S * (g + 1) / L - S * g / L, rows);
  } else {
    scale_rows = num_blocks(S, rows);
  }
  wb_quantized q{};
  q.struct_size = sizeof q;
  const std::int32_t code_type = config.element == 0 ? WB_F8E4M3 : config.element == 1 ? WB_F8E5M2 : WB_U8;
  q.codes = memory.tensor(input, code_type, {S, config.element == 2 ? C / 2 : C});
  q.scales = memory.tensor(input, config.scale == 1 || config.scale == 2 ? WB_F32 : WB_U8, {scale_rows, num_blocks(C, columns)});
  if (config.scale == 3) q.group_scales = memory.tensor(input, WB_F32, {is_grouped ? L : 1});
  const wb_tensor x = memory.tensor(input, input.pick(3) == 0 ? WB_BF16 : WB_F32, {S, C}), y = memory.tensor(input, WB_F32, {S, C});
  const wb_stream stream = stream_from(input);
  const wb_tensor* groups = is_grouped ? &offsets : nullptr;
  if (input.pick(4) != 0) expect(wb_quantize(&config, &x, groups, &q, &stream));
  expect(wb_dequantize(&config, &q, groups, &y, &stream));
}

// What needs no tensors.
void fuzz_small(Input& input, Memory& memory) {
  wb_group* group = nullptr;
  static const std::int32_t ranks[] = {0, 1, 2, 5, -1, 1025, INT32_MAX, INT32_MIN};
  expect(wb_group_create(input.pick(ranks), input.take<std::int64_t>(), input.take<std::int8_t>(), &group));
  wb_fabric* fabric = nullptr;
  expect(wb_group_fabric(group, input.take<std::int8_t>(), &fabric));
  if (group != nullptr) wb_group_destroy(group);
  const std::int64_t E = size_from(input, 1 + input.pick(9));
  float* bias = memory.floats(input, E);
  expect(wb_update_expert_bias(bias, memory.array<std::int64_t>(input, E), E, input.take<float>(), input.pick(2)));
  wb_step_status status{};
  expect(wb_step_status_init(&status, input.take<std::uint8_t>()));
  expect(wb_check_version(input.take<std::int8_t>(), "0.1.0"));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Memory memory;
  wb_group* group = nullptr;
  wb_fabric* fabric = nullptr;
  expect(wb_group_create(1, 10000, 0, &group));
  expect(wb_group_fabric(group, 0, &fabric));
  const int part = input.take<std::uint8_t>();
  switch (part < 216 ? part % 6 : 6) {
    case 0:
      fuzz_route(input, memory);
      break;
    case 1:
      fuzz_router(input, memory);
      break;
    case 2:
      fuzz_gemm(input, memory);
      break;
    case 3:
      fuzz_exchange(input, memory, fabric);
      break;
    case 4:
      fuzz_moe(input, memory, fabric);
      break;
    case 6:
      fuzz_quantize(input, memory);
      break;
    default:
      fuzz_small(input, memory);
  }
  wb_group_destroy(group);
  return 0;
}

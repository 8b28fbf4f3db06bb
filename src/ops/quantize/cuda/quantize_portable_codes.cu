// SPDX-License-Identifier: Apache-2.0
// The portable quantiser's second launch: codes under the stored scales, a thread a byte. Grid: persistent; CTAs take rows.
#include "ops/quantize/cuda/quantize_portable.cuh"

namespace waybill::cuda {
namespace {

// From what is stored.
__device__ BlockScale stored_scale(const CodedRows& out, std::int64_t index, float group) {
  if (out.scale == ScaleFormat::kF32) return {0, 1.0f, static_cast<const float*>(out.scales)[index]};
  if (out.scale == ScaleFormat::kE4M3) return {0, group, decode_one<ElementFormat::kE4M3>(static_cast<const std::uint8_t*>(out.scales)[index])};
  std::uint32_t byte = 0;
  if (out.scale == ScaleFormat::kE8M0) {
    byte = static_cast<const std::uint8_t*>(out.scales)[index];
  } else {
    const std::uint32_t bits = __float_as_uint(static_cast<const float*>(out.scales)[index]);
    byte = bits > kInfinityBits ? 255u : bits >> 23;  // 2^-127 is the one subnormal
  }
  return {byte, __uint_as_float(byte == 255 ? kNaNBits : (byte == 254 ? 0x400000u : (254u - byte) << 23)), 1.0f};
}

template <ElementFormat kFormat, bool kDivides>
__device__ std::uint32_t code_of(const WideRows& x, const CodedRows& out, std::int64_t row, int column, std::int64_t scale_row, float group) {
  const BlockScale scale = stored_scale(out, scale_row * out.scale_stride + column / out.block_columns * out.scale_column_stride, group);
  const float value = to_element<kDivides>(load_value(x, row, column), scale);
  if (!out.stochastic) return encode_one<kFormat>(value);
  const std::uint64_t draw = random_u64(out.seed, static_cast<std::uint64_t>(row * x.columns + column));
  return encode_one_stochastic<kFormat>(value, static_cast<std::uint32_t>(draw >> 32));
}

template <ElementFormat kFormat, bool kDivides>
__global__ void quantize_portable_codes(const WideRows x, const CodedRows out) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<128>(x, memory);
  int* first_block = memory + 2 * (x.groups + 1);
  count_blocks(table, x.groups, out.block_rows, first_block);
  constexpr int kPerByte = kFormat == ElementFormat::kE2M1 ? 2 : 1;
  const int bytes = x.columns / kPerByte, tile_columns = (blocks_of(x.columns, out.block_columns) + 3) / 4;
  for (int row = static_cast<int>(blockIdx.x); row < table.rows(); row += static_cast<int>(gridDim.x)) {
    const int g = table.group_of_row(row), in_group = row - table.first_row(g);
    const std::int64_t scale_row = first_block[g] + in_group / out.block_rows;
    if (scale_row >= out.scale_rows) continue;
    const float group = out.group_scales != nullptr ? out.group_scales[g] : 1.0f;
    const std::int64_t block = table.first_block(g) + in_group / 128;
    for (int i = static_cast<int>(threadIdx.x); i < bytes; i += kThreads) {
      std::uint32_t code = code_of<kFormat, kDivides>(x, out, row, i * kPerByte, scale_row, group);
      if constexpr (kPerByte == 2) code |= code_of<kFormat, kDivides>(x, out, row, 2 * i + 1, scale_row, group) << 4;
      if (out.codes != nullptr) out.codes[row * out.code_stride + i] = static_cast<std::uint8_t>(code);
      if (out.turned != nullptr && block < out.turned_blocks) {
        out.turned[(block * x.columns + i) * 128 + in_group % 128] = static_cast<std::uint8_t>(code);
      }
    }
    if (out.swizzled == nullptr) continue;
    for (int cb = static_cast<int>(threadIdx.x); cb < blocks_of(x.columns, out.block_columns); cb += kThreads) {
      const std::int64_t at = swizzled_index(table.first_block(g), tile_columns, in_group, cb);
      if (at < out.swizzled_bytes) out.swizzled[at] = static_cast<const std::uint8_t*>(out.scales)[scale_row * out.scale_stride + cb * out.scale_column_stride];
    }
  }
}

template <ElementFormat kFormat>
void launch(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  const bool divides = out.scale == ScaleFormat::kF32 || out.scale == ScaleFormat::kE4M3;
  const auto codes = divides ? quantize_portable_codes<kFormat, true> : quantize_portable_codes<kFormat, false>;
  allow_shared(codes, GroupTable::bytes(x.groups, 2));
  codes<<<kGrid, kThreads, static_cast<unsigned>(GroupTable::bytes(x.groups, 2)), stream>>>(x, out);
}

}  // namespace

void launch_quantize_portable_codes(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  if (out.element == ElementFormat::kE4M3) launch<ElementFormat::kE4M3>(x, out, stream);
  if (out.element == ElementFormat::kE5M2) launch<ElementFormat::kE5M2>(x, out, stream);
  if (out.element == ElementFormat::kE2M1) launch<ElementFormat::kE2M1>(x, out, stream);
}

}  // namespace waybill::cuda

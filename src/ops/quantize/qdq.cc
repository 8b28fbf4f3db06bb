// SPDX-License-Identifier: Apache-2.0
// Checks, the split into tasks, and the choice between the selected instruction set and the reference.
#include <algorithm>
#include <bit>
#include <limits>

#include "ops/quantize/qdq_kernels.h"
#include "ops/quantize/qdq_ref.h"

namespace waybill {
namespace {

constexpr std::int64_t kTaskElements = 1 << 14;  // what one task of the pool takes at least

void check_f32(const char* op, const char* name, const TensorView& view) {
  WB_CHECK(view.rank == 2 && view.dtype == DType::kF32 && view.device.type == DeviceType::kCpu, "{}: {} must be f32 [rows, C] on the cpu, got {}", op, name,
           view.describe());
  WB_CHECK(view.shape[1] <= 1 || view.stride[1] == 1, "{}: the columns of {} must be adjacent, got stride {}", op, name, view.stride[1]);
  WB_CHECK(view.data != nullptr || view.size() == 0, "{}: {} has no memory: {}", op, name, view.describe());
}

// Returns offsets[L], the number of rows that belong to a group.
std::int64_t check_offsets(const char* op, const TensorView& offsets) {
  const std::int64_t L = offsets.shape[0] - 1;
  block_row_offsets(offsets, 1);  // refuses offsets that decrease
  WB_CHECK(offsets.as<std::int32_t>()[0] == 0, "{}: offsets[0] must be 0, got {}", op, offsets.as<std::int32_t>()[0]);
  return offsets.as<std::int32_t>()[L];
}

void check_rows(const char* op, const TensorView& x, const TensorView& rows, std::int64_t S) {
  if (!rows) {
    WB_CHECK(x.shape[0] >= S, "{}: x has {} rows, the groups have {}", op, x.shape[0], S);
    return;
  }
  WB_CHECK(rows.rank == 1 && rows.shape[0] >= S, "{}: rows must be [S] with S >= {}, got {}", op, S, rows.describe());
  const std::int32_t* list = rows.as<std::int32_t>();
  for (std::int64_t s = 0; s < S; ++s) WB_CHECK(list[s] >= -1 && list[s] < x.shape[0], "{}: rows[{}] = {} is outside [-1, {})", op, s, list[s], x.shape[0]);
}

std::int64_t check(const QuantConfig& config, const QuantizeDequantizeArgs& args) {
  const char* op = "quantize_dequantize";
  validate(config);
  check_f32(op, "x", args.x);
  check_f32(op, "y", args.y);
  WB_CHECK(args.x.shape[1] == args.y.shape[1], "{}: x has {} columns, y has {}", op, args.x.shape[1], args.y.shape[1]);
  check_block_fit(config, "C (columns)", args.x.shape[1]);
  const std::int64_t S = args.offsets ? check_offsets(op, args.offsets) : args.y.shape[0];
  WB_CHECK(args.y.shape[0] >= S, "{}: y has {} rows, the groups have {}", op, args.y.shape[0], S);
  check_rows(op, args.x, args.rows, S);
  WB_CHECK(args.x.data != args.y.data || (!args.rows && args.x.stride[0] == args.y.stride[0]) || args.x.size() == 0,
           "{}: y may be x only without a list of rows", op);
  return S;
}

const float* row_pointer(const TensorView& x, const TensorView& rows, std::int64_t s) {
  const std::int64_t row = rows ? static_cast<const std::int32_t*>(rows.data)[s] : s;
  return row < 0 ? nullptr : static_cast<const float*>(x.data) + row * x.stride[0];
}

// Rows [begin, end) of one group that a task takes: whole blocks.
struct RowRange {
  std::int64_t group, group_begin, begin, end;
};

std::vector<RowRange> ranges_of(const TensorView& offsets, std::int64_t S, std::int64_t block_rows, std::int64_t C) {
  const std::int64_t wanted = std::max<std::int64_t>(kTaskElements / std::max<std::int64_t>(C, 1), 1),
                     step = (wanted + block_rows - 1) / block_rows * block_rows;
  const std::int64_t L = offsets ? offsets.shape[0] - 1 : 1;
  std::vector<RowRange> ranges;
  for (std::int64_t g = 0; g < L; ++g) {
    const std::int64_t first = offsets ? offsets.as<std::int32_t>()[g] : 0, last = offsets ? offsets.as<std::int32_t>()[g + 1] : S;
    for (std::int64_t begin = first; begin < last; begin += step) ranges.push_back({g, first, begin, std::min(begin + step, last)});
  }
  return ranges;
}

template <class Body>
void for_each_range(const std::vector<RowRange>& ranges, ThreadPool* pool, const Body& body) {
  parallel_for(pool, static_cast<std::int64_t>(ranges.size()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) body(i, ranges[static_cast<std::size_t>(i)]);
  });
}

// S_g of every group, as quantize() defines it.
std::vector<float> group_scales_of(const detail::QdqKernels& kernels, const QuantizeDequantizeArgs& args, const std::vector<RowRange>& ranges, std::int64_t L,
                                   ThreadPool* pool) {
  std::vector<std::int32_t> partial(ranges.size(), 0), amax(static_cast<std::size_t>(L), 0);
  for_each_range(ranges, pool, [&](std::int64_t i, const RowRange& range) {
    std::int32_t largest = 0;
    for (std::int64_t s = range.begin; s < range.end; ++s) {
      const float* x = row_pointer(args.x, args.rows, s);
      if (x != nullptr) largest = std::max(largest, kernels.largest_number(x, args.x.shape[1]));
    }
    partial[static_cast<std::size_t>(i)] = largest;
  });
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    std::int32_t& group = amax[static_cast<std::size_t>(ranges[i].group)];
    group = std::max(group, partial[i]);
  }
  constexpr float kMax = std::numeric_limits<float>::max();
  std::vector<float> scales(amax.size(), 1.0f);
  for (std::size_t g = 0; g < amax.size(); ++g) {
    if (amax[g] != 0) scales[g] = std::min(448.0f * 6.0f / std::min(std::bit_cast<float>(amax[g]), kMax), kMax);
  }
  return scales;
}

void run_fast(const detail::QdqKernels& kernels, const QuantConfig& config, const QuantizeDequantizeArgs& args, std::int64_t S, ThreadPool* pool) {
  const std::int64_t C = args.x.shape[1], L = args.offsets ? args.offsets.shape[0] - 1 : 1;
  const std::vector<RowRange> ranges = ranges_of(args.offsets, S, config.block_rows, C);
  const bool two_level = config.scale == ScaleFormat::kE4M3;
  const std::vector<float> group_scales = two_level ? group_scales_of(kernels, args, ranges, L, pool) : std::vector<float>(static_cast<std::size_t>(L), 1.0f);
  const detail::QdqBlockFn run = kernels.block[static_cast<int>(config.element)][static_cast<int>(config.scale)][config.stochastic ? 1 : 0];
  for_each_range(ranges, pool, [&](std::int64_t, const RowRange& range) {
    std::vector<const float*> x(static_cast<std::size_t>(std::min(config.block_rows, range.end - range.begin)));
    const auto g = static_cast<std::size_t>(range.group);
    const std::int64_t first_row = args.group_seeds != nullptr ? range.group_begin : 0;
    const std::uint64_t key = mix64(args.group_seeds != nullptr ? args.group_seeds[g] : config.seed);
    for (std::int64_t begin = range.begin; begin < range.end; begin += config.block_rows) {
      const std::int64_t num_rows = std::min(config.block_rows, range.end - begin);
      for (std::int64_t r = 0; r < num_rows; ++r) x[static_cast<std::size_t>(r)] = row_pointer(args.x, args.rows, begin + r);
      run(config, {x.data(), static_cast<float*>(args.y.data) + begin * args.y.stride[0], num_rows, C, args.y.stride[0], group_scales[g], key,
                   (begin - first_row) * C});
    }
  });
}

}  // namespace

void quantize_dequantize(const QuantConfig& config, const QuantizeDequantizeArgs& args, Stream stream) {
  const std::int64_t S = check(config, args);
  const detail::QdqKernels* kernels = detail::selected_qdq_kernels();
  if (kernels == nullptr || config.block_columns > detail::kQdqChunk) return quantize_dequantize_ref(config, args);
  run_fast(*kernels, config, args, S, stream.pool);
}

std::vector<std::int32_t> hadamard_offsets(const TensorView& offsets) {
  std::vector<std::int32_t> first;
  for (const std::int64_t block : block_row_offsets(offsets, kHadamardRows)) {
    WB_CHECK(block * kHadamardRows <= std::numeric_limits<std::int32_t>::max(), "hadamard_offsets: {} rows are more than 2^31 - 1", block * kHadamardRows);
    first.push_back(static_cast<std::int32_t>(block * kHadamardRows));
  }
  return first;
}

void hadamard_rows(const TensorView& x, const TensorView& rows, const TensorView& offsets, std::uint16_t signs, const TensorView& y, Stream stream) {
  const char* op = "hadamard_rows";
  check_f32(op, "x", x);
  check_f32(op, "y", y);
  const std::int64_t S = check_offsets(op, offsets), C = x.shape[1];
  check_rows(op, x, rows, S);
  const std::vector<std::int32_t> first = hadamard_offsets(offsets);
  WB_CHECK(y.shape[0] >= first.back() && y.shape[1] == C && y.is_contiguous(), "{}: y must be contiguous [{}, {}], got {}", op, first.back(), C, y.describe());
  const detail::QdqKernels* kernels = detail::selected_qdq_kernels();
  if (kernels == nullptr) return hadamard_rows_ref(x, rows, offsets, signs, y);
  for_each_range(ranges_of(offsets, S, kHadamardRows, C), stream.pool, [&](std::int64_t, const RowRange& range) {
    const float* block[kHadamardRows];
    for (std::int64_t begin = range.begin; begin < range.end; begin += kHadamardRows) {
      const std::int64_t num_rows = std::min(kHadamardRows, range.end - begin);
      for (std::int64_t r = 0; r < num_rows; ++r) block[r] = row_pointer(x, rows, begin + r);
      const std::int64_t to = first[static_cast<std::size_t>(range.group)] + begin - range.group_begin;
      kernels->hadamard(block, num_rows, C, signs, static_cast<float*>(y.data) + to * C);
    }
  });
}

void round_to_bf16(const TensorView& x, const TensorView& y, Stream stream) {
  WB_CHECK(x.dtype == DType::kF32 && y.dtype == DType::kBF16 && x.is_contiguous() && y.is_contiguous() && x.size() == y.size(),
           "round_to_bf16: x must be contiguous f32 and y contiguous bf16 of its size, got {} and {}", x.describe(), y.describe());
  const detail::QdqKernels* kernels = detail::selected_qdq_kernels();
  if (kernels == nullptr) return round_to_bf16_ref(x, y);
  const float* from = x.as<float>();
  auto* to = static_cast<std::uint16_t*>(y.data);
  parallel_for(stream.pool, x.size(), kTaskElements, [&](std::int64_t begin, std::int64_t end) { kernels->bf16(from + begin, end - begin, to + begin); });
}

}  // namespace waybill

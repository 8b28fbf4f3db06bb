// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/grouped_gemm_checks.h"

namespace waybill::detail {
namespace {

bool is_float(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

std::string place(Device device) { return device.type == DeviceType::kCpu ? "the cpu" : to_string(device); }

// A contiguous fp32 or bf16 tensor of the given rank on the operation's device.
void check_tensor(const char* op, const char* name, const TensorView& view, int rank, Device device) {
  WB_CHECK(view.rank == rank, "{}: {} must have {} dimensions, got {}", op, name, rank, view.describe());
  WB_CHECK(is_float(view.dtype), "{}: {} must be f32 or bf16, got {}", op, name, view.describe());
  WB_CHECK(view.device == device, "{}: {} is not on {}: {}", op, name, place(device), view.describe());
  WB_CHECK(view.is_contiguous(), "{}: {} must be contiguous, got {} with row stride {}", op, name, view.describe(), view.stride[0]);
  WB_CHECK(view.data != nullptr || view.size() == 0, "{}: {} has no memory: {}", op, name, view.describe());
}

// Returns offsets[L], the number of rows that belong to a group; on a GPU, where the values are not read, all `rows`.
std::int64_t check_offsets(const char* op, const TensorView& offsets, std::int64_t L, const char* rows_name, std::int64_t rows, Device device) {
  WB_CHECK(offsets.rank == 1 && offsets.shape[0] == L + 1, "{}: offsets must be [L + 1] = [{}], got {}", op, L + 1, offsets.describe());
  WB_CHECK(offsets.is_contiguous(), "{}: offsets must be contiguous", op);
  WB_CHECK(offsets.device == device, "{}: offsets is not on {}: {}", op, place(device), offsets.describe());
  if (device.type != DeviceType::kCpu) {
    (void)offsets.as<std::int32_t>();
    return rows;
  }
  const std::int32_t* values = offsets.as<std::int32_t>();
  WB_CHECK(values[0] == 0, "{}: offsets[0] must be 0, got {} (offsets are a prefix sum, not sizes)", op, values[0]);
  for (std::int64_t g = 0; g < L; ++g) {
    WB_CHECK(values[g + 1] >= values[g], "{}: offsets decrease at group {}: {} then {}", op, g, values[g], values[g + 1]);
  }
  WB_CHECK(values[L] <= rows, "{}: offsets[{}] = {} exceeds the {} rows of {}", op, L, values[L], rows, rows_name);
  return values[L];
}

void check_row_list(const char* op, const TensorView& a_rows, std::int64_t S, std::int64_t rows, Device device) {
  WB_CHECK(a_rows.rank == 1 && a_rows.shape[0] >= S, "{}: a_rows must be [S] with S >= {}, got {}", op, S, a_rows.describe());
  WB_CHECK(a_rows.is_contiguous(), "{}: a_rows must be contiguous", op);
  WB_CHECK(a_rows.device == device, "{}: a_rows is not on {}: {}", op, place(device), a_rows.describe());
  const std::int32_t* values = a_rows.as<std::int32_t>();
  if (device.type != DeviceType::kCpu) return;
  for (std::int64_t s = 0; s < S; ++s) {
    WB_CHECK(values[s] >= -1 && values[s] < rows, "{}: a_rows[{}] = {} is outside [-1, {})", op, s, values[s], rows);
  }
}

void check_bias(const char* op, const char* name, const TensorView& bias, std::int64_t L, std::int64_t N, Device device) {
  check_tensor(op, name, bias, 2, device);
  WB_CHECK(bias.dtype == DType::kF32 && bias.shape[0] == L && bias.shape[1] == N, "{}: {} must be f32 [{}, {}], got {}", op, name, L, N, bias.describe());
}

// L, N and C from the weights (or their gradient).
GroupedShape weights_shape(const char* op, const char* name, const TensorView& weights, WeightLayout layout) {
  check_tensor(op, name, weights, 3, weights.device);
  GroupedShape shape;
  shape.L = weights.shape[0];
  shape.N = weights.shape[layout == WeightLayout::kLNC ? 1 : 2];
  shape.C = weights.shape[layout == WeightLayout::kLNC ? 2 : 1];
  return shape;
}

void check_width(const char* op, const char* name, const TensorView& view, const char* letter, std::int64_t width) {
  WB_CHECK(view.shape[1] == width, "{}: {} has {} columns, the weights have {} = {}", op, name, view.shape[1], letter, width);
}

void check_accumulate(const char* op, const char* name, bool accumulate, const TensorView& out) {
  WB_CHECK(!accumulate || out.dtype == DType::kF32, "{}: accumulating into {} needs f32, got {}", op, name, out.describe());
}

}  // namespace

GroupedShape check(const GroupedGemmArgs& args) {
  const char* op = "grouped_gemm";
  GroupedShape shape = weights_shape(op, "weights", args.weights, args.layout);
  check_tensor(op, "a", args.a, 2, args.weights.device);
  check_tensor(op, "y", args.y, 2, args.weights.device);
  check_width(op, "a", args.a, "C", shape.C);
  check_width(op, "y", args.y, "N", shape.N);
  check_accumulate(op, "y", args.accumulate, args.y);
  shape.S = check_offsets(op, args.offsets, shape.L, "y", args.y.shape[0], args.weights.device);
  if (args.a_rows) {
    check_row_list(op, args.a_rows, shape.S, args.a.shape[0], args.weights.device);
  } else {
    WB_CHECK(shape.S <= args.a.shape[0], "{}: offsets[{}] = {} exceeds the {} rows of a", op, shape.L, shape.S, args.a.shape[0]);
  }
  if (args.bias) check_bias(op, "bias", args.bias, shape.L, shape.N, args.weights.device);
  return shape;
}

GroupedShape check(const GroupedGemmDgradArgs& args) {
  const char* op = "grouped_gemm_dgrad";
  GroupedShape shape = weights_shape(op, "weights", args.weights, args.layout);
  check_tensor(op, "dy", args.dy, 2, args.weights.device);
  check_tensor(op, "da", args.da, 2, args.weights.device);
  check_width(op, "dy", args.dy, "N", shape.N);
  check_width(op, "da", args.da, "C", shape.C);
  check_accumulate(op, "da", args.accumulate, args.da);
  shape.S = check_offsets(op, args.offsets, shape.L, "da", args.da.shape[0], args.weights.device);
  WB_CHECK(shape.S <= args.dy.shape[0], "{}: offsets[{}] = {} exceeds the {} rows of dy", op, shape.L, shape.S, args.dy.shape[0]);
  return shape;
}

GroupedShape check(const GroupedGemmWgradArgs& args) {
  const char* op = "grouped_gemm_wgrad";
  GroupedShape shape = weights_shape(op, "d_weights", args.d_weights, args.layout);
  check_tensor(op, "a", args.a, 2, args.d_weights.device);
  check_tensor(op, "dy", args.dy, 2, args.d_weights.device);
  check_width(op, "a", args.a, "C", shape.C);
  check_width(op, "dy", args.dy, "N", shape.N);
  check_accumulate(op, "d_weights", args.accumulate, args.d_weights);
  shape.S = check_offsets(op, args.offsets, shape.L, "dy", args.dy.shape[0], args.d_weights.device);
  if (args.a_rows) {
    check_row_list(op, args.a_rows, shape.S, args.a.shape[0], args.d_weights.device);
  } else {
    WB_CHECK(shape.S <= args.a.shape[0], "{}: offsets[{}] = {} exceeds the {} rows of a", op, shape.L, shape.S, args.a.shape[0]);
  }
  if (args.d_bias) check_bias(op, "d_bias", args.d_bias, shape.L, shape.N, args.d_weights.device);
  return shape;
}

GemmShape check(const GemmArgs& args) {
  const auto check_matrix = [](const char* name, const TensorView& view) {
    WB_CHECK(view.rank == 2, "gemm: {} must have 2 dimensions, got {}", name, view.describe());
    WB_CHECK(is_float(view.dtype), "gemm: {} must be f32 or bf16, got {}", name, view.describe());
    WB_CHECK(view.device.type == DeviceType::kCpu, "gemm: {} is not on the cpu: {}", name, view.describe());
    WB_CHECK(view.shape[1] <= 1 || view.stride[1] == 1, "gemm: the columns of {} must be adjacent, got stride {}", name, view.stride[1]);
    WB_CHECK(view.shape[0] <= 1 || view.stride[0] >= view.shape[1], "gemm: row stride {} of {} is less than its {} columns", view.stride[0], name,
             view.shape[1]);
    WB_CHECK(view.data != nullptr || view.size() == 0, "gemm: {} has no memory: {}", name, view.describe());
  };
  check_matrix("a", args.a);
  check_matrix("b", args.b);
  check_matrix("c", args.c);
  check_accumulate("gemm", "c", args.accumulate, args.c);
  GemmShape shape;
  shape.m = args.a.shape[args.transpose_a ? 1 : 0];
  shape.k = args.a.shape[args.transpose_a ? 0 : 1];
  shape.n = args.b.shape[args.transpose_b ? 0 : 1];
  const std::int64_t b_k = args.b.shape[args.transpose_b ? 1 : 0];
  WB_CHECK(shape.k == b_k, "gemm: op(a) is [{}, {}] but op(b) is [{}, {}]", shape.m, shape.k, b_k, shape.n);
  WB_CHECK(args.c.shape[0] == shape.m && args.c.shape[1] == shape.n, "gemm: c must be [{}, {}], got {}", shape.m, shape.n, args.c.describe());
  return shape;
}

}  // namespace waybill::detail

// SPDX-License-Identifier: Apache-2.0
#include "waybill/group_rows.h"

#include <cstring>

#include "ops/gemm/group_rows_backend.h"
#include "waybill/error.h"

namespace waybill {
namespace {

void check_list(const TensorView& list, const char* name, std::int64_t length, Device device) {
  WB_CHECK(list.rank == 1 && list.shape[0] == length && list.dtype == DType::kI32 && list.is_contiguous(), "group_rows: {} must be i32 [{}], got {}", name,
           length, list.describe());
  WB_CHECK(list.device == device, "group_rows: {} is not on {}: {}", name, to_string(device), list.describe());
  WB_CHECK(list.data != nullptr || length == 0, "group_rows: {} has no memory", name);
}

void write_offsets(const GroupRowsArgs& args, std::int64_t L) {
  const std::int32_t* sizes = args.sizes.as<std::int32_t>();
  std::int32_t* offsets = args.offsets.as<std::int32_t>();
  std::int64_t sum = 0;
  for (std::int64_t g = 0; g < L; ++g) {  // before anything is written
    WB_CHECK(sizes[g] >= 0 && (sum += sizes[g]) <= args.S, "group_sizes[{}] = {} is negative or passes the {} rows", g, sizes[g], args.S);
  }
  offsets[0] = 0;
  for (std::int64_t g = 0; g < L; ++g) offsets[g + 1] = offsets[g] + sizes[g];
}

void clear_rows_past(const TensorView& rows, std::int64_t end) {
  WB_CHECK(end >= 0 && end <= rows.shape[0], "group_rows: offsets[L] = {} is not within the {} rows", end, rows.shape[0]);
  const auto row_bytes = static_cast<std::size_t>(rows.shape[1]) * size_bytes(rows.dtype);
  if (end < rows.shape[0] && row_bytes > 0)
    std::memset(static_cast<char*>(rows.data) + static_cast<std::size_t>(end) * row_bytes, 0, static_cast<std::size_t>(rows.shape[0] - end) * row_bytes);
}

}  // namespace

namespace detail {
GroupRowsFn g_group_rows_on_device = nullptr;
}

void group_rows(const GroupRowsArgs& args, Stream stream) {
  const Device device = args.offsets.device;
  WB_CHECK(args.offsets.rank == 1 && args.offsets.shape[0] >= 1, "group_rows: offsets must be [L + 1], got {}", args.offsets.describe());
  const std::int64_t L = args.offsets.shape[0] - 1;
  check_list(args.offsets, "offsets", L + 1, device);
  if (args.sizes) check_list(args.sizes, "group_sizes", L, device);
  WB_CHECK(args.S >= 0 && args.S <= INT32_MAX, "group_rows: S = {} is not in [0, 2^31)", args.S);
  if (args.rows) {
    WB_CHECK(args.rows.rank == 2 && args.rows.shape[0] == args.S && args.rows.is_contiguous(), "group_rows: rows must be contiguous [{}, columns], got {}",
             args.S, args.rows.describe());
    WB_CHECK(args.rows.device == device, "group_rows: rows is not on {}: {}", to_string(device), args.rows.describe());
    WB_CHECK(args.rows.data != nullptr || args.rows.size() == 0, "group_rows: rows has no memory");
  }
  if (device.type != DeviceType::kCpu) {
    WB_CHECK(stream.device == device, "group_rows: the stream is on {}, offsets on {}", to_string(stream.device), to_string(device));
    if (detail::g_group_rows_on_device == nullptr) WB_FAIL(ErrorCode::kUnsupported, "group_rows: this library has no CUDA kernels");
    return detail::g_group_rows_on_device(args, L, stream);
  }
  if (args.sizes) write_offsets(args, L);
  if (args.rows) clear_rows_past(args.rows, args.offsets.as<std::int32_t>()[L]);
}

}  // namespace waybill

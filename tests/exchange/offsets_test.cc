// SPDX-License-Identifier: Apache-2.0
// Field case F13: element offsets beyond 2^31. Sources have the full sizes in address space only (untouched pages read as zero);
// targets that would have to be written as a whole are scaled: few rows, far apart.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "exchange/group.h"
#include "exchange/impl.h"

namespace waybill {
namespace {

using namespace testing_support;

constexpr std::int64_t kH = 7168, kK = 8;
const std::vector<std::int64_t> kSampleRows = {0, 149796, 149797, 299591, 299592, 299593, 299594, 303999};

// Address space; memory only where it is written.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes)
      : bytes_(bytes), data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (good()) ::munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool good() const { return data_ != MAP_FAILED; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

float stamp(std::int64_t row, std::int64_t column) { return static_cast<float>((row * 31 + column * 7) % 31 - 15); }

// A receive layout of R rows in which only `rows` have slots: one each, all of expert 0.
ReceiveLayout sparse_layout(std::int64_t R, const std::vector<std::int64_t>& rows) {
  ReceiveLayout layout;
  layout.L = 1;
  layout.row_offsets = {0, R};
  layout.row_slot_offsets.assign(static_cast<std::size_t>(R) + 1, 0);
  std::int64_t slot = 0;
  for (std::int64_t r = 0; r < R; ++r) {
    if (slot < static_cast<std::int64_t>(rows.size()) && rows[static_cast<std::size_t>(slot)] == r) {
      layout.slot_position.push_back(slot++);
      layout.slot_row.push_back(static_cast<std::int32_t>(r));
      layout.slot_weight.push_back(1.0f);
    }
    layout.row_slot_offsets[static_cast<std::size_t>(r) + 1] = slot;
  }
  layout.expert_offsets = {0, static_cast<std::int32_t>(slot)};
  layout.expert_counts = {static_cast<std::int32_t>(slot)};
  return layout;
}

TEST(ExchangeCases, F13_IndexArithmeticAtFullValues) {
  EXPECT_EQ(38000 * kK, 304000);
  EXPECT_EQ(38000 * kK * kH * 2, 4358144000);
  EXPECT_EQ(37449 * kK - 1, 299591);
  EXPECT_EQ(37450 * kK - 1, 299599);
  const auto offset = [](DType dtype, std::int64_t row) {
    const TensorView view(reinterpret_cast<void*>(0x1000), dtype, {1048576, kH});
    return static_cast<std::int64_t>(row_pointer(view, row) - static_cast<std::byte*>(view.data));
  };
  const std::int64_t limit = std::int64_t{1} << 31;
  const auto element = [&](std::int64_t row, std::int64_t column) { return offset(DType::kBF16, row) / 2 + column; };
  EXPECT_LT(element(299593, 1023), limit);  // first element index of 2^31: row 299593, column 1024
  EXPECT_EQ(element(299593, 1024), limit);
  EXPECT_LT(element(299593, 0), limit);
  EXPECT_GE(element(299594, 0), limit);
  EXPECT_LE(offset(DType::kBF16, 149796), limit);
  EXPECT_GT(offset(DType::kBF16, 149797), limit);
  EXPECT_EQ(offset(DType::kBF16, 303999), 303999 * kH * 2);
  EXPECT_EQ(offset(DType::kF32, 1048575), 1048575 * kH * 4);
  EXPECT_EQ(TensorView(nullptr, DType::kBF16, {304000, kH}).size() * 2, 4358144000);
}

TEST(ExchangeCases, F13_BudgetsOfThePooledSizeAre64Bit) {
  ExchangeConfig config;
  config.H = kH;
  config.E = 256;
  config.K = kK;
  config.T_max = 131072;
  EXPECT_EQ(receive_budget(config, 1).slots, 1048576);
  config.T_max = std::int64_t{1} << 34;
  EXPECT_EQ(receive_budget(config, 1).slots, std::int64_t{1} << 37);
}

// Sources at their full size: T * K rows of 7168 columns.
TEST(ExchangeCases, F13_FarSourceRowsEqualAGather) {
  for (const std::int64_t T : {37449, 37450, 38000}) {
    const std::int64_t R = T * kK;
    std::vector<std::int64_t> samples;
    for (const std::int64_t row : kSampleRows) {
      if (row < R) samples.push_back(row);
    }
    EXPECT_EQ(samples.size(), T == 37449 ? 4u : T == 37450 ? 7u : 8u);
    const SparseMemory halves(static_cast<std::size_t>(R * kH) * 2), floats(static_cast<std::size_t>(R * kH) * 4);
    if (!halves.good() || !floats.good()) GTEST_SKIP() << "needs " << R * kH * 6 << " bytes of address space";
    for (const std::int64_t row : samples) {
      for (std::int64_t h = 0; h < kH; ++h) {
        halves.as<bf16>()[row * kH + h] = bf16(stamp(row, h));
        floats.as<float>()[row * kH + h] = stamp(row, h);
      }
    }
    const auto S = static_cast<std::int64_t>(samples.size());
    const auto expect_rows = [&](const TensorView& view) {
      const Floats values = to_floats(view);
      for (std::int64_t s = 0; s < S; ++s) {
        for (std::int64_t h = 0; h < kH; ++h) ASSERT_EQ(values[static_cast<std::size_t>(s * kH + h)], stamp(samples[static_cast<std::size_t>(s)], h));
      }
    };
    // permute, forward: rows is far. Its backward and the weighted reduce read far slots below.
    const ReceiveLayout layout = sparse_layout(R, samples);
    Tensor y(DType::kBF16, {S, kH}), dy(DType::kF32, {S, kH}), z(DType::kF32, {S, kH});
    permute(layout, TensorView(halves.as<bf16>(), DType::kBF16, {R, kH}), y);
    expect_rows(y);
    // unpermute backward: dz is far.
    Floats d_weight(static_cast<std::size_t>(S));
    unpermute_reduce_backward(layout, y, true, TensorView::of(floats.as<float>(), {R, kH}), dy, d_weight.data());
    expect_rows(dy);
    for (std::int64_t s = 0; s < S; ++s) {
      double square = 0;
      for (std::int64_t h = 0; h < kH; ++h) square += std::pow(stamp(samples[static_cast<std::size_t>(s)], h), 2);
      EXPECT_EQ(d_weight[static_cast<std::size_t>(s)], square);
    }
    // unpermute, forward (also permute backward): y is far.
    ReceiveLayout far_slots;
    far_slots.L = 1;
    far_slots.row_offsets = {0, S};
    for (std::int64_t s = 0; s <= S; ++s) far_slots.row_slot_offsets.push_back(s);
    far_slots.slot_position = samples;
    far_slots.slot_row.assign(static_cast<std::size_t>(R), -1);
    far_slots.slot_weight.assign(static_cast<std::size_t>(R), 1.0f);
    unpermute_reduce(far_slots, TensorView(halves.as<bf16>(), DType::kBF16, {R, kH}), true, z);
    expect_rows(z);
    // combine: z is far, few tokens.
    const auto fabric = make_single_fabric();
    ExchangeConfig config;
    config.H = kH;
    config.E = 8;
    config.K = 8;
    Exchange exchange(config, block_placement(8, 1), *fabric);
    DispatchHandle handle;
    handle.plan.T = S;
    handle.plan.K = kK;
    handle.plan.row_offsets = handle.layout.row_offsets = {0, R};
    handle.plan.row_token.resize(static_cast<std::size_t>(R));
    for (std::int64_t s = 0; s <= S; ++s) handle.plan.token_offsets.push_back(s);
    for (const std::int64_t row : samples) handle.plan.token_rows.push_back(static_cast<std::int32_t>(row));
    exchange.combine(handle, TensorView::of(floats.as<float>(), {R, kH}), z);
    expect_rows(z);
    // dispatch: x has R tokens, the sampled ones have a route.
    Route route(R, kK, 8);
    for (const std::int64_t row : samples) route.view().set_id(row, 3, 5);
    route.recount();
    Tensor rows;
    exchange.dispatch(exchange.plan(route), TensorView(halves.as<bf16>(), DType::kBF16, {R, kH}), rows);
    expect_rows(rows);
  }
}

// Targets: 304 rows, each 1000 rows of 7168 columns apart, so that offsets are those of rows 0, 1000, ... 303000.
TEST(ExchangeCases, F13_FarTargetRowsEqualAGather) {
  const std::int64_t R = 304, stride = 1000 * kH;
  const SparseMemory memory(static_cast<std::size_t>(R * stride) * 2), floats(static_cast<std::size_t>(R * stride) * 4);
  if (!memory.good() || !floats.good()) GTEST_SKIP() << "needs " << R * stride * 6 << " bytes of address space";
  TensorView far(memory.as<bf16>(), DType::kBF16, {R, kH}), far_floats = TensorView::of(floats.as<float>(), {R, kH});
  far.stride[0] = far_floats.stride[0] = stride;
  std::vector<std::int64_t> all(static_cast<std::size_t>(R));
  for (std::size_t r = 0; r < all.size(); ++r) all[r] = static_cast<std::int64_t>(r);
  const ReceiveLayout layout = sparse_layout(R, all);
  Tensor rows(DType::kBF16, {R, kH}), sums(DType::kF32, {R, kH});
  for (std::int64_t r = 0; r < R; ++r) {
    for (std::int64_t h = 0; h < kH; ++h) {
      rows.as<bf16>()[r * kH + h] = bf16(stamp(r, h));
      sums.as<float>()[r * kH + h] = stamp(r, h);
    }
  }
  const auto expect_far = [&](const auto* data) {
    for (std::int64_t r = 0; r < R; ++r) {
      for (std::int64_t h = 0; h < kH; h += 7) ASSERT_EQ(static_cast<float>(data[r * stride + h]), stamp(r, h)) << "row " << r;
    }
  };
  permute(layout, rows, far);
  expect_far(memory.as<bf16>());
  unpermute_reduce(layout, rows, true, far_floats);
  expect_far(floats.as<float>());
  std::memset(far.rows(303, 304).data, 0, static_cast<std::size_t>(kH) * 2);
  unpermute_reduce_backward(layout, rows, true, sums, far, nullptr);
  expect_far(memory.as<bf16>());
  const auto fabric = make_single_fabric();
  ExchangeConfig config;
  config.H = kH;
  config.E = config.K = 1;
  Exchange exchange(config, block_placement(1, 1), *fabric);
  std::memset(far.rows(303, 304).data, 0, static_cast<std::size_t>(kH) * 2);
  exchange.combine(exchange.plan(Route::from_ids(R, 1, 1, std::vector<std::int32_t>(static_cast<std::size_t>(R), 0))), sums, far);
  expect_far(memory.as<bf16>());
}

}  // namespace
}  // namespace waybill

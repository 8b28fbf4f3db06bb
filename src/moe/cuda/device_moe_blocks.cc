// SPDX-License-Identifier: Apache-2.0
// What has a row a slot and the width of a row, made in blocks of columns: no sum of the layer crosses columns but the contractions, whose operands are whole.
#include <algorithm>

#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"
#include "ops/gemm/cuda/gemm_cuda.h"

namespace waybill::cuda {

std::vector<DeviceMoeLayer::Impl::ColumnBlock> DeviceMoeLayer::Impl::column_blocks(std::int64_t width) const {
  std::vector<ColumnBlock> blocks;
  const std::int64_t W = config.row_width();
  for (std::int64_t first = 0; first < W; first += width) blocks.push_back({first, std::min(width, W - first)});
  return blocks;
}

// y of the block into the window of partials, or at home to where it goes.
void DeviceMoeLayer::Impl::reduce_block(const Saved& saved, ColumnBlock block, std::span<const TensorView> out, std::span<const void* const> base,
                                        cudaStream_t stream) {
  std::vector<DeviceRows> from, to;
  if (!out.empty()) {
    const DeviceRows y_block{y(saved, 0).data, block.count};
    const DeviceRows part{static_cast<unsigned char*>(out[0].data) + block.first * static_cast<std::int64_t>(size_bytes(out[0].dtype)), config.H};
    std::vector<const void*> base_part;
    if (!base.empty()) base_part.push_back(static_cast<const float*>(base[0]) + block.first);
    mark(Phase::kCombine, stream);
    exchange->reduce_home(saved.handle, DType::kBF16, {&y_block, 1}, out[0].dtype, {&part, 1}, stream, base_part, block.count);
    mark(Phase::kExpertGemm, stream);
    return;
  }
  for (std::size_t i = 0; i < count(); ++i) {
    from.push_back({y(saved, i).data, block.count});
    auto* partials = static_cast<unsigned char*>(rows(windows.partials, i).data);
    to.push_back({partials + block.first * static_cast<std::int64_t>(size_bytes(exchange->partials())), config.row_width()});
  }
  mark(Phase::kCombine, stream);
  exchange->unpermute_reduce(saved.handle, DType::kBF16, from, /*weighted=*/false, exchange->partials(), to, /*z_in_window=*/true, stream, block.count);
  mark(Phase::kExpertGemm, stream);
}

void DeviceMoeLayer::Impl::second_matmul_in_blocks(const Forward& f) {
  const bool at_home = home() && config.shared_F == 0;
  for (const ColumnBlock block : column_blocks(y_columns(config, options))) {
    for (std::size_t i = 0; i < count(); ++i) {
      run_product_part({false, a(f.saved, i).data, f.parameters[i].w2.data, offsets(f.saved, i).as<std::int32_t>(), L, slots(f.saved, i), config.local_F(),
                        config.row_width(), block.first, block.count, y(f.saved, i).data, status_word(i)},
                       on(f.stream));
    }
    reduce_block(f.saved, block, at_home ? f.out : std::span<const TensorView>(), {}, f.stream);
  }
}

void DeviceMoeLayer::Impl::copy_columns(const Backward& b, Source source, ColumnBlock block, std::span<void* const> copies) {
  std::vector<DeviceRows> from, to;
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView rows = source == Source::kX ? listed_x(b.saved, i) : listed_d_out(b.saved, i);
    from.push_back({static_cast<std::uint16_t*>(rows.data) + block.first, config.row_width()}), to.push_back({copies[i], block.count});
  }
  home() ? exchange->permute_own(b.saved.handle, DType::kBF16, from, to, b.stream, block.count)
         : exchange->permute(b.saved.handle, DType::kBF16, from, to, b.stream, block.count);
}

// dW2, whose rows are the columns of d_out: from a copy of a block of them at a time, which lies in y.
void DeviceMoeLayer::Impl::second_weight_gradients_in_blocks(const Backward& b) {
  const std::int64_t W = config.row_width(), F = config.local_F();
  std::vector<void*> copies;
  for (std::size_t i = 0; i < count(); ++i) copies.push_back(y(b.saved, i).data);
  for (const ColumnBlock block : column_blocks(y_columns(config, options))) {
    copy_columns(b, Source::kDOut, block, copies);
    for (std::size_t i = 0; i < count(); ++i) {
      const TensorView& d = b.gradients[i].w2;
      auto* part = static_cast<unsigned char*>(d.data) + block.first * F * static_cast<std::int64_t>(size_bytes(d.dtype));
      run_wgrad_part({copies[i], a(b.saved, i).data, offsets(b.saved, i).as<std::int32_t>(), L, slots(b.saved, i), block.count, F, W, F, part,
                      d.dtype == DType::kBF16, adds_to(d, b), status_word(i)},
                     on(b.stream));
    }
  }
}

// dW1 of a block's columns, from a copy of the rows' columns: `copies` [ranks of the launch], bf16 [S, width].
void DeviceMoeLayer::Impl::first_weight_gradients_in_blocks(const Backward& b, std::int64_t width, std::span<void* const> copies) {
  const std::int64_t W = config.row_width(), N = config.inner_width();
  for (const ColumnBlock block : column_blocks(width)) {
    copy_columns(b, Source::kX, block, copies);
    for (std::size_t i = 0; i < count(); ++i) {
      const TensorView& d = b.gradients[i].w1;
      auto* part = static_cast<unsigned char*>(d.data) + block.first * static_cast<std::int64_t>(size_bytes(d.dtype));
      run_wgrad_part({h(b.saved, i).data, copies[i], offsets(b.saved, i).as<std::int32_t>(), L, slots(b.saved, i), N, block.count, N, W, part,
                      d.dtype == DType::kBF16, adds_to(d, b), status_word(i)},
                     on(b.stream));
    }
  }
}

void DeviceMoeLayer::Impl::row_gradients_in_blocks(const Backward& b, std::span<const TensorView> out, std::span<const void* const> base) {
  for (const ColumnBlock block : column_blocks(y_columns(config, options))) {
    for (std::size_t i = 0; i < count(); ++i) {
      run_product_part({true, h(b.saved, i).data, b.parameters[i].w1.data, offsets(b.saved, i).as<std::int32_t>(), L, slots(b.saved, i), config.inner_width(),
                        config.row_width(), block.first, block.count, y(b.saved, i).data, status_word(i)},
                       on(b.stream));
    }
    reduce_block(b.saved, block, out, base, b.stream);
  }
}

}  // namespace waybill::cuda

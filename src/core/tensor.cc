// SPDX-License-Identifier: Apache-2.0
#include "waybill/tensor.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/alloc_trace.h"
#include "waybill/buffer_bytes.h"

namespace waybill {

std::string to_string(Device device) { return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index); }

TensorView::TensorView(void* pointer, DType type, std::initializer_list<std::int64_t> dims, Device where)
    : data(pointer), dtype(type), rank(static_cast<int>(dims.size())), device(where) {
  WB_CHECK(dims.size() >= 1 && dims.size() <= kMaxRank, "a tensor has 1 to {} dimensions, got {}", kMaxRank, dims.size());
  std::copy(dims.begin(), dims.end(), shape.begin());
  std::int64_t step = 1;
  for (std::size_t i = dims.size(); i-- > 0;) {
    WB_CHECK(shape[i] >= 0, "dimension {} of a tensor is negative: {}", i, shape[i]);
    stride[i] = step;
    step *= std::max<std::int64_t>(shape[i], 1);
  }
}

std::int64_t TensorView::size() const {
  if (rank == 0) return 0;
  std::int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[static_cast<std::size_t>(i)];
  return count;
}

bool TensorView::is_contiguous() const {
  std::int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(i);
    if (shape[axis] != 1 && stride[axis] != step) return size() == 0;
    step *= shape[axis];
  }
  return true;
}

TensorView TensorView::rows(std::int64_t begin, std::int64_t end) const {
  WB_CHECK(rank > 0 && begin >= 0 && begin <= end && end <= shape[0], "rows [{}, {}) are outside {}", begin, end, describe());
  TensorView part = *this;
  part.data = static_cast<std::byte*>(data) + static_cast<std::size_t>(begin * stride[0]) * size_bytes(dtype);
  part.shape[0] = end - begin;
  return part;
}

std::string TensorView::describe() const {
  if (rank == 0) return "no tensor";
  std::string dims;
  for (int i = 0; i < rank; ++i) dims += fmt::format("{}{}", i == 0 ? "" : ", ", shape[static_cast<std::size_t>(i)]);
  return fmt::format("{} [{}] on {}", to_string(dtype), dims, to_string(device));
}

namespace {

std::atomic<std::size_t> g_live_bytes{0}, g_peak_bytes{0};

void add_live(std::size_t bytes) {
  const std::size_t live = g_live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::size_t peak = g_peak_bytes.load(std::memory_order_relaxed);
  while (live > peak && !g_peak_bytes.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
  }
}

void release(void* data, std::size_t bytes) {
  if (data == nullptr) return;
  std::free(data);
  g_live_bytes.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace

BufferBytes buffer_bytes() { return {g_live_bytes.load(std::memory_order_relaxed), g_peak_bytes.load(std::memory_order_relaxed)}; }
void reset_peak_buffer_bytes() { g_peak_bytes.store(g_live_bytes.load(std::memory_order_relaxed), std::memory_order_relaxed); }

Buffer::Buffer(std::size_t bytes, Device device) : bytes_(bytes), device_(device) {
  WB_CHECK(device.type == DeviceType::kCpu, "this Buffer allocates host memory only, got device {}", to_string(device));
  if (bytes == 0) return;
  constexpr std::size_t kAlign = 64;
  data_ = bytes > SIZE_MAX - kAlign ? nullptr : std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  if (data_ == nullptr) WB_FAIL(ErrorCode::kOutOfMemory, "cannot allocate {} bytes on {}", bytes, to_string(device));
  add_live(bytes);
  detail::note_allocation(bytes);
}

Buffer::~Buffer() { release(data_, bytes_); }

Buffer::Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), device_(other.device_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    device_ = other.device_;
  }
  return *this;
}

namespace {

std::size_t bytes_of(DType dtype, std::initializer_list<std::int64_t> shape) {
  unsigned __int128 bytes = size_bytes(dtype);
  for (const std::int64_t dim : shape) {
    WB_CHECK(dim >= 0, "a dimension is negative: {}", dim);
    bytes *= static_cast<std::uint64_t>(dim);
    if (bytes > SIZE_MAX) WB_FAIL(ErrorCode::kOutOfMemory, "a tensor of more than 2^64 bytes was asked for");
  }
  return static_cast<std::size_t>(bytes);
}

}  // namespace

Tensor::Tensor(DType dtype, std::initializer_list<std::int64_t> shape, Device device)
    : buffer_(bytes_of(dtype, shape), device), view_(buffer_.data(), dtype, shape, device) {}

Tensor Tensor::zeros(DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  Tensor tensor(dtype, shape, device);
  tensor.fill_zero();
  return tensor;
}

void Tensor::resize(DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  const std::size_t bytes = bytes_of(dtype, shape);
  if (bytes > buffer_.bytes() || !(buffer_.device() == device)) {
    buffer_ = Buffer();  // free first: two copies of a large tensor may not fit
    buffer_ = Buffer(bytes, device);
  }
  view_ = TensorView(buffer_.data(), dtype, shape, device);
}

void Tensor::fill_zero() {
  if (view_.size() > 0) std::memset(view_.data, 0, static_cast<std::size_t>(view_.size()) * size_bytes(view_.dtype));
}

}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// Matmuls with an activation in their epilogue give the bits of the matmul, then the activation kernel; both wrote over poisoned memory.
#include <cmath>

#include "cuda/gemm_harness.h"
#include "ops/activation/cuda/activation_kernels.h"

namespace waybill::cuda {
namespace {

constexpr ActivationKind kKinds[] = {ActivationKind::kSwiGLU, ActivationKind::kClampedSwiGLU, ActivationKind::kReluSquared};
constexpr float kLimit = 1.5f, kAlpha = 1.702f;

struct Sizes {
  std::vector<int> counts;
  std::int64_t F, k;
  bool bias = false, listed = false, weighted = true;
};

std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count); }

// One expert layer's half: h = a W^T and act(h), or da = dy W and the gradient of h.
class ActivationCase {
 public:
  ActivationCase(const Sizes& s, GemmForm form, ActivationKind kind, bool is_forward)
      : sizes_(s), form_(form), kind_(kind), is_forward_(is_forward), inner_(is_gated(kind) ? 2 * s.F : s.F) {
    const std::vector<std::int32_t> offsets = offsets_of(s.counts);
    groups_ = static_cast<std::int64_t>(s.counts.size()), valid_ = offsets.back(), rows_ = valid_ + 21;
    offsets_ = upload(offsets);
    const std::int64_t n = product_width();
    a_ = random(DType::kBF16, rows_ * s.k, 1, 0.25f), w_ = random(DType::kBF16, groups_ * n * s.k, 2, 0.5f);
    h_ = random(DType::kBF16, rows_ * inner_, 3, 1.5f), weight_ = random(DType::kF32, rows_, 4, 1.0f), bias_ = random(DType::kF32, groups_ * n, 5, 1.0f);
    std::vector<std::int32_t> list(bytes(rows_));
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = i % 13 == 0 ? -1 : static_cast<std::int32_t>((i * 31) % bytes(rows_));
    list_ = upload(list);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  // [h, a] or [dh, d_weight]
  using Result = std::vector<std::vector<unsigned char>>;

  Result fused(const GemmTile& tile, bool with_h) const {
    DeviceBuffer h = poisoned(rows_ * inner_ * 2), a = poisoned(rows_ * sizes_.F * 2), d_weight = poisoned(rows_ * 4);
    GroupedProblem p = problem();
    p.activation = {is_forward_ ? GemmEpilogue::kActivation : GemmEpilogue::kActivationGradient, kind_, kLimit, kAlpha, nullptr, weight(), nullptr};
    if (is_forward_) {
      p.d = a.data(), p.activation.h = with_h ? h.data() : nullptr;
    } else {
      p.d = h.data(), p.activation.h = h_.data(), p.activation.d_weight = with_h ? d_weight.as<float>() : nullptr;
    }
    EXPECT_EQ(refuse_grouped(p, 0), "");
    run_grouped(p, {tile, 2}, 0, stream_);
    return is_forward_ ? Result{host(h), host(a)} : Result{host(h), host(d_weight)};
  }
  Result unfused() const {
    DeviceBuffer h = poisoned(rows_ * inner_ * 2), a = poisoned(rows_ * sizes_.F * 2), d_weight = poisoned(rows_ * 4);
    GroupedProblem p = problem();
    p.d = is_forward_ ? h.data() : a.data();
    run_grouped(p, {}, 0, stream_);
    ActivationCall call{static_cast<int>(kind_), kLimit, kAlpha, rows_, sizes_.F, offsets_.as<std::int32_t>() + groups_, weight(), {}, {}, {}, nullptr};
    call.a = {a.data(), sizes_.F, true};
    if (is_forward_) {
      call.h = {h.data(), inner_, true};
      launch_activation_forward(call, 132, stream_);
      return {host(h), host(a)};
    }
    call.h = {h_.data(), inner_, true}, call.dh = {h.data(), inner_, true}, call.d_weight = d_weight.as<float>();
    launch_activation_backward(call, 132, stream_);
    return {host(h), host(d_weight)};
  }
  std::int64_t valid_rows() const { return valid_; }

 private:
  std::int64_t product_width() const { return is_forward_ ? inner_ : sizes_.F; }
  const float* weight() const { return sizes_.weighted ? weight_.as<float>() : nullptr; }
  GroupedProblem problem() const {
    GroupedProblem p{form_, GemmOutput::kBf16, groups_, rows_, 0, product_width(), sizes_.k, a_.data(), w_.data(), offsets_.as<std::int32_t>(), nullptr};
    if (sizes_.bias && is_forward_) p.bias = bias_.as<float>();
    if (sizes_.listed) p.a_list = list_.as<std::int32_t>(), p.a_rows = rows_;
    return p;
  }
  static DeviceBuffer random(DType dtype, std::int64_t count, std::uint64_t seed, float scale) {
    DeviceBuffer buffer(bytes(count) * size_bytes(dtype) + 16);
    fill_normal(buffer.data(), dtype, bytes(count), seed, scale, nullptr);
    return buffer;
  }
  static DeviceBuffer upload(const std::vector<std::int32_t>& values) {
    DeviceBuffer buffer(values.size() * 4 + 16);
    buffer.upload(values.data(), values.size() * 4);
    return buffer;
  }
  DeviceBuffer poisoned(std::int64_t count) const {
    DeviceBuffer buffer(bytes(count) + 16);
    buffer.fill(kPoison, stream_);
    return buffer;
  }
  std::vector<unsigned char> host(const DeviceBuffer& buffer) const {
    std::vector<unsigned char> result(buffer.bytes());
    buffer.download(result.data(), result.size(), stream_);
    stream_.synchronize();
    return result;
  }

  Sizes sizes_;
  GemmForm form_;
  ActivationKind kind_;
  bool is_forward_;
  std::int64_t inner_, groups_ = 0, rows_ = 0, valid_ = 0;
  CudaStream stream_;
  DeviceBuffer a_, w_, h_, weight_, bias_, offsets_, list_;
};

std::string name_of(const Sizes& s, GemmForm form, ActivationKind kind, const GemmTile& tile) {
  return "form " + std::to_string(static_cast<int>(form)) + ", kind " + std::to_string(static_cast<int>(kind)) + ", F " + std::to_string(s.F) + ", k " +
         std::to_string(s.k) + ", " + describe(GemmTuning{tile});
}

std::vector<Sizes> all_sizes() {
  return {
      {ragged_counts(), 136, 72}, {ragged_counts(), 320, 200, true, true}, {{300, 0, 77, 128}, 8, 40, true, false, false}, {{0, 0}, 64, 64}, {{1}, 1408, 64}};
}

TEST(GroupedGemmActivationCuda, ForwardHasTheBitsOfTheUnfusedKernels) {
  WB_NEEDS_HOPPER();
  for (const Sizes& s : all_sizes()) {
    for (const GemmForm form : {GemmForm::kNT, GemmForm::kNN}) {
      for (const ActivationKind kind : kKinds) {
        const ActivationCase c(s, form, kind, true);
        const ActivationCase::Result want = c.unfused();
        const std::vector<unsigned char> untouched(want[0].size(), kPoison);
        EXPECT_EQ(want[0] == untouched, c.valid_rows() == 0);
        for (const GemmKernel& kernel : grouped_kernels(form, GemmOutput::kBf16, GemmEpilogue::kActivation)) {
          const ActivationCase::Result both = c.fused(kernel.tile, true), only = c.fused(kernel.tile, false);
          EXPECT_TRUE(both[0] == want[0]) << "h, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(both[1] == want[1]) << "a, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(only[1] == want[1]) << "a alone, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(only[0] == untouched);
        }
      }
    }
  }
}

TEST(GroupedGemmActivationCuda, GradientHasTheBitsOfTheUnfusedKernels) {
  WB_NEEDS_HOPPER();
  for (const Sizes& s : all_sizes()) {
    for (const GemmForm form : {GemmForm::kNT, GemmForm::kNN}) {
      for (const ActivationKind kind : kKinds) {
        const ActivationCase c(s, form, kind, false);
        const ActivationCase::Result want = c.unfused();
        for (const GemmKernel& kernel : grouped_kernels(form, GemmOutput::kBf16, GemmEpilogue::kActivationGradient)) {
          const ActivationCase::Result both = c.fused(kernel.tile, true), again = c.fused(kernel.tile, true), only = c.fused(kernel.tile, false);
          EXPECT_TRUE(both[0] == want[0]) << "dh, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(both[1] == want[1]) << "d_weight, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(only[0] == want[0]) << "dh alone, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(again == both) << "again, " << name_of(s, form, kind, kernel.tile);
          EXPECT_TRUE(only[1] == std::vector<unsigned char>(only[1].size(), kPoison));
        }
      }
    }
  }
}

// Many tiles a CTA: buffers and barriers are used again and again.
TEST(GroupedGemmActivationCuda, LargeProblemsHaveTheSameBits) {
  WB_NEEDS_HOPPER();
  const Sizes s{{3000, 17, 1900, 0, 2129, 4000, 1}, 1536, 512};
  for (const bool is_forward : {true, false}) {
    const ActivationCase c(s, is_forward ? GemmForm::kNT : GemmForm::kNN, ActivationKind::kSwiGLU, is_forward);
    const ActivationCase::Result want = c.unfused();
    const GemmEpilogue epilogue = is_forward ? GemmEpilogue::kActivation : GemmEpilogue::kActivationGradient;
    for (const GemmKernel& kernel : grouped_kernels(is_forward ? GemmForm::kNT : GemmForm::kNN, GemmOutput::kBf16, epilogue)) {
      EXPECT_TRUE(c.fused(kernel.tile, true) == want) << describe(GemmTuning{kernel.tile});
    }
  }
}

TEST(ActivationKernelsCuda, MoreThan2To31Elements) {
  WB_NEEDS_HOPPER();
  constexpr std::int64_t kRows = 600000, kF = 2048, kFirst = kRows - 100;
  const CudaStream stream;
  const DeviceBuffer h(bytes(kRows * 2 * kF) * 2), a(bytes(kRows * kF) * 2), part(bytes((kRows - kFirst) * kF) * 2);
  fill_normal(h.data(), DType::kBF16, bytes(kRows * 2 * kF), 1, 1.0f, stream);
  ActivationCall call{0, 0, 0, kRows, kF, nullptr, nullptr, {}, {}, {}, nullptr};
  call.h = {h.data(), 2 * kF, true}, call.a = {a.data(), kF, true};
  launch_activation_forward(call, 132, stream);
  // The last rows alone.
  call.rows = kRows - kFirst, call.h.data = h.as<std::uint16_t>() + kFirst * 2 * kF, call.a.data = part.data();
  launch_activation_forward(call, 132, stream);
  std::vector<unsigned char> all(part.bytes()), alone(part.bytes());
  WB_TRY_CUDA(cudaMemcpyAsync(all.data(), a.as<std::uint16_t>() + kFirst * kF, all.size(), cudaMemcpyDeviceToHost, stream));
  part.download(alone.data(), alone.size(), stream);
  stream.synchronize();
  EXPECT_TRUE(all == alone);
  EXPECT_NE(all, std::vector<unsigned char>(all.size(), 0));
}

}  // namespace
}  // namespace waybill::cuda

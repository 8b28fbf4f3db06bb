// SPDX-License-Identifier: Apache-2.0
#include "waybill/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace waybill {
namespace {

using ::testing::HasSubstr;

TEST(Tensor, AnEmptyTensorIsGivenAndANullViewIsNot) {
  const Tensor empty(DType::kF32, {0, 8});
  EXPECT_TRUE(static_cast<bool>(empty.view()));
  EXPECT_EQ(empty.size(), 0);
  EXPECT_FALSE(static_cast<bool>(TensorView{}));
}

TEST(Tensor, RowsSharesMemoryAndRefusesTheOutside) {
  Tensor tensor = Tensor::zeros(DType::kI32, {4, 3});
  tensor.view().rows(2, 3).as<std::int32_t>()[1] = 7;
  EXPECT_EQ(tensor.as<std::int32_t>()[2 * 3 + 1], 7);
  EXPECT_THROW(tensor.view().rows(2, 5), Error);
}

TEST(Tensor, AWrongElementTypeIsNamed) {
  const Tensor tensor(DType::kBF16, {2, 2});
  try {
    tensor.as<float>();
    FAIL() << "a bf16 tensor was read as f32";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("bf16 [2, 2] on cpu"));
  }
}

TEST(Tensor, ResizeKeepsMemoryThatIsLargeEnough) {
  Tensor tensor(DType::kF32, {10, 10});
  const void* before = tensor.view().data;
  tensor.resize(DType::kBF16, {5, 10});
  EXPECT_EQ(tensor.view().data, before);
  EXPECT_EQ(tensor.size(), 50);
}

TEST(Tensor, ImpossibleSizesAreOutOfMemoryErrors) {
  try {
    const Tensor tensor(DType::kF32, {std::int64_t{1} << 40, std::int64_t{1} << 40});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

TEST(AllocationTrace, SeesEveryBufferWhileItLives) {
  {
    const AllocationTrace trace;
    const Tensor a(DType::kF32, {3, 5});
    const Tensor b(DType::kF32, {7});
    EXPECT_EQ(trace.count(), 2u);
    EXPECT_EQ(trace.count_of(60), 1u);
    EXPECT_EQ(trace.largest_bytes(), 60u);
    EXPECT_EQ(trace.total_bytes(), 88u);
  }
  const Tensor c(DType::kF32, {1});  // nobody traces any more
}

}  // namespace
}  // namespace waybill

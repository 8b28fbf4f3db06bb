// SPDX-License-Identifier: Apache-2.0
// The sm_90a grouped matmul kernels against sums in double: every form, output and tile on ragged groups, hard loads, determinism.
#include "cuda/gemm_harness.h"

namespace waybill::cuda {
namespace {

constexpr GemmForm kForms[] = {GemmForm::kNT, GemmForm::kNN, GemmForm::kTN};
constexpr GemmOutput kOutputs[] = {GemmOutput::kBf16, GemmOutput::kF32, GemmOutput::kAddF32};

std::string name_of(const GemmSizes& s, const GemmTuning& t) {
  return "form " + std::to_string(static_cast<int>(s.form)) + ", output " + std::to_string(static_cast<int>(s.output)) + ", " + describe(t) + ", groups " +
         std::to_string(s.counts.size()) + ", m " + std::to_string(s.m) + ", n " + std::to_string(s.n) + ", k " + std::to_string(s.k);
}

void expect_right(const GemmSizes& sizes, const GemmTuning& tuning, std::int64_t samples = std::int64_t{1} << 40) {
  const GemmCase c(sizes);
  c.run(tuning);
  const GemmCheck got = c.check(samples);
  EXPECT_EQ(got.wrong, 0) << name_of(sizes, tuning) << ": " << got.describe();
  EXPECT_GT(got.checked, 0);
  EXPECT_GT(got.worst, 0) << "nothing was compared";
  EXPECT_EQ(c.flags(), kStatusOk);
}

TEST(GroupedGemmCuda, EveryTileMatchesSumsInDoubleOnRaggedGroups) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    for (const GemmOutput output : kOutputs) {
      for (const GemmKernel& kernel : grouped_kernels(form, output)) {
        const bool is_tn = form == GemmForm::kTN;
        expect_right({form, output, ragged_counts(), is_tn ? 200 : 0, 328, is_tn ? 0 : 136}, {kernel.tile, 2});
      }
    }
  }
}

TEST(GroupedGemmCuda, WidthsOfModelsAndPartialTiles) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    for (const int n : {8, 64, 128, 136, 1408, 2880}) {
      for (const int k : {8, 40, 512, 1408}) {
        const bool is_tn = form == GemmForm::kTN;
        GemmSizes sizes{form, GemmOutput::kBf16, {130, 0, 1, 300, 64}, is_tn ? k : 0, n, is_tn ? 0 : k};
        sizes.bias = !is_tn;
        expect_right(sizes, {});
      }
    }
  }
}

TEST(GroupedGemmCuda, RowsThroughAListMatchAndPaddingRowsAreZero) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : {GemmForm::kNT, GemmForm::kNN}) {
    for (const GemmOutput output : kOutputs) {
      for (const GemmKernel& kernel : grouped_kernels(form, output)) {
        for (const int k : {8, 136, 1000}) {
          GemmSizes sizes{form, output, ragged_counts(), 0, 328, k};
          sizes.bias = k != 8, sizes.listed = true;
          expect_right(sizes, {kernel.tile, 2});
        }
      }
    }
  }
}

TEST(GroupedGemmCuda, ContractionsThroughAListMatchAndPaddingRowsAddNothing) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : kOutputs) {
    for (const GemmKernel& kernel : grouped_kernels(GemmForm::kTN, output)) {
      for (const bool is_a : {false, true}) {
        GemmSizes sizes{GemmForm::kTN, output, ragged_counts(), 200, 328, 0};
        sizes.listed = is_a, sizes.b_listed = !is_a;
        expect_right(sizes, {kernel.tile, 2});
        sizes.counts = {5, 20000, 0, 700, 9011, 64};
        GemmTuning tuning{kernel.tile, 2};
        tuning.min_slice_blocks = 8;
        expect_right(sizes, tuning);
      }
    }
  }
}

TEST(GroupedGemmCuda, TheCheckSeesOneWrongElementAndOneWriteBehindTheEnd) {
  WB_NEEDS_HOPPER();
  const GemmCase c({GemmForm::kNT, GemmOutput::kBf16, {130, 0, 7}, 0, 136, 264});
  c.run({});
  ASSERT_EQ(c.check().wrong, 0);
  auto* d = static_cast<std::uint16_t*>(c.problem().d);
  WB_TRY_CUDA(cudaMemsetAsync(d + 131 * 136 + 5, 0x7f, 2, c.stream()));
  WB_TRY_CUDA(cudaMemsetAsync(d + 137 * 136, 0, 2, c.stream()));
  const GemmCheck got = c.check();
  EXPECT_EQ(got.wrong, 2) << got.describe();
  EXPECT_EQ(got.first_wrong, 131 * 136 + 5);
}

TEST(GroupedGemmCuda, NoRowsAndOneGroup) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    for (const std::vector<int>& counts : {std::vector<int>{0, 0, 0}, std::vector<int>{0}, std::vector<int>{1}, std::vector<int>{0, 777, 0}}) {
      const GemmSizes sizes{form, GemmOutput::kBf16, counts, is_tn ? 264 : 0, 520, is_tn ? 0 : 264};
      const GemmCase c(sizes);
      c.run({});
      const GemmCheck got = c.check();
      EXPECT_EQ(got.wrong, 0) << name_of(sizes, {}) << ": " << got.describe();
    }
  }
}

TEST(GroupedGemmCuda, AGroupWithoutRowsHasAZeroGradient) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : {GemmOutput::kBf16, GemmOutput::kF32}) {
    const GemmCase c({GemmForm::kTN, output, {70, 0, 70}, 136, 264, 0});
    c.run({});
    const std::vector<unsigned char> d = c.result();
    const std::size_t third = d.size() / 3;
    for (std::size_t i = third; i < 2 * third; ++i) ASSERT_EQ(d[i], 0) << "byte " << i;
  }
}

TEST(GroupedGemmCuda, LongGroupsAreCutAndSummedInOrder) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : kOutputs) {
    for (const GemmKernel& kernel : grouped_kernels(GemmForm::kTN, output)) {
      GemmTuning tuning{kernel.tile, 2};
      tuning.min_slice_blocks = 8;
      const GemmSizes sizes{GemmForm::kTN, output, {5, 20000, 0, 700, 9011, 64}, 200, 328, 0};
      const GemmCase c(sizes);
      c.run(tuning);
      const GemmCheck got = c.check();
      EXPECT_EQ(got.wrong, 0) << name_of(sizes, tuning) << ": " << got.describe();
      const std::vector<unsigned char> first = c.result();
      for (int again = 0; again < 3; ++again) {
        c.run(tuning);
        EXPECT_TRUE(c.result() == first) << name_of(sizes, tuning) << ": run " << again << " differs";
      }
    }
  }
}

TEST(GroupedGemmCuda, UnequalGroupsThatAreNotCut) {
  WB_NEEDS_HOPPER();
  std::vector<int> many(64, 9), last(33, 5), two = {0, 500};
  many[50] = 1500, last[32] = 700;
  for (const std::vector<int>& counts : {ragged_counts(), many, last, two}) {
    for (const GemmOutput output : kOutputs) {
      GemmTuning tuning;
      tuning.slices_per_cluster = 0;
      expect_right({GemmForm::kTN, output, counts, 1400, 2000, 0}, tuning, 3000000);
    }
  }
}

TEST(GroupedGemmCuda, ManyGroups) {
  WB_NEEDS_HOPPER();
  std::mt19937 random(7);
  for (const int groups : {33, 256, 1152, 4096}) {
    std::vector<int> counts(static_cast<std::size_t>(groups));
    for (int& c : counts) c = random() % 3 == 0 ? 0 : static_cast<int>(random() % 9);
    counts[static_cast<std::size_t>(groups) / 2] = 1000;
    for (const GemmForm form : kForms) {
      const bool is_tn = form == GemmForm::kTN;
      expect_right({form, GemmOutput::kBf16, counts, is_tn ? 136 : 0, 264, is_tn ? 0 : 136}, {}, 2000000);
    }
  }
}

TEST(GroupedGemmCuda, RepeatedRunsAreBitEqual) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    const GemmCase c({form, GemmOutput::kBf16, {3000, 17, 512, 0, 129}, is_tn ? 1024 : 0, 1024, is_tn ? 0 : 1024});
    c.run({});
    const std::vector<unsigned char> first = c.result();
    for (int again = 0; again < 5; ++again) {
      c.run({});
      EXPECT_TRUE(c.result() == first) << "form " << static_cast<int>(form) << ", run " << again;
    }
  }
}

TEST(GroupedGemmCuda, ARowDoesNotDependOnOthersOrOnTheTile) {
  WB_NEEDS_HOPPER();
  constexpr std::int64_t kN = 520, kK = 264;
  const GemmCase c({GemmForm::kNT, GemmOutput::kBf16, {77, 150, 33}, 0, kN, kK});
  c.run({});
  const std::vector<unsigned char> first = c.result();
  for (const GemmKernel& kernel : grouped_kernels(GemmForm::kNT, GemmOutput::kBf16)) {
    c.run({kernel.tile});
    EXPECT_TRUE(c.result() == first) << describe(GemmTuning{kernel.tile});
  }
  // All rows but 100 become NaN.
  std::vector<unsigned char> row(kK * 2);
  WB_TRY_CUDA(cudaMemcpy(row.data(), c.a().as<unsigned char>() + 100 * kK * 2, row.size(), cudaMemcpyDeviceToHost));
  c.a().fill(0xff, c.stream());
  WB_TRY_CUDA(cudaMemcpyAsync(c.a().as<unsigned char>() + 100 * kK * 2, row.data(), row.size(), cudaMemcpyHostToDevice, c.stream()));
  c.run({});
  const std::vector<unsigned char> second = c.result();
  EXPECT_EQ(std::memcmp(first.data() + 100 * kN * 2, second.data() + 100 * kN * 2, kN * 2), 0);
  EXPECT_NE(std::memcmp(first.data() + 101 * kN * 2, second.data() + 101 * kN * 2, kN * 2), 0);
}

TEST(GroupedGemmCuda, LongGroupsBesideTheOthersHaveTheSameBits) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : kOutputs) {
    for (const std::vector<int>& counts : {std::vector<int>{9, 4000, 300, 0, 64, 2000, 77}, std::vector<int>(40, 100), std::vector<int>{0, 700}}) {
      const GemmCase c({GemmForm::kTN, output, counts, 1408, 2312, 0});
      GemmTuning tuning;
      tuning.slices_per_cluster = 0;
      c.run(tuning);
      const std::vector<unsigned char> in_order = c.result();
      for (const int batch : {1, 7, 16, 32}) {
        tuning.long_batch = batch;
        c.run(tuning);
        const GemmCheck got = c.check(1000000);
        EXPECT_EQ(got.wrong, 0) << got.describe();
        EXPECT_TRUE(c.result() == in_order) << "output " << static_cast<int>(output) << ", groups " << counts.size() << ", batches of " << batch;
      }
    }
  }
}

TEST(GroupedGemmCuda, ACapturedGraphFollowsNewOffsets) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    const GemmCase c({form, GemmOutput::kBf16, {500, 200, 0, 324}, is_tn ? 264 : 0, 520, is_tn ? 0 : 264, 0});
    c.run({});
    const GraphExec graph = GraphExec::capture(c.stream(), [&](cudaStream_t stream) {
      run_grouped(c.problem(), {}, 0, stream);
      run_grouped(c.problem(), {}, 0, stream);
    });
    for (const std::vector<int>& counts : {std::vector<int>{1, 0, 1023, 0}, std::vector<int>{100, 100, 100, 100}, std::vector<int>{0, 0, 0, 0}}) {
      const std::vector<std::int32_t> offsets = offsets_of(counts);
      c.offsets().upload(offsets.data(), offsets.size() * 4, c.stream());
      c.reset(c.stream());
      graph.launch(c.stream());
      const GemmCheck got = c.check();
      EXPECT_EQ(got.wrong, 0) << "form " << static_cast<int>(form) << ": " << got.describe();
    }
  }
}

TEST(GroupedGemmCuda, BrokenOffsetsAreReportedAndStayInside) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    const GemmCase c({form, GemmOutput::kBf16, {100, 100, 100}, is_tn ? 136 : 0, 264, is_tn ? 0 : 136});
    for (const std::vector<std::int32_t>& offsets : {std::vector<std::int32_t>{0, 200, 100, 300}, std::vector<std::int32_t>{0, 100, 200, 100000},
                                                     std::vector<std::int32_t>{-5, 100, 200, 300}, std::vector<std::int32_t>{7, 100, 200, 300}}) {
      c.offsets().upload(offsets.data(), offsets.size() * 4, c.stream());
      c.run({});
      EXPECT_EQ(c.flags(), kStatusBadOffsets) << offsets[0] << " " << offsets[1] << " " << offsets[2] << " " << offsets[3];
    }
  }
}

TEST(GroupedGemmCuda, MoreThan2To31Elements) {
  WB_NEEDS_HOPPER();
  constexpr std::int64_t kSamples = 40000;
  std::vector<int> few(4096, 1);
  few[17] = 300;
  // Operand rows: 1,100,000 x 2,048. Weights: 4,096 x 1,024 x 1,024. Results: 1,100,000 x 2,048 and 4,096 x 1,024 x 1,024.
  expect_right({GemmForm::kNT, GemmOutput::kBf16, {600000, 3, 499997}, 0, 136, 2048}, {}, kSamples);
  expect_right({GemmForm::kNN, GemmOutput::kBf16, few, 0, 1024, 1024}, {}, kSamples);
  expect_right({GemmForm::kNT, GemmOutput::kBf16, {600000, 3, 499997}, 0, 2048, 136}, {}, kSamples);
  expect_right({GemmForm::kTN, GemmOutput::kBf16, few, 1024, 1024, 0}, {}, kSamples);
  // Through a list.
  GemmSizes rows{GemmForm::kNT, GemmOutput::kBf16, {600000, 3, 499997}, 0, 136, 2048};
  rows.listed = true;
  expect_right(rows, {}, kSamples);
  GemmSizes contraction{GemmForm::kTN, GemmOutput::kBf16, std::vector<int>(4096, 268), 64, 2048, 0};
  contraction.b_listed = true;
  expect_right(contraction, {}, kSamples);
}

}  // namespace
}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// The 8-bit sm_90a grouped matmul kernels against sums in double: every form, output, pair of formats and tile on ragged groups, exact sums,
// hard loads, determinism.
#include "cuda/fp8_harness.h"

namespace waybill::cuda {
namespace {

constexpr GemmForm kForms[] = {GemmForm::kNT, GemmForm::kTN};
constexpr GemmOutput kOutputs[] = {GemmOutput::kBf16, GemmOutput::kF32, GemmOutput::kAddF32};
constexpr Fp8Types kTypes[] = {Fp8Types::kE4M3, Fp8Types::kE5M2E4M3, Fp8Types::kE4M3E5M2};

std::string name_of(const Fp8Sizes& s, const Fp8Tuning& t) {
  return "form " + std::to_string(static_cast<int>(s.form)) + ", output " + std::to_string(static_cast<int>(s.output)) + ", types " +
         std::to_string(static_cast<int>(s.types)) + (s.turned ? ", turned" : "") + ", " + describe(t) + ", groups " + std::to_string(s.counts.size()) +
         ", m " + std::to_string(s.m) + ", n " + std::to_string(s.n) + ", k " + std::to_string(s.k);
}

Fp8Tuning tuned(const Fp8Sizes& s) {
  Fp8Problem p{};
  p.form = s.form, p.output = s.output, p.types = s.types, p.groups = static_cast<std::int64_t>(s.counts.size()), p.m = s.m, p.n = s.n, p.k = s.k;
  p.rows = offsets_of(s.counts).back() + s.spare_rows;
  return choose_fp8_tuning(p, 132);
}

void expect_right(const Fp8Sizes& sizes, const Fp8Tuning& tuning, std::int64_t samples = std::int64_t{1} << 40) {
  const Fp8Case c(sizes);
  c.run(tuning);
  const GemmCheck got = c.check(samples);
  EXPECT_EQ(got.wrong, 0) << name_of(sizes, tuning) << ": " << got.describe();
  EXPECT_GT(got.checked, 0);
  EXPECT_GT(got.worst, 0) << "nothing was compared";
  EXPECT_EQ(c.flags(), kStatusOk);
}

TEST(GroupedFp8Cuda, SumsThatAreExactComeOutToTheBit) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    for (const GemmOutput output : kOutputs) {
      for (const Fp8Types types : kTypes) {
        for (const Fp8Kernel& kernel : fp8_kernels(form, output, types)) {
          for (const bool turned : {false, true}) {
            if (turned && form == GemmForm::kTN) continue;
            const bool is_tn = form == GemmForm::kTN;
            Fp8Sizes sizes{form, output, types, ragged_counts(), is_tn ? 200 : 0, 328, is_tn ? 0 : 400};
            sizes.turned = turned, sizes.small_integers = true;
            expect_right(sizes, {kernel.tile, 2});
          }
        }
      }
    }
  }
}

TEST(GroupedFp8Cuda, EveryTileMatchesSumsInDoubleOnRaggedGroups) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    for (const GemmOutput output : kOutputs) {
      for (const Fp8Types types : kTypes) {
        for (const Fp8Kernel& kernel : fp8_kernels(form, output, types)) {
          const bool is_tn = form == GemmForm::kTN;
          Fp8Sizes sizes{form, output, types, ragged_counts(), is_tn ? 264 : 0, 520, is_tn ? 0 : 272};
          sizes.scale = kernel.tile.block_n == 128 ? ScaleFormat::kF32 : ScaleFormat::kPowerOfTwo;
          Fp8Tuning tuning{kernel.tile, 2};
          tuning.prefetches_sums = true;
          expect_right(sizes, tuning);
        }
      }
    }
  }
}

TEST(GroupedFp8Cuda, WidthsOfModelsAndPartialTiles) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    for (const int n : {8, 64, 128, 136, 768, 1408, 2880}) {
      for (const int k : {16, 48, 128, 768, 1408}) {
        for (const bool turned : {false, true}) {
          const bool is_tn = form == GemmForm::kTN;
          if (turned && is_tn) continue;
          Fp8Sizes sizes{form, GemmOutput::kBf16, Fp8Types::kE4M3, {130, 0, 1, 300, 64}, is_tn ? k : 0, n, is_tn ? 0 : k};
          sizes.bias = !is_tn, sizes.turned = turned, sizes.row_scales = n == 136, sizes.odd_scales = n == 64 || n == 1408;
          sizes.scale = k == 768 ? ScaleFormat::kF32 : ScaleFormat::kPowerOfTwo;
          expect_right(sizes, tuned(sizes), 300000);
        }
      }
    }
  }
}

// A tile's warpgroups have 64 rows each: of the last tile one, two or three have rows, some of them few; an odd number of row tiles is shared by columns.
TEST(GroupedFp8Cuda, EveryHeightOfAGradient) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : kOutputs) {
    for (const Fp8Kernel& kernel : fp8_kernels(GemmForm::kTN, output, Fp8Types::kE4M3)) {
      for (const int m : {8, 64, 72, 128, 136, 192, 200, 320, 384, 456, 576}) {
        for (const int n : {40, 264}) {
          Fp8Sizes sizes{GemmForm::kTN, output, Fp8Types::kE4M3, {130, 0, 1, 900, 64, 257}, m, n, 0};
          sizes.small_integers = true;
          expect_right(sizes, {kernel.tile, 2});
        }
      }
    }
  }
}

TEST(GroupedFp8Cuda, TheCheckSeesOneWrongElementAndOneWriteBehindTheEnd) {
  WB_NEEDS_HOPPER();
  const Fp8Case c({GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3, {130, 0, 7}, 0, 136, 272});
  c.run({});
  ASSERT_EQ(c.check().wrong, 0);
  auto* d = static_cast<std::uint16_t*>(c.problem().d);
  WB_TRY_CUDA(cudaMemsetAsync(d + 131 * 136 + 5, 0x7f, 2, c.cuda_stream()));
  WB_TRY_CUDA(cudaMemsetAsync(d + 137 * 136, 0, 2, c.cuda_stream()));
  EXPECT_EQ(c.check().wrong, 2);
}

TEST(GroupedFp8Cuda, NoRowsAndOneGroup) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    for (const std::vector<int>& counts : {std::vector<int>{0, 0, 0}, std::vector<int>{0}, std::vector<int>{1}, std::vector<int>{0, 777, 0}}) {
      const Fp8Sizes sizes{form, GemmOutput::kBf16, Fp8Types::kE4M3, counts, is_tn ? 264 : 0, 520, is_tn ? 0 : 272};
      const Fp8Case c(sizes);
      c.run(tuned(sizes));
      const GemmCheck got = c.check();
      EXPECT_EQ(got.wrong, 0) << name_of(sizes, {}) << ": " << got.describe();
    }
  }
}

// 66 clusters share the units: 67 and a few more leave a last round of few, which is cut by columns.
TEST(GroupedFp8Cuda, ACutLastRoundHasTheSameBits) {
  WB_NEEDS_HOPPER();
  for (const std::vector<int>& counts : {std::vector<int>{67 * 256}, std::vector<int>{9000, 0, 8300, 130, 5, 700}}) {
    for (const int n : {256, 328, 648}) {
      for (const bool turned : {false, true}) {
        Fp8Sizes sizes{GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3, counts, 0, n, 400};
        sizes.turned = turned, sizes.bias = n == 328;
        const Fp8Case c(sizes);
        Fp8Tuning tuning{{256, 4, 2, 2}, 2};
        tuning.cuts_last_round = false;
        c.run(tuning);
        const std::vector<unsigned char> whole = c.result();
        tuning.cuts_last_round = true;
        for (int again = 0; again < 2; ++again) {
          c.run(tuning);
          const GemmCheck got = c.check(300000);
          EXPECT_EQ(got.wrong, 0) << name_of(sizes, tuning) << ": " << got.describe();
          EXPECT_TRUE(c.result() == whole) << name_of(sizes, tuning) << ", run " << again;
        }
      }
    }
  }
}

TEST(GroupedFp8Cuda, AGroupWithoutRowsHasAZeroGradient) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : {GemmOutput::kBf16, GemmOutput::kF32}) {
    const Fp8Sizes sizes{GemmForm::kTN, output, Fp8Types::kE4M3, {70, 0, 70}, 136, 264, 0};
    const Fp8Case c(sizes);
    c.run(tuned(sizes));
    const std::vector<unsigned char> d = c.result();
    const std::size_t third = d.size() / 3;
    for (std::size_t i = third; i < 2 * third; ++i) ASSERT_EQ(d[i], 0) << "byte " << i;
  }
}

TEST(GroupedFp8Cuda, LongGroupsAreCutAndSummedInOrder) {
  WB_NEEDS_HOPPER();
  for (const GemmOutput output : kOutputs) {
    for (const Fp8Kernel& kernel : fp8_kernels(GemmForm::kTN, output, Fp8Types::kE4M3)) {
      Fp8Tuning tuning{kernel.tile, 2};
      tuning.prefetches_sums = true;
      const Fp8Sizes sizes{GemmForm::kTN, output, Fp8Types::kE4M3, {5, 20000, 0, 700, 9011, 64}, 200, 328, 0};
      const Fp8Case c(sizes);
      c.run(tuning);
      const GemmCheck got = c.check(20000);
      EXPECT_EQ(got.wrong, 0) << name_of(sizes, tuning) << ": " << got.describe();
      const std::vector<unsigned char> first = c.result();
      for (int again = 0; again < 3; ++again) {
        c.run(tuning);
        EXPECT_TRUE(c.result() == first) << name_of(sizes, tuning) << ": run " << again << " differs";
      }
    }
  }
}

TEST(GroupedFp8Cuda, ManyGroups) {
  WB_NEEDS_HOPPER();
  std::mt19937 random(7);
  for (const int groups : {33, 256, 1152, 4096}) {
    std::vector<int> counts(static_cast<std::size_t>(groups));
    for (int& c : counts) c = random() % 3 == 0 ? 0 : static_cast<int>(random() % 9);
    counts[static_cast<std::size_t>(groups) / 2] = 1000;
    for (const GemmForm form : kForms) {
      const bool is_tn = form == GemmForm::kTN;
      const Fp8Sizes sizes{form, GemmOutput::kBf16, Fp8Types::kE4M3, counts, is_tn ? 136 : 0, 264, is_tn ? 0 : 144};
      expect_right(sizes, tuned(sizes), 20000);
    }
  }
}

TEST(GroupedFp8Cuda, RepeatedRunsAreBitEqual) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    const Fp8Sizes sizes{form, GemmOutput::kBf16, Fp8Types::kE4M3, {3000, 17, 512, 0, 129}, is_tn ? 1024 : 0, 1024, is_tn ? 0 : 1024};
    const Fp8Case c(sizes);
    c.run(tuned(sizes));
    const std::vector<unsigned char> first = c.result();
    for (int again = 0; again < 5; ++again) {
      c.run(tuned(sizes));
      EXPECT_TRUE(c.result() == first) << "form " << static_cast<int>(form) << ", run " << again;
    }
  }
}

TEST(GroupedFp8Cuda, ARowDoesNotDependOnOthersOrOnTheTile) {
  WB_NEEDS_HOPPER();
  constexpr std::int64_t kN = 520, kK = 272;
  const Fp8Case c({GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3, {77, 150, 33}, 0, kN, kK});
  c.run({});
  const std::vector<unsigned char> first = c.result();
  for (const Fp8Kernel& kernel : fp8_kernels(GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3)) {
    c.run({kernel.tile});
    EXPECT_TRUE(c.result() == first) << describe(Fp8Tuning{kernel.tile});
  }
  // All codes but those of row 100 become NaN.
  std::vector<unsigned char> row(kK);
  WB_TRY_CUDA(cudaMemcpy(row.data(), c.a().as<unsigned char>() + 100 * kK, row.size(), cudaMemcpyDeviceToHost));
  c.a().fill(0x7f, c.cuda_stream());
  WB_TRY_CUDA(cudaMemcpyAsync(c.a().as<unsigned char>() + 100 * kK, row.data(), row.size(), cudaMemcpyHostToDevice, c.cuda_stream()));
  c.run({});
  const std::vector<unsigned char> second = c.result();
  EXPECT_EQ(std::memcmp(first.data() + 100 * kN * 2, second.data() + 100 * kN * 2, kN * 2), 0);
  EXPECT_NE(std::memcmp(first.data() + 101 * kN * 2, second.data() + 101 * kN * 2, kN * 2), 0);
}

TEST(GroupedFp8Cuda, ACapturedGraphFollowsNewOffsets) {
  WB_NEEDS_HOPPER();
  const Fp8Sizes sizes{
      GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3, {500, 200, 0, 324}, 0, 520, 272, ScaleFormat::kPowerOfTwo, false, false, false, false, 0};
  const Fp8Case c(sizes);
  c.run({});
  const GraphExec graph = GraphExec::capture(c.cuda_stream(), [&](cudaStream_t stream) { run_fp8(c.problem(), {}, 0, stream); });
  for (const std::vector<int>& counts : {std::vector<int>{1, 0, 1023, 0}, std::vector<int>{100, 100, 100, 100}, std::vector<int>{0, 0, 0, 0}}) {
    const std::vector<std::int32_t> offsets = offsets_of(counts);
    c.offsets().upload(offsets.data(), offsets.size() * 4, c.cuda_stream());
    c.reset(c.cuda_stream());
    graph.launch(c.cuda_stream());
    const GemmCheck got = c.check();
    EXPECT_EQ(got.wrong, 0) << got.describe();
  }
}

TEST(GroupedFp8Cuda, BrokenOffsetsAreReportedAndStayInside) {
  WB_NEEDS_HOPPER();
  for (const GemmForm form : kForms) {
    const bool is_tn = form == GemmForm::kTN;
    const Fp8Sizes sizes{form, GemmOutput::kBf16, Fp8Types::kE4M3, {100, 100, 100}, is_tn ? 136 : 0, 264, is_tn ? 0 : 144};
    const Fp8Case c(sizes);
    for (const std::vector<std::int32_t>& offsets : {std::vector<std::int32_t>{0, 200, 100, 300}, std::vector<std::int32_t>{0, 100, 200, 100000},
                                                     std::vector<std::int32_t>{-5, 100, 200, 300}, std::vector<std::int32_t>{7, 100, 200, 300}}) {
      c.offsets().upload(offsets.data(), offsets.size() * 4, c.cuda_stream());
      c.run(tuned(sizes));
      EXPECT_EQ(c.flags(), kStatusBadOffsets) << offsets[0] << " " << offsets[1] << " " << offsets[2] << " " << offsets[3];
    }
  }
}

TEST(GroupedFp8Cuda, MoreThan2To31Elements) {
  WB_NEEDS_HOPPER();
  std::vector<int> few(2100, 1);
  few[17] = 300;
  expect_right({GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3, {600000, 3, 499997}, 0, 136, 2048}, {}, 4000);
  expect_right({GemmForm::kNT, GemmOutput::kBf16, Fp8Types::kE4M3, few, 0, 1024, 1024}, {}, 4000);
  expect_right({GemmForm::kTN, GemmOutput::kBf16, Fp8Types::kE4M3, few, 1024, 1024, 0}, {{192, 4, 2, 3}}, 4000);
}

}  // namespace
}  // namespace waybill::cuda

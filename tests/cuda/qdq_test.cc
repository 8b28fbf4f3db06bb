// SPDX-License-Identifier: Apache-2.0
// A recipe's operands as bf16: the GPU's one call against quantize_dequantize() and hadamard_rows() on the CPU, to the bit.
#include "ops/quantize/cuda/qdq.h"

#include "cuda/quantize_harness.h"
#include "waybill/random.h"
#include "waybill/recipe.h"

namespace waybill::cuda {
namespace {

struct QdqCase {
  QuantConfig format;
  bool hadamard, has_list;
  std::string name() const { return name_of(format) + (hadamard ? " rotated" : "") + (has_list ? " through a list" : ""); }
};

std::vector<QdqCase> cases() {
  std::vector<QdqCase> all;
  for (const Recipe kind : {Recipe::kMXFP8, Recipe::kNVFP4}) {
    for (const ScaleRule rule : {ScaleRule::kRoundUp, ScaleRule::kFloor}) {
      for (const Operand operand : {Operand::kActivation, Operand::kGradient, Operand::kWeight}) {
        for (const Contraction contraction : {Contraction::kColumns, Contraction::kRows}) {
          for (const bool listed : {false, true}) {
            RecipeConfig recipe;
            recipe.kind = kind, recipe.scale_rule = rule;
            const QuantConfig format = operand_format(recipe, operand, contraction);
            all.push_back({format, false, listed});
            if (kind == Recipe::kNVFP4 && contraction == Contraction::kRows && operand != Operand::kWeight) all.push_back({format, true, listed});
          }
        }
      }
    }
  }
  return all;
}

// What the layer on the CPU multiplies (src/moe/recipe_operands.cc), rounded to bf16; row s of the result is row offsets[g] + s or, rotated, that of
// hadamard_offsets().
Tensor expected(const QdqCase& test, const Tensor& x, const TensorView& list, const TensorView& offsets, std::uint64_t seed, std::uint64_t draws,
                std::int64_t first_id, std::int64_t rows) {
  const std::int64_t L = offsets.shape[0] - 1, C = x.dim(1);
  std::vector<std::uint64_t> seeds;
  for (std::int64_t g = 0; g < L; ++g) seeds.push_back(random_u64(random_u64(seed, draws), static_cast<std::uint64_t>(first_id + g)));
  Tensor y = Tensor::zeros(DType::kF32, {rows, C}), rotated;
  QuantizeDequantizeArgs args;
  args.x = x, args.rows = list, args.offsets = offsets, args.y = y;
  std::vector<std::int32_t> filled;
  if (test.hadamard) {
    filled = hadamard_offsets(offsets);
    rotated.resize(DType::kF32, {filled.back(), C});
    hadamard_rows(x, list, offsets, static_cast<std::uint16_t>(random_u64(seed, 0x100 + draws)), rotated);
    args.x = rotated, args.rows = {}, args.offsets = TensorView::of(filled.data(), {L + 1});
  }
  if (test.format.stochastic) args.group_seeds = seeds.data();
  quantize_dequantize(test.format, args);
  Tensor out(DType::kBF16, {rows, C});
  round_to_bf16(y, out);
  return out;
}

TEST(QdqCuda, EveryOperandOfTheRecipesHasTheBitsOfTheCpu) {
  WB_NEEDS_GPU();
  const std::vector<int> counts = {0, 1, 15, 16, 17, 31, 32, 33, 0, 64, 200, 5};
  const std::vector<std::int32_t> starts = offsets_of(counts);
  const auto L = static_cast<std::int64_t>(counts.size());
  const std::int64_t S = starts.back() + 9, R = 157, rows = S + 15 * L;
  Pair offsets(DType::kI32, {L + 1}, false), list(DType::kI32, {S}, false), seed_memory(DType::kI64, {1}, false);
  std::copy(starts.begin(), starts.end(), offsets.host.as<std::int32_t>());
  for (std::int64_t s = 0; s < S; ++s) list.host.as<std::int32_t>()[s] = s % 11 == 4 ? -1 : static_cast<std::int32_t>(s * 37 % R);
  constexpr std::uint64_t kSeed = 0x1234567890abcdefull, kDraws = 3;
  std::memcpy(seed_memory.host.view().data, &kSeed, 8);
  offsets.upload(), list.upload(), seed_memory.upload();
  for (const std::int64_t C : {std::int64_t{32}, std::int64_t{160}, std::int64_t{416}}) {
    Tensor values(DType::kF32, {std::max(S, R), C});
    Pair x(DType::kBF16, {std::max(S, R), C}, false);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < values.size(); ++i) {
      float v = normal(random) * std::exp2(static_cast<float>(i % 23 - 11));
      if (i % 997 == 5) v = 0;
      const bf16 rounded(v);
      x.host.as<bf16>()[i] = rounded, values.as<float>()[i] = static_cast<float>(rounded);
    }
    x.upload();
    for (const QdqCase& test : cases()) {
      Pair y(DType::kBF16, {rows, C}), group_scales(DType::kF32, {L}), filled(DType::kI32, {L + 1});
      const Tensor want = expected(test, values, test.has_list ? list.cpu() : TensorView(), offsets.cpu(), kSeed, kDraws, 40, rows);
      DeviceStatus status;
      QdqCall call{};
      call.x = {x.gpu().data,
                true,
                C,
                S,
                static_cast<int>(C),
                offsets.gpu().as<std::int32_t>(),
                static_cast<int>(L),
                status.device_ptr(),
                test.has_list ? list.gpu().as<std::int32_t>() : nullptr};
      call.y = y.gpu().data, call.element = test.format.element, call.scale = test.format.scale, call.rule = test.format.rule;
      call.block_rows = static_cast<int>(test.format.block_rows), call.block_columns = static_cast<int>(test.format.block_columns);
      call.stochastic = test.format.stochastic, call.hadamard = test.hadamard, call.draws = kDraws, call.first_id = 40;
      if (test.has_list) {
        call.seed.pointer = static_cast<const std::uint64_t*>(seed_memory.gpu().data);
      } else {
        call.seed.value = kSeed;
      }
      call.group_scales = group_scales.gpu().as<float>(), call.y_offsets = filled.gpu().as<std::int32_t>();
      const CudaStream stream;
      launch_qdq(call, stream);
      stream.synchronize();
      EXPECT_EQ(status.read(stream).flags, kStatusOk) << test.name();
      const std::vector<unsigned char> got = y.downloaded();
      std::vector<std::int32_t> ends(starts);
      if (test.hadamard) ends = hadamard_offsets(offsets.cpu());
      const std::size_t written = static_cast<std::size_t>(ends.back() * C);
      std::size_t first = written;
      for (std::size_t i = 0; i < written && first == written; ++i) {
        if (std::memcmp(got.data() + 2 * i, static_cast<const unsigned char*>(want.view().data) + 2 * i, 2) != 0) first = i;
      }
      EXPECT_EQ(first, written) << test.name() << ", C = " << C << ": row " << first / static_cast<std::size_t>(C) << ", column "
                                << first % static_cast<std::size_t>(C);
      for (std::size_t i = 2 * written; i < got.size(); ++i) ASSERT_EQ(got[i], kPoison) << test.name() << ": written past the groups";
      if (!test.hadamard) continue;
      std::vector<std::int32_t> device(static_cast<std::size_t>(L) + 1);
      const std::vector<unsigned char> raw = filled.downloaded();
      std::memcpy(device.data(), raw.data(), raw.size());
      EXPECT_EQ(device, ends) << test.name();
    }
  }
}

// A NaN spoils its block; blocks of zeros and infinities come out as the CPU says.
TEST(QdqCuda, SpecialValues) {
  WB_NEEDS_GPU();
  const std::int64_t S = 64, C = 64;
  Tensor values(DType::kF32, {S, C});
  Pair x(DType::kBF16, {S, C}, false), offsets(DType::kI32, {2}, false);
  offsets.host.as<std::int32_t>()[0] = 0, offsets.host.as<std::int32_t>()[1] = static_cast<std::int32_t>(S);
  for (std::int64_t i = 0; i < S * C; ++i) {
    float v = i / C < 32 ? 0.0f : static_cast<float>(i % 17) - 8.0f;
    if (i == 40 * C + 3) v = std::numeric_limits<float>::quiet_NaN();
    if (i == 50 * C + 20) v = -std::numeric_limits<float>::infinity();
    const bf16 rounded(v);
    x.host.as<bf16>()[i] = rounded, values.as<float>()[i] = static_cast<float>(rounded);
  }
  x.upload(), offsets.upload();
  for (const QdqCase& test : cases()) {
    if (test.has_list) continue;
    Pair y(DType::kBF16, {S, C}), group_scales(DType::kF32, {1}), filled(DType::kI32, {2});
    const Tensor want = expected(test, values, {}, offsets.cpu(), 5, 1, 0, S);
    std::memcpy(y.host.view().data, want.view().data, y.size());
    QdqCall call{};
    call.x = {x.gpu().data, true, C, S, static_cast<int>(C), offsets.gpu().as<std::int32_t>(), 1, nullptr};
    call.y = y.gpu().data, call.element = test.format.element, call.scale = test.format.scale, call.rule = test.format.rule;
    call.block_rows = static_cast<int>(test.format.block_rows), call.block_columns = static_cast<int>(test.format.block_columns);
    call.stochastic = test.format.stochastic, call.hadamard = test.hadamard, call.draws = 1, call.seed.value = 5;
    call.group_scales = group_scales.gpu().as<float>(), call.y_offsets = filled.gpu().as<std::int32_t>();
    launch_qdq(call, nullptr);
    EXPECT_EQ(y.difference("values"), "") << test.name();
  }
}

// Nothing is launched: this needs no GPU.
TEST(QdqCuda, OtherFormatsAreRefusedWithTheirBlocks) {
  const auto refused = [](QdqCall call, const char* text) {
    try {
      launch_qdq(call, nullptr);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      return;
    }
    ADD_FAILURE() << "not refused: " << text;
  };
  QdqCall call{};
  call.element = ElementFormat::kE4M3, call.scale = ScaleFormat::kE8M0, call.block_rows = 1, call.block_columns = 64;
  refused(call, "1 x 64");
  call.block_columns = 32, call.stochastic = true;
  refused(call, "1 x 32");
  call.element = ElementFormat::kE2M1, call.scale = ScaleFormat::kE4M3, call.block_columns = 16, call.hadamard = true;
  refused(call, "1 x 16");
  call.block_rows = 16, call.hadamard = false;
  refused(call, "16 x 16");
}

}  // namespace
}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
#include "waybill/data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>

#include "error_text.h"
#include "temp_folder.h"

namespace waybill {
namespace {

using test::error_text;
using test::TempFolder;
using test::write_file;
using testing::HasSubstr;

DataConfig text_config(const std::string& path) {
  DataConfig config;
  config.text = path;
  return config;
}

DataConfig bin_config(const std::string& path, const std::string& dtype = "") {
  DataConfig config;
  config.bin = path;
  config.dtype = dtype;
  return config;
}

template <class T>
void write_tokens(const std::string& path, const std::vector<T>& tokens) {
  write_file(path, std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T)));
}

TEST(DataTest, FilesOfAFolderAreJoinedInPathOrder) {
  TempFolder folder;
  std::filesystem::create_directories(folder / "sub");
  write_file(folder / "b.txt", "bbbb");
  write_file(folder / "a.txt", "aaaa");
  write_file(folder / "sub/c.txt", "cccc");
  write_file(folder / ".hidden", "xxxx");
  const Dataset data = Dataset::load(text_config(folder.str()), 256, 3);
  std::string text;
  for (std::int64_t i = 0; i < data.size(); ++i) text += static_cast<char>(data.token(i));
  EXPECT_EQ(text, "aaaa\nbbbb\ncccc");
}

TEST(DataTest, BadTextIsRefusedWithItsValues) {
  TempFolder folder;
  write_file(folder / "short.txt", "0123456789");
  EXPECT_EQ(error_text([&] { Dataset::load(text_config(folder / "none.txt"), 256, 4); }), "text " + (folder / "none.txt") + " does not exist");
  EXPECT_EQ(error_text([&] { Dataset::load(text_config(folder / "short.txt"), 256, 5); }),
            "text too short: " + (folder / "short.txt") + " holds 10 tokens, seq_len = 5 needs at least 12 (one training and one held-out sequence)");
  EXPECT_NO_THROW(Dataset::load(text_config(folder / "short.txt"), 256, 4));
  EXPECT_THAT(error_text([&] { Dataset::load(text_config(folder / "short.txt"), 50, 4); }),
              HasSubstr("token 50 at position 2 is outside the vocabulary of 50"));
  EXPECT_THAT(error_text([&] { Dataset::load({}, 256, 4); }), HasSubstr("set data.text"));
}

TEST(DataTest, TokenFilesOfBothWidthsReadBack) {
  TempFolder folder;
  write_tokens<std::uint16_t>(folder / "a.bin", {1, 2, 3, 65535, 5, 6});
  write_tokens<std::uint32_t>(folder / "b.bin", {1, 2, 3, 70000, 5, 6});
  write_file(folder / "b.bin.json", R"({"dtype": "uint32", "vocab": 70001})");
  const Dataset a = Dataset::load(bin_config(folder / "a.bin", "uint16"), 65536, 2);
  EXPECT_EQ(a.token(3), 65535);
  EXPECT_EQ(a.size(), 6);
  const Dataset b = Dataset::load(bin_config(folder / "b.bin"), 70001, 2);
  EXPECT_EQ(b.token(3), 70000);
}

TEST(DataTest, BadTokenFilesAreRefusedWithTheirValues) {
  TempFolder folder;
  const std::string bin = folder / "t.bin";
  write_tokens<std::uint16_t>(bin, {1, 2, 3, 400, 5});
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin), 256, 1); }), HasSubstr("the token type is not known"));
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin, "float32"), 256, 1); }), HasSubstr("dtype float32 is not supported"));
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin, "uint16"), 256, 1); }), HasSubstr("token 400 at position 3 is outside the vocabulary of 256"));
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin, "uint32"), 256, 1); }), HasSubstr("10 bytes is not a multiple of the 4 bytes of a uint32 token"));
  write_file(bin + ".json", R"({"dtype": "uint32", "vocab": 500})");
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin, "uint16"), 256, 1); }), HasSubstr("data.dtype = uint16 but " + bin + ".json says uint32"));
  write_file(bin + ".json", R"({"dtype": "uint16", "vocab": 500})");
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin), 256, 1); }), HasSubstr("tokenised for a vocabulary of 500, the model has 256"));
  write_file(bin + ".json", R"({"dtype": 16})");
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(bin), 256, 1); }), HasSubstr("dtype = 16 must be"));
}

TEST(DataTest, TokensReadWithTheWrongWidthAreNamed) {
  const TempFolder folder;
  std::vector<std::uint32_t> wide(300);
  for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<std::uint32_t>(1 + i % 200);
  write_tokens<std::uint32_t>(folder / "wide.bin", wide);
  write_tokens<std::uint16_t>(folder / "narrow.bin", {wide.begin(), wide.end()});
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(folder / "wide.bin", "uint16"), 256, 1); }),
              HasSubstr("every second token of 600 is 0: these are uint32 tokens"));
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(folder / "narrow.bin", "uint32"), 256, 1); }), HasSubstr("these are uint16 tokens"));
  EXPECT_EQ(Dataset::load(bin_config(folder / "wide.bin", "uint32"), 256, 1).entropy().unigram,
            Dataset::load(bin_config(folder / "narrow.bin", "uint16"), 256, 1).entropy().unigram);
}

TEST(DataTest, TheSidecarsVocabularyIsHeld) {
  const TempFolder folder;
  write_tokens<std::uint16_t>(folder / "t.bin", {1, 2, 200, 3, 4, 5});
  write_file(folder / "t.bin.json", R"({"dtype": "uint16", "vocab": 100})");
  EXPECT_THAT(error_text([&] { Dataset::load(bin_config(folder / "t.bin"), 256, 1); }), HasSubstr("token 200 at position 2 is outside the vocabulary of 100"));
}

TEST(DataTest, HeldOutTailIsNeverTrainedOn) {
  std::vector<std::int32_t> tokens(1000);
  std::iota(tokens.begin(), tokens.end(), 0);
  const Dataset data = Dataset::from_tokens(tokens, 1000, 16, 0.1);
  EXPECT_EQ(data.train_size(), 900);
  EXPECT_EQ(data.held_out_size(), 100);
  std::int32_t largest = 0, smallest = 1000;
  std::vector<std::int32_t> row(17);
  for (std::int64_t s = 0; s < 4000; ++s) {
    data.training_sequence(7, s / 8, s % 8, row);
    for (std::size_t i = 1; i < row.size(); ++i) EXPECT_EQ(row[i], row[i - 1] + 1);
    largest = std::max(largest, row.back());
    smallest = std::min(smallest, row.front());
  }
  EXPECT_EQ(largest, 899);  // the last training token is reached, the first held-out one never
  EXPECT_EQ(smallest, 0);
}

TEST(DataTest, HeldOutWindowsScoreEachTargetOnce) {
  std::vector<std::int32_t> tokens(1000);
  std::iota(tokens.begin(), tokens.end(), 0);
  const Dataset data = Dataset::from_tokens(tokens, 1000, 16, 0.1);
  EXPECT_EQ(data.num_held_out_sequences(), 6);  // (100 - 1) / 16
  std::set<std::int32_t> targets;
  std::vector<std::int32_t> row(17);
  for (std::int64_t i = 0; i < 6; ++i) {
    data.held_out_sequence(i, 6, row);
    for (std::size_t k = 1; k < row.size(); ++k) EXPECT_TRUE(targets.insert(row[k]).second);
  }
  EXPECT_EQ(targets.size(), 96u);
  EXPECT_EQ(*targets.begin(), 901);
  data.held_out_sequence(1, 2, row);  // 2 of 6, evenly spread: windows 0 and 3
  EXPECT_EQ(row[0], 900 + 3 * 16);
}

// The rows of a step, as a multiset, do not depend on how many ranks and micro-batches share them.
TEST(DataTest, GlobalBatchIsTheSameAtAnyNumberOfRanksAndMicroBatches) {
  std::vector<std::int32_t> tokens(5000);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i % 977);
  const Dataset data = Dataset::from_tokens(tokens, 977, 8, 0.1);
  const auto batch = [&](int W, std::int64_t micro_batches) {
    std::vector<std::vector<std::int32_t>> rows;
    const std::int64_t B = 16 / (W * micro_batches);
    for (std::int64_t m = 0; m < micro_batches; ++m) {
      for (int rank = 0; rank < W; ++rank) {
        Tensor t(DType::kI32, {B, 9});
        fill_micro_batch(data, 3, 11, m, rank, W, t);
        for (std::int64_t b = 0; b < B; ++b) rows.emplace_back(t.as<std::int32_t>() + b * 9, t.as<std::int32_t>() + (b + 1) * 9);
      }
    }
    return rows;
  };
  const auto one = batch(1, 1);
  ASSERT_EQ(one.size(), 16u);
  EXPECT_EQ(batch(4, 1), one);
  EXPECT_EQ(batch(2, 4), one);
  EXPECT_EQ(batch(1, 16), one);
  Tensor other(DType::kI32, {16, 9});
  fill_micro_batch(data, 3, 12, 0, 0, 1, other);
  EXPECT_NE(std::vector<std::int32_t>(other.as<std::int32_t>(), other.as<std::int32_t>() + 9), one[0]);
}

TEST(DataTest, EntropiesMatchClosedForms) {
  // a b a b ...: one bit a token, nothing left once the token before is known.
  std::vector<std::int32_t> alternating(1000);
  for (std::size_t i = 0; i < alternating.size(); ++i) alternating[i] = static_cast<std::int32_t>(i % 2);
  const TextEntropy two = Dataset::from_tokens(alternating, 2, 4, 0.1).entropy();
  EXPECT_NEAR(two.unigram, std::log(2.0), 1e-12);
  EXPECT_NEAR(two.bigram, 0, 1e-12);
  // Every pair of 4 tokens once (a de Bruijn cycle, closed): both entropies are ln 4, up to the closing token in the unigram counts.
  const std::vector<std::int32_t> cycle = {0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0};
  const TextEntropy uniform = Dataset::from_tokens(cycle, 4, 2, 0.2).entropy();
  EXPECT_NEAR(uniform.bigram, std::log(4.0), 1e-12);
  const double p0 = 5.0 / 17, p = 4.0 / 17;
  EXPECT_NEAR(uniform.unigram, -p0 * std::log(p0) - 3 * p * std::log(p), 1e-12);
  EXPECT_FALSE(Dataset::from_tokens(cycle, 5000, 2, 0.2).entropy().pairs_known);
}

TEST(DataTest, SamplesPrintWithoutControlBytesOrBrokenUtf8) {
  const std::vector<std::int32_t> tokens = {'a', '\n', 0x1b, 0xc3, 0xa9, 0xc3, 'b', 0xff, 0xe2, 0x82, 0xac, 0xed, 0xa0, 0x80};
  EXPECT_EQ(printable_text(tokens), "a\n?\xc3\xa9?b?\xe2\x82\xac???");
}

}  // namespace
}  // namespace waybill

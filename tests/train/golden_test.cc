// SPDX-License-Identifier: Apache-2.0
// The golden loss files: configs/golden.toml, and the first steps of configs/demo.toml, on made text. Format of a line: step, loss,
// gradient norm, as exact hexadecimal floats. A file's losses are demanded bit for bit on the kind of machine and compiler that its first line names; elsewhere
// (another instruction set sums in another order) within kGoldenBound. WAYBILL_UPDATE_GOLDEN=1 rewrites them: only after a wanted change of maths.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "run_helper.h"
#include "waybill/build_info.h"

namespace waybill {
namespace {

using test::Recording;
using test::RunFolder;

// Relative. Other implementations on one machine (WB_FORCE=gemm:portable, activation:ref) differ by less than 1e-6; the rest is room for
// routes that flip on another machine's rounding.
constexpr double kGoldenBound = 1e-4;

std::string machine_kind() {
#if defined(__x86_64__)
  const char* isa = __builtin_cpu_supports("avx512f")                                 ? "x86-64 avx512f"
                    : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? "x86-64 avx2"
                                                                                      : "x86-64";
#else
  const char* isa = "other";
#endif
  return fmt::format("{}; {}; {}", isa, build_info().compiler, build_info().build_type);
}

std::string hex(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%a", value);
  return text;
}

std::string to_text(const Recording& r) {
  std::string out = fmt::format("# {}\n# step loss gradient_norm\n", machine_kind());
  for (std::size_t i = 0; i < r.losses.size(); ++i) out += fmt::format("{} {} {}\n", i + 1, hex(r.losses[i]), hex(r.norms[i]));
  return out;
}

// The losses of a run against tests/train/golden/<name>.txt, which holds `steps` lines.
void expect_golden(const Recording& r, const std::string& name, std::size_t steps) {
  const std::string path = std::string(WAYBILL_GOLDEN_DIR) + "/" + name + ".txt";
  if (std::getenv("WAYBILL_UPDATE_GOLDEN") != nullptr) test::write_file(path, to_text(r));

  std::istringstream file(test::read_file(path));
  std::string kind, names;
  ASSERT_TRUE(std::getline(file, kind) && std::getline(file, names)) << path << " is missing";
  const bool same_kind = kind == "# " + machine_kind();
  std::size_t i = 0;
  double worst = 0;
  std::string step, loss, norm;
  for (; file >> step >> loss >> norm; ++i) {
    ASSERT_LT(i, r.losses.size());
    const double golden = std::strtod(loss.c_str(), nullptr);
    worst = std::max(worst, std::abs(r.losses[i] / golden - 1));
    EXPECT_NEAR(r.losses[i] / golden, 1, kGoldenBound) << "step " << step;
    if (same_kind) {
      EXPECT_EQ(hex(r.losses[i]), loss) << "step " << step;
      EXPECT_EQ(hex(r.norms[i]), norm) << "step " << step;
    }
  }
  EXPECT_EQ(i, r.losses.size());
  EXPECT_EQ(i, steps);
  ::testing::Test::RecordProperty("largest_relative_difference", fmt::format("{:.3g}", worst));
  std::printf("largest relative difference to the golden losses: %.3g (%s)\n", worst, same_kind ? "same kind: bit-equal demanded" : kind.c_str());
}

TEST(GoldenTest, LossesMatchTheFile) {
  RunFolder folder;
  Recording r;
  folder.train("golden", {"train.sample_tokens=0"}, r);
  expect_golden(r, "golden", 30);
}

// The demo as it stands, cut to 6 steps; evaluations and the sample are short.
TEST(GoldenTest, FirstLossesOfTheDemoMatchTheFile) {
  RunFolder folder(100000);
  Recording r;
  TrainOptions options;
  options.run_dir = folder.run("demo");
  const RunConfig config = folder.config({"train.steps=6", "train.warmup_steps=3", "train.eval_sequences=4", "train.final_eval_sequences=4",
                                          "train.sample_tokens=0", "train.measure_ceiling=false", "train.threads=1"},
                                         "demo");
  train(config, options, &r);
  expect_golden(r, "demo", 6);
}

// One rank and four follow one curve. The bound grows with the steps because rounding differences are amplified by training.
TEST(GoldenTest, OneRankFollowsTheCurveOfFour) {
  constexpr double kFirst = 1e-6, kLast = 1e-4;
  RunFolder folder;
  Recording four, one;
  folder.train("four", {"train.sample_tokens=0"}, four);
  folder.train("one", {"parallel.P=1", "train.sample_tokens=0"}, one);
  ASSERT_EQ(one.losses.size(), four.losses.size());
  double worst = 0;
  for (std::size_t i = 0; i < one.losses.size(); ++i) {
    const double difference = std::abs(one.losses[i] / four.losses[i] - 1);
    worst = std::max(worst, difference);
    EXPECT_LE(difference, i == 0 ? kFirst : kLast) << "step " << i + 1;
  }
  std::printf("largest relative difference of P = 1 to P = 4 in %zu steps: %.3g\n", one.losses.size(), worst);
}

}  // namespace
}  // namespace waybill

// SPDX-License-Identifier: Apache-2.0
// Nothing [T, E] exists after the router but the logits and their gradient. A program of its own: it replaces operator new, so
// that plain vectors are seen as well as tensors.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "moe/harness.h"

namespace {

std::atomic<std::size_t> g_watch{0};  // heap blocks of at least this size are counted; 0 = off
std::atomic<int> g_large_blocks{0};

void* counted(std::size_t bytes) {
  const std::size_t watch = g_watch.load();
  if (watch != 0 && bytes >= watch) g_large_blocks.fetch_add(1);
  if (void* block = std::malloc(bytes > 0 ? bytes : 1)) return block;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }

namespace waybill::test {
namespace {

// A [T, E] byte map would be 262,144 bytes and a float one four times that; everything legal is smaller.
constexpr std::int64_t kT = 256, kE = 1024;

void check(ScoreFunction score, Recompute recompute, AuxCounts aux_counts) {
  MoeConfig c = small_config(kE, 2, 4, 2);
  c.router.score = score;
  c.recompute = recompute;
  c.aux_counts = aux_counts;
  c.aux_coefficient = 0.1f, c.z_coefficient = 0.1f, c.global_coefficient = 0.1f;
  const Weights<float> w = random_weights(c, 400);
  const Batch batch = random_batch(c, {kT}, 401);
  const std::unique_ptr<Fabric> fabric = make_single_fabric();
  MoeLayer layer(c, *fabric, *fabric);
  {  // the matmuls' packing scratch is per thread and stays: let it grow first
    MoeLayer warm(c, *fabric, *fabric);
    RankRun(c, 1, 0, w, batch).run(warm, c, batch, {});
  }
  RankRun rank(c, 1, 0, w, batch);
  const AllocationTrace trace;
  g_watch = static_cast<std::size_t>(kT * kE);
  g_large_blocks = 0;
  rank.run(layer, c, batch, {});
  g_watch = 0;
  const std::size_t dense = static_cast<std::size_t>(kT * kE) * sizeof(float);
  EXPECT_EQ(trace.count_of(dense), 2u);                                           // logits and d_logits
  EXPECT_LT(trace.total_bytes() - 2 * dense, static_cast<std::size_t>(kT * kE));  // all other tensors together: less than a byte map
  EXPECT_EQ(g_large_blocks.load(), 0);                                            // and no vector either
}

TEST(MoeAllocations, OnlyTheLogitsAndTheirGradientAreTokensTimesExperts) {
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
      for (const AuxCounts counts : {AuxCounts::kDispatch, AuxCounts::kUnbiased}) {
        SCOPED_TRACE(fmt::format("score {} recompute {} counts {}", static_cast<int>(score), static_cast<int>(recompute), static_cast<int>(counts)));
        check(score, recompute, counts);
      }
    }
  }
}

TEST(MoeAllocations, TheWatchSeesADenseMap) {  // the check above can fail
  MoeConfig c = small_config(kE, 2, 4, 2);
  c.force_dense_map = true;
  const Weights<float> w = random_weights(c, 400);
  const Batch batch = random_batch(c, {kT}, 401);
  const std::unique_ptr<Fabric> fabric = make_single_fabric();
  MoeLayer layer(c, *fabric, *fabric);
  RankRun rank(c, 1, 0, w, batch);
  g_watch = static_cast<std::size_t>(kT * kE);
  g_large_blocks = 0;
  rank.run(layer, c, batch, {});
  g_watch = 0;
  EXPECT_GE(g_large_blocks.load(), 2);
}

}  // namespace
}  // namespace waybill::test

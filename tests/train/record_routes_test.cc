// SPDX-License-Identifier: Apache-2.0
// Recorded routes are those of the step's metrics, and recording changes nothing.
#include <gtest/gtest.h>

#include <filesystem>

#include "run_helper.h"
#include "waybill/route_io.h"

namespace waybill::test {
namespace {

namespace fs = std::filesystem;

TEST(RecordRoutesTest, FilesHoldTheRoutesThatTheMetricsCount) {
  const RunFolder folder;
  const std::vector<std::string> overrides{"train.steps=3", "train.warmup_steps=1", "train.micro_batches=2", "train.sample_tokens=0",
                                           "train.measure_ceiling=false"};
  Recording recording, plain;
  TrainOptions options;
  options.run_dir = folder.run("recorded");
  options.record_routes_every = 2;
  const RunConfig config = folder.config(overrides);
  train(config, options, &recording);
  folder.train("plain", overrides, plain);
  EXPECT_EQ(recording.losses, plain.losses);
  EXPECT_FALSE(fs::exists(folder.run("plain") + "/routes"));
  EXPECT_FALSE(fs::exists(options.run_dir + "/routes/step_00000003"));  // steps 1 and 2 only
  std::int64_t files = 0;
  for (const std::size_t step : {std::size_t{1}, std::size_t{2}}) {
    for (const LayerMetrics& layer : recording.steps[step - 1].layers) {
      std::vector<std::int64_t> counts(layer.counts.size(), 0);
      for (const char* micro : {"", "_micro_01"}) {
        for (int rank = 0; rank < config.parallel.W(); ++rank) {
          const Route route = load_route(fmt::format("{}/routes/step_{:08}/layer_{:03}{}/rank_{:03}.route", options.run_dir, step, layer.layer, micro, rank));
          ASSERT_EQ(static_cast<std::size_t>(route.E()), counts.size());
          for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += route.view().counts[e];
          ++files;
        }
      }
      EXPECT_EQ(counts, layer.counts) << "step " << step << ", layer " << layer.layer;
    }
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace waybill::test

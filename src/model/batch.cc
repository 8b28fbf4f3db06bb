// SPDX-License-Identifier: Apache-2.0
#include "model/batch.h"

#include <algorithm>

namespace waybill::model {
namespace {

enum class Fault : std::int64_t { kNone = 0, kShape = 1, kToken = 2 };

// One rank's findings; plain data that travels.
struct Report {
  std::int64_t micro_batches = 0, valid_tokens = 0;
  Fault fault = Fault::kNone;
  std::int64_t where[4] = {};  // kShape: micro-batch, dtype, rank, columns; kToken: micro-batch, sequence, column, token
};

Report inspect(std::span<const TensorView> micro_batches, std::int64_t seq_len, std::int64_t vocab) {
  Report report;
  report.micro_batches = static_cast<std::int64_t>(micro_batches.size());
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    const TensorView& tokens = micro_batches[m];
    const auto index = static_cast<std::int64_t>(m);
    if (tokens.dtype != DType::kI32 || tokens.rank != 2 || tokens.shape[1] != seq_len + 1 || !tokens.is_contiguous()) {
      report.fault = Fault::kShape;
      const std::int64_t where[4] = {index, static_cast<std::int64_t>(tokens.dtype), tokens.rank, tokens.shape[1]};
      std::copy_n(where, 4, report.where);
      return report;
    }
    const auto* data = tokens.as<std::int32_t>();
    for (std::int64_t i = 0; i < tokens.size(); ++i) {
      if (data[i] < -1 || data[i] >= vocab) {
        report.fault = Fault::kToken;
        const std::int64_t where[4] = {index, i / (seq_len + 1), i % (seq_len + 1), data[i]};
        std::copy_n(where, 4, report.where);
        return report;
      }
      report.valid_tokens += i % (seq_len + 1) < seq_len && data[i] >= 0 && data[i + 1] >= 0 ? 1 : 0;
    }
  }
  return report;
}

void refuse(const Report& report, int rank, std::int64_t seq_len, std::int64_t vocab) {
  const std::int64_t* w = report.where;
  WB_CHECK(report.fault != Fault::kShape, "rank {}: micro-batch {} must be contiguous i32 [B, {}], got {} with {} dimensions and {} columns", rank, w[0],
           seq_len + 1, to_string(static_cast<DType>(w[1])), w[2], w[3]);
  WB_CHECK(report.fault != Fault::kToken, "rank {}: token {} in micro-batch {}, sequence {}, column {} is outside [-1, {})", rank, w[3], w[0], w[1], w[2],
           vocab);
}

}  // namespace

TokenBatch split_tokens(const TensorView& tokens, std::int64_t seq_len) {
  TokenBatch batch;
  batch.B = tokens.shape[0];
  batch.seq_len = seq_len;
  const auto T = static_cast<std::size_t>(batch.T());
  batch.inputs.resize(T);
  batch.targets.resize(T);
  std::vector<std::uint8_t> padding(T);
  bool any = false;
  const auto* data = static_cast<const std::int32_t*>(tokens.data);
  for (std::size_t t = 0; t < T; ++t) {
    const std::size_t at = t + t / static_cast<std::size_t>(seq_len);  // rows of `tokens` hold one more column
    const bool valid = data[at] >= 0 && data[at + 1] >= 0;
    batch.inputs[t] = data[at];
    batch.targets[t] = valid ? data[at + 1] : -1;
    padding[t] = valid ? 0 : 1;
    any = any || !valid;
  }
  if (any) batch.padding = std::move(padding);
  return batch;
}

StepPlan plan_step(std::span<const TensorView> micro_batches, std::int64_t seq_len, std::int64_t vocab, Fabric& world) {
  const Report mine = inspect(micro_batches, seq_len, vocab);
  std::vector<Report> reports(static_cast<std::size_t>(world.size()));
  world.all_gather(&mine, reports.data(), sizeof(Report), "step plan");
  StepPlan plan;
  for (int r = 0; r < world.size(); ++r) {
    const Report& report = reports[static_cast<std::size_t>(r)];
    refuse(report, r, seq_len, vocab);
    WB_CHECK(report.micro_batches == reports[0].micro_batches, "rank {} has {} micro-batches but rank 0 has {}: every rank must bring the same number", r,
             report.micro_batches, reports[0].micro_batches);
    plan.valid_tokens += report.valid_tokens;
  }
  const std::size_t count = micro_batches.size();
  if (count == 0) return plan;
  std::vector<std::int64_t> mine_B(count), all_B(count * reports.size());
  for (std::size_t m = 0; m < count; ++m) mine_B[m] = micro_batches[m].shape[0];
  world.all_gather(mine_B.data(), all_B.data(), count * sizeof(std::int64_t), "step plan");
  for (std::size_t m = 0; m < count; ++m)
    for (std::size_t r = 0; r < reports.size(); ++r) {
      if (static_cast<int>(r) == world.rank()) plan.token_offset.push_back(plan.sequences * seq_len);
      plan.sequences += all_B[r * count + m];
    }
  return plan;
}

}  // namespace waybill::model

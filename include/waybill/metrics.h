// SPDX-License-Identifier: Apache-2.0
// What a run records: metrics.jsonl holds one JSON object a line, told apart by "kind": header, step, eval, sample, end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "waybill/data.h"
#include "waybill/exchange.h"
#include "waybill/phase.h"

namespace waybill {

inline constexpr int kMetricsSchema = 1;
inline constexpr std::int64_t kMaxLoadBins = 256;

struct LayerHeader {
  int layer = 0;
  std::int64_t E = 0, K = 0;
  int P = 1;
  std::string recipe = "fp32";  // of the expert matmuls
};

struct RunHeader {
  std::string name, text, created;  // created: ISO 8601, UTC
  std::string device = "cpu";       // "2 x NVIDIA H200"
  int W = 1, cores = 1, threads_per_rank = 1;
  std::uint64_t seed = 0;
  std::int64_t steps = 0, first_step = 0;  // planned in all; done before this start (resumed run)
  std::int64_t parameters = 0, active_parameters = 0;
  std::int64_t tokens = 0, tokens_per_step = 0;  // of the text; trained on in one step
  double flops_per_token = 0;                    // forward and backward, model formula
  double ceiling_tflops = 0;                     // measured fp32 matmul rate of this process; 0 = not measured
  TextEntropy entropy;
  std::vector<LayerHeader> layers;  // MoE layers only
};

struct LayerMetrics {
  int layer = 0;
  std::vector<std::int64_t> counts;  // slots per expert over all ranks; summed into at most kMaxLoadBins equal bins
  std::int64_t experts_per_bin = 1;
  std::vector<std::int64_t> rank_slots;  // slots per expert-parallel rank of the first group
  double max_over_mean = 0;              // hottest expert over the mean
  double rank_imbalance = 0;             // busiest rank over the mean, the worst of the expert-parallel groups
  std::int64_t hottest_expert = 0;
  double aux = 0, sequence = 0, global = 0, z = 0;
  std::int64_t nonfinite_rows = 0, short_rows = 0;
  // GPU runs only, from the device's counters; else empty.
  std::vector<std::int64_t> rank_rows;                    // rows received per rank
  std::int64_t min_expert_rows = 0, max_expert_rows = 0;  // slots of the emptiest and the fullest expert in the last micro-batch
  std::int64_t slot_demand = 0, row_demand = 0;           // the largest of any rank and micro-batch
  std::vector<std::vector<double>> wait_us;               // [rank][peer] how long the exchange's kernels of a rank waited for a peer
};

struct StepMetrics {
  std::int64_t step = 0;  // 1 for the first update
  double loss = 0, aux_loss = 0, learning_rate = 0, grad_norm = 0, clip_scale = 1;
  bool valid = true;        // false: the update was skipped (gradient not finite, or a receive budget exceeded)
  bool overflowed = false;  // it was the budget
  std::int64_t reruns = 0;  // of this step, after receive overflows
  std::int64_t total_reruns = 0, total_skipped = 0;
  double receive_factor = 0;  // the largest over layers; 0 = worst case
  std::int64_t tokens = 0, total_tokens = 0;
  double step_ms = 0, tokens_per_s = 0, tflops = 0;
  double ceiling_share = 0;  // tflops over the measured ceiling; on the CPU this is the MFU; 0 = unknown
  PhaseTimes times;          // mean over ranks
  ExchangeBytes bytes;       // sum over ranks
  double expert_tflops = 0;  // expert matmuls' operations over the time spent in them
  std::int64_t peak_rss_bytes = 0;
  // The most memory so far, of a rank on the CPU (the engine's buffers, mean of the process's ranks), of the fullest GPU else; and as predicted from the
  // config (waybill inspect memory). 0 = not known.
  std::int64_t peak_bytes = 0, predicted_bytes = 0;
  std::vector<LayerMetrics> layers;
};

// Appends lines; every line is flushed, and a failed write (disk full) is a kIo error that names the file. On resume, lines of steps
// after `resume_step` are removed first (resume_step < 0: the file must not exist yet).
class WB_API MetricsWriter {
 public:
  MetricsWriter(const std::string& path, std::int64_t resume_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void write(const RunHeader& header);
  void write(const StepMetrics& metrics);
  void write_eval(std::int64_t step, double loss, std::int64_t tokens);
  void write_sample(std::int64_t step, const std::string& text);
  void write_end(std::int64_t step, double seconds, double held_out_loss, bool goal_met);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace waybill

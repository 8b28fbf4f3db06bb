// SPDX-License-Identifier: Apache-2.0
#include "waybill/metrics.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "durable_file.h"
#include "waybill/error.h"
#include "waybill/version.h"

namespace waybill {
namespace {

using nlohmann::json;

json known(double value) { return value > 0 ? json(value) : json(nullptr); }

// JSON has no NaN: a loss that is not finite is null.
json finite(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }

json phases_ms(const std::array<double, kNumPhases>& seconds) {
  json out = json::object();
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    if (seconds[i] > 0) out[to_string(static_cast<Phase>(i))] = seconds[i] * 1e3;
  }
  return out;
}

json to_json(const ExchangeBytes& b) {
  json out = json::object();
  ExchangeBytes::for_each_field([&](const char* name, auto field) { out[name] = b.*field; });
  return out;
}

json to_json(const LayerMetrics& m) {
  json out{{"layer", m.layer},
           {"counts", m.counts},
           {"experts_per_bin", m.experts_per_bin},
           {"rank_slots", m.rank_slots},
           {"max_over_mean", m.max_over_mean},
           {"rank_imbalance", m.rank_imbalance},
           {"hottest_expert", m.hottest_expert},
           {"aux", finite(m.aux)},
           {"sequence", finite(m.sequence)},
           {"global", finite(m.global)},
           {"z", finite(m.z)},
           {"nonfinite_rows", m.nonfinite_rows},
           {"short_rows", m.short_rows}};
  if (m.rank_rows.empty()) return out;
  out["rank_rows"] = m.rank_rows;
  out["min_expert_rows"] = m.min_expert_rows;
  out["max_expert_rows"] = m.max_expert_rows;
  out["slot_demand"] = m.slot_demand;
  out["row_demand"] = m.row_demand;
  out["wait_us"] = m.wait_us;
  return out;
}

json to_json(const StepMetrics& m) {
  json layers = json::array();
  for (const LayerMetrics& layer : m.layers) layers.push_back(to_json(layer));
  return {{"kind", "step"},
          {"step", m.step},
          {"loss", finite(m.loss)},
          {"aux_loss", finite(m.aux_loss)},
          {"lr", m.learning_rate},
          {"grad_norm", finite(m.grad_norm)},
          {"clip_scale", m.clip_scale},
          {"valid", m.valid},
          {"reruns", m.reruns},
          {"overflows", m.total_reruns},
          {"skipped", m.total_skipped},
          {"receive_factor", m.receive_factor},
          {"tokens", m.tokens},
          {"total_tokens", m.total_tokens},
          {"step_ms", m.step_ms},
          {"tokens_per_s", m.tokens_per_s},
          {"tflops", m.tflops},
          {"mfu", known(m.ceiling_share)},
          {"ceiling_share", known(m.ceiling_share)},
          {"expert_tflops", m.expert_tflops},
          {"phase_ms", phases_ms(m.times.seconds)},
          {"wait_ms", phases_ms(m.times.wait_seconds)},
          {"bytes", to_json(m.bytes)},
          {"peak_rss_bytes", m.peak_rss_bytes},
          {"peak_bytes", m.peak_bytes},
          {"predicted_bytes", m.predicted_bytes},
          {"layers", layers}};
}

json to_json(const RunHeader& h) {
  json layers = json::array();
  for (const LayerHeader& layer : h.layers)
    layers.push_back({{"layer", layer.layer}, {"E", layer.E}, {"K", layer.K}, {"P", layer.P}, {"recipe", layer.recipe}});
  return {{"kind", "header"},
          {"schema", kMetricsSchema},
          {"version", version()},
          {"name", h.name},
          {"created", h.created},
          {"device", h.device},
          {"world", h.W},
          {"cores", h.cores},
          {"threads_per_rank", h.threads_per_rank},
          {"seed", h.seed},
          {"steps", h.steps},
          {"first_step", h.first_step},
          {"parameters", h.parameters},
          {"active_parameters", h.active_parameters},
          {"flops_per_token", h.flops_per_token},
          {"peak_tflops", known(h.ceiling_tflops)},
          {"ceiling_tflops", known(h.ceiling_tflops)},
          {"peak_label", "measured sgemm"},
          {"unigram_entropy", h.entropy.unigram},
          {"bigram_entropy", h.entropy.pairs_known ? json(h.entropy.bigram) : json(nullptr)},
          {"text", h.text},
          {"text_tokens", h.tokens},
          {"tokens_per_step", h.tokens_per_step},
          {"layers", layers}};
}

// Keeps what a run had recorded up to `step`: everything that was later, and a line cut by a kill, goes.
void keep_until(const std::string& path, std::int64_t step) {
  std::ifstream file(path);
  if (!file) return;
  std::string kept, line;
  while (std::getline(file, line)) {
    const json item = json::parse(line, nullptr, false);
    if (!item.is_object() || !item.contains("kind") || item["kind"] == "end" || item["kind"] == "sample") continue;
    const json at = item.value("step", json(0));  // a header has none
    if (at.is_number_integer() && at.get<std::int64_t>() <= step) kept += line + "\n";
  }
  file.close();
  replace_file(path, kept);
}

}  // namespace

struct MetricsWriter::Impl {
  std::string path;
  std::FILE* file = nullptr;

  void write(const json& line) {
    // error_handler replace: a sample may hold bytes that are not UTF-8.
    const std::string text = line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
    const long before = std::ftell(file);
    if (std::fwrite(text.data(), 1, text.size(), file) == text.size()) return;
    const int error = errno;
    // No part of a line stays behind. Should even this fail, readers skip a cut last line.
    const bool cut = before >= 0 && ftruncate(fileno(file), before) == 0;
    WB_FAIL(ErrorCode::kIo, "cannot write {} bytes to {}: {}{}", text.size(), path, std::strerror(error), cut ? "" : "; its last line is cut");
  }
};

MetricsWriter::MetricsWriter(const std::string& path, std::int64_t resume_step) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  if (resume_step >= 0) {
    keep_until(path, resume_step);
  } else {
    WB_CHECK(!std::filesystem::exists(path), "{} exists already", path);
  }
  impl_->file = std::fopen(path.c_str(), "ab");
  if (impl_->file == nullptr) WB_FAIL(ErrorCode::kIo, "cannot open {}: {}", path, std::strerror(errno));
  std::setvbuf(impl_->file, nullptr, _IONBF, 0);  // a line is one write: nothing is left for fclose to write after a failure
  std::fseek(impl_->file, 0, SEEK_END);
}

MetricsWriter::~MetricsWriter() { std::fclose(impl_->file); }

void MetricsWriter::write(const RunHeader& header) { impl_->write(to_json(header)); }
void MetricsWriter::write(const StepMetrics& metrics) { impl_->write(to_json(metrics)); }
void MetricsWriter::write_eval(std::int64_t step, double loss, std::int64_t tokens) {
  impl_->write({{"kind", "eval"}, {"step", step}, {"loss", finite(loss)}, {"tokens", tokens}});
}
void MetricsWriter::write_sample(std::int64_t step, const std::string& text) { impl_->write({{"kind", "sample"}, {"step", step}, {"text", text}}); }
void MetricsWriter::write_end(std::int64_t step, double seconds, double held_out_loss, bool goal_met) {
  impl_->write({{"kind", "end"}, {"step", step}, {"seconds", seconds}, {"loss", finite(held_out_loss)}, {"goal_met", goal_met}});
}

}  // namespace waybill

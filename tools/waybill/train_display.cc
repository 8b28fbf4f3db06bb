// SPDX-License-Identifier: Apache-2.0
#include "train_display.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "table.h"
#include "terminal.h"

namespace waybill::cli {
namespace {

constexpr std::int64_t kRows = 30, kRowsPerHeading = 20;
constexpr const char* kHeading = "   step     loss held-out  tokens/s  step ms | ms: router dispatch experts combine | hottest expert     rank imbalance";

double ms(const StepMetrics& m, std::initializer_list<Phase> phases) {
  double seconds = 0;
  for (const Phase phase : phases) seconds += m.times.seconds[static_cast<std::size_t>(phase)];
  return seconds * 1e3;
}

std::string hottest(const StepMetrics& m) {
  const auto it = std::max_element(m.layers.begin(), m.layers.end(), [](const auto& a, const auto& b) { return a.max_over_mean < b.max_over_mean; });
  if (it == m.layers.end()) return "-";
  return fmt::format("{:.2f}x layer {} #{}", it->max_over_mean, it->layer, it->hottest_expert);
}

std::string imbalance(const StepMetrics& m) {
  double worst = 0;
  for (const LayerMetrics& layer : m.layers) worst = std::max(worst, layer.rank_imbalance);
  return m.layers.empty() ? "-" : fmt::format("{:.2f}x", worst);
}

std::string row(const StepMetrics& m, const std::string& held_out) {
  return fmt::format("{:>7} {:>8.4f} {:>8} {:>9} {:>8.1f} | {:>10.2f} {:>8.2f} {:>7.2f} {:>7.2f} | {:<18} {:>7}", m.step, m.loss, held_out,
                     format_count(m.tokens_per_s), m.step_ms, ms(m, {Phase::kGate, Phase::kRouter}), ms(m, {Phase::kPlan, Phase::kDispatch}),
                     ms(m, {Phase::kExpertGemm, Phase::kActivation}), ms(m, {Phase::kCombine}), hottest(m), imbalance(m));
}

// A run does not end because nobody can read about it: the stream keeps the error, which the command reports when the run has ended.
void put(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

TrainDisplay::TrainDisplay(bool quiet) : quiet_(quiet), is_tty_(is_terminal(stdout)), start_(Clock::now()), last_bar_(start_) {}
TrainDisplay::~TrainDisplay() { clear_bar(); }

void TrainDisplay::on_start(const RunHeader& h) {
  header_ = h;
  start_ = Clock::now();
  row_every_ = std::max<std::int64_t>(1, (h.steps - h.first_step) / kRows);
  if (quiet_) return;
  print_line(fmt::format("{}: {} parameters, {} active per token; {} ranks on {} cores, {} thread(s) each", h.name,
                         format_count(static_cast<double>(h.parameters)), format_count(static_cast<double>(h.active_parameters)), h.W, h.cores,
                         h.threads_per_rank));
  print_line(fmt::format("text {}: {} tokens; entropy {:.4f} nats a token (unigram), {} (bigram)", h.text, format_count(static_cast<double>(h.tokens)),
                         h.entropy.unigram, h.entropy.pairs_known ? fmt::format("{:.4f}", h.entropy.bigram) : "not computed"));
  if (h.ceiling_tflops > 0) print_line(fmt::format("measured fp32 matmul rate: {:.1f} GFLOP/s (the ceiling MFU is given against)", h.ceiling_tflops * 1e3));
  if (h.first_step > 0) print_line(fmt::format("continued after step {}", h.first_step));
}

void TrainDisplay::on_step(const StepMetrics& m) {
  if (quiet_) return;
  if (m.step % row_every_ == 0 || m.step == header_.steps || m.step == header_.first_step + 1) {
    if (rows_++ % kRowsPerHeading == 0) print_line(kHeading);
    print_line(row(m, new_held_out_ ? fmt::format("{:.4f}", held_out_) : ""));
    new_held_out_ = false;
  }
  if (m.step == header_.steps && m.peak_bytes > 0 && m.predicted_bytes > 0) {
    // On the CPU buffers follow the fullest step, which an untrained router makes; budgets and GPUs have fixed sizes.
    print_line(fmt::format("memory of a {}: peak {}, predicted {}{} ({:+.1f}%)", header_.device == "cpu" ? "rank" : "GPU",
                           format_bytes(static_cast<double>(m.peak_bytes)), format_bytes(static_cast<double>(m.predicted_bytes)),
                           header_.device == "cpu" ? " for a balanced load" : "",
                           100 * (static_cast<double>(m.peak_bytes) / static_cast<double>(m.predicted_bytes) - 1)));
  }
  draw_bar(m);
}

void TrainDisplay::on_eval(std::int64_t step, double loss) {
  held_out_ = loss;
  new_held_out_ = true;
  if (!quiet_ && step == header_.steps) print_line(fmt::format("held-out loss after step {}: {:.4f} nats a token", step, loss));
}

void TrainDisplay::on_checkpoint(std::int64_t, const std::string& path) {
  if (!quiet_ && !is_tty_) print_line(fmt::format("saved {}", path));
}

void TrainDisplay::on_note(const std::string& text) { print_line("note: " + text); }

void TrainDisplay::print_line(const std::string& line) {
  clear_bar();
  put(line + "\n");
}

void TrainDisplay::draw_bar(const StepMetrics& m) {
  constexpr auto kInterval = std::chrono::milliseconds(100);
  if (!is_tty_ || (Clock::now() - last_bar_ < kInterval && m.step != header_.steps)) return;
  last_bar_ = Clock::now();
  const double elapsed = std::chrono::duration<double>(last_bar_ - start_).count();
  const auto done = static_cast<double>(m.step - header_.first_step), all = static_cast<double>(header_.steps - header_.first_step);
  const std::string share = m.ceiling_share > 0 ? fmt::format(" {:.0f}% MFU", m.ceiling_share * 100) : "";
  const std::string text = fmt::format(" step {}/{} loss {:.3f} {} tok/s{} {} left", m.step, header_.steps, m.loss, format_count(m.tokens_per_s), share,
                                       format_duration(elapsed / done * (all - done)));
  const int width = std::max(8, std::min(40, terminal_width(stdout) - static_cast<int>(text.size()) - 1));
  put(fmt::format("\r\x1b[K{}{}", progress_bar(static_cast<double>(m.step) / static_cast<double>(header_.steps), width), text));
  bar_drawn_ = true;
}

void TrainDisplay::clear_bar() {
  if (!bar_drawn_) return;
  put("\r\x1b[K");
  bar_drawn_ = false;
}

}  // namespace waybill::cli

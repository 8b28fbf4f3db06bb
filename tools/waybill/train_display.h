// SPDX-License-Identifier: Apache-2.0
// Draws a training run: a table that grows by one row now and then, and on a terminal a progress bar that is redrawn every step.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "waybill/trainer.h"

namespace waybill::cli {

class TrainDisplay : public TrainObserver {
 public:
  explicit TrainDisplay(bool quiet);
  ~TrainDisplay() override;

  void finish() { clear_bar(); }

  void on_start(const RunHeader& header) override;
  void on_step(const StepMetrics& metrics) override;
  void on_eval(std::int64_t step, double loss) override;
  void on_checkpoint(std::int64_t step, const std::string& path) override;
  void on_note(const std::string& text) override;

 private:
  using Clock = std::chrono::steady_clock;
  void print_line(const std::string& line);  // above the bar
  void draw_bar(const StepMetrics& metrics);
  void clear_bar();

  bool quiet_, is_tty_;
  bool bar_drawn_ = false;
  RunHeader header_;
  std::int64_t rows_ = 0;
  std::int64_t row_every_ = 1;
  double held_out_ = 0;
  bool new_held_out_ = false;
  Clock::time_point start_, last_bar_;
};

}  // namespace waybill::cli

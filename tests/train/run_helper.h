// SPDX-License-Identifier: Apache-2.0
// Small runs of the golden config on made text.
#pragma once

#include <string>
#include <vector>

#include "temp_folder.h"
#include "waybill/random.h"
#include "waybill/trainer.h"

namespace waybill::test {

// Words drawn from a short list: some structure to learn, the same on every machine.
inline std::string made_text(std::size_t bytes) {
  static const char* const words[] = {"waybill", "token", "expert", "rank", "route", "the", "a", "of", "to", "and", "dispatch", "combine"};
  std::string text;
  for (std::uint64_t i = 0; text.size() < bytes; ++i) {
    text += words[random_u64(5, i) % 12];
    text += random_u64(6, i) % 9 == 0 ? ".\n" : " ";
  }
  text.resize(bytes);
  return text;
}

class Recording : public TrainObserver {
 public:
  void on_start(const RunHeader& header) override { headers.push_back(header); }
  void on_step(const StepMetrics& metrics) override {
    steps.push_back(metrics);
    losses.push_back(metrics.loss);
    norms.push_back(metrics.grad_norm);
    if (metrics.step == stop_after) stop = true;
  }
  void on_note(const std::string& text) override { notes.push_back(text); }

  std::vector<RunHeader> headers;
  std::vector<StepMetrics> steps;
  std::vector<double> losses, norms;
  std::vector<std::string> notes;
  std::int64_t stop_after = -1;
  std::atomic<bool> stop{false};
};

// A folder with a text and runs of configs/golden.toml on it.
class RunFolder {
 public:
  explicit RunFolder(std::size_t text_bytes = 20000) { write_file(text(), made_text(text_bytes)); }
  std::string text() const { return folder_ / "text.txt"; }
  std::string run(const std::string& name) const { return folder_ / name; }
  std::string operator/(const std::string& name) const { return folder_ / name; }

  RunConfig config(std::vector<std::string> overrides = {}, const std::string& name = "golden") const {
    overrides.push_back("data.text=" + text());
    return load_run_config(std::string(WAYBILL_CONFIG_DIR) + "/" + name + ".toml", overrides);
  }
  TrainResult train(const std::string& name, const std::vector<std::string>& overrides, Recording& recording, bool resume = false, bool reshard = false) const {
    TrainOptions options;
    options.run_dir = run(name);
    options.resume = resume;
    options.reshard = reshard;
    options.stop = &recording.stop;
    return waybill::train(config(overrides), options, &recording);
  }

 private:
  TempFolder folder_;
};

}  // namespace waybill::test

// SPDX-License-Identifier: Apache-2.0
// Training a config.
#include <atomic>
#include <string>
#include <vector>

#include "guard.h"
#include "waybill/trainer.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

// Hands the run's events to the caller's function.
class CallbackObserver : public TrainObserver {
 public:
  CallbackObserver(wb_train_callback callback, void* user) : callback_(callback), user_(user) {}

  void on_step(const StepMetrics& metrics) override {
    wb_train_progress progress{};
    progress.event = WB_TRAIN_STEP;
    progress.valid = metrics.valid ? 1 : 0;
    progress.step = metrics.step;
    progress.loss = metrics.loss;
    progress.grad_norm = metrics.grad_norm;
    progress.learning_rate = metrics.learning_rate;
    progress.step_ms = metrics.step_ms;
    progress.tokens_per_s = metrics.tokens_per_s;
    progress.tokens = tokens_ = metrics.total_tokens;
    report(progress);
  }
  void on_eval(std::int64_t step, double loss) override {
    wb_train_progress progress{};
    progress.event = WB_TRAIN_EVAL;
    progress.valid = 1;
    progress.step = step;
    progress.loss = loss;
    progress.tokens = tokens_;
    report(progress);
  }
  const std::atomic<bool>& stop() const { return stop_; }

 private:
  void report(wb_train_progress& progress) {
    progress.struct_size = sizeof(progress);
    if (callback_ != nullptr && callback_(&progress, user_) != 0) stop_ = true;
  }

  wb_train_callback callback_;
  void* user_;
  std::int64_t tokens_ = 0;
  std::atomic<bool> stop_{false};
};

}  // namespace

wb_status wb_train(const char* config_path, const char* const* overrides, int32_t num_overrides, const char* run_folder, int32_t resume,
                   wb_train_callback callback, void* user, wb_train_result* result) noexcept {
  return guarded([&] {
    required(config_path, "config_path");
    required(run_folder, "run_folder");
    WB_CHECK(num_overrides >= 0 && (overrides != nullptr || num_overrides == 0), "overrides is null or their number negative ({})", num_overrides);
    if (result != nullptr) check_size<wb_train_result>(result->struct_size, "result");
    std::vector<std::string> changes;
    changes.reserve(static_cast<std::size_t>(num_overrides));
    for (std::int32_t i = 0; i < num_overrides; ++i) changes.emplace_back(&required(overrides[i], "an override"));
    CallbackObserver observer(callback, user);
    TrainOptions options;
    options.run_dir = run_folder;
    options.resume = resume != 0;
    options.stop = &observer.stop();
    const TrainResult done = train(load_run_config(config_path, changes), options, &observer);
    if (result == nullptr) return;
    wb_train_result values{};
    values.step = done.step;
    values.train_loss = done.train_loss;
    values.held_out_loss = done.held_out_loss;
    values.unigram_entropy = done.entropy.unigram;
    values.bigram_entropy = done.entropy.bigram;
    values.seconds = done.seconds;
    values.stopped = done.stopped ? 1 : 0;
    write_struct(result, values, "result");
  });
}

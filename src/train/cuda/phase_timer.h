// SPDX-License-Identifier: Apache-2.0
// Times of a step's phases on a GPU's stream, by events between them; the host reads them when the step has ended.
#pragma once

#include <memory>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "waybill/phase.h"

namespace waybill::cuda {

class PhaseTimer {
 public:
  void start() { used_ = 0, is_on_ = true; }
  void stop() { is_on_ = false; }

  // The phase of what is queued from here on.
  void mark(Phase phase, cudaStream_t stream) {
    if (!is_on_) return;
    if (used_ == marks_.size()) marks_.push_back({std::make_unique<CudaEvent>(), phase});
    marks_[used_].phase = phase;
    marks_[used_++].event->record(stream);
  }
  // Of the marks since start(); the last one only ends the one before. The stream must have passed them.
  PhaseTimes read() const {
    PhaseTimes times;
    for (std::size_t i = 0; i + 1 < used_; ++i) {
      times.seconds[static_cast<std::size_t>(marks_[i].phase)] += static_cast<double>(marks_[i + 1].event->elapsed_us_since(*marks_[i].event)) * 1e-6;
    }
    return times;
  }

 private:
  struct Mark {
    std::unique_ptr<CudaEvent> event;
    Phase phase;
  };
  std::vector<Mark> marks_;
  std::size_t used_ = 0;
  bool is_on_ = false;
};

}  // namespace waybill::cuda

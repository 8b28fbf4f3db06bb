// SPDX-License-Identifier: Apache-2.0
// One stack on all GPUs of a problem: steps, graphs, times, phases. Every GPU has a host thread of its own, as a training process would.
#pragma once

#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "bench/cuda/moe/stack.h"
#include "core/cuda/graph.h"

namespace waybill::cuda::moe_bench {

// `size` threads that run body(0) ... body(size - 1) and wait; the first exception is passed on.
class Team {
 public:
  explicit Team(std::size_t size);
  ~Team();
  void run(const std::function<void(std::size_t)>& body);

 private:
  void work(std::size_t index);
  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::function<void(std::size_t)> body_;
  std::uint64_t round_ = 0;
  std::size_t pending_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

struct StepTimes {
  double p50 = 0, p10 = 0, p90 = 0, p99 = 0;  // microseconds, the slower GPU's
  int iterations = 0;
};

// What lies between two marks of a step on one stream of a GPU.
struct PhaseSpan {
  Phase phase = Phase::kOther;
  bool is_backward = false;
  bool is_beside = false;  // not on the stack's main stream, whose spans lie end to end
  int device = 0;
  double begin_us = 0, us = 0;
};

// A replayed graph beside the host's call that queued it; times since the first call began.
struct ReplaySpan {
  int device = 0, step = 0;
  double host_begin_us = 0, host_us = 0;      // of the call
  double device_begin_us = 0, device_us = 0;  // of the replay
};

// Microseconds of a step, means over steps and GPUs.
struct PhaseSums {
  std::array<double, kNumPhases> main{};  // on the main stream
  // Exchange: plan, dispatch and combine. Combine holds the local sum of a token's rows, dispatch the waits for the other ranks. exposed: while none of another
  // phase runs on any stream of the GPU (unions of intervals); all: hidden or not; step: from the first mark to the last.
  double exposed_exchange = 0, all_exchange = 0, step = 0;
};
// Of one GPU's spans: time in which exchange runs, and the part of it in which nothing else does.
void add_exchange(const std::vector<PhaseSpan>& spans, int device, double& exposed, double& all);

class Runner {
 public:
  Runner(const StackOptions& options, Problem& problem);
  ~Runner();

  void step();     // forward and backward, eager; waits. Throws what went wrong
  void capture();  // after a step
  StepTimes time(bool captured, int iterations);
  // Spans of eager steps in which the host queued ahead of the device (as far as the stack lets it): the last of `repeats` steps, and in `sums` means.
  std::vector<PhaseSpan> phases(int repeats, PhaseSums& sums);
  // `steps` replays queued one behind the other, after capture(). The host waits for nothing between them: its calls end long before the replays do.
  std::vector<ReplaySpan> replays(int steps);
  std::size_t used_bytes() const { return used_bytes_; }  // device memory since before the stack was made, the largest GPU's, after a step
  Stack& stack(std::size_t device) { return *gpus_[device]->stack; }
  cudaStream_t stream(std::size_t device) const { return gpus_[device]->stream; }
  std::size_t num_gpus() const { return gpus_.size(); }
  std::int64_t dropped();

 private:
  struct Mark {
    Phase phase;
    bool is_backward, is_beside;
  };
  struct Gpu {
    explicit Gpu(int on) : device(on), stream(on), from(true), to(true) {}
    int device;
    CudaStream stream;
    CudaEvent from, to;
    bool recording = false, in_backward = false;
    std::vector<std::unique_ptr<CudaEvent>> events;
    std::vector<Mark> marks;
    std::unique_ptr<Stack> stack;
    GraphExec graph;
    LocalRanks ranks{};
    double us = 0;
  };
  void mark(Gpu& gpu, Phase phase, cudaStream_t stream);
  void check();
  void note_memory();

  Problem& problem_;
  Team team_;
  std::vector<std::size_t> free_before_;
  std::unique_ptr<CudaLocalGroup> group_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::size_t used_bytes_ = 0;
};

// Chrome trace events (Perfetto reads them), one process a GPU, phases as slices; those beside the main stream on a track of their own.
// replays: two more tracks a GPU, the host's calls and the graphs; or none.
void write_trace(const std::string& path, const std::string& title, const std::vector<PhaseSpan>& spans, const std::vector<ReplaySpan>& replays);

}  // namespace waybill::cuda::moe_bench

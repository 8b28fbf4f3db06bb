// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/runner.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "core/cuda/cuda_error.h"
#include "cuda/gemm_spin.h"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kLineUpPhase = 320;
constexpr std::size_t kMaxMarks = 64;

std::size_t free_bytes(int device) {
  const DeviceGuard guard(device);
  std::size_t free = 0, total = 0;
  WB_TRY_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

}  // namespace

Team::Team(std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) threads_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::work(std::size_t index) {
  std::uint64_t seen = 0;
  for (;;) {
    std::unique_lock lock(mutex_);
    start_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    lock.unlock();
    std::exception_ptr error;
    try {
      body_(index);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    if (--pending_ == 0) done_.notify_all();
  }
}

void Team::run(const std::function<void(std::size_t)>& body) {
  std::unique_lock lock(mutex_);
  body_ = body, error_ = nullptr, pending_ = threads_.size(), ++round_;
  start_.notify_all();
  done_.wait(lock, [&] { return pending_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

Runner::Runner(const StackOptions& options, Problem& problem) : problem_(problem), team_(problem.devices().size()) {
  for (const int device : problem.devices()) free_before_.push_back(free_bytes(device));
  group_ = std::make_unique<CudaLocalGroup>(problem.P(), problem.devices(), arena_bytes(options, problem));
  for (const int device : problem.devices()) {
    const DeviceGuard guard(device);
    gpus_.push_back(std::make_unique<Gpu>(device));
    Gpu& gpu = *gpus_.back();
    gpu.ranks = local_ranks(*group_, device);
    for (std::size_t i = 0; i < kMaxMarks; ++i) gpu.events.push_back(std::make_unique<CudaEvent>());
  }
  Windows windows{*group_, {}, 0};
  for (auto& gpu : gpus_) {
    const DeviceGuard guard(gpu->device);
    windows.next = 0;
    gpu->stack = make_stack(options, problem, windows, gpu->device, [this, g = gpu.get()](Phase phase, cudaStream_t stream) { mark(*g, phase, stream); });
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
}

Runner::~Runner() {
  for (auto& gpu : gpus_) {
    const DeviceGuard guard(gpu->device);
    (void)cudaDeviceSynchronize();
    gpu->graph = GraphExec();
    gpu->stack.reset();
  }
}

void Runner::mark(Gpu& gpu, Phase phase, cudaStream_t stream) {
  if (!gpu.recording || gpu.marks.size() >= kMaxMarks) return;
  gpu.events[gpu.marks.size()]->record(stream);
  gpu.marks.push_back({phase, gpu.in_backward, stream != gpu.stream.get()});
}

void Runner::check() {
  const std::string waits = group_->first_error();
  WB_CHECK(waits.empty(), "{}", waits);
  for (auto& gpu : gpus_) {
    const DeviceGuard guard(gpu->device);
    const std::string fault = gpu->stack->fault(gpu->stream);
    WB_CHECK(fault.empty(), "{}", fault);
  }
}

void Runner::note_memory() {
  for (std::size_t d = 0; d < gpus_.size(); ++d) {
    const std::size_t now = free_bytes(gpus_[d]->device);
    used_bytes_ = std::max(used_bytes_, free_before_[d] > now ? free_before_[d] - now : 0);
  }
}

void Runner::step() {
  team_.run([&](std::size_t d) {
    Gpu& gpu = *gpus_[d];
    const DeviceGuard guard(gpu.device);
    gpu.stack->forward(gpu.stream), gpu.stack->backward(gpu.stream);
    gpu.stream.synchronize();
  });
  check();
  note_memory();
}

void Runner::capture() {
  for (auto& gpu : gpus_) {
    const DeviceGuard guard(gpu->device);
    gpu->graph = GraphExec::capture(gpu->stream, [&](cudaStream_t s) { gpu->stack->forward(s), gpu->stack->backward(s); });
  }
  note_memory();
}

StepTimes Runner::time(bool captured, int iterations) {
  constexpr int kWarm = 3;
  std::vector<double> us;
  for (int i = 0; i < iterations + kWarm; ++i) {
    team_.run([&](std::size_t d) {
      Gpu& gpu = *gpus_[d];
      const DeviceGuard guard(gpu.device);
      launch_group_barrier_kernel(gpu.ranks, kLineUpPhase, 1, gpu.stream);  // the threads do not start at one instant
      gpu.from.record(gpu.stream);
      if (captured) {
        gpu.graph.launch(gpu.stream);
      } else {
        gpu.stack->forward(gpu.stream), gpu.stack->backward(gpu.stream);
      }
      gpu.to.record(gpu.stream);
      gpu.to.synchronize();
      gpu.us = static_cast<double>(gpu.to.elapsed_us_since(gpu.from));
    });
    double slowest = 0;
    for (const auto& gpu : gpus_) slowest = std::max(slowest, gpu->us);
    if (i >= kWarm) us.push_back(slowest);
  }
  check();
  std::sort(us.begin(), us.end());
  const auto at = [&](double q) { return us[static_cast<std::size_t>(q * static_cast<double>(us.size() - 1) + 0.5)]; };
  return {at(0.5), at(0.1), at(0.9), at(0.99), iterations};
}

namespace {

// Length of the union of intervals.
double covered(std::vector<std::pair<double, double>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  double sum = 0, end = -1;
  for (const auto& [from, to] : intervals) {
    if (to <= end) continue;
    sum += to - std::max(from, end), end = to;
  }
  return sum;
}

bool is_exchange(Phase phase) { return phase == Phase::kPlan || phase == Phase::kDispatch || phase == Phase::kCombine; }

}  // namespace

void add_exchange(const std::vector<PhaseSpan>& spans, int device, double& exposed, double& all) {
  std::vector<std::pair<double, double>> exchange, others, both;
  for (const PhaseSpan& s : spans) {
    if (s.device != device || s.phase == Phase::kOther) continue;
    (is_exchange(s.phase) ? exchange : others).emplace_back(s.begin_us, s.begin_us + s.us);
    both.emplace_back(s.begin_us, s.begin_us + s.us);
  }
  all += covered(exchange);
  exposed += covered(both) - covered(others);
}

std::vector<PhaseSpan> Runner::phases(int repeats, PhaseSums& sums) {
  std::vector<PhaseSpan> spans;
  sums = PhaseSums{};
  for (int i = 0; i < repeats; ++i) {
    team_.run([&](std::size_t d) {
      Gpu& gpu = *gpus_[d];
      const DeviceGuard guard(gpu.device);
      spin(3, gpu.stream);  // the host queues ahead
      launch_group_barrier_kernel(gpu.ranks, kLineUpPhase, 1, gpu.stream);
      gpu.marks.clear(), gpu.recording = true, gpu.in_backward = false;
      gpu.stack->forward(gpu.stream);
      gpu.in_backward = true;
      gpu.stack->backward(gpu.stream);
      gpu.recording = false;
      gpu.stream.synchronize();
    });
    spans.clear();
    for (const auto& gpu : gpus_) {
      const double share = 1.0 / repeats / static_cast<double>(gpus_.size());
      for (std::size_t m = 0; m < gpu->marks.size(); ++m) {
        const Mark& mark = gpu->marks[m];
        std::size_t next = m + 1;  // of the same stream
        while (next < gpu->marks.size() && gpu->marks[next].is_beside != mark.is_beside) ++next;
        if (next == gpu->marks.size() || (mark.is_beside && mark.phase == Phase::kOther)) continue;
        const double us = std::max(0.0, static_cast<double>(gpu->events[next]->elapsed_us_since(*gpu->events[m])));
        const auto begin = static_cast<double>(gpu->events[m]->elapsed_us_since(*gpu->events[0]));
        spans.push_back({mark.phase, mark.is_backward, mark.is_beside, gpu->device, begin, us});
        if (mark.is_beside) continue;
        sums.main[static_cast<std::size_t>(mark.phase)] += us * share, sums.step += us * share;
      }
      double exposed = 0, all = 0;
      add_exchange(spans, gpu->device, exposed, all);
      sums.exposed_exchange += exposed * share, sums.all_exchange += all * share;
    }
  }
  check();
  return spans;
}

std::vector<ReplaySpan> Runner::replays(int steps) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<ReplaySpan>> all(gpus_.size());
  team_.run([&](std::size_t d) {
    Gpu& gpu = *gpus_[d];
    const DeviceGuard guard(gpu.device);
    launch_group_barrier_kernel(gpu.ranks, kLineUpPhase, 1, gpu.stream);
    gpu.stream.synchronize();
    std::vector<std::unique_ptr<CudaEvent>> ends;
    for (int i = 0; i <= steps; ++i) ends.push_back(std::make_unique<CudaEvent>(true));
    const auto start = Clock::now();
    const auto since = [&] { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); };
    ends[0]->record(gpu.stream);  // an empty stream: the device passes it at once
    for (int i = 0; i < steps; ++i) {
      ReplaySpan span{gpu.device, i, since(), 0, 0, 0};
      gpu.graph.launch(gpu.stream);
      span.host_us = since() - span.host_begin_us;
      ends[static_cast<std::size_t>(i) + 1]->record(gpu.stream);
      all[d].push_back(span);
    }
    gpu.stream.synchronize();
    for (int i = 0; i < steps; ++i) {
      ReplaySpan& span = all[d][static_cast<std::size_t>(i)];
      const auto at = [&](int event) { return static_cast<double>(ends[static_cast<std::size_t>(event)]->elapsed_us_since(*ends[0])); };
      span.device_begin_us = i == 0 ? 0 : at(i), span.device_us = at(i + 1) - span.device_begin_us;
    }
  });
  check();
  std::vector<ReplaySpan> spans;
  for (const auto& part : all) spans.insert(spans.end(), part.begin(), part.end());
  return spans;
}

std::int64_t Runner::dropped() {
  std::int64_t sum = 0;
  for (auto& gpu : gpus_) {
    const DeviceGuard guard(gpu->device);
    sum += gpu->stack->dropped(gpu->stream);
  }
  return sum;
}

void write_trace(const std::string& path, const std::string& title, const std::vector<PhaseSpan>& spans, const std::vector<ReplaySpan>& replays) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  WB_CHECK(file != nullptr, "cannot write {}", path);
  fmt::print(file, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"title\":\"{}\"}},\"traceEvents\":[\n", title);
  std::vector<int> devices;
  for (const PhaseSpan& s : spans) {
    if (std::find(devices.begin(), devices.end(), s.device) == devices.end()) devices.push_back(s.device);
  }
  for (const int device : devices) {
    fmt::print(file, "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{0},\"tid\":0,\"args\":{{\"name\":\"GPU {0}\"}}}},\n", device);
  }
  for (const int device : devices) {
    const char* const tracks[] = {"phases of an eager step", "the same, beside them", "host: calls that queue a replay", "replays of the graph"};
    for (int track = 0; track < (replays.empty() ? 2 : 4); ++track)
      fmt::print(file, "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":\"{}\"}}}},\n", device, track, tracks[track]);
  }
  for (const ReplaySpan& r : replays) {
    const auto slice = [&](int track, double begin, double us) {
      fmt::print(file, "{{\"ph\":\"X\",\"name\":\"step {}\",\"cat\":\"captured\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f}}},\n", r.step, r.device,
                 track, begin, us);
    };
    slice(2, r.host_begin_us, r.host_us), slice(3, r.device_begin_us, r.device_us);
  }
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const PhaseSpan& s = spans[i];
    fmt::print(file, "{{\"ph\":\"X\",\"name\":\"{}\",\"cat\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f}}}{}\n", to_string(s.phase),
               s.is_backward ? "backward" : "forward", s.device, s.is_beside ? 1 : 0, s.begin_us, s.us, i + 1 < spans.size() ? "," : "");
  }
  fmt::print(file, "]}}\n");
  std::fclose(file);
}

}  // namespace waybill::cuda::moe_bench

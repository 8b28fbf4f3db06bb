// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_watch.h"

#include <cstdlib>
#include <memory>
#include <set>
#include <utility>

namespace waybill::cuda {
namespace {

constexpr std::chrono::milliseconds kEvery(10), kAnswer(500);
constexpr std::chrono::seconds kUse(2), kExit(5);

// Whose threads run. Never freed: the last of them may end behind static destructors.
struct Running {
  std::mutex mutex;
  std::set<NcclWatch*> watches;
};
Running& running() {
  static auto* const all = new Running;
  return *all;
}

std::int64_t ms(std::chrono::nanoseconds time) { return std::chrono::duration_cast<std::chrono::milliseconds>(time).count(); }

}  // namespace

NcclWatch::NcclWatch(const NcclLibrary& nccl, NcclComm& comm, int rank, int size, Hooks hooks)
    : nccl_(nccl), comm_(comm), rank_(rank), size_(size), hooks_(std::move(hooks)) {}

NcclWatch::~NcclWatch() { stop(); }

void NcclWatch::start(Lifeline& lifeline, int ranks_per_node, RailProgress& progress, std::chrono::nanoseconds timeout) {
  lifeline_ = &lifeline, ranks_per_node_ = ranks_per_node, progress_ = &progress;
  [[maybe_unused]] static const int registered = std::atexit([] { end_all(); });
  const std::lock_guard lock(running().mutex);
  running().watches.insert(this);
  thread_ = std::thread([this, timeout] { watch(timeout); });
}

void NcclWatch::stop() {
  const std::lock_guard lock(running().mutex);
  running().watches.erase(this);
  end_thread();
}

void NcclWatch::end_thread() {
  {
    const std::lock_guard lock(stopping_);
    is_stopped_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// An abort that has begun may end, too.
void NcclWatch::end_all() noexcept {
  const std::lock_guard lock(running().mutex);
  for (NcclWatch* watch : running().watches) {
    watch->end_thread();
    (void)watch->has_aborted_within(kExit);
  }
  running().watches.clear();
}

// Counts are read one after the other; what stands is what does not change from one look to the next.
RailProgress NcclWatch::progress() const {
  if (progress_ == nullptr) return {};
  const auto read = [](const std::uint32_t& word) { return std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(word)).load(std::memory_order_relaxed); };
  return {read(progress_->begun), read(progress_->ended), 0};
}

void NcclWatch::report() { lifeline_->report(progress().begun + collectives_.load(std::memory_order_relaxed)); }

void NcclWatch::watch(std::chrono::nanoseconds timeout) {
  hooks_.enter_thread();
  RailProgress seen = progress();
  auto since = std::chrono::steady_clock::now();
  while (true) {
    {
      std::unique_lock lock(stopping_);
      if (stop_.wait_for(lock, kEvery, [this] { return is_stopped_; })) return;
    }
    report();
    if (is_lost()) return;
    const auto now = std::chrono::steady_clock::now();
    const RailProgress current = progress();
    if (current.begun == current.ended || current.begun != seen.begun || current.ended != seen.ended) {
      seen = current, since = now;
    } else if (now - since > timeout) {
      time_out(timeout);
      return;
    }
  }
}

std::string NcclWatch::name(int rank) const { return fmt::format("rank {} of node {}", rank, rank / ranks_per_node_); }

bool NcclWatch::is_lost() noexcept {
  if (is_given_up_.load(std::memory_order_acquire)) return true;
  ncclResult_t error = ncclSuccess;
  {
    const NcclComm::Use use = comm_.try_use();
    if (use.get() != nullptr && nccl_.comm_get_async_error(use.get(), &error) != ncclSuccess) error = ncclSystemError;
  }
  const bool has_failed = error != ncclSuccess && error != ncclInProgress;
  if (!has_failed && (lifeline_ == nullptr || lifeline_->lost() < 0)) return false;
  refuse(error);
  return true;
}

void NcclWatch::throw_lost(const char* what) const { WB_FAIL(code_, "rank {} of {}: {}: {}", rank_, size_, what, text_); }

void NcclWatch::refuse(ncclResult_t error) {
  if (!is_given_up_.load(std::memory_order_acquire)) give_up(ErrorCode::kPeerFailed, loss(error));
}

// NCCL may know that a connection has ended before the lifeline does: a second for its word.
std::string NcclWatch::loss(ncclResult_t error) {
  int lost = lifeline_ != nullptr ? lifeline_->lost() : -1;
  for (int i = 0; lifeline_ != nullptr && lost < 0 && i < 100; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10)), lost = lifeline_->lost();
  if (lost < 0) return fmt::format("NCCL: {}", nccl_.error_string(error));
  const Loss why = lifeline_->loss();
  lifeline_->tell(lost, why);
  if (lost == rank_) return fmt::format("the others gave this rank up, it did not {} in time", why == Loss::kLate ? "come" : "answer");
  constexpr const char* kReasons[] = {"its process has ended", "it did not answer its neighbours", "it answers, but did not come in time"};
  return fmt::format("{} is lost, {}", name(lost), kReasons[static_cast<int>(why)]);
}

void NcclWatch::time_out(std::chrono::nanoseconds timeout) {
  const std::lock_guard lock(asking_);
  if (is_given_up_.load(std::memory_order_acquire)) return;
  std::string late;
  if (lifeline_ != nullptr) {
    report();
    const Lifeline::Answers answers = lifeline_->ask(kAnswer);
    if (is_lost()) return;
    const auto add = [&](const char* first, const std::vector<int>& ranks) {
      for (const int rank : ranks) late += (rank == ranks.front() ? first : ", ") + name(rank);
    };
    add("; no answer from ", answers.silent), add("; answers, but has not come so far: ", answers.late);
    if (!answers.silent.empty()) lifeline_->tell(answers.silent.front(), Loss::kSilent);
    if (answers.silent.empty() && !answers.late.empty()) lifeline_->tell(answers.late.front(), Loss::kLate);
    if (late.empty()) late = "; all neighbours answer and have come as far";
  }
  give_up(ErrorCode::kTimeout, fmt::format("took longer than {} ms{}", ms(timeout), late));
}

// NCCL's kernels leave by an abort, which itself waits for graphs to be destroyed: on a thread of its own.
void NcclWatch::give_up(ErrorCode code, const std::string& text) {
  const std::lock_guard lock(deciding_);
  if (is_given_up_.load(std::memory_order_relaxed)) return;
  const auto end = std::make_shared<std::promise<void>>();
  code_ = code, text_ = text, aborted_ = end->get_future().share();
  is_given_up_.store(true, std::memory_order_release);
  if (progress_ != nullptr) std::atomic_ref(progress_->is_lost).store(1, std::memory_order_release);
  hooks_.poison();
  const ncclComm_t comm = comm_.take(kUse);
  if (comm == nullptr) return end->set_value();
  std::thread([end, comm, abort = nccl_.comm_abort, enter = hooks_.enter_thread] {
    enter();
    (void)abort(comm);
    end->set_value();
  }).detach();
}

bool NcclWatch::has_aborted_within(std::chrono::nanoseconds patience) const {
  return is_given_up_.load(std::memory_order_acquire) && aborted_.wait_for(patience) == std::future_status::ready;
}

}  // namespace waybill::cuda

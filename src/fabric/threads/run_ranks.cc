// SPDX-License-Identifier: Apache-2.0
// P ranks as threads of this process.
#include <exception>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>

#include "fabric/threads/groups.h"
#include "fabric/threads/threads_fabric.h"

namespace waybill {
namespace {

struct Failure {
  int rank = 0;
  int order = 0;  // 0 = the first that came
  ErrorCode code = ErrorCode::kInternal;
  std::string text;  // empty: not a std::exception
  std::exception_ptr original;
};

// "rank 2: ...": all ranks throw what one of them found.
bool names_a_rank(const std::string& text) {
  constexpr std::string_view kPrefix = "rank ";
  if (!text.starts_with(kPrefix)) return false;
  const std::size_t end = text.find_first_not_of("0123456789", kPrefix.size());
  return end != std::string::npos && end > kPrefix.size() && text.compare(end, 2, ": ") == 0;
}

class Failures {
 public:
  // Called inside a catch block; returns the text for the peers.
  std::string record(int rank) {
    Failure failure;
    failure.rank = rank;
    failure.original = std::current_exception();
    try {
      throw;
    } catch (const Error& error) {
      failure.code = error.code();
      failure.text = error.what();
    } catch (const std::exception& error) {
      failure.text = error.what();
    } catch (...) {
    }
    std::string text = failure.text.empty() ? "an exception that is not a std::exception" : failure.text;
    const std::lock_guard lock(mutex_);
    failure.order = static_cast<int>(all_.size());
    all_.push_back(std::move(failure));
    return text;
  }

  // The first error that is not the echo of a peer's; of equal texts the lowest rank's, so that the message is repeatable.
  void rethrow_first() const {
    const Failure* first = nullptr;
    for (const Failure& failure : all_) {
      if (first == nullptr || (first->code == ErrorCode::kPeerFailed && failure.code != ErrorCode::kPeerFailed)) first = &failure;
    }
    if (first == nullptr) return;
    for (const Failure& failure : all_) {
      if (failure.code == first->code && failure.text == first->text && failure.rank < first->rank) first = &failure;
    }
    if (first->text.empty()) std::rethrow_exception(first->original);
    if (names_a_rank(first->text)) throw Error(first->code, first->text);
    WB_FAIL(first->code, "rank {}: {}", first->rank, first->text);
  }

 private:
  std::mutex mutex_;
  std::vector<Failure> all_;
};

std::shared_ptr<threads::Hub> make_world(int P, const FabricOptions& options, threads::CopyBytes copy = threads::copy_host) {
  WB_CHECK(P >= 1 && P <= 4096, "the threads engine takes 1 to 4096 ranks, got P = {}", P);
  WB_CHECK(options.timeout.count() > 0, "the fabric's timeout must be positive, got {} ms", options.timeout.count());
  WB_CHECK(options.ranks_per_node >= 0 && options.ranks_per_node <= P, "ranks_per_node = {} must be 0 (one node) to P = {}", options.ranks_per_node, P);
  Topology topology{std::vector<int>(static_cast<std::size_t>(P), 0), std::vector<int>(static_cast<std::size_t>(P), 0)};
  for (int rank = 0; options.ranks_per_node > 0 && rank < P; ++rank) topology.node_of[static_cast<std::size_t>(rank)] = rank / options.ranks_per_node;
  return std::make_shared<threads::Hub>(P, "world", std::move(topology), options, copy);
}

void run_one(const std::shared_ptr<threads::Hub>& hub, int rank, const std::function<void(Fabric&)>& body, Failures& failures) {
  threads::ThreadsFabric fabric(hub, rank);
  try {
    body(fabric);
  } catch (...) {
    fabric.abort(failures.record(rank));
  }
}

}  // namespace

std::vector<std::unique_ptr<Fabric>> make_thread_group(int P, const FabricOptions& options) {
  const auto hub = make_world(P, options);
  std::vector<std::unique_ptr<Fabric>> ranks;
  ranks.reserve(static_cast<std::size_t>(P));
  for (int rank = 0; rank < P; ++rank) ranks.push_back(std::make_unique<threads::ThreadsFabric>(hub, rank));
  return ranks;
}

void run_ranks(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options) { threads::run_ranks(P, body, options, threads::copy_host); }

void threads::run_ranks(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options, CopyBytes copy) {
  const auto hub = make_world(P, options, copy);
  Failures failures;
  std::vector<std::thread> ranks;
  ranks.reserve(static_cast<std::size_t>(P));
  try {
    for (int rank = 0; rank < P; ++rank) ranks.emplace_back([&, rank] { run_one(hub, rank, body, failures); });
  } catch (const std::system_error& error) {
    hub->fail(ErrorCode::kPeerFailed, "not all ranks could be started");
    const std::size_t started = ranks.size();
    for (std::thread& thread : ranks) thread.join();
    WB_FAIL(ErrorCode::kOutOfMemory, "run_ranks: {} of {} threads could be started: {}", started, P, error.what());
  }
  for (std::thread& thread : ranks) thread.join();
  failures.rethrow_first();
}

}  // namespace waybill

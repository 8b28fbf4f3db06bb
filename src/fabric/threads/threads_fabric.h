// SPDX-License-Identifier: Apache-2.0
// One rank's end of a hub.
#pragma once

#include <memory>

#include "fabric/threads/hub.h"

namespace waybill::threads {

class ThreadsFabric final : public Fabric {
 public:
  ThreadsFabric(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~ThreadsFabric() override { hub_->leave(rank_); }
  ThreadsFabric(const ThreadsFabric&) = delete;
  ThreadsFabric& operator=(const ThreadsFabric&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  const char* engine() const override { return "threads"; }
  const Topology& topology() const override { return hub_->topology(); }
  std::chrono::milliseconds timeout() const override { return hub_->timeout(); }

  void barrier(std::string_view phase) override;
  void all_gather(const void* send, void* receive, std::size_t bytes_per_rank, std::string_view phase) override;
  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override;
  void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) override;
  void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) override;
  void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) override;
  void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) override;
  std::unique_ptr<Fabric> split(int colour, int key, std::string_view name) override;
  void abort(const std::string& reason) noexcept override;

 private:
  void pairwise(Signature signature, std::span<const Span> send, std::span<const Span> receive);
  template <class T>
  void reduce(std::span<T> values, ReduceOp op, std::string_view phase);

  std::shared_ptr<Hub> hub_;
  int rank_;
  std::uint64_t sequence_ = 0;  // of the next collective
};

}  // namespace waybill::threads

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "waybill/fabric.h"

namespace waybill::testing_support {

// Counts what leaves the rank, and can lay the ranks out on other nodes; everything else goes through.
class CountingFabric final : public Fabric {
 public:
  explicit CountingFabric(Fabric& inner) : inner_(inner), topology_(inner.topology()) {}
  CountingFabric(Fabric& inner, const std::vector<int>& node_of) : CountingFabric(inner) { topology_.node_of = node_of; }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const char* engine() const override { return inner_.engine(); }
  const Topology& topology() const override { return topology_; }
  std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  void barrier(std::string_view phase) override { inner_.barrier(phase); }
  void all_gather(const void* send, void* receive, std::size_t bytes, std::string_view phase) override {
    for (int p = 0; p < size(); ++p) count(p, bytes);
    inner_.all_gather(send, receive, bytes, phase);
  }
  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override {
    for (int p = 0; p < size(); ++p) count(p, send[static_cast<std::size_t>(p)].bytes);
    return inner_.all_to_all_start(send, receive, phase);
  }
  void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) override { inner_.all_reduce(values, op, phase); }
  void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) override { inner_.all_reduce(values, op, phase); }
  void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) override {
    for (int p = 0; p < size(); ++p) count(p, values.size_bytes());
    inner_.all_reduce(values, op, phase);
  }
  void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) override { inner_.broadcast(data, bytes, root, phase); }
  std::unique_ptr<Fabric> split(int colour, int key, std::string_view name) override { return inner_.split(colour, key, name); }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }

  std::int64_t sent = 0, sent_between_nodes = 0;

 private:
  void count(int to, std::size_t bytes) {
    if (to == rank()) return;
    sent += static_cast<std::int64_t>(bytes);
    const auto node = [&](int p) { return topology_.node_of[static_cast<std::size_t>(p)]; };
    if (node(to) != node(rank())) sent_between_nodes += static_cast<std::int64_t>(bytes);
  }

  Fabric& inner_;
  Topology topology_;
};

}  // namespace waybill::testing_support

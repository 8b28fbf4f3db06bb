// SPDX-License-Identifier: Apache-2.0
#include "baselines/slot_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace waybill::baselines {
namespace {

template <class T>
Fabric::Span span_of(T* data, std::int64_t count) {
  return {const_cast<std::remove_const_t<T>*>(data), static_cast<std::size_t>(count) * sizeof(T)};
}

std::vector<std::int64_t> rows_by_rank(const std::vector<std::int64_t>& counts, std::size_t P) {
  std::vector<std::int64_t> rows(P, 0);
  for (std::size_t i = 0; i < counts.size(); ++i) rows[i / (counts.size() / P)] += counts[i];
  return rows;
}

// Spans of consecutive rows, one a rank.
std::vector<Fabric::Span> spans(float* data, const std::vector<std::int64_t>& rows, std::int64_t width) {
  std::vector<Fabric::Span> result;
  for (const std::int64_t count : rows) {
    result.push_back(span_of(data, count * width));
    data += count * width;
  }
  return result;
}

}  // namespace

void SlotExchange::plan(const RouteView& route, std::int64_t pad_rows, ExchangeBytes& bytes, std::int64_t& slots_visited, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kPlan);
  const auto E = static_cast<std::size_t>(placement_.E), P = static_cast<std::size_t>(ep_.size());
  const std::int64_t slots = route.T * route.K, L = placement_.L();
  send_counts_.assign(E, 0);
  for (std::int64_t i = 0; i < slots; ++i) {
    const std::int32_t id = route.id(i / route.K, i % route.K);
    if (is_route(id, route.E)) ++send_counts_[static_cast<std::size_t>(id)];
  }
  for (std::size_t e = 0; pad_rows >= 0 && e < E; ++e) {
    WB_ASSERT(send_counts_[e] <= pad_rows);
    send_counts_[e] = pad_rows;
  }
  // Counting sort by expert; within an expert in order of the slots.
  std::vector<std::int64_t> next(E, 0);
  std::exclusive_scan(send_counts_.begin(), send_counts_.end(), next.begin(), std::int64_t{0});
  send_slot_.assign(static_cast<std::size_t>(next.back() + send_counts_.back()), -1);
  for (std::int64_t i = 0; i < slots; ++i) {
    const std::int32_t id = route.id(i / route.K, i % route.K);
    if (is_route(id, route.E)) send_slot_[static_cast<std::size_t>(next[static_cast<std::size_t>(id)]++)] = i;
  }
  slots_visited += 2 * slots;

  receive_counts_.assign(E, 0);
  std::vector<Fabric::Span> send, receive;
  for (std::size_t p = 0; p < P; ++p) {
    send.push_back(span_of(send_counts_.data() + static_cast<std::int64_t>(p) * L, L));
    receive.push_back(span_of(receive_counts_.data() + static_cast<std::int64_t>(p) * L, L));
  }
  ep_.all_to_all(send, receive, "slot counts");
  bytes.counts += (ep_.size() - 1) * L * 8;
  bytes.rows += rows_to_others();
}

std::vector<std::int64_t> SlotExchange::expert_counts() const {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(placement_.L()), 0);
  for (std::size_t i = 0; i < receive_counts_.size(); ++i) counts[i % counts.size()] += receive_counts_[i];
  return counts;
}

std::int64_t SlotExchange::rows_to_others() const {
  return num_sent() - rows_by_rank(send_counts_, static_cast<std::size_t>(ep_.size()))[static_cast<std::size_t>(ep_.rank())];
}

void SlotExchange::reorder(float* arrived, const std::vector<std::int64_t>& starts, const TensorView& rows, bool to_experts) const {
  const auto L = static_cast<std::size_t>(placement_.L());
  const std::int64_t width = rows.shape[1];
  std::vector<std::int64_t> from(receive_counts_.size(), 0), to(receive_counts_.size(), 0), next = starts;
  std::exclusive_scan(receive_counts_.begin(), receive_counts_.end(), from.begin(), std::int64_t{0});
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i] = next[i % L];
    next[i % L] += receive_counts_[i];
  }
  float* data = rows.as<float>();
  parallel_for(stream_.pool, static_cast<std::int64_t>(to.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const auto count = static_cast<std::size_t>(receive_counts_[i] * width) * sizeof(float);
      if (count == 0) continue;
      float* a = arrived + from[i] * width;
      float* r = data + to[i] * width;
      std::memcpy(to_experts ? r : a, to_experts ? a : r, count);
    }
  });
}

void SlotExchange::dispatch(const TensorView& sent, const std::vector<std::int64_t>& starts, const TensorView& rows, ExchangeBytes& bytes, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kDispatch);
  const auto P = static_cast<std::size_t>(ep_.size());
  const std::int64_t width = rows.shape[1];
  const std::vector<std::int64_t> receive_rows = rows_by_rank(receive_counts_, P);
  arrived_.resize(DType::kF32, {std::accumulate(receive_rows.begin(), receive_rows.end(), std::int64_t{0}), width});
  ep_.all_to_all(spans(sent.as<float>(), rows_by_rank(send_counts_, P), width), spans(arrived_.as<float>(), receive_rows, width), "slot rows");
  reorder(arrived_.as<float>(), starts, rows, /*to_experts=*/true);
  bytes.payload += rows_to_others() * width * 4;
}

void SlotExchange::collect(const TensorView& rows, const std::vector<std::int64_t>& starts, const TensorView& sent, ExchangeBytes& bytes, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const auto P = static_cast<std::size_t>(ep_.size());
  const std::int64_t width = rows.shape[1];
  const std::vector<std::int64_t> receive_rows = rows_by_rank(receive_counts_, P);
  const std::int64_t total = std::accumulate(receive_rows.begin(), receive_rows.end(), std::int64_t{0});
  arrived_.resize(DType::kF32, {total, width});
  reorder(arrived_.as<float>(), starts, rows, /*to_experts=*/false);
  ep_.all_to_all(spans(arrived_.as<float>(), receive_rows, width), spans(sent.as<float>(), rows_by_rank(send_counts_, P), width), "slot results");
  bytes.combined += (total - receive_rows[static_cast<std::size_t>(ep_.rank())]) * width * 4;
}

}  // namespace waybill::baselines

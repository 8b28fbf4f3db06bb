// SPDX-License-Identifier: Apache-2.0
// Planning of the dense-map design: who sends which rows, and which slots they fill.
#include <algorithm>
#include <limits>

#include "baselines/map_rows.h"

namespace waybill::baselines {
namespace {

// Every rank's `mine` behind one another in rank order. rows: [P+1] prefix sum of the ranks' row counts.
template <class T>
void gather(Fabric& ep, const T* mine, const std::vector<std::int64_t>& rows, std::int64_t width, std::vector<T>& all, const char* phase) {
  const auto me = static_cast<std::size_t>(ep.rank());
  all.resize(static_cast<std::size_t>(rows.back() * width));
  std::vector<Fabric::Span> send, receive;
  for (std::size_t p = 0; p + 1 < rows.size(); ++p) {
    send.push_back({const_cast<T*>(mine), static_cast<std::size_t>((rows[me + 1] - rows[me]) * width) * sizeof(T)});
    receive.push_back({all.data() + rows[p] * width, static_cast<std::size_t>((rows[p + 1] - rows[p]) * width) * sizeof(T)});
  }
  ep.all_to_all(send, receive, phase);
}

}  // namespace

void MapRows::plan(const RouteView& route, MoeStackCounters& counters, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kPlan);
  gather_routes(route, counters);
  list_sent_rows(counters);
  counters.bytes.rows += rows_to_others();
  find_received_rows(counters);
}

// Counts, then the route itself: a byte map of all experts, or ids.
void MapRows::gather_routes(const RouteView& route, MoeStackCounters& counters) {
  T_ = route.T;
  K_ = route.K;
  const std::int64_t E = placement_.E, peers = ep_.size() - 1;
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(ep_.size()));
  ep_.all_gather(&T_, tokens.data(), sizeof(T_), "map tokens");
  token_offsets_.assign(1, 0);
  for (const std::int64_t count : tokens) token_offsets_.push_back(token_offsets_.back() + count);
  ids_.resize(static_cast<std::size_t>(T_ * K_));
  for (std::int64_t i = 0; i < T_ * K_; ++i) ids_[static_cast<std::size_t>(i)] = route.id(i / K_, i % K_);
  weights_.assign(route.weights, route.weights + T_ * K_);
  counters.bytes.counts += peers * 8;

  if (!from_ids()) {
    own_map_.assign(static_cast<std::size_t>(T_ * E), 0);
    for (std::int64_t i = 0; i < T_ * K_; ++i) {
      if (is_route(ids_[static_cast<std::size_t>(i)], E)) own_map_[static_cast<std::size_t>(i / K_ * E + ids_[static_cast<std::size_t>(i)])] = 1;
    }
    counters.slots_visited += T_ * K_;
  }
  if (!changes_.compact_routes) {
    gather(ep_, own_map_.data(), token_offsets_, E, all_map_, "map");
    counters.bytes.ids += peers * T_ * E;
    return;
  }
  if (route.id_dtype == DType::kI16) {
    std::vector<std::int16_t> narrow;
    gather(ep_, static_cast<const std::int16_t*>(route.ids), token_offsets_, K_, narrow, "map ids");
    all_ids_.assign(narrow.begin(), narrow.end());
  } else {
    gather(ep_, static_cast<const std::int32_t*>(route.ids), token_offsets_, K_, all_ids_, "map ids");
  }
  counters.bytes.ids += peers * T_ * K_ * static_cast<std::int64_t>(size_bytes(route.id_dtype));
  if (changes_.row_lists) return;
  // Scans want a map again: this rank's columns of every token.
  all_map_.assign(static_cast<std::size_t>(token_offsets_.back() * L_), 0);
  for (std::size_t i = 0; i < all_ids_.size(); ++i) {
    const std::int64_t local = all_ids_[i] - first_;
    if (all_ids_[i] >= 0 && local >= 0 && local < L_)
      all_map_[i / static_cast<std::size_t>(K_) * static_cast<std::size_t>(L_) + static_cast<std::size_t>(local)] = 1;
  }
  counters.slots_visited += static_cast<std::int64_t>(all_ids_.size());
}

// Tokens for each rank, ascending, each once.
void MapRows::list_sent_rows(MoeStackCounters& counters) {
  const int P = ep_.size();
  std::vector<std::vector<std::int32_t>> tokens(static_cast<std::size_t>(P));
  if (from_ids()) {
    std::vector<std::int64_t> last(static_cast<std::size_t>(P), -1);
    for (std::int64_t i = 0; i < T_ * K_; ++i) {
      const std::int32_t id = ids_[static_cast<std::size_t>(i)];
      if (!is_route(id, placement_.E)) continue;
      const auto p = static_cast<std::size_t>(id / L_);
      if (last[p] == i / K_) continue;
      last[p] = i / K_;
      tokens[p].push_back(static_cast<std::int32_t>(i / K_));
    }
    counters.slots_visited += T_ * K_;
  } else {
    for (std::int64_t t = 0; t < T_; ++t) {
      for (int p = 0; p < P; ++p) {
        const std::uint8_t* columns = own_map_.data() + t * placement_.E + p * L_;
        const std::uint8_t* hit = std::find(columns, columns + L_, 1);
        counters.slots_visited += std::min<std::int64_t>(hit - columns + 1, L_);
        if (hit != columns + L_) tokens[static_cast<std::size_t>(p)].push_back(static_cast<std::int32_t>(t));
      }
    }
  }
  send_offsets_.assign(1, 0);
  send_token_.clear();
  for (const std::vector<std::int32_t>& list : tokens) {
    send_token_.insert(send_token_.end(), list.begin(), list.end());
    send_offsets_.push_back(static_cast<std::int64_t>(send_token_.size()));
  }
}

// Rows that arrive here, known without being told: everyone has everyone's routes.
void MapRows::find_received_rows(MoeStackCounters& counters) {
  const std::int64_t all = token_offsets_.back();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(L_), 0);
  receive_token_.clear();
  receive_offsets_.assign(1, 0);
  row_slot_offsets_.assign(1, 0);
  row_expert_.clear();
  const std::uint8_t* columns = all_map_.data() + (changes_.compact_routes ? 0 : first_);
  const std::int64_t stride = changes_.compact_routes ? L_ : placement_.E;
  std::size_t source = 0;
  for (std::int64_t t = 0; t < all; ++t) {
    while (t == token_offsets_[source + 1]) {
      receive_offsets_.push_back(static_cast<std::int64_t>(receive_token_.size()));
      ++source;
    }
    bool hit = false;
    const auto add = [&](std::int64_t local) {
      hit = true;
      ++counts[static_cast<std::size_t>(local)];
      if (changes_.row_lists) row_expert_.push_back(static_cast<std::int32_t>(local));
    };
    for (std::int64_t k = 0; from_ids() && k < K_; ++k) {
      const std::int64_t id = all_ids_[static_cast<std::size_t>(t * K_ + k)], local = id - first_;
      if (id >= 0 && local >= 0 && local < L_) add(local);
    }
    for (std::int64_t l = 0; !from_ids() && l < L_; ++l) {
      if (columns[t * stride + l] != 0) add(l);
    }
    if (!hit) continue;
    receive_token_.push_back(t);
    row_slot_offsets_.push_back(static_cast<std::int64_t>(row_expert_.size()));
  }
  while (receive_offsets_.size() < token_offsets_.size()) receive_offsets_.push_back(static_cast<std::int64_t>(receive_token_.size()));
  counters.slots_visited += all * (from_ids() ? K_ : L_);
  number_slots(counts, counters);
}

// Positions of the slots in expert order: by expert, then row.
void MapRows::number_slots(const std::vector<std::int64_t>& counts, MoeStackCounters& counters) {
  expert_offsets_.assign(1, 0);
  std::int64_t total = 0;
  for (const std::int64_t count : counts) {
    total += count;
    WB_CHECK(total <= std::numeric_limits<std::int32_t>::max(), "a rank receives more than 2^31 - 1 slots");
    expert_offsets_.push_back(static_cast<std::int32_t>(total));
  }
  std::vector<std::int32_t> next(expert_offsets_.begin(), expert_offsets_.end() - 1);
  if (changes_.row_lists) {
    row_slot_.resize(row_expert_.size());
    for (std::size_t i = 0; i < row_slot_.size(); ++i) row_slot_[i] = next[static_cast<std::size_t>(row_expert_[i])]++;
    counters.slots_visited += total;
    return;
  }
  slot_map_.resize(receive_token_.size() * static_cast<std::size_t>(L_));
  const std::uint8_t* columns = all_map_.data() + (changes_.compact_routes ? 0 : first_);
  const std::int64_t stride = changes_.compact_routes ? L_ : placement_.E;
  for (std::size_t r = 0; r < receive_token_.size(); ++r) {
    for (std::int64_t l = 0; l < L_; ++l) {
      slot_map_[r * static_cast<std::size_t>(L_) + static_cast<std::size_t>(l)] =
          columns[receive_token_[r] * stride + l] != 0 ? next[static_cast<std::size_t>(l)]++ : -1;
    }
  }
  counters.slots_visited += R() * L_;
}

}  // namespace waybill::baselines

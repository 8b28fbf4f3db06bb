// SPDX-License-Identifier: Apache-2.0
// Fast forward pass. A row is read once into order keys; the K best are found without sorting it: the K-th largest of 2K bucket
// maxima bounds the K-th best key from below, so only the few keys at or above it (about 1.4 K of random ones) are sorted. Rows are
// independent and split over the pool.
#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>

#include "core/balanced_order.h"
#include "ops/router/row_scratch.h"

namespace waybill::router_impl {
namespace {

constexpr std::int64_t kMaxCountedBuckets = 256;  // threshold() compares every bucket with every other

// The k best of keys[0, n), best first, as composites in `out` (room for n). Returns how many there are.
std::int64_t select_best(const RowKernels& kernels, const std::uint32_t* keys, std::int64_t n, std::int64_t k, std::uint32_t* buckets, std::uint64_t* out) {
  const std::int64_t num_buckets = padded_to_lanes(2 * k);
  const bool has_bound = num_buckets <= kMaxCountedBuckets && 2 * num_buckets <= n;
  const std::uint32_t bound = has_bound ? kernels.threshold(keys, n, k, num_buckets, buckets) : 1;
  std::int64_t count = kernels.collect(keys, n, bound, out);
  if (count <= kMaxSmallSort) {
    std::uint64_t small[kMaxSmallSort];
    std::copy_n(out, count, small);
    kernels.sort_small(small, count, out);
  } else {
    if (count > k) std::nth_element(out, out + k - 1, out + count, std::greater<>());
    count = std::min(count, k);
    std::sort(out, out + count, std::greater<>());
  }
  return std::min(count, k);
}

float key_value(std::uint32_t key) { return scalar::from_bits((key >> 31) != 0 ? key ^ 0x80000000u : ~key); }

// Sets the keys of groups that are not kept to 0 = excluded.
void drop_groups(const RowKernels& kernels, const RouterConfig& config, RowScratch& scratch) {
  const std::int64_t size = config.E / config.num_groups;
  const std::int64_t n = keys_per_group_score(config);
  for (std::int64_t g = 0; g < config.num_groups; ++g) {
    const std::uint32_t* keys = scratch.keys + g * size;
    GroupRank rank{g, 0, 0.0f};
    if (n <= 2) {
      std::uint32_t best = 0, second = 0;
      for (std::int64_t e = 0; e < size; ++e) {
        second = std::max(second, std::min(best, keys[e]));
        best = std::max(best, keys[e]);
      }
      if (n == 1) second = 0;
      rank.num_keys = (best != 0) + (second != 0);
      rank.score = best == 0 ? 0.0f : key_value(best);
      if (second != 0) rank.score += key_value(second);
    } else {
      rank.num_keys = select_best(kernels, keys, size, n, scratch.buckets, scratch.composites);
      for (std::int64_t i = 0; i < rank.num_keys; ++i) {
        const float key = key_value(static_cast<std::uint32_t>(scratch.composites[i] >> 32));
        rank.score = i == 0 ? key : rank.score + key;
      }
    }
    scratch.groups[static_cast<std::size_t>(g)] = rank;
  }
  std::nth_element(scratch.groups.begin(), scratch.groups.begin() + config.num_kept_groups - 1, scratch.groups.end(), comes_before);
  for (std::int64_t i = config.num_kept_groups; i < config.num_groups; ++i) {
    std::fill_n(scratch.keys + scratch.groups[static_cast<std::size_t>(i)].id * size, size, 0u);
  }
}

class ForwardRows {
 public:
  explicit ForwardRows(const ForwardCall& call) : call_(call), kernels_(row_kernels()), vectors_(call.config, call.inputs), order_(call.config.E) {
    const bool is_given = call.inputs.replay_ids || call.config.forced_balance != ForcedBalance::kOff;
    source_ = is_given ? Source::kGiven : Source::kChosen;
    has_own_unbiased_set_ = is_given || call.inputs.expert_bias || uses_groups(call.config);
    needs_row_sum_ = is_softmax(call.config.score) && !is_renormalised(call.config);
  }

  void run(std::int64_t begin, std::int64_t end) {
    RowScratch scratch(call_.config);
    StatusWord seen;
    for (std::int64_t t = begin; t < end; ++t) {
      if (is_padding(call_.inputs, t)) {
        std::fill_n(scratch.ids, call_.config.K, -1);
        std::fill_n(scratch.selected_weights, call_.config.K, 0.0f);
      } else {
        route_row(t, scratch, seen);
      }
      store(t, scratch);
    }
    add_status(seen);
  }

 private:
  enum class Source { kChosen, kGiven };

  void route_row(std::int64_t t, RowScratch& scratch, StatusWord& seen) {
    const RouterConfig& config = call_.config;
    const float* x = scratch.load(kernels_, call_.inputs.logits, t);
    std::int64_t count;
    bool has_nonfinite;
    if (source_ == Source::kChosen) {
      has_nonfinite = kernels_.keys(config.score, x, vectors_.bias, vectors_.keep, config.E, scratch.keys);
      if (uses_groups(config)) drop_groups(kernels_, config, scratch);
      count = select_best(kernels_, scratch.keys, config.E, config.K, scratch.buckets, scratch.composites);
      for (std::int64_t k = 0; k < config.K; ++k) scratch.ids[k] = k < count ? composite_id(scratch.composites[k]) : -1;
    } else {
      has_nonfinite = kernels_.has_nonfinite(x, config.E);
      count = take_given(t, x, scratch, seen);
    }
    seen.num_nonfinite_rows += has_nonfinite;
    seen.num_short_rows += count < config.K;
    write_weights(x, scratch);
    if (call_.outputs.counts_unbiased != nullptr) count_unbiased(x, scratch);
  }

  // Returns the number of valid slots.
  std::int64_t take_given(std::int64_t t, const float* x, RowScratch& scratch, StatusWord& seen) const {
    const RouterConfig& config = call_.config;
    const TensorView& replay = call_.inputs.replay_ids;
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < config.K; ++k) {
      std::int32_t id = 0;
      const std::int64_t i = t * config.K + k;
      if (!replay)
        id = order_.expert(call_.inputs.token_offset * config.K + i);
      else if (replay.dtype == DType::kI16)
        id = static_cast<const std::int16_t*>(replay.data)[i];
      else
        id = static_cast<const std::int32_t*>(replay.data)[i];
      if (id < -1 || id >= config.E) {
        seen.flags |= kStatusBadId;
        ++seen.num_bad_ids;
        id = -1;
      }
      if (id >= 0 && (!scalar::is_finite(x[id]) || vectors_.keep[id] == 0)) id = -1;
      scratch.ids[k] = id;
      count += id >= 0;
    }
    return count;
  }

  void write_weights(const float* x, RowScratch& scratch) const {
    const RouterConfig& config = call_.config;
    for (std::int64_t k = 0; k < config.K; ++k) {
      scratch.valid[k] = scratch.ids[k] >= 0 ? 1 : 0;
      scratch.selected_x[k] = scratch.ids[k] >= 0 ? x[scratch.ids[k]] : 0.0f;
    }
    RowSum row;
    if (needs_row_sum_) row = kernels_.full_scores(config.score, x, vectors_.keep, config.E, scratch.p);
    kernels_.selected_weights(config.score, is_renormalised(config), needs_row_sum_ ? &row : nullptr, config.scaling_factor, config.normalise_epsilon,
                              scratch.selected_x, scratch.valid, scratch.padded_k, scratch.selected_scratch, scratch.selected_weights);
  }

  void count_unbiased(const float* x, RowScratch& scratch) const {
    std::int64_t count = 0;
    if (has_own_unbiased_set_) {
      kernels_.keys(call_.config.score, x, vectors_.zeros, vectors_.keep, call_.config.E, scratch.keys);
      count = select_best(kernels_, scratch.keys, call_.config.E, call_.config.K, scratch.buckets, scratch.composites);
    } else {
      while (count < call_.config.K && scratch.ids[count] >= 0) ++count;
    }
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int32_t id = has_own_unbiased_set_ ? composite_id(scratch.composites[k]) : scratch.ids[k];
      std::atomic_ref(call_.outputs.counts_unbiased[id]).fetch_add(1, std::memory_order_relaxed);
    }
  }

  static std::int32_t composite_id(std::uint64_t composite) { return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(composite)); }

  void store(std::int64_t t, const RowScratch& scratch) const {
    const RouteView& route = call_.outputs.route;
    const std::int64_t begin = t * route.K;
    if (route.id_dtype == DType::kI16)
      std::copy_n(scratch.ids, route.K, static_cast<std::int16_t*>(route.ids) + begin);
    else
      std::copy_n(scratch.ids, route.K, static_cast<std::int32_t*>(route.ids) + begin);
    std::copy_n(scratch.selected_weights, route.K, route.weights + begin);
  }

  void add_status(const StatusWord& seen) const {
    StatusWord* status = call_.outputs.status;
    if (status == nullptr) return;
    const auto add = [](std::int64_t& total, std::int64_t part) { std::atomic_ref(total).fetch_add(part, std::memory_order_relaxed); };
    add(status->num_nonfinite_rows, seen.num_nonfinite_rows);
    add(status->num_short_rows, seen.num_short_rows);
    add(status->num_bad_ids, seen.num_bad_ids);
    std::atomic_ref(status->flags).fetch_or(seen.flags, std::memory_order_relaxed);
  }

  const ForwardCall& call_;
  const RowKernels& kernels_;
  ExpertVectors vectors_;
  BalancedOrder order_;
  Source source_ = Source::kChosen;
  bool has_own_unbiased_set_ = false;
  bool needs_row_sum_ = false;
};

}  // namespace

void forward_fast(const ForwardCall& call) {
  if (call.outputs.counts_unbiased != nullptr) std::fill_n(call.outputs.counts_unbiased, call.config.E, 0);
  if (call.outputs.weight_factors != nullptr) std::fill_n(call.outputs.weight_factors, call.outputs.route.T, 0.0f);  // none: the logits are at hand
  ForwardRows rows(call);
  parallel_for(call.stream.pool, call.outputs.route.T, rows_per_task(call.config.E), [&](std::int64_t begin, std::int64_t end) { rows.run(begin, end); });
  write_counts(call);
  write_score_sums_fast(call);
}

}  // namespace waybill::router_impl

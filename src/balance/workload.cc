// SPDX-License-Identifier: Apache-2.0
#include "waybill/workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/balanced_order.h"
#include "waybill/random.h"

namespace waybill {
namespace {

struct Name {
  const char* short_name;
  const char* name;
};
constexpr std::array<Name, kNumWorkloads> kNames = {{{"W0", "balanced"},
                                                     {"W1", "zipf"},
                                                     {"W2", "hot_expert"},
                                                     {"W3", "one_expert"},
                                                     {"W4", "hot_rank"},
                                                     {"W5", "ragged_sources"},
                                                     {"W6", "empty_experts"},
                                                     {"W7", "moving_hot_spot"},
                                                     {"W8", "burst"},
                                                     {"W9", "few_rows"}}};

const Name& name_of(Workload workload) {
  const auto i = static_cast<std::size_t>(workload);
  WB_CHECK(i < kNames.size(), "workload {} does not exist, there are {}", i, kNames.size());
  return kNames[i];
}

// Draws a row's K distinct experts.
class RowDraw {
 public:
  explicit RowDraw(const WorkloadConfig& config) : config_(config), key_(mix64(config.seed) ^ mix64(static_cast<std::uint64_t>(config.step) * 977 + 13)) {
    const auto E = static_cast<std::size_t>(config.E);
    allowed_.resize(E);
    std::iota(allowed_.begin(), allowed_.end(), 0);
    if (config.workload == Workload::kEmptyExperts) keep_busy_experts();
    if (config.workload == Workload::kHotExpert && config.K < config.E) std::erase(allowed_, pick_expert(1, false));  // it has its share of rows already
    if (config.workload == Workload::kZipf) build_zipf();
  }

  std::uint64_t key() const { return key_; }
  std::int64_t hot_block() const { return std::max<std::int64_t>(config_.K, config_.E / 8); }
  // An expert that is a function of the seed only, or of the step too.
  std::int32_t pick_expert(std::uint64_t salt, bool by_step) const {
    return static_cast<std::int32_t>(random_u64(by_step ? key_ : mix64(config_.seed), salt) % static_cast<std::uint64_t>(config_.E));
  }

  void start(std::int64_t token, std::int32_t* row) {
    row_ = row;
    count_ = 0;
    counter_ = static_cast<std::uint64_t>(token) << 20;
  }
  std::int64_t missing() const { return config_.K - count_; }

  void take(std::int32_t id) {
    if (count_ < config_.K && !has(id)) row_[count_++] = id;
  }
  // n more experts, uniform over [begin, end), or over all experts the workload allows.
  void take_uniform(std::int64_t n) {
    take_from(n, static_cast<std::int64_t>(allowed_.size()), [&](std::int64_t i) { return allowed_[static_cast<std::size_t>(i)]; });
  }
  void take_uniform(std::int64_t n, std::int64_t begin, std::int64_t end) {
    take_from(n, end - begin, [&](std::int64_t i) { return static_cast<std::int32_t>(begin + i); });
  }
  void take_zipf(std::int64_t n) {
    for (int attempt = 0; n > 0 && attempt < 64; ++attempt) {
      const double u = static_cast<double>(next() >> 11) * 0x1p-53;
      const auto rank = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, u) - cumulative_.begin();
      n -= take_new(allowed_[static_cast<std::size_t>(rank)]);
    }
    for (std::size_t rank = 0; n > 0 && rank < allowed_.size(); ++rank) n -= take_new(allowed_[rank]);  // the most popular ones left
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t next() { return random_u64(key_, counter_++); }
  bool has(std::int32_t id) const { return std::find(row_, row_ + count_, id) != row_ + count_; }
  std::int64_t take_new(std::int32_t id) {
    const std::int64_t before = count_;
    take(id);
    return count_ - before;
  }

  template <class At>
  void take_from(std::int64_t n, std::int64_t size, const At& at) {
    n = std::min(n, missing());
    for (int attempt = 0; n > 0 && attempt < 64; ++attempt) n -= take_new(at(static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(size))));
    const auto first = static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(size));
    for (std::int64_t i = 0; n > 0 && i < size; ++i) n -= take_new(at((first + i) % size));  // dense rows (K near E): the next free ones
  }

  void keep_busy_experts() {
    std::erase_if(allowed_, [&](std::int32_t e) { return e >= (config_.E + 1) / 2 || e % 4 == 3; });
    for (std::int32_t e = 0; static_cast<std::int64_t>(allowed_.size()) < config_.K; ++e) {
      if (std::find(allowed_.begin(), allowed_.end(), e) == allowed_.end()) allowed_.push_back(e);
    }
  }

  void build_zipf() {
    const std::uint64_t shuffle = mix64(config_.seed + 71);
    std::sort(allowed_.begin(), allowed_.end(), [&](std::int32_t a, std::int32_t b) {
      return random_u64(shuffle, static_cast<std::uint64_t>(a)) < random_u64(shuffle, static_cast<std::uint64_t>(b));
    });
    double sum = 0;
    for (std::size_t rank = 0; rank < allowed_.size(); ++rank) cumulative_.push_back(sum += std::pow(static_cast<double>(rank + 1), -config_.zipf_exponent));
    for (double& value : cumulative_) value /= sum;
  }

  const WorkloadConfig& config_;
  std::uint64_t key_;
  std::vector<std::int32_t> allowed_;
  std::vector<double> cumulative_;
  std::int32_t* row_ = nullptr;
  std::int64_t count_ = 0;
  std::uint64_t counter_ = 0;
};

// True for floor(rate * T) evenly spaced tokens out of T.
bool is_in_share(std::int64_t t, double rate) { return std::floor(static_cast<double>(t + 1) * rate) > std::floor(static_cast<double>(t) * rate); }

void draw_row(const WorkloadConfig& config, std::int64_t t, RowDraw& draw) {
  switch (config.workload) {
    case Workload::kZipf:
      draw.take_zipf(config.K);
      return;
    case Workload::kHotExpert:
      if (is_in_share(t, std::min(1.0, config.hot_factor * static_cast<double>(config.K) / static_cast<double>(config.E))))
        draw.take(draw.pick_expert(1, false));
      break;
    case Workload::kOneExpert:
      draw.take(draw.pick_expert(1, false));
      break;
    case Workload::kHotRank: {
      std::int64_t num_hot = 0;
      for (std::int64_t k = 0; k < config.K; ++k) num_hot += draw.uniform() < config.hot_share;
      draw.take_uniform(num_hot, 0, draw.hot_block());
      if (draw.hot_block() < config.E) draw.take_uniform(draw.missing(), draw.hot_block(), config.E);
      break;
    }
    case Workload::kMovingHotSpot:
      if (is_in_share(t, config.hot_share)) draw.take(draw.pick_expert(2, true));
      break;
    case Workload::kBurst: {
      const std::int64_t length = config.T / 4;
      const auto begin = static_cast<std::int64_t>(random_u64(draw.key(), 3) % static_cast<std::uint64_t>(config.T - length + 1));
      if (t >= begin && t < begin + length) {
        for (std::uint64_t i = 0; draw.missing() > 0; ++i) draw.take(draw.pick_expert(100 + i, true));
      }
      break;
    }
    default:
      break;
  }
  draw.take_uniform(draw.missing());
}

}  // namespace

const char* short_name(Workload workload) { return name_of(workload).short_name; }
const char* to_string(Workload workload) { return name_of(workload).name; }

Workload parse_workload(std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i].short_name || name == kNames[i].name) return static_cast<Workload>(i);
    known += fmt::format("{}{} ({})", i == 0 ? "" : ", ", kNames[i].short_name, kNames[i].name);
  }
  WB_FAIL(ErrorCode::kInvalidArgument, "there is no workload '{}'; known are {}", name, known);
}

std::int64_t few_rows_tokens(std::int64_t E, std::int64_t K) {
  WB_CHECK(K >= 1 && K <= E, "K = {} must be in [1, E = {}]", K, E);
  const std::int64_t tokens = (E + E / 2) / K;
  return tokens * K >= E ? tokens : tokens + 1;
}

void validate(const WorkloadConfig& c) {
  name_of(c.workload);
  WB_CHECK(c.E >= 1 && c.E <= INT32_MAX && c.K >= 1 && c.K <= c.E, "a workload needs 1 <= K <= E < 2^31, got K = {}, E = {}", c.K, c.E);
  WB_CHECK(c.T >= 0 && c.T <= INT32_MAX / c.K, "a workload needs 0 <= T * K < 2^31, got T = {}, K = {}", c.T, c.K);
  WB_CHECK(c.step >= 0, "step must not be negative, got {}", c.step);
  WB_CHECK(c.zipf_exponent >= 0 && c.zipf_exponent <= 16, "zipf_exponent must be in [0, 16], got {}", c.zipf_exponent);
  WB_CHECK(c.hot_factor >= 0 && std::isfinite(c.hot_factor), "hot_factor must be finite and not negative, got {}", c.hot_factor);
  WB_CHECK(c.hot_share >= 0 && c.hot_share <= 1, "hot_share must be in [0, 1], got {}", c.hot_share);
  if (c.workload == Workload::kFewRows) {
    WB_CHECK(c.T * c.K >= c.E && c.T * c.K <= 2 * c.E, "W9 needs E <= T * K <= 2 E, got T = {}, K = {}, E = {} (T = {} fits)", c.T, c.K, c.E,
             few_rows_tokens(c.E, c.K));
  }
}

std::vector<std::int32_t> workload_ids(const WorkloadConfig& config) {
  validate(config);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(config.T * config.K));
  if (config.workload == Workload::kBalanced || config.workload == Workload::kFewRows) {
    const BalancedOrder order(config.E);
    const std::int64_t shift = config.workload == Workload::kFewRows ? static_cast<std::int64_t>(mix64(config.seed) % static_cast<std::uint64_t>(config.E)) : 0;
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = order.expert(static_cast<std::int64_t>(i) + shift);
    return ids;
  }
  RowDraw draw(config);
  for (std::int64_t t = 0; t < config.T; ++t) {
    draw.start(t, ids.data() + t * config.K);
    draw_row(config, t, draw);
  }
  return ids;
}

std::vector<std::int64_t> workload_bounds(const WorkloadConfig& config, int P) {
  validate(config);
  WB_CHECK(P >= 1, "a workload needs at least one source rank, got P = {}", P);
  std::vector<std::int64_t> share(static_cast<std::size_t>(P), 1);
  if (config.workload == Workload::kRaggedSources && P > 1) {
    for (std::size_t p = 0; p < share.size(); ++p) share[p] = p % 3 == 0 ? 0 : 1 + static_cast<std::int64_t>(random_u64(mix64(config.seed + 5), p) % 8);
  }
  const std::int64_t total = std::accumulate(share.begin(), share.end(), std::int64_t{0});
  std::vector<std::int64_t> bounds{0};
  std::int64_t passed = 0;
  for (const std::int64_t part : share) bounds.push_back(config.T * (passed += part) / total);
  return bounds;
}

std::vector<Route> workload_routes(const WorkloadConfig& config, int P) {
  const std::vector<std::int32_t> ids = workload_ids(config);
  const std::vector<std::int64_t> bounds = workload_bounds(config, P);
  std::vector<Route> routes;
  for (std::size_t p = 0; p + 1 < bounds.size(); ++p) {
    const std::int64_t T = bounds[p + 1] - bounds[p];
    const std::vector<float> weights(static_cast<std::size_t>(T * config.K), 1.0f / static_cast<float>(config.K));
    routes.push_back(Route::from_ids(T, config.K, config.E, std::span(ids).subspan(static_cast<std::size_t>(bounds[p] * config.K), weights.size()), weights));
  }
  return routes;
}

std::vector<std::int64_t> workload_counts(const WorkloadConfig& config) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(std::max<std::int64_t>(config.E, 0)), 0);
  for (const std::int32_t id : workload_ids(config)) ++counts[static_cast<std::size_t>(id)];
  return counts;
}

}  // namespace waybill

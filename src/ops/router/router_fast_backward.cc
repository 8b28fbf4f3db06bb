// SPDX-License-Identifier: Apache-2.0
// Fast losses and backward pass. Work is split into tasks of consecutive rows of one sequence; their partial sums are added in task
// order, so that results do not depend on the pool. A row of d_logits is written where it stands, with at most a few [E] rows of scratch.
#include <algorithm>
#include <vector>

#include "ops/router/row_scratch.h"

namespace waybill::router_impl {
namespace {

// Rows in tasks that do not cross a sequence boundary.
struct TaskGrid {
  std::int64_t T = 0, sequence_length = 0, rows = 1, tasks_per_sequence = 0;

  TaskGrid(const RouterConfig& config, const RouterLossConfig& losses, std::int64_t num_rows)
      : T(num_rows), sequence_length(losses.sequence_coefficient != 0 ? losses.sequence_length : std::max<std::int64_t>(num_rows, 1)) {
    rows = std::min(rows_per_task(config.E), sequence_length);
    tasks_per_sequence = (sequence_length + rows - 1) / rows;
  }
  std::int64_t num_sequences() const { return T / sequence_length; }
  std::int64_t num_tasks() const { return num_sequences() * tasks_per_sequence; }
  std::int64_t sequence_of(std::int64_t task) const { return task / tasks_per_sequence; }
  std::int64_t begin(std::int64_t task) const { return sequence_of(task) * sequence_length + task % tasks_per_sequence * rows; }
  std::int64_t end(std::int64_t task) const { return std::min(begin(task) + rows, (sequence_of(task) + 1) * sequence_length); }
  // Tasks a thread takes at a time: at least one task's worth of rows, and few enough that a sequence is not recounted often.
  std::int64_t grain(const RouterConfig& config, const RouterLossConfig& losses) const {
    const std::int64_t by_rows = std::max<std::int64_t>(1, rows_per_task(config.E) / rows);
    return losses.sequence_coefficient != 0 ? std::max(by_rows, tasks_per_sequence / 4) : by_rows;
  }
};

// The constants of the losses: L = sum over rows of aux_factor * n . P + sequence_factor[b] * n_b . P + z_factor * lse^2.
struct LossPlan {
  bool has_aux = false, has_sequence = false, has_z = false;
  double aux_factor = 0, z_factor = 0;
  std::vector<double> sequence_factor;  // [B]
  std::vector<float> aux_counts;        // [E]

  bool has_scores() const { return has_aux || has_sequence; }

  LossPlan(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route, const RouterLossInputs& given,
           const TaskGrid& grid) {
    const auto valid = static_cast<double>(count_valid_tokens(inputs, 0, route.T));
    if (valid == 0) return;
    const double experts_per_route = static_cast<double>(config.E) / static_cast<double>(config.K);
    const double loss_tokens = given.loss_tokens > 0 ? given.loss_tokens : valid;
    has_aux = losses.aux_coefficient != 0;
    has_z = losses.z_coefficient != 0;
    has_sequence = losses.sequence_coefficient != 0;
    z_factor = losses.z_coefficient / loss_tokens;
    if (has_aux) {
      aux_factor = losses.aux_coefficient * experts_per_route / ((given.aux_tokens > 0 ? given.aux_tokens : valid) * loss_tokens);
      aux_counts.assign(static_cast<std::size_t>(config.E), 0.0f);
      if (given.aux_counts != nullptr)
        std::copy_n(given.aux_counts, config.E, aux_counts.begin());
      else
        add_counts(config, inputs, route, 0, route.T, aux_counts.data());
    }
    if (!has_sequence) return;
    double num_nonempty = 0;
    for (std::int64_t b = 0; b < grid.num_sequences(); ++b) {
      const auto tokens = static_cast<double>(count_valid_tokens(inputs, b * grid.sequence_length, (b + 1) * grid.sequence_length));
      num_nonempty += tokens > 0;
      sequence_factor.push_back(tokens > 0 ? losses.sequence_coefficient * experts_per_route / (tokens * tokens) : 0.0);
    }
    for (double& factor : sequence_factor) factor /= given.num_sequences > 0 ? given.num_sequences : num_nonempty;
  }

  static void add_counts(const RouterConfig& config, const RouterInputs& inputs, const RouteView& route, std::int64_t begin, std::int64_t end, float* counts) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (is_padding(inputs, t)) continue;
      for (std::int64_t k = 0; k < route.K; ++k) {
        const std::int32_t id = route.id(t, k);
        if (id >= 0 && id < config.E) counts[id] += 1.0f;
      }
    }
  }
};

// A row's softmax and full scores, as far as they are needed.
class RowScores {
 public:
  RowScores(const RouterConfig& config, const RowKernels& kernels, const ExpertVectors& vectors) : config_(config), kernels_(kernels), vectors_(vectors) {}

  // False where no expert exists. softmax / p are null unless asked for.
  bool compute(const float* x, bool needs_softmax, bool needs_p, RowScratch& scratch) {
    const bool is_shared = is_softmax(config_.score);
    softmax = p = nullptr;
    if (needs_softmax || (needs_p && is_shared)) {
      const RowSum row = kernels_.full_scores(ScoreFunction::kSoftmax, x, vectors_.keep, config_.E, scratch.softmax);
      if (row.sum == 0) return false;
      kernels_.scale(scratch.softmax, config_.E, 1.0f / row.sum);
      lse = kernels_.log_sum_exp(row);
      if (needs_softmax) softmax = scratch.softmax;
      if (is_shared) p = scratch.softmax;
    }
    if (needs_p && !is_shared) {
      const RowSum row = kernels_.full_scores(config_.score, x, vectors_.keep, config_.E, scratch.p);
      if (row.sum == 0) return false;
      kernels_.scale(scratch.p, config_.E, 1.0f / row.sum);
      p = scratch.p;
    }
    if (!needs_p) p = nullptr;
    return true;
  }

  const float* softmax = nullptr;
  const float* p = nullptr;
  float lse = 0;

 private:
  const RouterConfig& config_;
  const RowKernels& kernels_;
  const ExpertVectors& vectors_;
};

// Counts of the sequence a task belongs to, kept while consecutive tasks share it.
class SequenceCounts {
 public:
  SequenceCounts(const RouterConfig& config, const RouterInputs& inputs, const RouteView& route, const TaskGrid& grid)
      : config_(config), inputs_(inputs), route_(route), grid_(grid), counts_(static_cast<std::size_t>(config.E)) {}

  const std::vector<float>& of(std::int64_t b) {
    if (b != current_) {
      std::fill(counts_.begin(), counts_.end(), 0.0f);
      LossPlan::add_counts(config_, inputs_, route_, b * grid_.sequence_length, (b + 1) * grid_.sequence_length, counts_.data());
      current_ = b;
    }
    return counts_;
  }

 private:
  const RouterConfig& config_;
  const RouterInputs& inputs_;
  const RouteView& route_;
  const TaskGrid& grid_;
  std::int64_t current_ = -1;
  std::vector<float> counts_;
};

}  // namespace

RouterLosses losses_fast(const LossesCall& call) {
  const TaskGrid grid(call.config, call.losses, call.route.T);
  const LossPlan plan(call.config, call.losses, call.inputs, call.route, call.loss_inputs, grid);
  if (!plan.has_scores() && !plan.has_z) return {};
  if (uses_score_sums(call)) {
    RouterLosses values;
    for (std::int64_t e = 0; plan.has_aux && e < call.config.E; ++e) {
      values.aux += static_cast<double>(plan.aux_counts[static_cast<std::size_t>(e)]) * call.loss_inputs.score_sums[e];
    }
    values.aux *= plan.aux_factor;
    if (plan.has_z) values.z = plan.z_factor * call.loss_inputs.score_sums[call.config.E];
    return values;
  }
  const RowKernels& kernels = row_kernels();
  const ExpertVectors vectors(call.config, call.inputs);
  std::vector<RouterLosses> parts(static_cast<std::size_t>(grid.num_tasks()));
  parallel_for(call.stream.pool, grid.num_tasks(), grid.grain(call.config, call.losses), [&](std::int64_t begin, std::int64_t end) {
    RowScratch scratch(call.config);
    RowScores scores(call.config, kernels, vectors);
    SequenceCounts sequence(call.config, call.inputs, call.route, grid);
    for (std::int64_t task = begin; task < end; ++task) {
      const float* n_b = plan.has_sequence ? sequence.of(grid.sequence_of(task)).data() : nullptr;
      RouterLosses sums;
      for (std::int64_t t = grid.begin(task); t < grid.end(task); ++t) {
        if (is_padding(call.inputs, t) || !scores.compute(scratch.load(kernels, call.inputs.logits, t), plan.has_z, plan.has_scores(), scratch)) continue;
        if (plan.has_aux) sums.aux += kernels.dot(plan.aux_counts.data(), scores.p, call.config.E);
        if (plan.has_sequence) sums.sequence += kernels.dot(n_b, scores.p, call.config.E);
        if (plan.has_z) sums.z += static_cast<double>(scores.lse) * scores.lse;
      }
      parts[static_cast<std::size_t>(task)] = sums;
    }
  });
  RouterLosses total;
  double sequence_sum = 0;
  for (std::int64_t task = 0; task < grid.num_tasks(); ++task) {
    const RouterLosses& part = parts[static_cast<std::size_t>(task)];
    total.aux += part.aux;
    total.z += part.z;
    sequence_sum += part.sequence;
    if (plan.has_sequence && (task + 1) % grid.tasks_per_sequence == 0) {
      total.sequence += plan.sequence_factor[static_cast<std::size_t>(grid.sequence_of(task))] * sequence_sum;
      sequence_sum = 0;
    }
  }
  total.aux *= plan.aux_factor;
  total.z *= plan.z_factor;
  return total;
}

void write_score_sums_fast(const ForwardCall& call) {
  double* sums = call.outputs.score_sums;
  if (sums == nullptr) return;
  const RowKernels& kernels = row_kernels();
  const ExpertVectors vectors(call.config, call.inputs);
  // Blocks of rows whose number depends on T alone; added up in their order.
  const std::int64_t T = call.outputs.route.T, E = call.config.E, num_blocks = std::clamp<std::int64_t>(T / 256, 1, 64);
  std::vector<std::vector<double>> parts(static_cast<std::size_t>(num_blocks));
  parallel_for(call.stream.pool, num_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    RowScratch scratch(call.config);
    RowScores scores(call.config, kernels, vectors);
    for (std::int64_t block = begin; block < end; ++block) {
      std::vector<double>& part = parts[static_cast<std::size_t>(block)];
      part.assign(static_cast<std::size_t>(E) + 1, 0.0);
      for (std::int64_t t = T * block / num_blocks; t < T * (block + 1) / num_blocks; ++t) {
        if (is_padding(call.inputs, t) || !scores.compute(scratch.load(kernels, call.inputs.logits, t), true, true, scratch)) continue;
        for (std::int64_t e = 0; e < E; ++e) part[static_cast<std::size_t>(e)] += static_cast<double>(scores.p[e]);
        part[static_cast<std::size_t>(E)] += static_cast<double>(scores.lse) * static_cast<double>(scores.lse);
      }
    }
  });
  std::fill_n(sums, E + 1, 0.0);
  for (const std::vector<double>& part : parts) {
    for (std::int64_t e = 0; e <= E; ++e) sums[e] += part[static_cast<std::size_t>(e)];
  }
}

namespace {

class BackwardRows {
 public:
  BackwardRows(const BackwardCall& call, const TaskGrid& grid, const LossPlan& plan)
      : call_(call), grid_(grid), plan_(plan), kernels_(row_kernels()), vectors_(call.config, call.inputs) {
    is_dense_task_ = call.d_weights != nullptr && is_softmax(call.config.score) && !is_renormalised(call.config);
    needs_softmax_ = is_dense_task_ || plan.has_z;
  }

  void run(std::int64_t begin, std::int64_t end) const {
    RowScratch scratch(call_.config);
    RowScores scores(call_.config, kernels_, vectors_);
    SequenceCounts sequence(call_.config, call_.inputs, call_.route, grid_);
    std::vector<float> a(static_cast<std::size_t>(plan_.has_scores() ? call_.config.E : 0));
    std::int64_t filled_for = -1;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t b = grid_.sequence_of(task);
      if (plan_.has_scores() && b != filled_for) {
        fill_factors(plan_.has_sequence ? &sequence.of(b) : nullptr, b, a);
        filled_for = b;
      }
      for (std::int64_t t = grid_.begin(task); t < grid_.end(task); ++t) row(t, a, scores, scratch);
    }
  }

 private:
  // a_e = d loss / d P_te, the same for every row of a sequence.
  void fill_factors(const std::vector<float>* n_b, std::int64_t b, std::vector<float>& a) const {
    for (std::size_t e = 0; e < a.size(); ++e) {
      double value = plan_.has_aux ? plan_.aux_factor * plan_.aux_counts[e] : 0.0;
      if (n_b != nullptr) value += plan_.sequence_factor[static_cast<std::size_t>(b)] * (*n_b)[e];
      a[e] = static_cast<float>(value);
    }
  }

  void row(std::int64_t t, const std::vector<float>& a, RowScores& scores, RowScratch& scratch) const {
    const RouterConfig& config = call_.config;
    float* out = static_cast<float*>(call_.d_logits.data) + t * call_.d_logits.stride[0];
    if (is_padding(call_.inputs, t)) {
      std::fill_n(out, config.E, 0.0f);
      return;
    }
    const float* x = scratch.load(kernels_, call_.inputs.logits, t);
    const double dot = call_.d_weights != nullptr ? gather_selected(t, x, scratch) : 0.0;
    if (!needs_softmax_ && !plan_.has_scores()) {
      std::fill_n(out, config.E, 0.0f);
    } else if (scores.compute(x, needs_softmax_, plan_.has_scores(), scratch)) {
      const float mean = scores.p != nullptr ? kernels_.dot(a.data(), scores.p, config.E) : 0.0f;
      double softmax_scale = plan_.has_z ? call_.loss_scale * 2.0 * plan_.z_factor * scores.lse : 0.0;
      if (is_dense_task_) softmax_scale -= dot;
      kernels_.loss_gradient(config.score, x, scores.p, a.data(), mean, call_.loss_scale, scores.softmax, static_cast<float>(softmax_scale), config.E, out);
    } else {
      std::fill_n(out, config.E, 0.0f);
      return;
    }
    if (call_.d_weights != nullptr) add_selected(t, dot, scratch, out);
  }

  // Reads the row's ids; returns sum_k g_k w_k over the valid slots.
  double gather_selected(std::int64_t t, const float* x, RowScratch& scratch) const {
    const RouteView& route = call_.route;
    double dot = 0;
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      const bool is_valid = id >= 0 && id < route.E && scalar::is_finite(x[id]) && vectors_.keep[id] != 0;
      scratch.ids[k] = is_valid ? id : -1;
      scratch.valid[k] = is_valid ? 1 : 0;
      scratch.selected_x[k] = is_valid ? x[id] : 0.0f;
      if (is_valid) dot += static_cast<double>(call_.d_weights[t * route.K + k]) * route.weights[t * route.K + k];
    }
    return dot;
  }

  // Parity mode where every selected score is 0: the weights are constants.
  bool are_weights_constant(RowScratch& scratch) const {
    if (call_.config.normalise_epsilon == 0) return false;
    kernels_.selected_weights(call_.config.score, false, nullptr, 1.0f, 0.0f, scratch.selected_x, scratch.valid, scratch.padded_k, scratch.selected_scratch,
                              scratch.selected_weights);
    return std::all_of(scratch.selected_weights, scratch.selected_weights + call_.config.K, [](float s) { return s == 0; });
  }

  void add_selected(std::int64_t t, double dot, RowScratch& scratch, float* out) const {
    const RouteView& route = call_.route;
    if (are_weights_constant(scratch)) return;
    kernels_.slopes(call_.config.score, scratch.selected_x, scratch.padded_k, scratch.selected_scratch);
    const double centred = is_renormalised(call_.config) ? dot / call_.config.scaling_factor : 0.0;
    for (std::int64_t k = 0; k < route.K; ++k) {
      if (scratch.ids[k] < 0) continue;
      const double w = route.weights[t * route.K + k];
      out[scratch.ids[k]] += static_cast<float>(scratch.selected_scratch[k] * w * (call_.d_weights[t * route.K + k] - centred));
    }
  }

  const BackwardCall& call_;
  const TaskGrid& grid_;
  const LossPlan& plan_;
  const RowKernels& kernels_;
  ExpertVectors vectors_;
  bool is_dense_task_ = false, needs_softmax_ = false;
};

}  // namespace

void backward_fast(const BackwardCall& call) {
  const TaskGrid grid(call.config, call.losses, call.route.T);
  const LossPlan plan(call.config, call.losses, call.inputs, call.route, call.loss_inputs, grid);
  const BackwardRows rows(call, grid, plan);
  parallel_for(call.stream.pool, grid.num_tasks(), grid.grain(call.config, call.losses), [&](std::int64_t begin, std::int64_t end) { rows.run(begin, end); });
}

}  // namespace waybill::router_impl

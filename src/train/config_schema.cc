// SPDX-License-Identifier: Apache-2.0
#include "config_schema.h"

#include <algorithm>
#include <cmath>

#include "key_builder.h"
#include "waybill/error.h"

namespace waybill {
namespace {

constexpr double kMaxCount = 1e9, kMaxWidth = 1 << 20, kMaxReal = 1e30;

#define WB_REF(expression) ([](auto& c) -> auto& { return c.expression; })

std::vector<LayerKey> make_layer_keys() {
  std::vector<LayerKey> keys;
  const auto add = [&keys](LayerKey key) { keys.push_back(std::move(key)); };
  using L = LayerConfig;
  add(integer_key<L>("moe.E", 0, 1 << 20, "experts of a layer, all ranks", WB_REF(moe.E)));
  add(integer_key<L>("moe.K", 0, 1024, "experts per token", WB_REF(moe.K)));
  add(integer_key<L>("moe.F", 0, kMaxWidth, "inner width of an expert", WB_REF(moe.F)));
  add(integer_key<L>("moe.latent", 0, kMaxWidth, "width of the rows that experts see; 0 = the model's width", WB_REF(moe.latent)));
  add(integer_key<L>("moe.shared_F", 0, kMaxWidth, "inner width of the shared expert; 0 = none", WB_REF(moe.shared_F)));
  add(choice_key<L>("moe.activation", {"swiglu", "clamped_swiglu", "relu2"}, "of the experts", WB_REF(moe.activation.kind)));
  add(real_key<L>("moe.activation_limit", 1e-6, kMaxReal, "clamped_swiglu: where gate and up are clamped", WB_REF(moe.activation.limit)));
  add(real_key<L>("moe.activation_alpha", 1e-6, kMaxReal, "clamped_swiglu: slope inside the sigmoid", WB_REF(moe.activation.alpha)));
  add(choice_key<L>("moe.recipe", {"fp32", "bf16", "fp8", "mxfp8", "nvfp4"}, "how operands of the expert matmuls are rounded", WB_REF(moe.recipe.kind)));
  add(choice_key<L>("moe.scale_rule", {"round_up", "floor"}, "mxfp8 and fp8: rounding of a power-of-two scale", WB_REF(moe.recipe.scale_rule)));
  add(bool_key<L>("moe.power_of_two_scales", "fp8: scales are powers of two, not fp32", WB_REF(moe.recipe.power_of_two_scales)));
  add(bool_key<L>("moe.stochastic_rounding", "nvfp4: of gradients", WB_REF(moe.recipe.stochastic_rounding)));
  add(bool_key<L>("moe.hadamard", "nvfp4: random rotation of the weight gradients' operands", WB_REF(moe.recipe.hadamard)));
  add(bool_key<L>("moe.expert_bias", "biases on both expert matmuls", WB_REF(moe.expert_bias)));
  add(real_key<L>("moe.bias_update_rate", 0, 1, "step of the aux-free router bias per optimizer step; 0 = no bias", WB_REF(moe.bias_update_rate)));
  add(bool_key<L>("moe.bias_subtract_mean", "remove the mean of each bias update", WB_REF(moe.bias_subtract_mean)));
  add(real_key<L>("moe.aux_coefficient", 0, 1e6, "of the auxiliary (Switch) loss", WB_REF(moe.aux_coefficient)));
  add(real_key<L>("moe.sequence_coefficient", 0, 1e6, "of the per-sequence loss", WB_REF(moe.sequence_coefficient)));
  add(real_key<L>("moe.global_coefficient", 0, 1e6, "of the loss over all micro-batches' counts", WB_REF(moe.global_coefficient)));
  add(real_key<L>("moe.z_coefficient", 0, 1e6, "of the router z-loss", WB_REF(moe.z_coefficient)));
  add(choice_key<L>("moe.aux_counts", {"dispatch", "unbiased"}, "counts of the auxiliary losses", WB_REF(moe.aux_counts)));
  add(choice_key<L>("moe.recompute", {"none", "activation", "layer"}, "what the backward pass computes again", WB_REF(moe.recompute)));
  add(real_key<L>("moe.capacity_factor", 0, 1e6, "drop routes above this multiple of a balanced load; 0 = dropless", WB_REF(moe.capacity_factor)));
  add(bool_key<L>("moe.pad_to_capacity", "pad every expert to its capacity", WB_REF(moe.pad_to_capacity)));
  add(bool_key<L>("moe.force_dense_map", "take the dense-map path always, to compare with", WB_REF(moe.force_dense_map)));
  add(choice_key<L>("router.score", {"softmax", "softmax_selected", "sigmoid", "sqrt_softplus"}, "score function", WB_REF(moe.router.score)));
  add(bool_key<L>("router.renormalise", "weights of a token sum to 1 (before scaling)", WB_REF(moe.router.renormalise)));
  add(real_key<L>("router.scaling_factor", 1e-6, 1e6, "multiplies the weights last", WB_REF(moe.router.scaling_factor)));
  add(integer_key<L>("router.num_groups", 1, 1 << 20, "groups of a group-limited router", WB_REF(moe.router.num_groups)));
  add(integer_key<L>("router.num_kept_groups", 1, 1 << 20, "groups a token may choose from", WB_REF(moe.router.num_kept_groups)));
  add(choice_key<L>("router.group_score", {"top2_sum", "topk_per_group"}, "score of a group", WB_REF(moe.router.group_score)));
  add(real_key<L>("router.normalise_epsilon", 0, 1, "added to the weight sum (parity with other stacks); 0 = exact", WB_REF(moe.router.normalise_epsilon)));
  add(choice_key<L>("router.forced_balance", {"off", "round_robin"}, "ignore the scores and balance exactly", WB_REF(moe.router.forced_balance)));
  add(choice_key<L>("exchange.mode", {"eager", "captured"}, "exact sizes, or fixed receive budgets", WB_REF(moe.mode)));
  add(real_key<L>("exchange.receive_factor", 0, 1e6, "receive budget over balanced load; 0 = the mode's default", WB_REF(moe.receive_factor)));
  add(choice_key<L>("exchange.combine_wire", {"f32", "bf16"}, "number format of partial results between ranks", WB_REF(moe.combine_wire)));
  add(choice_key<L>("exchange.hierarchy", {"flat", "two_level", "auto"}, "rows go once per rank, or once per node and on from there", WB_REF(moe.hierarchy)));
  add(bool_key<L>("exchange.overlap_shared", "compute the shared expert while rows travel; same bits", WB_REF(moe.overlap_shared)));
  add(integer_key<L>("exchange.alignment", 1, 4096, "rows each expert's block is aligned to", WB_REF(moe.alignment)));
  add(bool_key<L>("exchange.debug_checks", "validate routes at every exchange", WB_REF(moe.debug_checks)));
  return keys;
}

void add_model_keys(std::vector<RunKey>& keys) {
  const auto add = [&keys](RunKey key) { keys.push_back(std::move(key)); };
  using R = RunConfig;
  add(text_key<R>("name", "of the run; part of the run folder's name", WB_REF(name)));
  add(integer_key<R>("model.vocab", 2, 1 << 24, "tokens; 256 for text read as bytes", WB_REF(model.vocab)));
  add(integer_key<R>("model.H", 1, kMaxWidth, "width", WB_REF(model.H)));
  add(integer_key<R>("model.num_layers", 1, 1000, "layers", WB_REF(num_layers)));
  add(integer_key<R>("model.num_dense_layers", 0, 1000, "leading layers with a dense feed-forward", WB_REF(num_dense_layers)));
  add(integer_key<R>("model.dense_F", 0, kMaxWidth, "inner width of a dense layer", WB_REF(layer.dense_F)));
  add(integer_key<R>("model.num_heads", 1, 4096, "query heads", WB_REF(model.num_heads)));
  add(integer_key<R>("model.num_kv_heads", 1, 4096, "key/value heads", WB_REF(model.num_kv_heads)));
  add(integer_key<R>("model.head_dim", 2, 4096, "width of a head", WB_REF(model.head_dim)));
  add(integer_key<R>("model.seq_len", 1, 1 << 24, "tokens of a training sequence", WB_REF(model.seq_len)));
  add(bool_key<R>("model.qk_norm", "normalise queries and keys per head", WB_REF(model.qk_norm)));
  add(bool_key<R>("model.tie_embeddings", "one table for input and output", WB_REF(model.tie_embeddings)));
  add(real_key<R>("model.rope_theta", 1, kMaxReal, "base of the rotary embedding", WB_REF(model.rope_theta)));
  add(real_key<R>("model.norm_epsilon", 0, 1, "inside the RMS norms", WB_REF(model.norm_epsilon)));
  add(real_key<R>("model.init_std", 0, 10, "of the initial weights", WB_REF(model.init_std)));
}

// Counted by `inspect model`, not trained: counted_only_settings() in config_resolve.cc goes over the same keys.
void add_counted_keys(std::vector<RunKey>& keys) {
  const auto add = [&keys](RunKey key) { keys.push_back(std::move(key)); };
  using R = RunConfig;
  add(choice_key<R>("model.attention", {"gqa", "mla"}, "mla: counted only", WB_REF(counted.attention.kind)));
  add(integer_key<R>("model.q_rank", 0, kMaxWidth, "mla: query rank", WB_REF(counted.attention.q_rank)));
  add(integer_key<R>("model.kv_rank", 0, kMaxWidth, "mla: key/value rank", WB_REF(counted.attention.kv_rank)));
  add(integer_key<R>("model.nope_dim", 0, 4096, "mla: head width without rotation", WB_REF(counted.attention.nope_dim)));
  add(integer_key<R>("model.rope_dim", 0, 4096, "mla: head width with rotation", WB_REF(counted.attention.rope_dim)));
  add(integer_key<R>("model.v_dim", 0, 4096, "mla: head width of values", WB_REF(counted.attention.v_dim)));
  add(bool_key<R>("model.output_gate", "learned gate on the attention's output, counted only", WB_REF(counted.attention.output_gate)));
  add(integer_key<R>("model.full_attention_interval", 1, 1000, "every n-th layer has attention, the others gated delta nets (counted only)",
                     WB_REF(counted.full_attention_interval)));
  add(integer_key<R>("model.linear_key_heads", 0, 4096, "gated delta nets: query and key heads", WB_REF(counted.delta_net.num_key_heads)));
  add(integer_key<R>("model.linear_value_heads", 0, 4096, "gated delta nets: value heads", WB_REF(counted.delta_net.num_value_heads)));
  add(integer_key<R>("model.linear_key_dim", 0, 4096, "gated delta nets: width of a query or key head", WB_REF(counted.delta_net.key_dim)));
  add(integer_key<R>("model.linear_value_dim", 0, 4096, "gated delta nets: width of a value head", WB_REF(counted.delta_net.value_dim)));
  add(integer_key<R>("model.linear_conv", 1, 4096, "gated delta nets: taps of the convolution", WB_REF(counted.delta_net.conv_width)));
  add(integer_key<R>("model.mtp_layers", 0, 16, "multi-token-prediction modules, counted only", WB_REF(counted.mtp_layers)));
  add(bool_key<R>("model.shared_gate", "learned gate on the shared expert, counted only", WB_REF(counted.shared_gate)));
}

void add_run_keys(std::vector<RunKey>& keys) {
  const auto add = [&keys](RunKey key) { keys.push_back(std::move(key)); };
  using R = RunConfig;
  add(integer_key<R>("parallel.P", 1, 4096, "expert-parallel ranks", WB_REF(parallel.P)));
  add(integer_key<R>("parallel.D", 1, 4096, "replicas of each expert; W = P * D ranks", WB_REF(parallel.D)));
  add(integer_key<R>("parallel.ranks_per_node", 0, 4096, "node boundary of the exchange; 0 = as the fabric sees it", WB_REF(parallel.ranks_per_node)));
  add(integer_key<R>("train.seed", 0, 9e18, "of weights, batches and samples", WB_REF(train.seed)));
  add(integer_key<R>("train.steps", 1, kMaxCount, "optimizer steps", WB_REF(train.steps)));
  add(integer_key<R>("train.global_batch", 1, kMaxCount, "sequences per step, all ranks", WB_REF(train.global_batch)));
  add(integer_key<R>("train.micro_batches", 1, kMaxCount, "parts a step is computed in", WB_REF(train.micro_batches)));
  add(real_key<R>("train.learning_rate", 0, 10, "after the warm-up", WB_REF(train.learning_rate)));
  add(real_key<R>("train.min_learning_rate", 0, 10, "at the last step", WB_REF(train.min_learning_rate)));
  add(integer_key<R>("train.warmup_steps", 0, kMaxCount, "steps of linear warm-up", WB_REF(train.warmup_steps)));
  add(real_key<R>("train.beta1", 0, 0.999999, "AdamW", WB_REF(train.optimizer.beta1)));
  add(real_key<R>("train.beta2", 0, 0.999999, "AdamW", WB_REF(train.optimizer.beta2)));
  add(real_key<R>("train.epsilon", 1e-20, 1, "AdamW", WB_REF(train.optimizer.epsilon)));
  add(real_key<R>("train.weight_decay", 0, 10, "AdamW, on matrices", WB_REF(train.optimizer.weight_decay)));
  add(real_key<R>("train.clip_norm", 0, 1e9, "largest gradient norm; 0 = off", WB_REF(train.clip_norm)));
  add(integer_key<R>("train.eval_every", 0, kMaxCount, "steps between held-out losses; 0 = only at the end", WB_REF(train.eval_every)));
  add(integer_key<R>("train.eval_sequences", 0, kMaxCount, "held-out sequences of one; 0 = all", WB_REF(train.eval_sequences)));
  add(integer_key<R>("train.final_eval_sequences", 0, kMaxCount, "of the last one; 0 = all", WB_REF(train.final_eval_sequences)));
  add(integer_key<R>("train.checkpoint_every", 0, kMaxCount, "steps between checkpoints; 0 = only at the end", WB_REF(train.checkpoint_every)));
  add(integer_key<R>("train.keep_checkpoints", 1, 1000, "newest checkpoints kept", WB_REF(train.keep_checkpoints)));
  add(integer_key<R>("train.sample_tokens", 0, 1e6, "generated at the end", WB_REF(train.sample_tokens)));
  add(real_key<R>("train.sample_temperature", 0, 100, "0 = always the likeliest token", WB_REF(train.sample_temperature)));
  add(text_key<R>("train.sample_prompt", "start of the sample", WB_REF(train.sample_prompt)));
  add(integer_key<R>("train.threads", 0, 1024, "CPU threads a rank; 0 = usable cores / W", WB_REF(train.threads)));
  add(integer_key<R>("train.max_skipped", 0, kMaxCount, "steps in a row that are not finite before the run ends with an error; 0 = go on",
                     WB_REF(train.max_skipped)));
  add(integer_key<R>("train.max_reruns", 1, 1000, "of a step after overflows, before the worst-case budget is used", WB_REF(train.max_reruns)));
  add(real_key<R>("train.timeout_s", 1, 1e6, "seconds a rank waits for another", WB_REF(train.timeout_s)));
  add(bool_key<R>("train.tensorboard", "write RUN/tensorboard/events.out.tfevents.* beside metrics.jsonl", WB_REF(train.tensorboard)));
  add(bool_key<R>("train.measure_ceiling", "time a large fp32 matmul at start", WB_REF(train.measure_ceiling)));
  add(choice_key<R>("train.device", {"auto", "cpu", "cuda"}, "auto: a GPU where there is one that can train this", WB_REF(train.device)));
  add(integer_key<R>("train.gpus", 1, 8, "GPUs that the ranks lie on", WB_REF(train.gpus)));
  add(integer_key<R>("train.overflow_check_every", 1, 1000, "GPU: steps between reads of overflows and metrics; above 1 an overflow is not computed again",
                     WB_REF(train.overflow_check_every)));
  add(text_key<R>("data.text", "text file or folder, tokens are bytes", WB_REF(data.text)));
  add(text_key<R>("data.bin", "file of uint16 or uint32 tokens", WB_REF(data.bin)));
  add(text_key<R>("data.dtype", "of data.bin; empty = as BIN.json says", WB_REF(data.dtype)));
  add(real_key<R>("data.held_out_fraction", 1e-6, 0.999999, "tail of the text that is never trained on", WB_REF(data.held_out_fraction)));
}
#undef WB_REF

RunKey lift(const LayerKey& key) {
  return {key.name,
          key.type,
          key.help,
          key.min,
          key.max,
          key.choices,
          [set = key.set](RunConfig& c, const ConfigValue& v) { set(c.layer, v); },
          [get = key.get](const RunConfig& c) { return get(c.layer); }};
}

std::vector<RunKey> make_run_keys() {
  std::vector<RunKey> keys;
  add_model_keys(keys);
  add_counted_keys(keys);
  for (const LayerKey& key : layer_keys()) keys.push_back(lift(key));
  add_run_keys(keys);
  return keys;
}

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

std::string number(double value) { return value == std::floor(value) && std::fabs(value) < 1e15 ? fmt::format("{:.0f}", value) : fmt::format("{}", value); }

}  // namespace

const std::vector<LayerKey>& layer_keys() {
  static const std::vector<LayerKey> keys = make_layer_keys();
  return keys;
}

const std::vector<RunKey>& run_keys() {
  static const std::vector<RunKey> keys = make_run_keys();
  return keys;
}

std::string allowed(KeyType type, double min, double max, const std::vector<std::string>& choices) {
  switch (type) {
    case KeyType::kBool:
      return "true or false";
    case KeyType::kInteger:
      return fmt::format("an integer from {} to {}", number(min), number(max));
    case KeyType::kReal:
      return fmt::format("a number from {} to {}", number(min), number(max));
    case KeyType::kText:
      return "a string";
    case KeyType::kChoice:
      return fmt::format("one of \"{}\"", fmt::join(choices, "\", \""));
  }
  return "";
}

ConfigValue check_value(const std::string& origin, const std::string& name, KeyType type, double min, double max, const std::vector<std::string>& choices,
                        const ConfigValue& value) {
  const auto refuse = [&] {
    WB_FAIL(ErrorCode::kInvalidArgument, "{}: {} = {} must be {}", origin, name, to_toml_value(value), allowed(type, min, max, choices));
  };
  ConfigValue result = value;
  if (type == KeyType::kReal && std::holds_alternative<std::int64_t>(value)) result = static_cast<double>(std::get<std::int64_t>(value));
  const bool right_type = type == KeyType::kBool      ? std::holds_alternative<bool>(result)
                          : type == KeyType::kInteger ? std::holds_alternative<std::int64_t>(result)
                          : type == KeyType::kReal    ? std::holds_alternative<double>(result)
                                                      : std::holds_alternative<std::string>(result);
  if (!right_type) refuse();
  if (type == KeyType::kInteger) {
    const auto v = static_cast<double>(std::get<std::int64_t>(result));
    if (v < min || v > max) refuse();
  }
  if (type == KeyType::kReal) {
    const double v = std::get<double>(result);
    if (!(v >= min && v <= max)) refuse();
  }
  if (type == KeyType::kChoice && std::find(choices.begin(), choices.end(), std::get<std::string>(result)) == choices.end()) refuse();
  return result;
}

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(3, word.size() / 2) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::vector<ConfigKeyInfo> config_keys() {
  static const char* const names[] = {"bool", "integer", "real", "string", "choice"};
  const RunConfig defaults;
  std::vector<ConfigKeyInfo> list;
  for (const RunKey& key : run_keys()) {
    list.push_back({key.name, names[static_cast<int>(key.type)], allowed(key.type, key.min, key.max, key.choices), to_toml_value(key.get(defaults)), key.help});
  }
  return list;
}

}  // namespace waybill

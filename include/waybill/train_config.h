// SPDX-License-Identifier: Apache-2.0
// A run as one typed TOML file. Sections: [model] [moe] [router] [exchange] [[layers]] [parallel] [train] [data]; config_keys()
// lists every key with its type, range, default and meaning. Unknown keys are errors that name file, line and the nearest key.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "waybill/data.h"
#include "waybill/model_math.h"
#include "waybill/optimizer.h"

namespace waybill {

// A scalar of a config file.
using ConfigValue = std::variant<bool, std::int64_t, double, std::string>;

enum class TrainDevice : std::uint8_t {
  kAuto = 0,  // the GPU where one is there, this build has CUDA and the GPU path does what the config asks for; else the CPU, with a log line
  kCpu = 1,
  kCuda = 2,  // the GPU, or an error that says why not
};

struct TrainSettings {
  std::uint64_t seed = 1;
  std::int64_t steps = 1000;
  std::int64_t global_batch = 32;   // sequences per optimizer step, over all ranks and micro-batches
  std::int64_t micro_batches = 1;   // global_batch must divide by micro_batches * W
  double learning_rate = 3e-3;      // at the end of the warm-up
  double min_learning_rate = 3e-4;  // at the last step
  std::int64_t warmup_steps = 50;
  OptimizerConfig optimizer{};
  double clip_norm = 1.0;                 // 0 = off
  std::int64_t eval_every = 100;          // 0 = only at the end
  std::int64_t eval_sequences = 64;       // held-out sequences of an evaluation during training; 0 = all
  std::int64_t final_eval_sequences = 0;  // of the last one; 0 = all
  std::int64_t checkpoint_every = 200;    // 0 = only at the end
  std::int64_t keep_checkpoints = 2;
  std::int64_t sample_tokens = 300;  // generated at the end; 0 = none
  double sample_temperature = 0.8;
  std::string sample_prompt = "And ";
  std::int64_t threads = 0;       // CPU threads a rank; 0 = usable cores / W, at least 1
  std::int64_t max_skipped = 20;  // steps in a row without an update (loss or gradient not finite), then the run ends; 0 = never
  std::int64_t max_reruns = 8;    // of one step after receive overflows; then the worst-case budget is used
  double timeout_s = 300;         // of a cross-rank wait
  bool tensorboard = false;       // scalars of every step for TensorBoard: RUN/tensorboard
  bool measure_ceiling = true;    // time a large fp32 matmul at start; MFU is given against it (CPU only)
  TrainDevice device = TrainDevice::kAuto;
  std::int64_t gpus = 1;                  // that the W ranks lie on; W must divide by it
  std::int64_t overflow_check_every = 1;  // GPU: steps between reads of what steps came to. An exceeded budget skips the update on the GPU at once;
                                          // at 1 the step is also computed again at the demand seen
};

struct ParallelSettings {
  int P = 1;               // expert-parallel ranks of every MoE layer that does not say otherwise
  int D = 1;               // replicas of an expert; the world has W = P * D ranks
  int ranks_per_node = 0;  // node boundary for exchange.hierarchy; 0 = what the fabric sees (threads: one node; mpi: host names)
  int W() const { return P * D; }
};

// One [[layers]] table: changes for some layers. `values` holds dotted keys of the moe, router and exchange sections.
struct LayerOverride {
  std::vector<std::int64_t> index;
  std::vector<std::pair<std::string, ConfigValue>> values;  // also "kind" ("dense", "moe"), "dense_F" and "P"
};

// What only `inspect model` understands: kinds of layers and heads that are counted, not trained.
struct CountedOnly {
  AttentionShape attention;  // its heads are ModelConfig's
  DeltaNetShape delta_net;
  std::int64_t full_attention_interval = 1;  // every n-th layer has attention, those before it gated delta nets; 1 = every layer
  std::int64_t mtp_layers = 0;
  bool shared_gate = false;
};

struct RunConfig {
  std::string name = "run";
  ModelConfig model;  // model.layers is written by resolve(); the rest comes from [model]
  std::int64_t num_layers = 2;
  std::int64_t num_dense_layers = 0;  // leading layers with a dense feed-forward
  CountedOnly counted;
  LayerConfig layer;  // defaults of a layer: [moe], [router], [exchange], model.dense_F
  std::vector<LayerOverride> layers;
  ParallelSettings parallel;
  TrainSettings train;
  DataConfig data;
};

// Reads a file and applies overrides "section.key=value" (type-checked like the file's values), then resolve()s.
WB_API RunConfig load_run_config(const std::string& path, std::span<const std::string> overrides = {});
// The same from text; `origin` stands for the file name in messages.
WB_API RunConfig parse_run_config(const std::string& toml, const std::string& origin, std::span<const std::string> overrides = {});
// Builds model.layers from num_layers, num_dense_layers, layer and layers.
WB_API void resolve(RunConfig& config);
// Every cross-key rule of a run: the model's (K <= E, E divisible by P, ...), batch sizes, what this engine cannot train. The
// message starts with config.name.
WB_API void validate(const RunConfig& config);
// TOML text with every key; parse_run_config() of it gives an equal config.
WB_API std::string to_toml(const RunConfig& config);
// The part that a checkpoint must agree with: [model], [moe], [router] and layer shapes, as TOML text (parallel sizes not included).
WB_API std::string model_toml(const RunConfig& config);
// The settings that make this a model of `inspect model` only, as "model.key = value"; empty: this engine trains it.
WB_API std::vector<std::string> counted_only_settings(const RunConfig& config);
// For `inspect model`: sizes only, also of models that this engine does not train. Refuses widths whose kind of layer is not there.
WB_API ArchitectureConfig architecture_of(const RunConfig& config);

struct ConfigKeyInfo {
  std::string name, type, allowed, default_value, help;
};
WB_API std::vector<ConfigKeyInfo> config_keys();

}  // namespace waybill

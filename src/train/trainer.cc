// SPDX-License-Identifier: Apache-2.0
#include "waybill/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <memory>
#include <optional>

#include "collective_error.h"
#include "durable_file.h"
#include "rank_trainer.h"
#include "run_folder.h"
#include "sampler.h"
#include "select_device.h"
#include "tensorboard.h"
#include "waybill/buffer_bytes.h"
#include "waybill/error.h"
#include "waybill/model_math.h"

namespace waybill {
namespace {

using Clock = std::chrono::steady_clock;

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

double unix_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

int threads_per_rank(const RunConfig& config, const Fabric& world) {
  if (config.train.threads > 0) return static_cast<int>(config.train.threads);
  // Ranks that share this machine's cores: all of them in one process, else those of this node.
  const std::vector<int>& nodes = world.topology().node_of;
  const auto here = std::count(nodes.begin(), nodes.end(), nodes[static_cast<std::size_t>(world.rank())]);
  const bool processes = std::string_view(world.engine()) == "mpi" && config.parallel.ranks_per_node == 0;
  return std::max(1, num_usable_cores() / (processes ? static_cast<int>(here) : config.parallel.W()));
}

FabricOptions fabric_options(const RunConfig& config) {
  FabricOptions options;
  options.ranks_per_node = config.parallel.ranks_per_node;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.train.timeout_s * 1000));
  return options;
}

// A run that cannot fit is refused here: otherwise the system kills the process without a word. Compared is what the ranks of this
// machine must hold with the memory that is there at all: weights, gradients, moments, a micro-batch's activations and all its tokens.
void check_memory(const RunConfig& config, int ranks_here) {
  MemoryPlan plan;
  const std::int64_t sequences = config.train.global_batch / (config.train.micro_batches * config.parallel.W());
  plan.tokens_per_rank = sequences * config.model.seq_len;
  const MemoryEstimate rank = memory_per_rank(architecture_of(config.model), plan);
  const std::int64_t step_sequences = config.train.global_batch / config.parallel.W();
  const double tokens = static_cast<double>(step_sequences) * static_cast<double>(config.model.seq_len + 1) * 4;
  const double state = (rank.weights + rank.gradients + rank.optimizer) * ranks_here;
  const double batch = (rank.activations + rank.receive_window + rank.operands + rank.logits + tokens) * ranks_here;
  const double present = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  WB_CHECK(state <= present,
           "{}: {} rank(s) on this machine need {:.1f} GB for weights, gradients and moments alone ({:.2f} B parameters a rank), it has {:.1f} GB", config.name,
           ranks_here, state * 1e-9, static_cast<double>(rank.parameters) * 1e-9, present * 1e-9);
  WB_CHECK(state + batch <= present,
           "{}: {} rank(s) on this machine need {:.1f} GB for weights, gradients and moments and {:.1f} GB for {} sequences of {} tokens in a micro-batch, it "
           "has {:.1f} GB; raise train.micro_batches or lower train.global_batch",
           config.name, ranks_here, state * 1e-9, batch * 1e-9, sequences, config.model.seq_len, present * 1e-9);
}

// A NaN has a sign that means nothing.
double plain(double value) { return std::isnan(value) ? std::abs(value) : value; }

// What rank 0 does beside its part of the training: files, observer, result.
class Recorder {
 public:
  Recorder(const std::string& run_dir, std::int64_t resume_step, TrainObserver* observer, TrainResult& result)
      : run_dir_(run_dir), writer_(metrics_path(run_dir), resume_step), observer_(observer != nullptr ? observer : &silent_), result_(result) {}

  void start(const RunHeader& header, bool tensorboard) {
    header_ = header;
    if (tensorboard) events_.emplace(run_dir_ + "/tensorboard", unix_seconds());
    writer_.write(header);
    observer_->on_start(header);
  }
  void step(StepMetrics& metrics) {
    metrics.tflops = header_.flops_per_token * metrics.tokens_per_s * 1e-12;
    metrics.ceiling_share = header_.ceiling_tflops > 0 ? metrics.tflops / header_.ceiling_tflops : 0;
    writer_.write(metrics);
    if (events_) events_->write(metrics, unix_seconds());
    if (metrics.reruns > 0) {
      observer_->on_note(fmt::format("step {}: a receive budget overflowed; computed again {} time(s), receive factor now {:.3f}", metrics.step, metrics.reruns,
                                     metrics.receive_factor));
    }
    if (metrics.overflowed && !metrics.valid)
      observer_->on_note(fmt::format("step {}: a receive budget overflowed, update skipped", metrics.step));
    else if (!metrics.valid)
      observer_->on_note(fmt::format("step {}: gradient norm {} is not finite, update skipped", metrics.step, metrics.grad_norm));
    observer_->on_step(metrics);
    result_.train_loss = metrics.loss;
    result_.reruns = metrics.total_reruns;
    result_.skipped = metrics.total_skipped;
  }
  void eval(std::int64_t step, double loss, std::int64_t tokens) {
    writer_.write_eval(step, loss, tokens);
    const std::pair<std::string, double> scalars[] = {{"held_out_loss", loss}};
    if (events_) events_->write(step, unix_seconds(), scalars);
    observer_->on_eval(step, loss);
    result_.held_out_loss = loss;
  }
  void note(const std::string& text) { observer_->on_note(text); }
  void checkpoint(std::int64_t step, const std::string& path) { observer_->on_checkpoint(step, path); }
  void sample(std::int64_t step, const std::string& text) {
    writer_.write_sample(step, text);
    replace_file(sample_path(run_dir_), text + "\n");
    result_.sample = text;
  }
  void end(double seconds) { writer_.write_end(result_.step, seconds, result_.held_out_loss, result_.goal_met); }

 private:
  std::string run_dir_;
  MetricsWriter writer_;
  std::optional<TensorBoardWriter> events_;
  TrainObserver silent_;
  TrainObserver* observer_;
  TrainResult& result_;
  RunHeader header_;
};

RunHeader make_header(const RunConfig& config, const Dataset& data, const TextEntropy& entropy, double ceiling, const Fabric& world, StepTrainer& trainer) {
  RunHeader header;
  header.name = config.name;
  header.text = config.data.description();
  header.created = utc_now();
  header.device = trainer.device();
  header.W = config.parallel.W();
  header.cores = num_usable_cores();
  header.threads_per_rank = threads_per_rank(config, world);
  header.seed = config.train.seed;
  header.steps = config.train.steps;
  header.first_step = trainer.steps_done();
  header.parameters = trainer.num_parameters(false);
  header.active_parameters = trainer.num_parameters(true);
  header.tokens = data.size();
  header.tokens_per_step = config.train.global_batch * config.model.seq_len;
  header.flops_per_token = flops_per_token(architecture_of(config.model)).total();
  header.ceiling_tflops = ceiling;
  header.entropy = entropy;
  for (std::size_t i = 0; i < config.model.layers.size(); ++i) {
    const LayerConfig& layer = config.model.layers[i];
    if (layer.is_moe) header.layers.push_back({static_cast<int>(i), layer.moe.E, layer.moe.K, layer.P, to_string(layer.moe.recipe.kind)});
  }
  return header;
}

// The loop of one rank; `recorder` exists on rank 0 only.
class Loop {
 public:
  // `resumed`: the checkpoint the run goes on from, or empty.
  Loop(const RunConfig& config, const TrainOptions& options, const Dataset& data, Fabric& world, StepTrainer& trainer, Recorder* recorder,
       const std::string& resumed)
      : config_(config),
        options_(options),
        data_(data),
        world_(world),
        trainer_(trainer),
        recorder_(recorder),
        saved_step_(trainer.steps_done()),
        saved_path_(resumed) {}

  // True when the run reached its last step, false when it was stopped.
  bool run() {
    while (trainer_.steps_done() < config_.train.steps) {
      absorb(trainer_.advance(data_, trainer_.steps_done()));
      if (due(config_.train.eval_every) || due(config_.train.checkpoint_every) || trainer_.steps_done() == config_.train.steps) absorb(trainer_.settle());
      if (config_.train.max_skipped > 0 && skipped_in_a_row_ >= config_.train.max_skipped) give_up(last_);
      if (due(config_.train.eval_every) && trainer_.steps_done() < config_.train.steps) evaluate(config_.train.eval_sequences);
      // The last update may be what broke the steps after it: while they are skipped, older checkpoints are not replaced.
      if (due(config_.train.checkpoint_every) && last_.valid) save();
      if (stop_requested()) {
        absorb(trainer_.settle());
        save();
        return trainer_.steps_done() >= config_.train.steps;
      }
      if (trainer_.steps_done() == config_.train.steps && good_step_ == 0 && config_.train.max_skipped > 0) give_up(last_);
    }
    WB_CHECK(save() || config_.train.max_skipped == 0, "step {}: the weights are not finite; {}", trainer_.steps_done(), kept_checkpoint());
    return true;
  }

  void evaluate(std::int64_t count) {
    const std::int64_t all = data_.num_held_out_sequences(), n = count <= 0 ? all : std::min(count, all);
    const double factor = trainer_.info().receive_factor, loss = trainer_.evaluate(data_, count), raised = trainer_.info().receive_factor;
    if (recorder_ == nullptr) return;
    if (raised > factor)
      recorder_->note(fmt::format("step {}: a receive budget overflowed in the evaluation, receive factor now {:.3f}", trainer_.steps_done(), raised));
    recorder_->eval(trainer_.steps_done(), loss, n * config_.model.seq_len);
  }

 private:
  bool due(std::int64_t every) const { return every > 0 && trainer_.steps_done() % every == 0; }
  void absorb(std::vector<StepMetrics> known) {
    for (StepMetrics& metrics : known) {
      if (recorder_ != nullptr) recorder_->step(metrics);
      skipped_in_a_row_ = metrics.valid ? 0 : skipped_in_a_row_ + 1;
      if (metrics.valid) good_step_ = metrics.step;
      last_ = std::move(metrics);
    }
  }
  // The weights of the last good step are saved, then the run ends.
  [[noreturn]] void give_up(const StepMetrics& metrics) {
    const std::string since = good_step_ > 0 ? fmt::format("the last good step was {}", good_step_) : "no step was good";
    save();
    WB_FAIL(ErrorCode::kInvalidArgument, "step {}: loss {} or gradient norm {} is not finite, {} step(s) in a row (train.max_skipped = {}); {}; {}",
            metrics.step, plain(metrics.loss), plain(metrics.grad_norm), skipped_in_a_row_, config_.train.max_skipped, since, kept_checkpoint());
  }
  std::string kept_checkpoint() const { return saved_path_.empty() ? "this run saved no checkpoint" : "the newest checkpoint is " + saved_path_; }
  bool stop_requested() {
    std::int64_t stop[] = {world_.rank() == 0 && options_.stop != nullptr && options_.stop->load() ? 1 : 0};
    world_.all_reduce(std::span<std::int64_t>(stop), ReduceOp::kMax, "train.stop");
    return stop[0] != 0;
  }
  // False where the weights are not finite: such a state replaces nothing.
  bool save() {
    if (saved_step_ == trainer_.steps_done()) return true;
    if (!trainer_.is_finite()) {
      if (recorder_ != nullptr) recorder_->note(fmt::format("step {}: weights are not finite, no checkpoint saved", trainer_.steps_done()));
      return false;
    }
    saved_path_ = trainer_.save(checkpoint_folder(options_.run_dir));
    saved_step_ = trainer_.steps_done();
    if (recorder_ != nullptr) recorder_->checkpoint(saved_step_, saved_path_);
    return true;
  }

  const RunConfig& config_;
  const TrainOptions& options_;
  const Dataset& data_;
  Fabric& world_;
  StepTrainer& trainer_;
  Recorder* recorder_;
  std::int64_t saved_step_;
  std::string saved_path_;
  std::int64_t skipped_in_a_row_ = 0, good_step_ = 0;
  StepMetrics last_;  // the newest that is known
};

std::string make_sample(const RunConfig& config, Fabric& world, StepTrainer& trainer) {
  const bool is_bytes = !config.data.text.empty();
  const auto prompt = encode_prompt(config.train.sample_prompt, config.model.vocab, is_bytes);
  const auto tokens = continue_tokens(trainer.model(), world, prompt, config.train.sample_tokens, config.train.sample_temperature, config.train.seed);
  return decode_sample(tokens, is_bytes);
}

struct Shared {
  const RunConfig& config;
  const TrainOptions& options;
  const Dataset& data;
  const ResumePoint& resume;
  double ceiling;
  bool on_gpu;  // one thread drives all ranks
  TrainObserver* observer;
  TrainResult& result;  // written by rank 0
};

void run_rank(const Shared& shared, Fabric& world) {
  const auto start = Clock::now();
  const RunConfig& config = shared.config;
  ThreadPool pool(threads_per_rank(config, world));
  const std::unique_ptr<StepTrainer> owner =
      shared.on_gpu ? detail::g_train_device_backend->make(config, world, &pool) : std::make_unique<RankTrainer>(config, world, &pool);
  StepTrainer& trainer = *owner;
  if (!shared.resume.path.empty()) trainer.load(shared.resume.path);
  if (shared.options.record_routes_every > 0) trainer.record_routes(shared.options.run_dir, shared.options.record_routes_every);
  TrainResult& result = shared.result;
  std::optional<Recorder> recorder;
  if (world.rank() == 0) {
    if (shared.options.resume) replace_file(config_path(shared.options.run_dir), to_toml(config));
    recorder.emplace(shared.options.run_dir, shared.options.resume ? trainer.steps_done() : -1, shared.observer, result);
    recorder->start(make_header(config, shared.data, result.entropy, shared.ceiling, world, trainer), config.train.tensorboard);
  }
  Loop loop(config, shared.options, shared.data, world, trainer, recorder ? &*recorder : nullptr, shared.resume.path);
  const bool finished = loop.run();
  if (recorder || shared.options.world != nullptr) {
    result.step = trainer.steps_done();
    result.stopped = !finished;
  }
  if (!finished) return;
  loop.evaluate(config.train.final_eval_sequences);
  const std::string sample = config.train.sample_tokens > 0 ? make_sample(config, world, trainer) : "";
  if (!recorder) return;
  if (!sample.empty()) recorder->sample(result.step, sample);
  const bool below_pairs = result.entropy.pairs_known && result.held_out_loss < result.entropy.bigram;
  result.goal_met = below_pairs && result.held_out_loss <= result.entropy.unigram - kGoalBelowUnigram;
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  recorder->end(result.seconds);
}

}  // namespace

TrainResult train(const RunConfig& config, const TrainOptions& options, TrainObserver* observer) {
  const auto start = Clock::now();
  reset_peak_buffer_bytes();
  WB_CHECK(!options.run_dir.empty(), "train() needs a run folder");
  Fabric* world = options.world;
  const bool is_root = world == nullptr || world->rank() == 0;
  std::optional<Dataset> data;
  std::unique_ptr<RunLock> lock;  // held by rank 0 until the run has ended
  ResumePoint resume;
  double ceiling = 0;
  bool on_gpu = false;
  const auto prepare = [&] {
    validate(config);
    WB_CHECK(world == nullptr || world->size() == config.parallel.W(), "{} processes were started, but the config says P = {}, D = {}: it needs {}",
             world->size(), config.parallel.P, config.parallel.D, config.parallel.W());
    on_gpu = choose_gpu(config, options);
    if (!on_gpu) check_memory(config, world == nullptr ? config.parallel.W() : 1);
    data.emplace(Dataset::load(config.data, config.model.vocab, config.model.seq_len));
    if (options.resume) {
      if (is_root) lock = lock_run_folder(options.run_dir);
      resume = check_resume(options.run_dir, config, options.reshard);
    } else if (is_root) {
      lock = create_run_folder(options.run_dir, config);
    }
    if (is_root && !on_gpu && config.train.measure_ceiling) ceiling = measure_matmul_ceiling();
  };
  // One rank's refusal (a file that only its host lacks) is every rank's.
  if (world != nullptr)
    run_together(*world, "train.start", prepare);
  else
    prepare();
  TrainResult result;
  result.entropy = data->entropy();
  const Shared shared{config, options, *data, resume, ceiling, on_gpu, observer, result};
  if (world != nullptr)
    run_rank(shared, *world);
  else
    run_ranks(
        on_gpu ? 1 : config.parallel.W(), [&shared](Fabric& fabric) { run_rank(shared, fabric); }, fabric_options(config));
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

std::string generate(const std::string& run_dir, const GenerateOptions& options) {
  WB_CHECK(options.temperature >= 0 && options.temperature <= 100, "temperature = {} must be from 0 to 100", options.temperature);
  RunConfig config = load_run_config(config_path(run_dir));
  const std::string path = latest_checkpoint(checkpoint_folder(run_dir));
  config.parallel = {};
  for (LayerConfig& layer : config.model.layers) layer.P = 1;
  auto world = make_single_fabric();
  ThreadPool pool(num_usable_cores());
  RankTrainer trainer(config, *world, &pool);
  trainer.load(path);
  const bool is_bytes = !config.data.text.empty();
  const auto prompt = encode_prompt(options.prompt, config.model.vocab, is_bytes);
  return decode_sample(continue_tokens(trainer.model(), *world, prompt, options.tokens, options.temperature, options.seed), is_bytes);
}

}  // namespace waybill

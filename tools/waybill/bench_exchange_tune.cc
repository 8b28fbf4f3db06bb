// SPDX-License-Identifier: Apache-2.0
// `waybill bench exchange --tune FILE`. CPU: the threads of a rank and the grains of its steps share the cores, and each bounds the others (more threads want
// smaller tasks), so they are searched in turn, each with what the others have come to, until a round changes nothing.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "bench_exchange.h"
#include "bench_verbs.h"
#include "exchange/tuning_table.h"

namespace waybill::cli {
namespace {

constexpr double kSameTime = 1.03;  // medians this close count as equal: the first candidate is taken
constexpr int kMostRounds = 3;

struct Candidate {
  int threads = 1;  // of a rank
  CpuTuning tuning;
  bool operator==(const Candidate&) const = default;
  std::string text() const {
    return fmt::format("threads={} copy_rows={} permute_rows={} sum_tokens={}", threads, tuning.copy_rows, tuning.permute_rows, tuning.sum_tokens);
  }
};

class CpuSearch {
 public:
  using Step = std::function<void(RoundTrip&)>;
  CpuSearch(const BenchOptions& options, const BenchShape& shape, BenchReport& report)
      : options_(options), shape_(shape), routes_(unit_routes(options, shape)), report_(report) {
    record_.op = "exchange", record_.implementation = "threads";
    record_.load = summarise_load(options.load, views_of(routes_));
  }
  ~CpuSearch() { set_cpu_tuning(saved_); }
  CpuSearch(const CpuSearch&) = delete;

  Candidate find() {
    const int most = options_.threads > 0 ? options_.threads : std::max(1, num_usable_cores() / shape_.P);
    best_ = Candidate{most, CpuTuning{}};
    for (int round = 0; round < kMostRounds; ++round) {
      const Candidate before = best_;
      std::vector<Candidate> threads;
      for (int count = 1; count < most; count *= 2) threads.push_back({count, best_.tuning});
      threads.push_back({most, best_.tuning});
      if (options_.threads == 0) choose("round trip", threads, [](RoundTrip& trip) { trip.all(); });
      choose("dispatch", grains(&CpuTuning::copy_rows), [](RoundTrip& trip) { trip.dispatch(); });
      choose("permute and reduce", grains(&CpuTuning::permute_rows), [](RoundTrip& trip) { trip.permute_rows(), trip.reduce(); });
      choose("combine", grains(&CpuTuning::sum_tokens), [](RoundTrip& trip) { trip.combine(); });
      if (best_ == before) break;
    }
    // What was found step by step must also be faster as a whole.
    const Candidate built_in{most, CpuTuning{}};
    const Timing before = time(built_in, [](RoundTrip&trip) { trip.all(); }), tuned = time(best_, [](RoundTrip&trip) { trip.all(); });
    add("round trip, built in: " + built_in.text(), before), add("round trip, tuned: " + best_.text(), tuned);
    if (tuned.p50_us > before.p50_us) best_ = built_in;
    return best_;
  }

 private:
  // The present number first.
  std::vector<Candidate> grains(int CpuTuning::*member) const {
    std::vector<Candidate> candidates{best_};
    for (const int grain : {16, 32, 64, 128, 256}) {
      if (grain == best_.tuning.*member) continue;
      candidates.push_back(best_), candidates.back().tuning.*member = grain;
    }
    return candidates;
  }
  void choose(const std::string& what, const std::vector<Candidate>& candidates, const Step& step) {
    std::vector<double> us;
    for (const Candidate& candidate : candidates) {
      const Timing timing = time(candidate, step);
      us.push_back(timing.p50_us);
      add(fmt::format("tune {}: {}", what, candidate.text()), timing);
    }
    const double fastest = *std::min_element(us.begin(), us.end());
    best_ = candidates[static_cast<std::size_t>(std::find_if(us.begin(), us.end(), [&](double t) { return t <= kSameTime * fastest; }) - us.begin())];
  }
  Timing time(const Candidate& candidate, const Step& step) {
    set_cpu_tuning(candidate.tuning);
    Timing timing;
    run_ranks(shape_.P, [&](Fabric& fabric) {
      ThreadPool pool(candidate.threads);
      RoundTrip trip(shape_, routes_[static_cast<std::size_t>(fabric.rank())], row_dtype(options_), fabric, &pool);
      options_.no_check ? trip.all() : trip.check();
      const Timing mine = measure_ranks(options_, fabric, [&] { step(trip); });
      if (fabric.rank() == 0) timing = mine;
    });
    return timing;
  }
  void add(const std::string& variant, const Timing& timing) {
    record_.variant = variant, record_.timing = timing;
    report_.add(record_);
  }

  const BenchOptions& options_;
  const BenchShape& shape_;
  std::vector<Route> routes_;
  BenchReport& report_;
  BenchRecord record_;
  CpuTuning saved_ = cpu_tuning();
  Candidate best_;
};

std::string read_file(const std::string& path) {
  if (!std::filesystem::exists(path)) return {};
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) WB_FAIL(ErrorCode::kIo, "cannot read {}", path);
  const bool has_lines = text.str().find_first_not_of(" \t\r\n") != std::string::npos;
  if (has_lines) (void)parse_tuning(text.str(), path);  // refuses what is no table before anything is measured
  return text.str();
}

// Lines of the CPU engine, or of the GPUs.
std::string lines_of(const std::string& text, bool cpu) {
  std::istringstream in(text);
  std::string kept, line;
  while (std::getline(in, line)) {
    const std::size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string::npos || line[begin] == '#' || line[begin] == '\r') continue;
    if ((line.compare(begin, 3, "cpu") == 0) == cpu) kept += line + '\n';
  }
  return kept;
}

}  // namespace

void tune_exchange(const BenchOptions& options, const std::string& file) {
  const BenchShape shape = options.resolve();
  const bool on_cpu = options.device == "cpu";
  const std::string old = read_file(file);
  const int threads = on_cpu ? threads_per_rank(options, shape.P) : 1;
  BenchReport report(options, shape, threads);
  report.set_checked(!options.no_check);
  std::string text = fmt::format("# waybill bench exchange --tune, {}: T={} H={} E={} K={}", options.device, shape.T, shape.H, shape.E, shape.K);
  if (on_cpu) {
    const Candidate best = CpuSearch(options, shape, report).find();
    text += fmt::format(" P={} {}, {} usable cores: {} threads a rank\n", shape.P, options.dtype, num_usable_cores(), best.threads);
    text += format_tuning(best.tuning) + lines_of(old, false);
  } else {
    BenchRecord record;
    record.op = "exchange", record.implementation = "cuda", record.load.name = "uniform";
    text += "\n" + lines_of(old, true) + tuned_gpu_rows(shape, lines_of(old, false), report, record);
  }
  std::ofstream out(file);
  out << text;
  out.close();
  if (!out) WB_FAIL(ErrorCode::kIo, "cannot write {}", file);
  report.finish();
  if (options.json != "-") fmt::print("{}: WAYBILL_EXCHANGE_TUNING reads it\n{}", file, text);
}

}  // namespace waybill::cli

// SPDX-License-Identifier: Apache-2.0
#include "bench_moe_gpu.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "bench_loads.h"
#include "table.h"
#include "waybill/error.h"
#include "waybill/version.h"

namespace waybill::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

GpuMoeBenchFunction g_bench = nullptr;

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// A file of the source tree: from here, or from a folder above the command.
std::string source_file(const std::string& name) {
  std::error_code error;
  if (fs::is_regular_file(name, error)) return name;
  for (auto folder = fs::read_symlink("/proc/self/exe", error).parent_path(); !error && folder.has_relative_path(); folder = folder.parent_path()) {
    if (fs::is_regular_file(folder / name, error)) return (folder / name).string();
  }
  return "";
}

// Lines of JSON; [] where the file is not there.
json read_lines(const std::string& path) {
  json records = json::array();
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) records.push_back(json::parse(line));
  }
  return records;
}

// GPUs that our records are of; 0: there is none.
int gpus_of(const json& records) {
  for (const json& r : records) {
    if (r.contains("gpus")) return r["gpus"].get<int>();
  }
  return 0;
}

// What a run on fewer GPUs than ranks cannot show.
void print_limits(int ranks, int gpus) {
  if (gpus == 0 || gpus == ranks) return;
  fmt::print(
      "{} virtual ranks on {} GPU{}: every design does all its work, exchange code included, but rows cross no link within a GPU. What dispatch and combine "
      "cost "
      "between GPUs, whether a link hides behind matmuls, and waits for a peer are not shown; PyTorch's processes have the tokens of all ranks on their GPU.\n",
      ranks, gpus, gpus == 1 ? "" : "s");
}

struct Scratch {
  fs::path folder = fs::temp_directory_path() / fmt::format("waybill_bench_moe_{}", getpid());
  Scratch() { fs::create_directories(folder); }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
  }
  std::string file(const char* name) const { return (folder / name).string(); }
};

// The PyTorch layer on the same GPUs, one process each, which has the tokens of all ranks that lie on its GPU. Why it did not run, or "".
std::string run_peer(const BenchOptions& common, const GpuMoeBench& options, int ranks, int gpus, const std::string& out) {
  if (options.no_peer) return "--no-peer";
  if (gpus == 0) return "none of ours ran";
  if (ranks % gpus != 0) return fmt::format("{} ranks do not lie evenly on {} GPUs", ranks, gpus);
  std::vector<std::string> loads;
  for (const std::string& load : options.loads) {
    if (!load.starts_with("recorded:")) loads.push_back(load);
  }
  if (loads.empty() && !options.loads.empty()) return "it does not replay recorded routes";
  const std::string script = source_file("bench/peers/torch_moe_ep.py");
  if (script.empty()) return "bench/peers/torch_moe_ep.py was found neither here nor above the command";
  if (std::system((quoted(options.python) + " -c 'import torch' >/dev/null 2>&1").c_str()) != 0) return "no PyTorch in " + options.python;
  std::string command = fmt::format("{} {} {} --variant grouped loop --ranks {} --ranks-per-gpu {} --iterations {}", quoted(options.python), quoted(script),
                                    quoted(out), gpus, ranks / gpus, common.iterations);
  if (!options.shapes.empty()) {
    command += " --shape";
    for (const std::string& shape : options.shapes) command += " " + quoted(shape);
  }
  if (!loads.empty()) command += " --load";
  for (const std::string& load : loads) command += " " + quoted(load);
  std::fflush(stdout);
  return std::system(command.c_str()) == 0 ? "" : "it failed (see above)";
}

// Time and memory of every variant over those of the PyTorch layer, by shape and load.
void print_ratios(const json& records) {
  Table table({"shape", "load", "variant", "ms", "TFLOP/s/GPU", "over PyTorch grouped", "over PyTorch loop", "peak GiB", "of PyTorch's"});
  for (const json& r : records) {
    if (!r.contains("tflops") || r["variant"].get<std::string>().starts_with("torch")) continue;
    const auto peer = [&](const char* variant) -> const json* {
      for (const json& p : records) {
        if (p["case"] == r["case"] && p["variant"] == variant && p.value("load", "") == r.value("load", "")) return &p;
      }
      return nullptr;
    };
    const json *grouped = peer("torch grouped"), *loop = peer("torch loop");
    const auto over = [&](const json* p, const char* what) {
      if (p == nullptr) return std::string("-");
      const double mine = r[what].get<double>(), its = (*p)[what].get<double>();
      return fmt::format("{:.2f}", std::string(what) == "value" ? its / mine : mine / its);
    };
    table.add({r["case"].get<std::string>(), r.value("load", ""), r["variant"].get<std::string>(), fmt::format("{:.3f}", r["value"].get<double>() * 1e-3),
               fmt::format("{:.0f}", r["tflops"].get<double>()), over(grouped, "value"), over(loop, "value"),
               fmt::format("{:.2f}", r["peak_bytes"].get<double>() / (1 << 30)), over(grouped, "peak_bytes")});
  }
  table.print(stdout);
  fmt::print("over PyTorch: its time over ours. Peak memory: less weights and their gradients, with the layer's inputs and results.\n");
}

}  // namespace

void set_gpu_moe_bench(GpuMoeBenchFunction function) { g_bench = function; }

int bench_moe_on_gpu(const BenchOptions& common, const GpuMoeBench& options) {
  if (g_bench == nullptr) WB_FAIL(ErrorCode::kUnsupported, "bench moe --device cuda: this program was built without CUDA or without WAYBILL_BUILD_BENCH");
  WB_CHECK(common.json != "-", "bench moe --device cuda prints while it runs: --json needs a file, got -");
  check_writable(common.json, "--json"), check_writable(options.plot, "--plot"), check_writable(options.trace, "--trace");
  WB_CHECK(options.plot.empty() || !common.json.empty(), "--plot needs the records: give --json FILE");
  const int ranks = common.P > 0 ? common.P : 2;
  const Scratch scratch;
  const std::string ours = scratch.file("moe.jsonl"), theirs = scratch.file("torch.jsonl");
  std::vector<std::string> arguments{"waybill bench moe", ours, "--ranks", std::to_string(ranks), "--iterations", std::to_string(common.iterations)};
  const auto pass = [&](const char* name, const std::string& value) {
    if (!value.empty()) arguments.emplace_back(name), arguments.push_back(value);
  };
  pass("--shapes", common.shapes_file.empty() ? shared_file("moe.toml", "--shapes") : common.shapes_file);
  pass("--shape", fmt::format("{}", fmt::join(options.shapes, ","))), pass("--load", fmt::format("{}", fmt::join(options.loads, ",")));
  pass("--stack", fmt::format("{}", fmt::join(options.stacks, ","))), pass("--recipe", fmt::format("{}", fmt::join(options.recipes, ",")));
  pass("--trace", options.trace), pass("--column-blocks", options.column_blocks), pass("--eager", options.eager);
  if (options.seconds > 0) pass("--most-seconds", fmt::format("{}", options.seconds));
  pass("--factor", fmt::format("{}", options.receive_factor));
  if (!options.no_ablation) arguments.emplace_back("--ablation");
  if (options.f32_gradients) arguments.emplace_back("--f32");
  if (options.wgrad_control) arguments.emplace_back("--wgrad-control");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  setenv("CUDA_MODULE_LOADING", "LAZY", 1);  // a thread a GPU (exchange/cuda/device_exchange.h); nothing has started CUDA yet
  const int code = g_bench(static_cast<int>(argv.size()), argv.data());
  json records = read_lines(ours);
  const int gpus = gpus_of(records);
  const std::string no_peer = run_peer(common, options, ranks, gpus, theirs);
  if (!no_peer.empty()) fmt::print("PyTorch layer: not run, {}\n", no_peer);
  for (json& record : read_lines(theirs)) records.push_back(std::move(record));
  print_ratios(records);
  print_limits(ranks, gpus);
  if (!common.json.empty()) {
    std::ofstream file(common.json);
    file << json{{"header",
                  {{"area", "moe"}, {"version", version()}, {"ranks", ranks}, {"gpus", gpus}, {"peer", no_peer.empty() ? "PyTorch" : "not run: " + no_peer}}},
                 {"records", records}}
                .dump(1)
         << "\n";
    WB_CHECK(file.good(), "cannot write {}", common.json);
  }
  const std::string plot = fmt::format("-m waybill_report.moe_bench {}", quoted(common.json));
  if (!options.plot.empty()) {
    const fs::path report = fs::path(source_file("tools/report/waybill_report/__init__.py")).parent_path().parent_path();
    const std::string command = fmt::format("PYTHONPATH={} {} {} --output {}", quoted(report.string()), quoted(options.python), plot, quoted(options.plot));
    WB_CHECK(std::system(command.c_str()) == 0, "--plot {}: the report did not run: {}", options.plot, command);
  } else if (!common.json.empty()) {
    fmt::print("plot: PYTHONPATH=tools/report python3 {}\n", plot);
  }
  return code;
}

}  // namespace waybill::cli

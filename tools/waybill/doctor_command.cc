// SPDX-License-Identifier: Apache-2.0
// waybill doctor: what this build is, what the machine has, what will and will not run, how to mend it; --selftest runs the engine.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "doctor_machine.h"
#include "doctor_selftest.h"
#include "waybill/build_info.h"
#include "waybill/mpi_fabric.h"
#if defined(WAYBILL_WITH_CUDA)
#include "core/cuda/device_report.h"
#endif

namespace waybill::cli {
namespace {

const char* mark(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok     ";
    case Verdict::kNote:
      return "note   ";
    case Verdict::kProblem:
      return "PROBLEM";
  }
  return "?";
}

void print_findings(const std::vector<Finding>& findings) {
  for (const Finding& finding : findings) {
    fmt::print("{}  {:<7} {}\n", mark(finding.verdict), finding.topic, finding.found);
    if (!finding.advice.empty()) fmt::print("{:<17}-> {}\n", "", finding.advice);
  }
}

void print_abilities() {
  const bool has_cuda = !build_info().cuda_archs.empty();
  fmt::print("runs here: train, generate, bench, inspect, simulate on the CPU; expert-parallel ranks as threads of one process\n");
  if (mpi_available()) fmt::print("runs here: ranks as processes, also on several machines: mpirun -n W waybill train CONFIG\n");
  if (!has_cuda) {
    fmt::print("does not run here: GPU kernels (CPU build)\n");
  } else {
    fmt::print(
        "runs on a GPU of this build: train (train.device), bench router and moe (--device cuda), bench exchange --tune; libwaybill.so with device memory\n"
        "does not run on GPUs: generate, bench gemm, bench exchange without --tune, simulate\n");
  }
  if (!mpi_available()) fmt::print("does not run here: ranks as processes (built without MPI; Debian: libopenmpi-dev openmpi-bin, -DWAYBILL_MPI=ON)\n");
}

// In builds with CUDA: every GPU, which kernels run on it, driver, NCCL and multicast state, and how to mend what is missing.
std::string gpu_report() {
#if defined(WAYBILL_WITH_CUDA)
  return cuda::describe(cuda::device_report());
#else
  return "";
#endif
}

int print_self_checks(const std::vector<SelfCheckResult>& results) {
  double seconds = 0;
  int failed = 0;
  for (const SelfCheckResult& result : results) {
    seconds += result.seconds;
    failed += result.failure.empty() ? 0 : 1;
    fmt::print("{}  {} ({:.0f} ms)\n", result.failure.empty() ? "ok     " : "FAILED ", result.name, result.seconds * 1e3);
    if (!result.failure.empty()) fmt::print("         {}\n", result.failure);
  }
  fmt::print("self-test: {} of {} checks passed in {:.1f} s\n", static_cast<int>(results.size()) - failed, results.size(), seconds);
  return self_check_exit_code(results);
}

nlohmann::json to_json(const std::vector<Finding>& findings, const std::vector<SelfCheckResult>& checks) {
  const BuildInfo& info = build_info();
  nlohmann::json out = {{"version", info.version},       {"compiler", info.compiler}, {"build_type", info.build_type}, {"cpu_isas", info.cpu_isas},
                        {"cuda_archs", info.cuda_archs}, {"features", info.features}, {"simd", simd_level()},          {"mpi", mpi_available()}};
  if (const std::string gpus = gpu_report(); !gpus.empty()) out["gpu_report"] = gpus;
  for (const Finding& finding : findings) {
    out["findings"].push_back({{"topic", finding.topic}, {"found", finding.found}, {"advice", finding.advice}, {"ok", finding.verdict == Verdict::kOk}});
  }
  for (const SelfCheckResult& check : checks) {
    out["selftest"].push_back({{"name", check.name}, {"passed", check.failure.empty()}, {"failure", check.failure}, {"seconds", check.seconds}});
  }
  return out;
}

void run(bool selftest, bool json) {
  const std::vector<Finding> findings = examine_machine();
  std::vector<SelfCheckResult> checks;
  if (json) {
    if (selftest) checks = run_self_checks(engine_self_checks());
    fmt::print("{}\n", to_json(findings, checks).dump(2));
    if (selftest && self_check_exit_code(checks) != 0) throw CLI::RuntimeError(1);
    return;
  }
  fmt::print("{}\n", describe(build_info()));
  print_findings(findings);
  fmt::print("{}", gpu_report());
  print_abilities();
  if (!selftest) return;
  if (const int code = print_self_checks(run_self_checks(engine_self_checks())); code != 0) throw CLI::RuntimeError(code);
}

}  // namespace

void register_doctor_command(CLI::App& app) {
  CLI::App* doctor = app.add_subcommand("doctor", "Say what this build and machine can run, and how to mend what is missing");
  struct Options {
    bool selftest = false, json = false;
  };
  auto options = std::make_shared<Options>();
  doctor->add_flag("--selftest", options->selftest, "run the engine on small problems (seconds); exit code 1 when a check fails");
  doctor->add_flag("--json", options->json, "as JSON");
  doctor->callback([options] { run(options->selftest, options->json); });
}

}  // namespace waybill::cli

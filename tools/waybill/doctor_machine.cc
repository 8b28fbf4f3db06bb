// SPDX-License-Identifier: Apache-2.0
#include "doctor_machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "table.h"
#include "waybill/build_info.h"
#include "waybill/thread_pool.h"

namespace waybill::cli {
namespace {

Finding examine_cpu() {
  const std::string simd = simd_level();
  const int usable = num_usable_cores();
  const unsigned all = std::thread::hardware_concurrency();
  Finding finding{Verdict::kOk, "CPU", fmt::format("{}; {} of {} hardware threads usable; kernels: {}", cpu_name(), usable, all, simd), ""};
  if (simd == "portable") {
    finding.verdict = Verdict::kNote;
    finding.advice = "no AVX2: everything runs, expert matmuls are several times slower than on an AVX2 or AVX-512 CPU";
  } else if (usable < 2) {
    finding.verdict = Verdict::kNote;
    finding.advice = "one usable thread: several ranks run, but take turns";
  }
  return finding;
}

Finding examine_memory() {
  const std::int64_t available = memory_bytes("MemAvailable"), total = memory_bytes("MemTotal");
  Finding finding{Verdict::kOk, "memory",
                  fmt::format("{} available of {}", format_bytes(static_cast<double>(available)), format_bytes(static_cast<double>(total))), ""};
  if (total == 0) return {Verdict::kNote, "memory", "unknown (/proc/meminfo cannot be read)", ""};
  if (available < std::int64_t{1} << 30) {
    finding.verdict = Verdict::kNote;
    finding.advice = "the demo needs about 1 GB; close programs or train a smaller config (waybill inspect model CONFIG tells what one needs)";
  }
  return finding;
}

Finding examine_disk() {
  std::error_code error;
  const auto space = std::filesystem::space(".", error);
  if (error) return {Verdict::kNote, "disk", "free space of this folder is unknown: " + error.message(), ""};
  Finding finding{Verdict::kOk, "disk", format_bytes(static_cast<double>(space.available)) + " free here", ""};
  if (space.available < std::uintmax_t{1} << 30) {
    finding.verdict = Verdict::kNote;
    finding.advice = "checkpoints may not fit; free space or give another --out folder";
  }
  return finding;
}

Finding examine_gpu() {
  const BuildInfo& info = build_info();
  const std::string gpus = first_line_of("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null");
  if (info.cuda_archs.empty()) {
    return {gpus.empty() ? Verdict::kOk : Verdict::kNote, "GPU", gpus.empty() ? "none, and this build is for the CPU" : gpus + "; this build is for the CPU",
            gpus.empty() ? "" : "GPUs are not used: build with -DWAYBILL_CUDA=ON where nvcc is installed"};
  }
  if (gpus.empty()) {
    return {Verdict::kNote, "GPU", fmt::format("no NVIDIA driver; built for {}", fmt::join(info.cuda_archs, " ")), "only the CPU engine runs"};
  }
  return {Verdict::kOk, "GPU", fmt::format("{}; built for {}", gpus, fmt::join(info.cuda_archs, " ")), ""};
}

struct Program {
  const char* name;
  const char* command;
  const char* missing;  // what does not work without it
};
constexpr Program kPrograms[] = {
    {"g++", "g++ --version 2>/dev/null", "needed to build: apt-get install g++"},
    {"cmake", "cmake --version 2>/dev/null", "needed to build: apt-get install cmake"},
    {"ninja", "ninja --version 2>/dev/null", "needed by the presets: apt-get install ninja-build"},
    {"nvcc", "nvcc --version 2>/dev/null | tail -n 2", "CUDA kernels cannot be built; the CPU engine can"},
    {"bible", "PATH=\"$PATH:/usr/games\" command -v bible 2>/dev/null", "the demo's text is missing: apt-get install bible-kjv, or give --text"},
    {"plotly", "for p in .venv/bin/python python3; do $p -c 'import plotly; print(\"plotly\", plotly.__version__)' 2>/dev/null && break; done",
     "no HTML report: scripts/setup.sh demo"},
};

}  // namespace

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
  }
  return "unknown CPU";
}

std::string simd_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return "avx512f";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "portable";
}

std::int64_t memory_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) != 0) continue;
    std::istringstream fields(line.substr(key.size() + 1));
    std::int64_t kibibytes = 0;
    fields >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

std::string first_line_of(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "";
  std::array<char, 256> buffer{};
  std::string line;
  if (std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe) != nullptr) line = buffer.data();
  // Reads the rest, so that the program does not die of a closed pipe and its exit status means something.
  std::array<char, 4096> rest{};
  while (std::fread(rest.data(), 1, rest.size(), pipe) > 0) {
  }
  const int status = pclose(pipe);
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return status == 0 ? line : "";
}

std::vector<Finding> examine_machine() {
  std::vector<Finding> findings = {examine_cpu(), examine_memory(), examine_disk(), examine_gpu()};
  for (const Program& program : kPrograms) {
    const std::string found = first_line_of(program.command);
    findings.push_back(
        {found.empty() ? Verdict::kNote : Verdict::kOk, program.name, found.empty() ? "not found" : found, found.empty() ? program.missing : ""});
  }
  return findings;
}

}  // namespace waybill::cli

// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/device_report.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace waybill::cuda {
namespace {

// A library opened for its version only.
class Library {
 public:
  explicit Library(const char* name) : handle_(dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {}
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  template <class Function>
  Function get(const char* symbol) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle_, symbol));
  }

 private:
  void* handle_;
};

std::string dotted(int version, int major_unit, int minor_unit) { return fmt::format("{}.{}", version / major_unit, version % major_unit / minor_unit); }

// NVLinks in use and the driver's version, through the management library.
class Management {
 public:
  Management() : library_("libnvidia-ml.so.1") {
    const auto init = library_.get<int (*)()>("nvmlInit_v2");
    is_open_ = init != nullptr && init() == 0;
  }
  ~Management() {
    const auto shutdown = library_.get<int (*)()>("nvmlShutdown");
    if (is_open_ && shutdown != nullptr) shutdown();
  }
  std::string driver_version() const {
    const auto get = library_.get<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion");
    char text[96] = {};
    return is_open_ && get != nullptr && get(text, sizeof(text)) == 0 ? text : "";
  }
  int num_nvlinks(const char* pci_bus_id) const {
    const auto find = library_.get<int (*)(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    const auto state = library_.get<int (*)(void*, unsigned, int*)>("nvmlDeviceGetNvLinkState");
    void* device = nullptr;
    if (!is_open_ || find == nullptr || state == nullptr || find(pci_bus_id, &device) != 0) return -1;
    int count = 0;
    for (unsigned link = 0; link < 18; ++link) {
      int is_active = 0;
      if (state(device, link, &is_active) == 0 && is_active == 1) ++count;
    }
    return count;
  }

 private:
  Library library_;
  bool is_open_ = false;
};

GpuInfo read_gpu(int index, int count, const Management& management) {
  GpuInfo gpu;
  gpu.index = index;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
    (void)cudaGetLastError();
    gpu.path = "none", gpu.reason = "its properties cannot be read";
    return gpu;
  }
  gpu.name = properties.name;
  gpu.compute_major = properties.major, gpu.compute_minor = properties.minor;
  gpu.num_sms = properties.multiProcessorCount;
  gpu.total_bytes = properties.totalGlobalMem, gpu.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  int khz = 0;
  if (cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, index) == cudaSuccess) gpu.sm_clock_mhz = khz / 1000;
  if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, index) == cudaSuccess) gpu.memory_clock_mhz = khz / 1000;
  int previous = 0;
  if (cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(index) == cudaSuccess) {
    std::size_t total = 0;
    if (cudaMemGetInfo(&gpu.free_bytes, &total) != cudaSuccess) gpu.free_bytes = 0;
    (void)cudaSetDevice(previous);
  }
  for (int other = 0; other < count; ++other) {
    int can_access = 0;
    if (other != index && cudaDeviceCanAccessPeer(&can_access, index, other) == cudaSuccess && can_access == 1) gpu.peers.push_back(other);
  }
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof(bus), index) == cudaSuccess) gpu.num_nvlinks = management.num_nvlinks(bus);
  (void)cudaGetLastError();
  if (gpu.compute_major == 9) {
    gpu.path = "can run the sm_90a kernels";
  } else if (gpu.compute_major >= 8) {
    gpu.path = "can run the portable kernels", gpu.reason = "correct, no speed claim; needs a build with WAYBILL_CUDA_PORTABLE=ON";
  } else {
    gpu.path = "none", gpu.reason = "compute capability 8.0 or newer is needed";
  }
  return gpu;
}

std::string nccl_version(int code) { return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100); }

// Version code of the NCCL header this build saw; 0: none.
#if defined(NCCL_VERSION_CODE)
constexpr int kNcclHeader = NCCL_VERSION_CODE;
#else
constexpr int kNcclHeader = 0;
#endif

void check_nccl(DeviceReport& report) {
  Library nccl("libnccl.so.2");
  const auto get = nccl.get<int (*)(int*)>("ncclGetVersion");
  int version = 0;
  if (get != nullptr && get(&version) == 0) report.nccl_library = nccl_version(version);
  if (kNcclHeader != 0) report.nccl_header = nccl_version(kNcclHeader);
  if (const Finding finding = compare_nccl(kNcclHeader, version); finding.level != Finding::kOk) report.findings.push_back(finding);
  if (report.nccl_library.empty()) {
    report.findings.push_back({Finding::kWarning, "NCCL was not found: one process can use the GPUs of this machine, several processes cannot",
                               "install NCCL 2.28.9 or put its folder on LD_LIBRARY_PATH"});
  }
  const char* nvls = std::getenv("NCCL_NVLS_ENABLE");
  if (report.gpus.size() > 1 && (nvls == nullptr || std::strcmp(nvls, "0") != 0)) {
    report.findings.push_back(
        {Finding::kWarning, "NVLink multicast is not switched off in NCCL", "export NCCL_NVLS_ENABLE=0 (Waybill does not use multicast)"});
  }
}

}  // namespace

Finding compare_nccl(int header, int library) {
  if (header == 0 || library == 0 || header == library) return {};
  const bool other_major = header / 10000 != library / 10000;
  return {other_major || library < header ? Finding::kError : Finding::kWarning,
          fmt::format("NCCL differs: built with the header of {}, the library found is {}", nccl_version(header), nccl_version(library)),
          other_major || library < header
              ? fmt::format("put the library of {} first on LD_LIBRARY_PATH (LD_DEBUG=libs shows which one is taken), or build again with its header",
                            nccl_version(header))
              : "a newer library of the same major version serves; build again with its header to use what is new in it"};
}

DeviceReport device_report() {
  DeviceReport report;
  const Management management;
  report.driver_version = management.driver_version();
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0) report.cuda_driver = dotted(version, 1000, 10);
  int runtime = 0;
  if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) report.cuda_runtime = dotted(runtime, 1000, 10);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error != cudaSuccess || count == 0) {
    report.findings.push_back(
        {Finding::kWarning, fmt::format("no GPU can be used ({})", error != cudaSuccess ? cudaGetErrorString(error) : "none found"),
         report.cuda_driver.empty() ? "install the NVIDIA driver (the CPU engine runs without it)" : "check nvidia-smi and CUDA_VISIBLE_DEVICES"});
    return report;
  }
  if (version / 1000 < runtime / 1000) {
    report.findings.push_back({Finding::kError, fmt::format("the driver supports CUDA {}, this build needs {}", report.cuda_driver, report.cuda_runtime),
                               "update the NVIDIA driver or build with an older CUDA toolkit"});
  }
  for (int index = 0; index < count; ++index) report.gpus.push_back(read_gpu(index, count, management));
  for (const GpuInfo& gpu : report.gpus) {
    if (gpu.path == "none") report.findings.push_back({Finding::kError, fmt::format("cuda:{} ({}) runs nothing: {}", gpu.index, gpu.name, gpu.reason), ""});
    if (count > 1 && static_cast<int>(gpu.peers.size()) < count - 1) {
      report.findings.push_back({Finding::kWarning, fmt::format("cuda:{} reaches {} of {} other GPUs directly", gpu.index, gpu.peers.size(), count - 1),
                                 "expert-parallel groups need NVLink or PCIe peer access between their GPUs"});
    }
  }
  check_nccl(report);
  return report;
}

std::string describe(const DeviceReport& report) {
  const auto or_none = [](const std::string& s) { return s.empty() ? std::string("none") : s; };
  std::string text = fmt::format("driver {}, CUDA driver {}, CUDA runtime {}, NCCL {} (header of the build: {})\n", or_none(report.driver_version),
                                 or_none(report.cuda_driver), or_none(report.cuda_runtime), or_none(report.nccl_library), or_none(report.nccl_header));
  for (const GpuInfo& gpu : report.gpus) {
    text += fmt::format("cuda:{} {}, sm_{}{}, {} SMs, {:.1f} of {:.1f} GiB free, L2 {} MiB, SM clock up to {} MHz, peers {}, NVLinks {}: {}{}\n", gpu.index,
                        gpu.name, gpu.compute_major, gpu.compute_minor, gpu.num_sms, static_cast<double>(gpu.free_bytes) / 1073741824.0,
                        static_cast<double>(gpu.total_bytes) / 1073741824.0, gpu.l2_bytes >> 20, gpu.sm_clock_mhz, gpu.peers.size(),
                        gpu.num_nvlinks < 0 ? std::string("unknown") : std::to_string(gpu.num_nvlinks), gpu.path,
                        gpu.reason.empty() ? "" : " (" + gpu.reason + ")");
  }
  for (const Finding& finding : report.findings) {
    text += fmt::format("{}: {}{}\n", finding.level == Finding::kError ? "error" : (finding.level == Finding::kWarning ? "warning" : "ok"), finding.text,
                        finding.mend.empty() ? "" : "; mend: " + finding.mend);
  }
  return text;
}

}  // namespace waybill::cuda

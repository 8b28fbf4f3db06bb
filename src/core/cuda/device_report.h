// SPDX-License-Identifier: Apache-2.0
// What `waybill doctor` says about GPUs: what is there, what runs, what does not and how to mend it. Never throws on a machine
// without a GPU or driver: the lack is a finding.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace waybill::cuda {

struct GpuInfo {
  int index = 0;
  std::string name;
  int compute_major = 0, compute_minor = 0;
  int num_sms = 0;
  std::size_t total_bytes = 0, free_bytes = 0, l2_bytes = 0;
  int sm_clock_mhz = 0, memory_clock_mhz = 0;
  std::vector<int> peers;  // GPUs of this process whose memory it can reach
  int num_nvlinks = -1;    // active NVLinks; -1 = unknown
  // Which kernels it can run: "can run the sm_90a kernels", "can run the portable kernels" or "none", and what limits them.
  std::string path, reason;
};

struct Finding {
  enum Level { kOk = 0, kWarning = 1, kError = 2 } level = kOk;
  std::string text, mend;  // mend: what to do; empty when nothing needs doing
};

struct DeviceReport {
  std::string driver_version, cuda_driver, cuda_runtime;  // empty: none found
  std::string nccl_library, nccl_header;                  // versions; header empty in builds without NCCL
  std::vector<GpuInfo> gpus;
  std::vector<Finding> findings;
};

// Do the NCCL header of the build and the library of the run (version codes, 0 = none) go together? kOk without text where they do.
Finding compare_nccl(int header, int library);

DeviceReport device_report();
std::string describe(const DeviceReport& report);  // lines of text

}  // namespace waybill::cuda

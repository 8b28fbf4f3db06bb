// SPDX-License-Identifier: Apache-2.0
#include "select_device.h"

#include "waybill/error.h"
#include "waybill/log.h"

namespace waybill {
namespace detail {

const TrainDeviceBackend* g_train_device_backend = nullptr;

}  // namespace detail

namespace {

// Why this run cannot use GPUs; empty: it can. is_there: a GPU is, so that a reason is worth a line.
std::string refusal(const RunConfig& config, const TrainOptions& options, bool& is_there) {
  if (detail::g_train_device_backend == nullptr) return "this program was built without CUDA";
  const int gpus = detail::g_train_device_backend->num_gpus();
  is_there = gpus > 0;
  if (gpus < config.train.gpus) return fmt::format("train.gpus = {}, but {} GPUs were found", config.train.gpus, gpus);
  if (options.world != nullptr) return "ranks that are processes train on CPUs";
  if (options.record_routes_every > 0) return "routes are recorded on the CPU only";
  try {
    detail::g_train_device_backend->check(config);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

bool choose_gpu(const RunConfig& config, const TrainOptions& options) {
  if (config.train.device == TrainDevice::kCpu) return false;
  bool is_there = false;
  const std::string reason = refusal(config, options, is_there);
  if (reason.empty()) return true;
  if (config.train.device == TrainDevice::kCuda) WB_FAIL(ErrorCode::kUnsupported, "train.device = \"cuda\": {}", reason);
  if (is_there) log(LogLevel::kWarning, fmt::format("training on the CPU though a GPU is there: {}", reason));
  return false;
}

}  // namespace waybill

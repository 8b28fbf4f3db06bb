// SPDX-License-Identifier: Apache-2.0
// Handles on GPUs by config, group size, device and an index (two handles of one config). They live as long as the process.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "ffi_support.h"

namespace waybill::jax {

template <class Config, class Handle, wb_status (*kCreate)(const Config*, std::int32_t, const wb_process_group*, Handle**)>
class DeviceRegistry {
 public:
  static DeviceRegistry& instance() {
    static DeviceRegistry* const registry = new DeviceRegistry;  // never destroyed: CUDA may be gone by then
    return *registry;
  }

  // The handle; made where there is none and `may_create` says so, else null.
  wb_status get(const Config& config, std::int32_t P, std::int32_t device, std::int32_t index, const wb_process_group* group, bool may_create,
                Handle** handle) {
    // What this thread found last: an execution costs one comparison, no lock and no allocation. Handles are never given back.
    thread_local std::array<Found, 8> recent{};
    thread_local std::size_t next = 0;
    for (const Found& found : recent) {
      if (found.handle != nullptr && found.P == P && found.device == device && found.index == index &&
          std::memcmp(&found.config, &config, sizeof(config)) == 0) {
        *handle = found.handle;
        return WB_OK;
      }
    }
    const wb_status status = look_up(config, P, device, index, group, may_create, handle);
    if (status == WB_OK && *handle != nullptr) recent[next++ % recent.size()] = Found{*handle, P, device, index, config};
    return status;
  }

 private:
  struct Found {
    Handle* handle;
    std::int32_t P, device, index;
    Config config;
  };

  wb_status look_up(const Config& config, std::int32_t P, std::int32_t device, std::int32_t index, const wb_process_group* group, bool may_create,
                    Handle** handle) {
    const std::tuple key(std::string(reinterpret_cast<const char*>(&config), sizeof(config)), P, device, index);
    const std::lock_guard lock(mutex_);
    if (const auto found = handles_.find(key); found != handles_.end()) {
      *handle = found->second;
      return WB_OK;
    }
    *handle = nullptr;
    if (!may_create) return WB_OK;
    const wb_status status = kCreate(&config, device, group, handle);
    if (status == WB_OK) handles_.emplace(key, *handle);
    return status;
  }

  std::mutex mutex_;
  std::map<std::tuple<std::string, std::int32_t, std::int32_t, std::int32_t>, Handle*> handles_;
};

using DeviceLayers = DeviceRegistry<wb_moe_config, wb_device_moe, wb_device_moe_create>;
using DeviceExchanges = DeviceRegistry<wb_exchange_config, wb_device_exchange, wb_device_exchange_create>;

}  // namespace waybill::jax

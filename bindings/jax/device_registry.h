// SPDX-License-Identifier: Apache-2.0
// Handles on GPUs by config, group and an index (two handles of one config). They live as long as the process. A group is this process alone, one of several
// processes of one GPU each, or several GPUs of this process; a program may hold several groups of the last kind side by side (a mesh with other axes).
#pragma once

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "ffi_support.h"

namespace waybill::jax {

// The groups within one process, [groups, P, 2]: process and device (XLA's number of it) of each rank. Of one element: there are none, the device is this
// process's rank. Part of the program, and the same in every process.
using Groups = ffi::Span<const std::int32_t>;

// This process's number in them.
inline std::atomic<std::int32_t> this_process{0};

// Which group and rank a device is; false: in none.
struct LocalRank {
  const std::int32_t* group = nullptr;  // [P, 2]
  std::int32_t rank = 0;

  bool find(const Groups& groups, std::int32_t P, std::int32_t ordinal) {
    const auto ranks = static_cast<std::int32_t>(groups.size() / 2);
    for (std::int32_t i = 0; i < ranks; ++i) {
      const std::int32_t* const at = groups.begin() + 2 * i;
      if (at[0] != this_process || at[1] != ordinal) continue;
      group = groups.begin() + 2 * (i / P * P), rank = i % P;
      return true;
    }
    return false;
  }
  std::vector<std::int32_t> ordinals(std::int32_t P) const {
    std::vector<std::int32_t> all;
    for (std::int32_t r = 0; r < P; ++r) all.push_back(group[2 * r + 1]);
    return all;
  }
};

template <class Config, class Handle, wb_status (*kCreate)(const Config*, std::int32_t, const wb_process_group*, Handle**),
          wb_status (*kCreateLocal)(const Config*, std::int32_t, const std::int32_t*, Handle**)>
class DeviceRegistry {
 public:
  static DeviceRegistry& instance() {
    static DeviceRegistry* const registry = new DeviceRegistry;  // never destroyed: CUDA may be gone by then
    return *registry;
  }

  // The handle of a call on device `ordinal`, and the GPU as CUDA numbers it. One that is this process alone is made where there is none.
  ffi::Error find(const Config& config, std::int32_t P, const Groups& groups, std::int32_t ordinal, std::int32_t index, Handle** handle, std::int32_t* device) {
    // What this thread found last: an execution costs one comparison, no lock and no allocation. Handles are never given back.
    thread_local std::array<Found, 8> recent{};
    thread_local std::size_t next = 0;
    for (const Found& found : recent) {
      if (found.handle != nullptr && found.P == P && found.ordinal == ordinal && found.index == index &&
          std::memcmp(&found.config, &config, sizeof(config)) == 0 && found.groups.size() == groups.size() &&
          std::equal(groups.begin(), groups.end(), found.groups.begin())) {
        *handle = found.handle, *device = found.device;
        return ffi::Error::Success();
      }
    }
    *handle = nullptr, *device = ordinal;
    if (groups.size() > 1) {
      LocalRank place;
      if (!place.find(groups, P, ordinal)) {
        return refuse("device " + std::to_string(ordinal) + " of process " + std::to_string(this_process) + " is in no group of this program");
      }
      look_up_local(Key(bytes_of(config), index, place.ordinals(P)), place.rank, handle, device);
    } else {
      WB_FFI_TRY(get(config, P, ordinal, index, nullptr, P == 1, handle));
    }
    if (*handle == nullptr) return refuse("this process has not made the layer or exchange of this program; trace and compile it here");
    recent[next++ % recent.size()] = Found{*handle, P, ordinal, index, *device, config, {groups.begin(), groups.end()}};
    return ffi::Error::Success();
  }

  // The handle of this process alone, or of its group with others; made where there is none and `may_create` says so, else null.
  wb_status get(const Config& config, std::int32_t P, std::int32_t device, std::int32_t index, const wb_process_group* group, bool may_create,
                Handle** handle) {
    const std::tuple key(bytes_of(config), P, device, index);
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

  // Makes the P handles of a group within this process, once: rank r on XLA's device ordinals[r], which is CUDA's devices[r].
  wb_status make_local(const Config& config, std::int32_t P, const std::int32_t* ordinals, const std::int32_t* devices, std::int32_t index) {
    const Key key(bytes_of(config), index, std::vector<std::int32_t>(ordinals, ordinals + P));
    const std::lock_guard lock(mutex_);
    if (local_.count(key) != 0) return WB_OK;
    Ranks ranks{std::vector<Handle*>(static_cast<std::size_t>(P)), std::vector<std::int32_t>(devices, devices + P)};
    const wb_status status = kCreateLocal(&config, P, devices, ranks.handles.data());
    if (status == WB_OK) local_.emplace(key, std::move(ranks));
    return status;
  }

 private:
  struct Found {
    Handle* handle;
    std::int32_t P, ordinal, index, device;
    Config config;
    std::vector<std::int32_t> groups;
  };
  struct Ranks {
    std::vector<Handle*> handles;
    std::vector<std::int32_t> devices;
  };
  using Key = std::tuple<std::string, std::int32_t, std::vector<std::int32_t>>;  // config, index, devices of the ranks

  static std::string bytes_of(const Config& config) { return std::string(reinterpret_cast<const char*>(&config), sizeof(config)); }

  void look_up_local(const Key& key, std::int32_t rank, Handle** handle, std::int32_t* device) {
    const std::lock_guard lock(mutex_);
    const auto found = local_.find(key);
    if (found == local_.end()) return;
    *handle = found->second.handles[static_cast<std::size_t>(rank)], *device = found->second.devices[static_cast<std::size_t>(rank)];
  }

  std::mutex mutex_;
  std::map<std::tuple<std::string, std::int32_t, std::int32_t, std::int32_t>, Handle*> handles_;
  std::map<Key, Ranks> local_;
};

using DeviceLayers = DeviceRegistry<wb_moe_config, wb_device_moe, wb_device_moe_create, wb_device_moe_create_local>;
using DeviceExchanges = DeviceRegistry<wb_exchange_config, wb_device_exchange, wb_device_exchange_create, wb_device_exchange_create_local>;

}  // namespace waybill::jax

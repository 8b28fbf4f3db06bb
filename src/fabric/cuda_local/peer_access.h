// SPDX-License-Identifier: Apache-2.0
// Whether GPUs reach each other's memory: what cuda_local stands on.
#pragma once

#include <functional>
#include <span>

namespace waybill::cuda {

using CanAccessPeer = std::function<bool(int device, int peer)>;

bool can_access_peer(int device, int peer);  // CUDA's word

// Each of `devices` must reach the memory of every other (a device may be there several times): kInvalidArgument naming the two that do not, before
// anything is allocated or switched on.
void check_peer_access(std::span<const int> devices, const CanAccessPeer& can_access = can_access_peer);

// Behind check_peer_access(): `device` may read and write the memory of `peer` from now on. Idempotent in a process.
void enable_peer_access(int device, int peer);

}  // namespace waybill::cuda

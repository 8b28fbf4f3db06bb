// SPDX-License-Identifier: Apache-2.0
// All ranks of a group must mean one layer: with different ones they would wait for each other, or add gradients of different models.
#pragma once

#include "waybill/moe.h"

namespace waybill::moe {

// Collective over `ep`. Throws Error on every rank alike, naming the first setting that differs, both values and the rank. Settings that
// change neither results nor what is sent (threads, overlap_shared) may differ, T_max in eager mode too.
void check_agreement(const MoeConfig& config, Fabric& ep);

}  // namespace waybill::moe

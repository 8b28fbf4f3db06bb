// SPDX-License-Identifier: Apache-2.0
// When compact routes are legal. Every trigger of the dense-map path is a bit with a reason in words (DenseMapReason).
#pragma once

#include "waybill/moe.h"

namespace waybill::moe {

// Compact plans number a row's slots in int16.
inline constexpr std::int64_t kMaxCompactK = 32767;

// Reasons that the configuration and the fabric give: known before any batch and equal on every rank.
std::uint32_t static_dense_reasons(const MoeConfig& config, const Fabric& ep);

// True where a row of [T, K] ids names an expert twice.
bool has_duplicate_ids(const RouteView& route);

}  // namespace waybill::moe

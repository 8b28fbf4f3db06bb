// SPDX-License-Identifier: Apache-2.0
// Route: the compact result of the router for one batch. Plain data; nothing here is [T, E].
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/tensor.h"

namespace waybill {

inline constexpr std::int64_t kMaxExpertsInt16 = 32768;  // ids 0..32767

// int16 up to 32,768 experts (times expert-tensor-parallel ways), int32 beyond.
inline DType route_id_dtype(std::int64_t num_experts) { return num_experts <= kMaxExpertsInt16 ? DType::kI16 : DType::kI32; }

// The only test that may decide whether an id is used as an address. -1 means "no route"; every other id outside [0, E) is a
// bad id: ignored alike by plan, dispatch, permute and combine, and counted (RoutePlan::num_bad_ids, StatusWord).
WB_HD inline bool is_route(std::int32_t id, std::int64_t E) { return id >= 0 && id < E; }
WB_HD inline bool is_bad_id(std::int32_t id, std::int64_t E) { return id < -1 || id >= E; }

// Routes in memory that somebody else owns (host or device).
//   ids     [T, K] int16 or int32. -1 = no route. Valid ids of a row are distinct and come in descending selection score
//           (ties: lower id first); -1 last.
//   weights [T, K] fp32, 0 where the id is -1.
//   counts  [E] int32, valid routes per expert of this rank's unmasked tokens; may be null where not asked for.
struct RouteView {
  std::int64_t T = 0, K = 0, E = 0;
  DType id_dtype = DType::kI16;
  void* ids = nullptr;
  float* weights = nullptr;
  std::int32_t* counts = nullptr;
  Device device{};

  // Host only.
  std::int32_t id(std::int64_t t, std::int64_t k) const {
    return id_dtype == DType::kI16 ? static_cast<const std::int16_t*>(ids)[t * K + k] : static_cast<const std::int32_t*>(ids)[t * K + k];
  }
  void set_id(std::int64_t t, std::int64_t k, std::int32_t value) const {
    if (id_dtype == DType::kI16)
      static_cast<std::int16_t*>(ids)[t * K + k] = static_cast<std::int16_t>(value);
    else
      static_cast<std::int32_t*>(ids)[t * K + k] = value;
  }
};

// Owner, on the host.
class WB_API Route {
 public:
  Route() = default;
  Route(std::int64_t T, std::int64_t K, std::int64_t E);  // ids -1, weights and counts 0
  Route(std::int64_t T, std::int64_t K, std::int64_t E, DType id_dtype);

  // From ids [T*K] and weights [T*K] (empty = 1 at every valid slot). Counts are computed. Checks as validate() does.
  static Route from_ids(std::int64_t T, std::int64_t K, std::int64_t E, std::span<const std::int32_t> ids, std::span<const float> weights = {});

  std::int64_t T() const { return view_.T; }
  std::int64_t K() const { return view_.K; }
  std::int64_t E() const { return view_.E; }
  const RouteView& view() const { return view_; }
  operator const RouteView&() const { return view_; }
  void recount();                                 // counts from ids; ids outside [0, E) are not counted
  static Route copy_of(const RouteView& source);  // host memory only; counts are computed where the source has none

 private:
  Tensor ids_, weights_, counts_;
  RouteView view_;
};

struct RouteCheck {
  bool allow_out_of_range = false;  // ids outside [-1, E) are skipped instead of refused
  bool allow_duplicates = false;    // a row that names an expert twice (only the dense-map path takes such routes)
};

// Throws kInvalidArgument naming row, slot and value of the first broken rule: id range, distinct ids, weight finite and 0 at
// -1, and, where counts are given, counts equal to the ids' (so their sum is the number of valid routes: the dropless
// invariant). That -1 comes last is not demanded of callers' routes. Host routes only. T = 0 is legal.
WB_API void validate(const RouteView& route, const RouteCheck& check = {});

// Which rank holds which expert. Default: E / P consecutive experts a rank.
struct ExpertPlacement {
  std::int64_t E = 0;
  int P = 1;
  // Optional table for other placements; null = block placement. Host memory, [E].
  const std::int32_t* rank_table = nullptr;   // rank of expert e
  const std::int32_t* local_table = nullptr;  // index of expert e on its rank

  // For valid ids only (is_route). Callable from kernels when the tables are device memory.
  WB_HD std::int64_t L() const { return E / P; }
  WB_HD int rank_of(std::int64_t e) const { return rank_table != nullptr ? rank_table[e] : static_cast<int>(e / L()); }
  WB_HD std::int64_t local_of(std::int64_t e) const { return local_table != nullptr ? local_table[e] : e % L(); }
};
// Refuses E < 1, P < 1 and E not divisible by P, with the values.
WB_API ExpertPlacement block_placement(std::int64_t E, int P);
// The same, and for tables: every rank holds exactly E / P experts under the local ids 0 .. E / P - 1.
WB_API void validate(const ExpertPlacement& placement);

}  // namespace waybill

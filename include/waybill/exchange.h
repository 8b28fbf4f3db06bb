// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on a Fabric: rows go to the ranks of their experts once per rank, with only that rank's ids and weights;
// results come back and are summed per token in fixed order. CPU engine; the CUDA engines mirror the same contract.
#pragma once

#include <cstdint>
#include <memory>

#include "waybill/fabric.h"
#include "waybill/phase.h"
#include "waybill/route_plan.h"
#include "waybill/status.h"
#include "waybill/stream.h"

namespace waybill {

enum class ExchangeMode : std::uint8_t {
  kEager = 0,     // sizes are exact; the host waits for counts
  kCaptured = 1,  // fixed budgets, no host wait on a GPU; overflow sets the sticky status word
};
enum class CombineWire : std::uint8_t { kF32 = 0, kBF16 = 1 };

struct ExchangeConfig {
  std::int64_t H = 0;       // columns of a row
  std::int64_t E = 0, K = 0;
  std::int64_t T_max = 0;   // most tokens a rank may bring (captured mode must know it)
  ExchangeMode mode = ExchangeMode::kEager;
  double receive_factor = 0;  // f: S <= ceil(f * T_max * K), R <= min(P * T_max, that S); 0 = worst case
  CombineWire combine_wire = CombineWire::kF32;
  std::int64_t alignment = 1;  // each expert's rows start at a multiple of it in the receive layout
  bool debug_checks = false;   // validate routes and the dropless invariant at every exchange
};

// Budgets of a rank. Eager or f = 0: worst case.
struct ReceiveBudget {
  std::int64_t slots = 0, rows = 0;
};
WB_API ReceiveBudget receive_budget(const ExchangeConfig& config, int P);

// Bytes this rank sent to other ranks (not to itself), by kind, and what a dense-map design would have sent.
struct ExchangeBytes {
  std::int64_t payload = 0, ids = 0, weights = 0, counts = 0;
  std::int64_t rows = 0;                   // rows sent to other ranks
  std::int64_t dense_route_map = 0;        // [T, E] byte map per rank
  std::int64_t compact_route = 0;          // [T, K] ids
  std::int64_t dense_probability_row = 0;  // rows * E * 4
  std::int64_t local_probability_slice = 0;  // rows * L * 4: the upper limit of a dense local slice; `weights` is what was sent
  void operator+=(const ExchangeBytes& o) {
    payload += o.payload; ids += o.ids; weights += o.weights; counts += o.counts; rows += o.rows;
    dense_route_map += o.dense_route_map; compact_route += o.compact_route;
    dense_probability_row += o.dense_probability_row; local_probability_slice += o.local_probability_slice;
  }
};

// What a dispatch leaves behind: both sides' plans. Kept for combine and for the backward pass; replaying it gives the same bytes.
struct DispatchHandle {
  RoutePlan plan;         // sender's side
  ReceiveLayout layout;   // receiver's side
  bool valid = true;      // false after an overflow on any rank of the group: results are declared invalid on every rank
};

class WB_API Exchange {
 public:
  Exchange(const ExchangeConfig& config, const ExpertPlacement& placement, Fabric& fabric);

  const ExchangeConfig& config() const { return config_; }
  const ExpertPlacement& placement() const { return placement_; }
  ReceiveBudget budget() const { return budget_; }
  StatusWord& status() { return status_; }
  const ExchangeBytes& bytes() const { return bytes_; }
  void reset_bytes() { bytes_ = {}; }

  // Exchanges counts, ids and weights. Collective. On overflow (captured mode) every rank's handle is !valid, its layout is
  // empty, and the status word of the rank that overflowed holds demand and capacity of both budgets.
  DispatchHandle plan(const RouteView& route, PhaseTimes* times = nullptr);

  // rows [R, H] (dtype of x: fp32 or bf16), by source rank then token. x [T, H].
  void dispatch(const DispatchHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times = nullptr);

  // out [T, H] = sum over ranks (rank order, fp32) of z rows; z [R, H] fp32 is each rank's sum over its slots.
  // A token without routes gets exactly 0. out may be fp32 or bf16 (one rounding at the end).
  void combine(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times = nullptr);

  // Per-slot scalars back to their routes: values [S] in expert order -> d_weights [T, K], 0 at slots without a route.
  void return_slot_values(const DispatchHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times = nullptr);

 private:
  ExchangeConfig config_;
  ExpertPlacement placement_;
  Fabric& fabric_;
  ReceiveBudget budget_;
  StatusWord status_;
  ExchangeBytes bytes_;
};

// Local steps of the receiver (no communication); also the reference of the permute kernels.
// permute: expert-ordered copy, y[s] = rows[slot_row[s]], padding slots 0.   rows [R, H] -> y [S_padded, H]
WB_API void permute(const ReceiveLayout& layout, const TensorView& rows, const TensorView& y, Stream stream = {});
// unpermute_reduce: z[r] = sum over the row's slots in order k of (weighted ? slot_weight : 1) * y[slot], fp32.
WB_API void unpermute_reduce(const ReceiveLayout& layout, const TensorView& y, bool weighted, const TensorView& z, Stream stream = {});
// Backward of the weighted reduce: dy[s] = weight * dz[row], d_weight[s] = <y[s], dz[row]> (d_weight may be null).
WB_API void unpermute_reduce_backward(const ReceiveLayout& layout, const TensorView& y, bool weighted, const TensorView& dz, const TensorView& dy,
                                      float* d_weight, Stream stream = {});

}  // namespace waybill

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
// How rows travel where the ranks of the group sit on several nodes (Topology::node_of of the fabric).
enum class Hierarchy : std::uint8_t {
  kFlat = 0,      // once per destination rank
  kTwoLevel = 1,  // once per remote node, there passed on to the ranks that need the row; combine mirrors it, one partial sum per node
  kAuto = 2,      // two-level where there are several nodes and one of them holds several ranks, else flat
};

struct ExchangeConfig {
  std::int64_t H = 0;  // columns of a row
  std::int64_t E = 0, K = 0;
  std::int64_t T_max = 0;  // most tokens a rank may bring (captured mode must know it)
  ExchangeMode mode = ExchangeMode::kEager;
  double receive_factor = 0;  // f: S <= ceil(f * T_max * K), R <= min(P * T_max, that S); 0 = worst case. Eager sizes exactly
  // What a rank's partial sum travels as. kBF16 at P > 1 rounds every rank's partial, the own rank's too, so that a token's
  // result does not depend on the rank it lives on. At P = 1 nothing travels and nothing is rounded before the end.
  CombineWire combine_wire = CombineWire::kF32;
  // Order of a token's sum. Flat: ranks in rank order. Two-level: inside a node its ranks in rank order, then the nodes in node order
  // (numbered by their first rank), so bits may differ from flat where a token visits several ranks of a node. Two-level kBF16
  // rounds once per node (the own node too, where there are several); inside a node partials travel in fp32.
  Hierarchy hierarchy = Hierarchy::kFlat;
  std::int64_t alignment = 1;  // each expert's rows start at a multiple of it in the receive layout
  bool debug_checks = false;   // validate routes and the dropless invariant at every exchange
};

// Refuses, before any communication and with the values: H, K, E, alignment < 1, K > E, E not divisible by P, captured mode
// without T_max, a receive_factor that is negative or not finite.
WB_API void validate(const ExchangeConfig& config, int P);

// Budgets of a rank, never above the worst case. f = 0: the worst case. Eager mode sizes exactly and enforces no budget: what it
// gets here is the worst case at T_max, or zeros where T_max is not given.
struct ReceiveBudget {
  std::int64_t slots = 0, rows = 0;  // real slots S and rows R
  std::int64_t padded_slots = 0;     // memory of an expert-ordered buffer: slots and the padding that `alignment` may add
};
WB_API ReceiveBudget receive_budget(const ExchangeConfig& config, int P);

// Bytes this rank sent to other ranks (not to itself), by kind and by distance, and what a dense-map design would have sent. What a
// gateway of a two-level exchange passes on counts as its own.
struct ExchangeBytes {
  std::int64_t payload = 0;                  // rows of dispatch
  std::int64_t combined = 0;                 // partial sums of combine
  std::int64_t ids = 0;                      // local ids
  std::int64_t weights = 0;                  // weights of plan and values of return_slot_values
  std::int64_t counts = 0;                   // sizes, slots per row, agreement on overflow
  std::int64_t rows = 0;                     // rows of dispatch sent to other ranks
  std::int64_t rows_between_nodes = 0;       // the part of `rows` that left the node
  std::int64_t between_nodes = 0;            // the part of total() that left the node; the rest stayed inside
  std::int64_t dense_route_map = 0;          // [T, E] byte map per rank
  std::int64_t compact_route = 0;            // [T, K] ids
  std::int64_t dense_probability_row = 0;    // rows * E * 4
  std::int64_t local_probability_slice = 0;  // rows * L * 4: the upper limit of a dense local slice; `weights` is what was sent

  // Calls visit(name, pointer to member) for every field. The only list of them: sums, differences and metrics walk it.
  template <class Visit>
  static void for_each_field(const Visit& visit) {
    visit("payload", &ExchangeBytes::payload);
    visit("combined", &ExchangeBytes::combined);
    visit("ids", &ExchangeBytes::ids);
    visit("weights", &ExchangeBytes::weights);
    visit("counts", &ExchangeBytes::counts);
    visit("rows", &ExchangeBytes::rows);
    visit("rows_between_nodes", &ExchangeBytes::rows_between_nodes);
    visit("between_nodes", &ExchangeBytes::between_nodes);
    visit("dense_route_map", &ExchangeBytes::dense_route_map);
    visit("compact_route", &ExchangeBytes::compact_route);
    visit("dense_probability_row", &ExchangeBytes::dense_probability_row);
    visit("local_probability_slice", &ExchangeBytes::local_probability_slice);
  }
  void operator+=(const ExchangeBytes& o) {
    for_each_field([&](const char*, auto field) { this->*field += o.*field; });
  }
  void operator-=(const ExchangeBytes& o) {
    for_each_field([&](const char*, auto field) { this->*field -= o.*field; });
  }
  std::int64_t total() const { return payload + combined + ids + weights + counts; }
  std::int64_t within_nodes() const { return total() - between_nodes; }
};

// Two-level exchange only (else empty): what this rank sends once per node, and what it passes on as gateway. The gateway of source s
// for another node is that node's rank number (index of s in its own node) mod (size of the other); for its own node, s itself.
struct NodePlan {
  // As source: rows by gateway rank, tokens ascending.
  std::vector<std::int64_t> send_offsets;   // [P+1]
  std::vector<std::int32_t> send_token;     // [node rows]
  std::vector<std::int64_t> token_offsets;  // [T+1] into token_rows
  std::vector<std::int32_t> token_rows;     // node rows of a token in node order: what the source sums
  // As gateway: arrived rows by source rank, tokens ascending, and to which ranks of this node each goes on.
  std::vector<std::int64_t> arrive_offsets;       // [P+1]
  std::vector<std::int64_t> forward_offsets;      // [P+1] into forward_rows, by receiving rank
  std::vector<std::int32_t> forward_rows;         // arrived row of each forward, ascending within a rank
  std::vector<std::int64_t> row_forward_offsets;  // [arrived rows + 1] into row_forwards
  std::vector<std::int32_t> row_forwards;         // forwards of an arrived row in rank order: what the gateway sums

  std::int64_t num_arrived() const { return arrive_offsets.empty() ? 0 : arrive_offsets.back(); }
  std::size_t bytes() const {
    return (send_offsets.size() + token_offsets.size() + arrive_offsets.size() + forward_offsets.size() + row_forward_offsets.size()) * sizeof(std::int64_t) +
           (send_token.size() + token_rows.size() + forward_rows.size() + row_forwards.size()) * sizeof(std::int32_t);
  }
};

// What a dispatch leaves behind: both sides' plans. Kept for combine and for the backward pass; replaying it gives the same bytes.
struct DispatchHandle {
  RoutePlan plan;        // sender's side
  ReceiveLayout layout;  // receiver's side
  NodePlan nodes;
  bool valid = true;  // false after an overflow on any rank of the group: results are declared invalid on every rank
  // Captured mode: the largest demand of any rank of the group, so that every rank can choose the same larger budget.
  std::int64_t max_slot_demand = 0, max_row_demand = 0;
};

class PendingRows;

// Every call is collective and is made by one thread per rank. A call on an invalid handle communicates nothing, on every rank
// alike: rows become [0, H], out and d_weights become 0. Bad ids (outside [-1, E)) are ignored alike by every step and counted in
// the status word; with debug_checks they are refused on every rank, naming rank, row, slot and value.
class WB_API Exchange {
 public:
  // Collective: the ranks compare their configs; the first difference is named on every rank. Tables of the placement are copied.
  // pool: threads that pack and sum rows; results do not depend on it.
  Exchange(const ExchangeConfig& config, const ExpertPlacement& placement, Fabric& fabric, ThreadPool* pool = nullptr);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const ExchangeConfig& config() const;
  const ExpertPlacement& placement() const;
  ReceiveBudget budget() const;
  bool two_level() const;  // what `hierarchy` came to on this fabric
  StatusWord& status();    // sticky; clear() it after reading
  const ExchangeBytes& bytes() const;
  void reset_bytes();

  // Exchanges counts, ids and weights. Collective. On overflow (captured mode) every rank's handle is !valid, its layout is
  // empty, and the status word of the rank that overflowed holds demand and capacity of both budgets.
  // Captured mode: more than T_max tokens on any rank is refused on every rank.
  DispatchHandle plan(const RouteView& route, PhaseTimes* times = nullptr);

  // rows [R, H] (dtype of x: fp32 or bf16), by source rank then token. x [T, H]; its rows may be strided.
  // Captured mode: the memory of `rows` is that of the row budget at every step.
  void dispatch(const DispatchHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times = nullptr);

  // out [T, H] = sum over ranks (rank order, fp32) of z rows; z [R, H] fp32, contiguous, is each rank's sum over its slots.
  // A token without routes gets exactly 0. out may be fp32 or bf16 (one rounding at the end). out must not overlap z.
  void combine(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times = nullptr);

  // The same in two halves: the rows move while the caller computes, and finish() of the result ends the call (results are bit-equal
  // to the call in one piece). Until then no other call of this Exchange and no other collective of its fabric may be made, and
  // handle, rows, z and out must stay; x may be reused at once. Two-level: the first of the two steps overlaps.
  PendingRows dispatch_start(const DispatchHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times = nullptr);
  PendingRows combine_start(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times = nullptr);

  // Per-slot scalars back to their routes: values in expert order [S_padded] (padding ignored) -> d_weights [T, K], 0 at slots
  // without a route.
  void return_slot_values(const DispatchHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times = nullptr);

 private:
  friend class PendingRows;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A dispatch or combine on its way. Movable; destroying it finishes it, or withdraws it (which fails the group) during an exception.
class WB_API PendingRows {
 public:
  PendingRows() = default;
  PendingRows(PendingRows&& other) noexcept;
  PendingRows& operator=(PendingRows&& other) noexcept;
  ~PendingRows();

  void finish(PhaseTimes* times = nullptr);  // once; later calls do nothing

 private:
  friend class Exchange;
  PendingRows(Exchange::Impl& exchange, const DispatchHandle& handle, bool is_combine, const TensorView& from, const TensorView& to);
  void settle() noexcept;

  Exchange::Impl* exchange_ = nullptr;
  const DispatchHandle* handle_ = nullptr;
  bool is_combine_ = false;
  TensorView from_, to_;
  std::unique_ptr<ExchangeRequest> request_;  // null: nothing to wait for
  int exceptions_ = 0;
};

// Local steps of the receiver (no communication). Rows may be strided, columns are contiguous. Offsets are 64-bit. Work is split
// by row over the stream's pool; results do not depend on it. A row's sum starts with its first slot and adds the others in order
// k; a row without slots is 0. Tensors: y, dy fp32 or bf16, z, dz fp32.
// permute: expert-ordered copy, y[s] = rows[slot_row[s]], padding slots 0.   rows [R, H] -> y [S_padded, H], same dtype.
// Its backward is unpermute_reduce with weighted = false.
WB_API void permute(const ReceiveLayout& layout, const TensorView& rows, const TensorView& y, Stream stream = {});
// unpermute_reduce: z[r] = sum over the row's slots in order k of (weighted ? slot_weight : 1) * y[slot], fp32.
WB_API void unpermute_reduce(const ReceiveLayout& layout, const TensorView& y, bool weighted, const TensorView& z, Stream stream = {});
// Backward of the weighted reduce: dy[s] = weight * dz[row], 0 at padding slots; d_weight[s] = <y[s], dz[row]>, 0 at padding slots.
// d_weight [S_padded] may be null; then y may be a null view.
WB_API void unpermute_reduce_backward(const ReceiveLayout& layout, const TensorView& y, bool weighted, const TensorView& dz, const TensorView& dy,
                                      float* d_weight, Stream stream = {});

}  // namespace waybill

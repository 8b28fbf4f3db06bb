// SPDX-License-Identifier: Apache-2.0
// The designs that came before compact routes, complete and written as their own engineers would have: to compare with, on the same
// parameters, inputs and fabric. Every stack gives the MoE layer's result (the capacity stack: on tokens of which nothing was dropped).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "waybill/moe.h"

namespace waybill {

enum class MoeStackKind : std::uint8_t {
  kSparse = 0,       // MoeLayer: compact routes, one copy of a row per rank, grouped GEMM through index lists
  kLoop = 1,         // one copy of a row per expert, one matmul per expert on a leaf tensor of its own, index_add
  kPadded = 2,       // the same exchange, then a batched GEMM in which every local expert has the rows of the fullest
  kCapacity = 3,     // a fixed budget of rows per expert and source rank; what does not fit is dropped and counted
  kDenseMap = 4,     // [T, E] map and full probability rows on the wire, all-slot scans, repeated-max top-k, grouped GEMM
  kBlockSparse = 5,  // the loop's exchange, then block-sparse matmuls (SDD, DSD, DDS) over a topology built from the routes
};
inline constexpr int kNumMoeStacks = 6;
WB_API const char* to_string(MoeStackKind kind);             // "sparse", "loop", "padded", "capacity", "dense-map", "block-sparse"
WB_API MoeStackKind parse_moe_stack(std::string_view name);  // kInvalidArgument listing the names

// What turns the dense-map stack into a sparse one, one change at a time (all off = the old design).
struct DenseMapChanges {
  bool compact_routes = false;  // ids [T, K] are gathered over the ranks instead of a byte map [T, E]
  bool local_slice = false;     // a row carries the probabilities of its destination's experts [L] instead of all [E]
  bool row_lists = false;       // lists of the set slots instead of scans over every (row, expert) pair
  bool fast_top_k = false;      // threshold selection instead of K passes that take the maximum of a score row
};

enum class DropOrder : std::uint8_t {
  kPosition = 0,     // first choices before second choices, earlier tokens first
  kProbability = 1,  // larger weight first; ties: earlier token
};

struct MoeStackConfig {
  MoeStackKind kind = MoeStackKind::kSparse;
  // The routed part of a layer: sizes, router, activation. No latent width, shared experts, biases on matmuls, auxiliary losses,
  // expert tensor parallelism, captured mode or recompute: these are the same in every design.
  MoeConfig moe;
  DenseMapChanges changes;        // dense-map
  double capacity_factor = 1.25;  // capacity: an expert takes ceil(capacity_factor * T * K / E) routes of a rank's T tokens
  bool pad_to_capacity = true;    // capacity: every expert always gets that many rows (fixed-size exchange), else only the real ones
  DropOrder drop_order = DropOrder::kProbability;
  std::int64_t block = 64;  // block-sparse: rows and columns of a block
};
// Refuses, with the values, what a stack cannot do and everything MoeConfig's own validate() refuses.
WB_API void validate(const MoeStackConfig& config, int P);

// What a design costs, of one rank, since construction or reset.
struct MoeStackCounters {
  ExchangeBytes bytes;  // sent to other ranks
  // (row, expert) pairs that planning, permutation, the sums over slots and the return of weights look at, by loop counts; for the
  // sparse stack by the same loops' formula: a pass over T*K or S each.
  std::int64_t slots_visited = 0;
  std::int64_t scores_visited = 0;  // expert scores that the top-k looked at (replayed routes: none)
  std::int64_t real_rows = 0;       // routes computed; summed over ranks: all of them
  std::int64_t computed_rows = 0;   // rows of the first expert matmul, padding included
  std::int64_t dropped_routes = 0;  // of this rank's tokens
};

class WB_API MoeStack {
 public:
  virtual ~MoeStack() = default;

  // As MoeLayer's: collective over ep; x, out [T, H] fp32, out is written; dx is written, gradients are added to. A forward keeps what
  // the next backward needs. replay: take these ids instead of choosing (weights come from the logits), on every rank or on none.
  virtual void forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, const Route* replay = nullptr,
                       PhaseTimes* times = nullptr) = 0;
  virtual void backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx,
                        PhaseTimes* times = nullptr) = 0;

  virtual const Route& route() const = 0;       // the router's decision of the last forward
  virtual const Route& kept_route() const = 0;  // what was computed of it: less where the capacity stack dropped
  virtual const MoeStackCounters& counters() const = 0;
  virtual void reset_counters() = 0;
};

// Collective over ep, which must outlive the stack.
WB_API std::unique_ptr<MoeStack> make_moe_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool = nullptr);

}  // namespace waybill

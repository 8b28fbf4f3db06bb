// SPDX-License-Identifier: Apache-2.0
// A design of the MoE layer on the ranks of one GPU: what the module benchmark times.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "bench/cuda/moe/problem.h"
#include "fabric/cuda_local/local_ranks.h"
#include "waybill/phase.h"

namespace waybill::cuda::moe_bench {

// Called before work of a phase is queued, and with kOther after the last of forward and of backward.
using OnPhase = std::function<void(Phase phase, cudaStream_t stream)>;

// What turns the dense map into the sparse layer, one change at a time (the steps before it included).
enum class MapChange : int {
  kNone = 0,       // [T, E] map and probability rows, K maxima, scans over every (row, expert) pair
  kFastTopK,       // the library's router instead of K passes that take a maximum; map and probabilities are made from its ids
  kCompactRoutes,  // ids [T, K] go to the other ranks instead of the map, which they make again
  kLocalSlice,     // a row carries the probabilities of its destination's experts instead of all
  kRowLists,       // lists of the set slots instead of maps and scans: the library's plan and layout, rows still copied to expert order
};

struct StackOptions {
  std::string kind = "sparse";  // sparse, dense-map, loop, padded, capacity
  MapChange change = MapChange::kNone;
  double receive_factor = 1.25;   // budgets of sparse and dense-map
  double capacity_factor = 1.25;  // capacity
  bool permute = false;           // sparse: always copy rows to expert order
  bool accumulate = false;        // sparse: add to the weight gradients (f32)
  bool exact = false;             // sparse: eager at exact sizes, no budget
  bool resend = false;            // sparse: backward sends the rows of x again
  Recipe recipe = Recipe::kBF16;  // sparse
  int combine_sms = 0;            // sparse: of a combine that runs beside the gradient of the first weights
  bool whole_x = false;           // sparse, beside: the rows of x have a buffer of their own
  int column_blocks = 1;          // sparse: of y
  bool keep_weights = false;      // sparse, recipes of blocks: weights are quantised once, not in every step
};

// What a step sends and looks at beside rows and matmuls, forward and backward, mean of the ranks; a rank's share to itself counts. From sizes and the last
// step's rows, not measured.
struct StepCounts {
  double route_bytes = 0;     // maps or ids to every rank
  double weight_bytes = 0;    // routing weights with the rows, and their gradients back
  double slots_visited = 0;   // pairs of row and expert: two permutes, two sums, the weights' return
  double scores_visited = 0;  // by the choice of the K experts
};

class Stack {
 public:
  virtual ~Stack() = default;
  virtual void forward(cudaStream_t stream) = 0;
  virtual void backward(cudaStream_t stream) = 0;
  virtual int host_waits() const { return 0; }         // of a step
  virtual std::string fault(cudaStream_t stream) = 0;  // after a step: what was exceeded; empty = nothing
  virtual std::int64_t dropped(cudaStream_t /*stream*/) { return 0; }
  virtual const std::int32_t* places(int /*index*/) const { return nullptr; }  // capacity: [T K] on the device, -1: dropped
  virtual std::int64_t computed_rows() const = 0;                              // of the first matmul in the last step, padding included; mean of the ranks
  virtual std::size_t predicted_bytes() const { return 0; }                    // of a GPU, where a stack can say
  virtual StepCounts step_counts(cudaStream_t /*stream*/) { return {}; }       // after a step; dense-map and sparse
  virtual void add_counts(std::vector<std::int64_t>& /*counts*/, cudaStream_t /*stream*/) {}  // sparse: [E] routes of the last step, of this GPU's tokens
};

// Windows of the group's arenas: every GPU's stack asks for the same ones in the same order, and they are booked once.
struct Windows {
  CudaLocalGroup& group;
  std::vector<std::uint64_t> offsets;
  std::size_t next = 0;
  std::uint64_t book(const std::string& name, std::size_t bytes) {
    if (next == offsets.size()) offsets.push_back(group.window(name, bytes));
    return offsets[next++];
  }
};

// Bytes that an arena of the group must hold.
std::size_t arena_bytes(const StackOptions& options, Problem& problem);
std::unique_ptr<Stack> make_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase);

// Bytes of the sparse stack on a GPU, by its own account; factor in place of the options'. At exact sizes: with the slots of the hottest rank.
std::size_t sparse_bytes(const StackOptions& options, Problem& problem, double factor);
std::size_t sparse_arena_bytes(const StackOptions& options, Problem& problem);
std::unique_ptr<Stack> make_sparse_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase);
std::size_t map_arena_bytes(const StackOptions& options, Problem& problem);
std::unique_ptr<Stack> make_map_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase);
std::size_t slot_arena_bytes(const StackOptions& options, Problem& problem);
std::unique_ptr<Stack> make_slot_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase);

}  // namespace waybill::cuda::moe_bench

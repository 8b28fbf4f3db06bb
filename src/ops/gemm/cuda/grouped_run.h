// SPDX-License-Identifier: Apache-2.0
// Host side of the sm_90a kernels: tensor maps, scratch, the choice of a tile, the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "ops/gemm/cuda/grouped_params.h"

namespace waybill::cuda {

// What the epilogues with an activation need (grouped_activation.cuh). Width F: n / 2 where the kind is gated, else n (kActivation); n (gradient).
struct GroupedActivation {
  GemmEpilogue epilogue = GemmEpilogue::kPlain;
  ActivationKind kind = ActivationKind::kSwiGLU;
  float limit = 0, alpha = 0;
  // The pre-activation [rows, 2 F or F] bf16: kActivation writes it (null: it is not wanted, d [rows, F] is the activation), the gradient reads it
  // (d is its gradient, laid out as h).
  void* h = nullptr;
  const float* row_weight = nullptr;  // [rows] or null
  float* d_weight = nullptr;          // gradient: [rows] or null
};

// A product in one of the forms of grouped_params.h; operands bf16, contiguous, pointers to device memory.
struct GroupedProblem {
  GemmForm form;
  GemmOutput output;
  std::int64_t groups, rows;         // rows: of the ragged tensors (their smallest)
  std::int64_t m = 0, n = 0, k = 0;  // m: kTN only; k: kNT, kNN only
  const void *a, *b;
  const std::int32_t* offsets;
  void* d;
  const float* bias = nullptr;
  // [rows]: where row s of a is. Outside [0, a_rows): kNT, kNN: a zero row, without bias; kTN: a row that adds nothing. kTN: b_list likewise, one
  // of them at most.
  const std::int32_t* a_list = nullptr;
  std::int64_t a_rows = 0;
  const std::int32_t* b_list = nullptr;
  std::int64_t b_rows = 0;
  // kTN: the product is a part of one of [whole_m, whole_n] a group: D lies within that one's result, and groups are cut into slices as that one's
  // are, so that the bits are the same. 0: m, n.
  std::int64_t whole_m = 0, whole_n = 0;
  StatusWord* status = nullptr;
  std::int64_t b_row_stride = 0, b_plane = 0;  // kNT, kNN: b is a part of wider weights, these elements from a row to the next and from a group; 0: contiguous
  GroupedActivation activation = {};           // kNT, kNN with bf16 results
};

// How a launch is shaped; every choice gives the same bits in kNT and kNN, and in kTN unless a group is cut into slices.
struct GemmTuning {
  GemmTile tile;
  int band = 8;
  int slices_per_cluster = 2, min_slice_blocks = 16;
  bool overlap = true;  // may start while its predecessor on the stream ends (programmatic dependent launch)
  int long_batch = 0;   // kTN, groups that are not cut: so many units of long ones at a time beside the others; 0: in order (grouped_units.cuh)
};

// The compiled kernels of a form and output, or of a form and an epilogue with an activation.
std::span<const GemmKernel> grouped_kernels(GemmForm form, GemmOutput output, GemmEpilogue epilogue = GemmEpilogue::kPlain);

// Why the kernels cannot take the problem; empty = they can.
std::string refuse_grouped(const GroupedProblem& problem, int device);
// Why the two calls, the product and then the activation, are faster than the fused kernel; empty = they are not (docs/perf/grouped-gemm.md).
std::string refuse_for_speed(const GroupedProblem& problem);
// From the shape and the mean rows of a group, which the host knows; not from the counts, which it does not.
GemmTuning choose_tuning(const GroupedProblem& problem, int num_sms);
std::string describe(const GemmTuning& tuning);

// Queues the product. Nothing waits. Captured graphs keep the scratch of their stream: its first call must not be inside a capture.
void run_grouped(const GroupedProblem& problem, const GemmTuning& tuning, int device, cudaStream_t stream);

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// Host side of the 8-bit sm_90a kernels: tensor maps, the choice of a tile, the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "ops/gemm/cuda/fp8_params.h"

namespace waybill::cuda {

// A product in one of the forms of fp8_params.h; contiguous codes and scales in device memory.
struct Fp8Problem {
  GemmForm form;  // kNT or kTN
  GemmOutput output;
  Fp8Types types;
  std::int64_t groups, rows;         // rows: of the ragged tensors
  std::int64_t m = 0, n = 0, k = 0;  // m: kTN only; k: kNT only
  const void *a, *b;
  const float *a_scales, *b_scales;
  // kNT: scales of A, [rows, k blocks] with any strides; those of adjacent rows adjacent (1), columns aligned to
  // 16 bytes is fastest: the copy engine loads them. kTN: [blocks, m].
  std::int64_t a_scale_stride = 0, a_scale_k = 1;
  // kNT: scales of B's tiles, [groups, n blocks, k blocks] with any strides. b_is_turned: B is [groups * k blocks, n, 128], as quantize() turns
  // tiles of a [groups, k, n] tensor.
  std::int64_t b_scale_group = 0, b_scale_column = 0, b_scale_k = 0;
  bool b_is_turned = false;
  std::int64_t max_blocks = 0;  // kTN: blocks that a, b and their scales hold; what offsets ask beyond it is reported and left out
  const std::int32_t* offsets;
  void* d;
  const float* bias = nullptr;  // kNT: [groups, n]
  StatusWord* status = nullptr;
};

// Every choice gives the same bits, but in kTN where a group is cut into slices.
struct Fp8Tuning {
  GemmTile tile{256, 4, 2, 2};
  int band = 8;
  int slices_per_cluster = 2, min_slice_blocks = 8;
  bool cuts_last_round = true;   // of the tiles of 256 columns with bf16 results; the others never do
  bool prefetches_sums = false;  // kTN, sums that the copy engine adds (fp8_producer.cuh)
  bool overlap = true;
};

std::span<const Fp8Kernel> fp8_kernels(GemmForm form, GemmOutput output, Fp8Types types);

// Why the kernels cannot take the problem; empty = they can.
std::string refuse_fp8(const Fp8Problem& problem, int device);
// From the shape and the mean rows of a group.
Fp8Tuning choose_fp8_tuning(const Fp8Problem& problem, int num_sms);
std::string describe(const Fp8Tuning& tuning);

// Queues the product. Nothing waits. Captured graphs keep the scratch of their stream: its first call must not be inside a capture.
void run_fp8(const Fp8Problem& problem, const Fp8Tuning& tuning, int device, cudaStream_t stream);

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// The parameters of one GPU: fp32 values, gradients and moments, and bf16 working copies, each kind in one array of one layout. Replicated parameters come
// first, then the experts of this GPU's ranks, then what is not trained (router biases, values only).
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "model/parameters.h"
#include "ops/optimizer/cuda/optimizer_kernels.h"
#include "waybill/optimizer.h"

namespace waybill::cuda {

// The part of the world that one GPU holds: ranks [first_rank, first_rank + num_ranks) of W. Expert-parallel groups of P ranks lie in it whole, or it in one of
// them; either number is a multiple of the other.
struct DeviceShare {
  int device = 0, index = 0, num_devices = 1;
  int first_rank = 0, num_ranks = 1, W = 1;

  int group_ranks(int P) const { return std::min(P, num_ranks); }           // ranks of one group on this GPU: as many slices of the experts are here
  int num_groups(int P) const { return num_ranks / group_ranks(P); }        // that have ranks here; they share the experts' memory
  int first_group(int P) const { return first_rank / P; }                   // of the world's
  int first_slice(int P) const { return first_rank % P; }                   // of the experts, of P in all
  int gpus_of_group(int P) const { return P / group_ranks(P); }             // GPUs that hold the experts once
  int num_replicas(int P) const { return num_devices / gpus_of_group(P); }  // GPUs that hold the same experts
};

class DeviceParameters {
 public:
  // list: the host's, with all experts (P = 1). config: P of every layer.
  DeviceParameters(const ModelConfig& config, const model::ParameterList& list, const DeviceShare& share);

  float* value(int parameter) const { return values_.as<float>() + at(parameter).offset; }
  float* grad(int parameter) const { return grads_.as<float>() + at(parameter).offset; }
  std::uint16_t* copy(int parameter) const { return copies_.as<std::uint16_t>() + at(parameter).offset; }  // bf16
  std::int64_t size(int parameter) const { return at(parameter).size; }                                    // elements on this GPU
  std::int64_t num_replicated() const { return num_replicated_; }  // gradients [0, this) belong to replicated parameters
  float* grads() const { return grads_.as<float>(); }
  // Gradients of experts of layers with the same P, which lie behind each other. The same on all GPUs.
  struct ExpertRange {
    int P;
    std::int64_t begin, end;
  };
  const std::vector<ExpertRange>& expert_ranges() const { return expert_ranges_; }

  // Whole parameters and moments, from and to the host's list: experts of this GPU only. Both wait.
  void upload(const model::ParameterList& list, std::span<const OptimizerState> states, cudaStream_t stream);
  void download(const model::ParameterList& list, std::span<const OptimizerState> states, cudaStream_t stream) const;
  void download_gradients(const model::ParameterList& list, cudaStream_t stream) const;

  // What the optimizer's kernels need; `squares` [all_units()] and `owner` are indexed by a unit's number over all GPUs.
  SumSquares sum_squares() const;
  AdamW adamw(const OptimizerConfig& config, const UpdateState* state) const;
  std::int64_t all_units() const { return all_units_; }
  const std::uint8_t* owner() const { return owner_.as<std::uint8_t>(); }
  double* squares() const { return squares_.as<double>(); }

 private:
  struct Place {
    std::int64_t offset = 0, size = 0;                                       // in the arrays
    std::int64_t host_offset = 0;                                            // in the host's tensor
    std::int64_t first_unit = 0, num_units = 0, own_begin = 0, own_end = 0;  // units over all GPUs; those here
  };
  const Place& at(int parameter) const { return places_[static_cast<std::size_t>(parameter)]; }
  void copy_out(std::size_t parameter, const DeviceBuffer& from, const Tensor& to, cudaStream_t stream) const;
  void lay_out(const ModelConfig& config, const model::ParameterList& list);
  void make_chunks(const ModelConfig& config, const model::ParameterList& list);

  DeviceShare share_;
  std::vector<Place> places_;
  std::vector<ExpertRange> expert_ranges_;
  std::int64_t num_trained_ = 0, num_replicated_ = 0, num_values_ = 0, all_units_ = 0, num_chunks_ = 0, num_units_ = 0;
  DeviceBuffer values_, grads_, m_, v_, copies_;
  DeviceBuffer chunks_, unit_begin_, units_, owner_, chunk_squares_, squares_;
};

}  // namespace waybill::cuda

// SPDX-License-Identifier: Apache-2.0
// What every stack of the module benchmark works on: one shape, one load, the same parameters, rows and gradients on every GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "waybill/moe.h"

namespace waybill::cuda::moe_bench {

struct Shape {
  std::string name;
  std::int64_t T = 0, H = 0, F = 0, E = 0, K = 0;  // T: tokens a rank
  std::int64_t latent = 0;                         // of the rows that experts see; 0: H. The library's layer alone does that
  std::int64_t row_width() const { return latent > 0 ? latent : H; }
  std::string label() const;  // "name T8192 H2048 F512 E512 K10"
};
// The [[shape]] tables of bench/shapes/moe.toml (keys this benchmark knows; others are passed over).
std::vector<Shape> read_shapes(const std::string& path);

// "recorded:FOLDER": routes that a training run recorded.
inline bool is_recorded(const std::string& load) { return load.rfind("recorded:", 0) == 0; }
inline std::string recorded_folder(const std::string& load) { return load.substr(9); }

// One rank's tensors: all bf16 but the gate's gradient (f32). ids [T, K]: the load's routes, null on the natural load.
struct RankTensors {
  int rank = 0, device = 0;
  std::int64_t T = 0;
  TensorView x, d_out, out, dx, ids;
  MoeTensors weights, gradients;
  std::vector<DeviceBuffer> memory;
};

class Problem {
 public:
  // load: "natural" (the router's own choice of normal logits: x is normal, rows of the gate have length 1) or W0 to W9 or a recorded one (replayed ids).
  // f32_gradients: weight gradients f32 instead of bf16.
  Problem(const Shape& shape, int P, const std::vector<int>& devices, const std::string& load, bool f32_gradients = false);

  const Shape& shape() const { return shape_; }
  int P() const { return P_; }
  std::int64_t L() const { return shape_.E / P_; }
  const std::vector<int>& devices() const { return devices_; }
  int ranks_per_gpu() const { return (P_ + static_cast<int>(devices_.size()) - 1) / static_cast<int>(devices_.size()); }
  const std::string& load() const { return load_; }
  std::int64_t T_max() const { return T_max_; }
  std::vector<RankTensors*> on(int device);
  RankTensors& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }
  RouterConfig router() const;
  MoeConfig layer_config(double receive_factor) const;

  // Rows of every expert over all ranks, and valid routes; the load's; on the natural load known once set_counts() has been told (from the first stack's
  // routes).
  void set_counts(std::vector<std::int64_t> counts) { counts_ = std::move(counts); }
  const std::vector<std::int64_t>& counts() const { return counts_; }
  std::int64_t routes() const;
  std::int64_t rows_of_rank(int r) const;    // slots of its experts
  std::int64_t longest_expert(int r) const;  // rows of its fullest expert
  std::int64_t hottest_rank_rows() const;
  // Matmuls of the experts on valid rows: gate, up and down, 2 operations a multiply-add, once forward and twice backward; mean of the GPUs.
  double flops() const {
    return 18.0 * static_cast<double>(routes()) / static_cast<double>(devices_.size()) * static_cast<double>(shape_.row_width()) *
           static_cast<double>(shape_.F);
  }
  // Inputs and results of the layer (x, d_out, out, dx) on the GPU with the most of them: what every stack needs besides.
  std::size_t activation_bytes() const;
  // What a run of these ranks on these GPUs shows, as records name it.
  std::string evidence() const;

 private:
  void fill_rank(RankTensors& t, bool f32_gradients);
  Shape shape_;
  int P_;
  std::vector<int> devices_;
  std::string load_;
  std::int64_t T_max_ = 0;
  std::vector<std::unique_ptr<RankTensors>> ranks_;
  std::vector<std::int64_t> counts_;
};

}  // namespace waybill::cuda::moe_bench

// SPDX-License-Identifier: Apache-2.0
// What a stack computed, against a dense loop in double on the host and against another stack.
#pragma once

#include <string>

#include "bench/cuda/moe/problem.h"

namespace waybill::cuda::moe_bench {

// |got - want| / |want| over all elements (bf16 or f32, same shape). places [rows, K]: rows with a -1 among them are left out; or null.
double relative_difference(const TensorView& got, const TensorView& want, const std::int32_t* places, std::int64_t K);

// Results of one step, kept for comparison.
class Results {
 public:
  explicit Results(Problem& problem);
  void keep(Problem& problem);  // copies out, dx and gradients of every rank
  // Text of the first difference beyond `bound`, or empty; largest: the largest relative norm seen. With places: of out and dx alone.
  std::string compare(Problem& problem, const std::vector<const std::int32_t*>& places, double bound, double& largest) const;

 private:
  std::vector<std::vector<TensorView>> views_;  // [rank]
  std::vector<DeviceBuffer> memory_;
};
void poison_results(Problem& problem);  // out, dx and gradients become NaN

// Token t of rank r: the relative norms of out and dx against the dense loop in double with the router's choice (or the load's ids).
struct TokenErrors {
  double out = 0, dx = 0;
};
TokenErrors check_token(Problem& problem, int r, std::int64_t t);

}  // namespace waybill::cuda::moe_bench

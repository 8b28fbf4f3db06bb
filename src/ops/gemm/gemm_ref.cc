// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/gemm_ref.h"

#include "ops/gemm/element.h"

namespace waybill {

void gemm_ref(const GemmArgs& args) {
  const std::int64_t K = args.a.shape[args.transpose_a ? 0 : 1];
  for (std::int64_t m = 0; m < args.c.shape[0]; ++m) {
    for (std::int64_t n = 0; n < args.c.shape[1]; ++n) {
      double sum = 0;
      for (std::int64_t k = 0; k < K; ++k) {
        const float a = detail::load_element(args.a, args.transpose_a ? k * args.a.stride[0] + m : m * args.a.stride[0] + k);
        const float b = detail::load_element(args.b, args.transpose_b ? n * args.b.stride[0] + k : k * args.b.stride[0] + n);
        sum += static_cast<double>(a) * b;
      }
      const std::int64_t at = m * args.c.stride[0] + n;
      const float before = args.accumulate ? detail::load_element(args.c, at) : 0.0f;
      detail::store_element(args.c, at, static_cast<float>(before + sum));
    }
  }
}

}  // namespace waybill

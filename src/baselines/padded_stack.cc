// SPDX-License-Identifier: Apache-2.0
#include "baselines/padded_stack.h"

#include <algorithm>
#include <limits>

namespace waybill::baselines {

ExpertRows BatchedStack::lay_out(std::vector<std::int64_t> counts) const {
  const std::int64_t longest = *std::max_element(counts.begin(), counts.end());
  ExpertRows layout;
  for (std::size_t e = 0; e < counts.size(); ++e) layout.starts.push_back(static_cast<std::int64_t>(e) * longest);
  layout.total = static_cast<std::int64_t>(counts.size()) * longest;
  layout.counts = std::move(counts);
  return layout;
}

void BatchedStack::experts_forward(const StackCall& call, const ExpertRows& layout, const TensorView& rows, const TensorView& y) {
  WB_CHECK(layout.total <= std::numeric_limits<std::int32_t>::max(), "padding makes {} rows, more than 2^31 - 1", layout.total);
  std::vector<std::int32_t> offsets(layout.starts.begin(), layout.starts.end());
  offsets.push_back(static_cast<std::int32_t>(layout.total));
  experts_.forward(call.parameters, std::move(offsets), rows, nullptr, y, call.times);
}

void BatchedStack::experts_backward(const StackCall& call, const MoeTensors& gradients, const ExpertRows& /*layout*/, const TensorView& rows,
                                    const TensorView& dy, const TensorView& d_rows) {
  experts_.backward(call.parameters, gradients, rows, nullptr, dy, d_rows, nullptr, call.times);
}

std::unique_ptr<MoeStack> make_padded_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) {
  return std::make_unique<BatchedStack>(config, ep, pool);
}

}  // namespace waybill::baselines

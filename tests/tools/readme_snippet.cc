// SPDX-License-Identifier: Apache-2.0
// The library tour of README.md, compiled and run. scripts/check_docs.py compares it with the README line by line.
// [readme]
#include <waybill/exchange.h>
#include <waybill/router.h>

#include <cstdio>
#include <vector>

int main() {
  using namespace waybill;
  constexpr std::int64_t T = 4, H = 8, E = 8, K = 2;
  run_ranks(4, [&](Fabric& fabric) {  // 4 ranks, each a thread of this process
    std::vector<float> x(T * H, 1.0f), logits(T * E), out(T * H);
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(fabric.rank())) % 11);

    RouterConfig router;
    router.E = E;
    router.K = K;
    Route route(T, K, E);  // ids [T, K] int16 and weights [T, K]: nothing [T, E]
    RouterInputs inputs;
    inputs.logits = TensorView::of(logits.data(), {T, E});
    RouterOutputs outputs;
    outputs.route = route;
    router_forward(router, inputs, outputs);

    ExchangeConfig config;
    config.H = H;
    config.E = E;
    config.K = K;
    Exchange exchange(config, block_placement(E, fabric.size()), fabric);
    const DispatchHandle handle = exchange.plan(route);
    Tensor rows;  // [R, H]: each token once per rank that holds one of its experts
    exchange.dispatch(handle, TensorView::of(x.data(), {T, H}), rows);

    Tensor y(DType::kF32, {handle.layout.S_padded(), H}), z(DType::kF32, {handle.layout.R(), H});
    permute(handle.layout, rows, y);  // expert order; a real layer runs its experts here
    unpermute_reduce(handle.layout, y, true, z);
    exchange.combine(handle, z, TensorView::of(out.data(), {T, H}));
    std::printf("rank %d received %lld rows for %lld slots\n", fabric.rank(), static_cast<long long>(handle.layout.R()),
                static_cast<long long>(handle.layout.S()));
  });
}
// [/readme]

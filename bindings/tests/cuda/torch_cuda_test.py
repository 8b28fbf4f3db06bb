# SPDX-License-Identifier: Apache-2.0
"""The PyTorch ops on CUDA tensors against the same ops on the CPU: values, gradients, streams, graphs, no wait, refusals."""

import pytest

torch = pytest.importorskip("torch")
wbt = pytest.importorskip("waybill.torch")
import waybill  # noqa: E402
from waybill._library import has_cuda  # noqa: E402

pytestmark = [pytest.mark.skipif(not has_cuda(), reason="libwaybill.so was built without CUDA"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")]  # fmt: skip


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20261130)


def relative(got, want):
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30)) if want.numel() else 0.0


def on_both(tensor):
    """The tensor on the CPU and its copy on the GPU, each a leaf."""
    return tensor.clone().requires_grad_(), tensor.cuda().requires_grad_()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padded", [False, True])
def test_router_and_its_gradient(dtype, bound, score, padded):
    T, E, K = 300, 64, 6
    config = wbt.RouterConfig(E=E, K=K, score=score, aux_coefficient=0.1, z_coefficient=0.01, scaling_factor=1.5)
    bias, d_weights, d_losses = 0.1 * torch.randn(E), torch.randn(T, K), torch.tensor([0.5, 1.0, 2.0])
    mask = torch.arange(T) % 5 == 2 if padded else None
    results = []
    for logits in on_both(torch.randn(T, E).to(dtype)):
        place = logits.device
        routes = wbt.router(logits, config, bias=bias.to(place), padding_mask=None if mask is None else mask.to(place))
        ((routes.weights * d_weights.to(place)).sum() + (routes.losses * d_losses.to(place)).sum()).backward()
        assert all(part.device == place for part in routes)
        results.append((routes, logits.grad))
    (want, want_gradient), (got, gradient) = results
    assert torch.equal(got.ids.cpu(), want.ids) and torch.equal(got.counts.cpu(), want.counts)
    assert relative(got.weights, want.weights) < 1e-5 and relative(got.losses, want.losses) < 1e-5
    assert gradient.dtype == dtype and relative(gradient, want_gradient) < bound


@pytest.mark.parametrize("layout", ["LNC", "LCN"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [[50, 0, 70, 10], [0, 0, 0, 0], [160, 0, 0, 0]], ids=["ragged", "empty", "one"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_matmul_and_its_gradients(layout, dtype, bound, sizes, with_bias):
    S, C, N, L = 160, 72, 136, 4
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    a, w = on_both(torch.randn(S, C).to(dtype)), on_both(torch.randn(L, *((N, C) if layout == "LNC" else (C, N))).to(dtype))
    bias, dy = on_both(torch.randn(L, N)), torch.randn(S, N).to(dtype)
    results = []
    for i in range(2):
        y = wbt.grouped_matmul(a[i], w[i], offsets.to(a[i].device), bias=bias[i] if with_bias else None, layout=layout)
        y.backward(dy.to(y.device))
        results.append([y, a[i].grad, w[i].grad, *([bias[i].grad] if with_bias else [])])
    for want, got in zip(*results):
        assert got.is_cuda and got.dtype == want.dtype and relative(got, want) < bound
    y, da, dw, *_ = results[1]
    assert y[offsets[-1] :].abs().sum() == 0 and da[offsets[-1] :].abs().sum() == 0
    for g, size in enumerate(sizes):
        assert size or dw[g].abs().max() == 0


def block(x, gate, w1, w2, config):
    """Router, sort, grouped matmuls; nothing waits."""
    routes = wbt.router(x.float() @ gate.T, config)
    order = routes.ids.flatten().argsort(stable=True)
    token = order // config.K
    offsets = torch.nn.functional.pad(routes.counts.cumsum(0, dtype=torch.int32), (1, 0))
    y = wbt.grouped_matmul(torch.nn.functional.silu(wbt.grouped_matmul(x[token], w1, offsets)), w2, offsets)
    out = torch.zeros_like(x, dtype=torch.float32).index_add(0, token, y.float() * routes.weights.flatten()[order, None])
    return out, routes.losses.sum()


def problem(T=128, H=64, E=8, K=2, F=96):
    config = wbt.RouterConfig(E=E, K=K, aux_coefficient=0.1, z_coefficient=0.01)
    leaf = lambda *shape, dtype=torch.bfloat16: (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).to(dtype).requires_grad_()  # noqa: E731
    return torch.randn(T, H, device="cuda").bfloat16(), leaf(E, H, dtype=torch.float32), leaf(E, F, H), leaf(E, H, F), config


def step(x, gate, w1, w2, config):
    out, loss = block(x, gate, w1, w2, config)
    return out, *torch.autograd.grad(out.square().mean() + loss, (gate, w1, w2))


def test_nothing_waits_for_the_device():
    operands = problem()
    step(*operands)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*operands)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_stream_is_used():
    a, w = torch.zeros(64, 64, device="cuda").bfloat16(), torch.randn(1, 64, 64, device="cuda").bfloat16()
    offsets, source = torch.tensor([0, 64], dtype=torch.int32, device="cuda"), torch.randn(64, 64, device="cuda").bfloat16()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a call on another stream would read zeros
        a.copy_(source)
        y = wbt.grouped_matmul(a, w, offsets)
        ids = wbt.router(a.float(), wbt.RouterConfig(E=64, K=1)).ids
    stream.synchronize()
    assert relative(y, source.double() @ w[0].double().T) < 2e-2
    assert torch.equal(source.gather(1, ids.long())[:, 0], source.max(-1).values)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
def test_graphs_replay_with_other_data(warm):
    """Also where the capture is the first call of these sizes, so that scratch is made inside of it."""
    x, *rest = problem(T=128 if warm else 192)
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(x, *rest)
        torch.cuda.current_stream().wait_stream(side)
    torch.autograd.grad((x.float() @ rest[0].T).sum(), rest[0])  # PyTorch's matmul makes a handle of each thread, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, *rest)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        got = [part.clone() for part in captured]
        assert all(torch.equal(a, b) for a, b in zip(got[1:], step(x, *rest)[1:]))
        assert relative(got[0], step(x, *rest)[0]) < 1e-6  # index_add has no fixed order
        problem(T=512)  # other memory moves


def test_repeats_have_equal_bits():
    x, *rest = problem(T=500)
    first = step(x, *rest)[1:]
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(x, *rest)[1:]))


def test_compiled_code_calls_the_ops():
    x, *rest = problem()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    out, loss = compiled(x, *rest)
    got = torch.autograd.grad(out.square().mean() + loss, rest[:3])
    for a, b in zip((out, *got), step(x, *rest)):
        assert relative(a, b) < 2e-2


def slots_of(dtype, **options):
    """An exchange of one rank, its operands on the CPU, and a block over them."""
    T, E, K, H = 70, 8, 3, 64
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int16)
    ids[::9] = -1  # padding
    exchange = wbt.Exchange(waybill.single(), H=H, E=E, K=K, **options)

    def block(x, ids, weights):
        slots = exchange.dispatch_slots(x, ids, weights)
        return exchange.combine_slots(slots.rows * 2, ids, weights), slots

    return block, (torch.randn(T, H).to(dtype), ids, torch.randn(T, K)), torch.randn(T, H)


def run_slots(block, x, ids, weights, d_out):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out, slots = block(x, ids, weights)
    return [out.detach(), *torch.autograd.grad(out, (x, weights), d_out)], [part.detach() for part in slots]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("alignment", [1, 16])
def test_slots_are_those_of_the_cpu(dtype, bound, alignment):
    block, operands, d_out = slots_of(dtype, alignment=alignment)
    want, want_slots = run_slots(block, *operands, d_out)
    given = [part.cuda() for part in operands]
    got, slots = run_slots(block, *given, d_out.cuda())
    used = len(want_slots[0])
    assert torch.equal(slots[0][:used].cpu(), want_slots[0]) and slots[0][used:].abs().max() == 0
    assert torch.equal(slots[1].cpu(), want_slots[1]) and int(slots[2]) == 1
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and relative(a, b) < bound
    again, _ = run_slots(torch.compile(block, backend="aot_eager", fullgraph=True), *given, d_out.cuda())
    assert all(torch.equal(a, b) for a, b in zip(again, got))


def test_slots_wait_for_nothing_are_captured_and_keep_to_their_budget():
    block, operands, d_out = slots_of(torch.float32, receive_factor=0.25)
    _, slots = run_slots(block, *(part.cuda() for part in operands), d_out.cuda())
    assert int(slots[2]) == 0 and slots[0].abs().max() == 0 and slots[1].abs().max() == 0
    block, operands, d_out = slots_of(torch.float32)
    x, ids, weights = (part.cuda() for part in operands)
    block(x, ids, weights)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x, ids, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = block(x, ids, weights)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, block(x, ids, weights)[0])
    with pytest.raises(ValueError, match="x has 140 rows, this exchange's T_max is 70"):
        block(x.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1))


def test_refusals_name_what_is_wrong(monkeypatch):
    a, w = torch.zeros(4, 8, device="cuda"), torch.zeros(1, 8, 8, device="cuda")
    with pytest.raises(ValueError, match="offsets is on cpu, the other tensors are on cuda:0"):
        wbt.grouped_matmul(a, w, torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="bias is on cpu, the other tensors are on cuda:0"):
        wbt.router(a, wbt.RouterConfig(E=8, K=1), bias=torch.zeros(8))
    monkeypatch.setattr(wbt._views, "has_cuda", lambda: False)
    with pytest.raises(NotImplementedError, match="a is on cuda:0; this build of Waybill computes on the CPU only"):
        wbt.grouped_matmul(a, w, torch.tensor([0, 4], dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mx_codes_are_those_of_the_cpu(element):
    x = torch.randn(3, 5, 64) * torch.exp2(4 * torch.randn(3, 5, 64))
    want, got = (wbt.quantize_mx(part, element=element) for part in (x, x.cuda()))
    assert torch.equal(got[0].view(torch.uint8).cpu(), want[0].view(torch.uint8)) and torch.equal(got[1].cpu(), want[1])
    assert torch.equal(wbt.dequantize_mx(*got).cpu(), wbt.dequantize_mx(*want))

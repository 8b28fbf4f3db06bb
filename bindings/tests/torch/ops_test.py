# SPDX-License-Identifier: Apache-2.0
"""The custom ops: values and gradients against plain PyTorch, opcheck of fake functions and autograd, torch.compile, refusals."""

import pytest
import reference
import torch
import waybill
import waybill.torch as wbt
from conftest import relative


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_values_and_gradients(dtype, bound, score):
    T, E, K = 37, 12, 3
    logits = torch.randn(T, E, dtype=torch.float32).to(dtype).requires_grad_()
    coefficient = 0.1 if score == "softmax" else 0.0
    routes = wbt.router(logits, wbt.RouterConfig(E=E, K=K, score=score, aux_coefficient=coefficient, z_coefficient=0.01))
    wide = logits.detach().float().requires_grad_()
    ids, weights = reference.route(wide, K, score=score)
    assert torch.equal(routes.ids.long(), ids)
    assert relative(routes.weights, weights) < 1e-5
    assert torch.equal(routes.counts.long(), torch.bincount(ids.flatten(), minlength=E))
    losses = [reference.aux_loss(wide, ids, coefficient), torch.zeros(()), reference.z_loss(wide, 0.01)]
    for got, want in zip(routes.losses, losses):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    d_weights, d_losses = torch.randn(T, K), torch.tensor([0.5, 1.0, 2.0])
    ((routes.weights * d_weights).sum() + (routes.losses * d_losses).sum()).backward()
    ((weights * d_weights).sum() + sum(loss * scale for loss, scale in zip(losses, d_losses))).backward()
    assert relative(logits.grad, wide.grad) < bound


def test_router_padding_bias_and_no_tokens():
    logits = torch.zeros(3, 4)
    routes = wbt.router(logits, wbt.RouterConfig(E=4, K=1), bias=torch.tensor([0.0, 0, 5, 0]), padding_mask=torch.tensor([False, True, False]))
    assert routes.ids.tolist() == [[2], [-1], [2]] and routes.weights.tolist() == [[1], [0], [1]] and routes.counts.tolist() == [0, 0, 2, 0]
    empty = wbt.router(torch.zeros(0, 4), wbt.RouterConfig(E=4, K=2))
    assert empty.ids.shape == (0, 2) and empty.counts.tolist() == [0] * 4


@pytest.mark.parametrize("layout", ["LNC", "LCN"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [[5, 0, 7, 1], [0, 0, 0, 0], [13, 0, 0, 0]], ids=["ragged", "empty", "one"])
def test_grouped_matmul_values_and_gradients(layout, dtype, bound, sizes):
    L, N, C, S = 4, 6, 8, 16
    a = torch.randn(S, C).to(dtype).requires_grad_()
    w = torch.randn(L, *((N, C) if layout == "LNC" else (C, N))).to(dtype).requires_grad_()
    bias = torch.randn(L, N).requires_grad_()
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    y = wbt.grouped_matmul(a, w, offsets, bias=bias, layout=layout)
    a64, w64, bias64 = (t.detach().double().requires_grad_() for t in (a, w, bias))
    parts = [a64[offsets[g] : offsets[g + 1]] @ (w64[g].T if layout == "LNC" else w64[g]) + bias64[g] for g in range(L)]
    want = torch.cat([*parts, a64.new_zeros(S - offsets[-1], N)])
    assert y.dtype == dtype and relative(y, want) < bound
    dy = torch.randn(S, N).to(dtype)
    y.backward(dy)
    (want * dy.double()).sum().backward()
    for got, expected in ((a, a64), (w, w64), (bias, bias64)):
        assert relative(got.grad, expected.grad) < bound
    for g, size in enumerate(sizes):
        assert size or w.grad[g].abs().max() == 0


def test_opcheck_of_router_and_grouped_matmul():
    text = wbt.RouterConfig(E=6, K=2, aux_coefficient=0.1).text
    # The whole-graph utility makes gradients for integer outputs too; the compiled block below covers what it would.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.waybill.router.default, (torch.randn(4, 6, requires_grad=True), None, None, text, 0), test_utils=utilities)
    args = (torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True), torch.tensor([0, 2, 5], dtype=torch.int32), None, False)
    torch.library.opcheck(torch.ops.waybill.grouped_matmul.default, args)


def test_a_block_of_ops_compiles_and_trains_the_same():
    E, K, H, F, T = 4, 2, 8, 6, 10
    config = wbt.RouterConfig(E=E, K=K, aux_coefficient=0.01)
    exchange = wbt.Exchange(waybill.single(), H=H, E=E, K=K)
    leaves = [torch.randn(T, H), torch.randn(E, H), torch.randn(E, 2 * F, H), torch.randn(E, H, F)]

    def block(x, gate, w1, w2):
        routes = wbt.router(x @ gate.T, config)
        plan = exchange.plan(routes.ids, routes.weights)
        slots = exchange.permute(exchange.dispatch(x, plan), plan)
        left, right = wbt.grouped_matmul(slots, w1, plan.expert_offsets).chunk(2, -1)
        y = wbt.grouped_matmul(torch.nn.functional.silu(left) * right, w2, plan.expert_offsets)
        return exchange.combine(exchange.unpermute(y, plan), plan), routes.losses.sum()

    def run(function, tensors):
        tensors = [t.clone().requires_grad_() for t in tensors]
        out, loss = function(*tensors)
        (out.square().sum() + loss).backward()
        return [out.detach(), *(t.grad for t in tensors)]

    def by_hand(x, gate, w1, w2):
        logits = x @ gate.T
        ids, weights = reference.route(logits, K)
        return reference.experts(x, ids, weights, w1, w2), reference.aux_loss(logits, ids, 0.01)

    want = run(by_hand, [t.double() for t in leaves])
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for got in (run(block, leaves), run(compiled, leaves)):
        for mine, theirs in zip(got, want):
            assert relative(mine, theirs) < 1e-5


@pytest.mark.parametrize("P", [1, 2])
def test_two_steps_are_the_four(P):
    E, K, H, T = 4, 2, 8, 10
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(P * T)]).to(torch.int16)
    ids[3] = -1
    x, weights = torch.randn(P * T, H), torch.rand(P * T, K)

    def body(fabric):
        exchange = wbt.Exchange(fabric, H=H, E=E, K=K, alignment=4)
        mine = slice(fabric.rank * T, (fabric.rank + 1) * T)

        def run(steps):
            a, w = x[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
            out = steps(a, ids[mine], w)
            return [out, *torch.autograd.grad(out.square().sum(), (a, w))]

        def four(a, ids, w):
            plan = exchange.plan(ids, w)
            slots = exchange.permute(exchange.dispatch(a, plan), plan)
            return exchange.combine(exchange.unpermute(3 * slots, plan), plan)

        def two(a, ids, w):
            slots = exchange.dispatch_slots(a, ids, w)
            assert int(slots.group_sizes.sum()) == len(slots.rows) and int(slots.valid) == 1
            return exchange.combine_slots(3 * slots.rows, ids, w)

        assert all(torch.equal(one, other) for one, other in zip(run(four), run(two)))
        return True

    assert waybill.Group(P).run(body) == [True] * P


def test_refusals_name_what_is_wrong(monkeypatch):
    config = wbt.RouterConfig(E=4, K=2)
    with pytest.raises(ValueError, match="logits is float64, allowed are float32, bfloat16, float16"):
        wbt.router(torch.zeros(2, 4, dtype=torch.float64), config)
    with pytest.raises(ValueError, match=r"logits has shape \[2, 5\], needed is \[T, 4\]"):
        wbt.router(torch.zeros(2, 5), config)
    with pytest.raises(TypeError, match="logits is list, a torch.Tensor is needed"):
        wbt.router([[0.0]], config)
    with pytest.raises(ValueError, match="K is 9|K = 9"):
        wbt.router(torch.zeros(2, 4), wbt.RouterConfig(E=4, K=9))
    with pytest.raises(ValueError, match=r"weights has shape \[2, 3, 5\], needed is \[L, N, 4\]"):
        wbt.grouped_matmul(torch.zeros(2, 4), torch.zeros(2, 3, 5), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="offsets"):
        wbt.grouped_matmul(torch.zeros(2, 4), torch.zeros(1, 3, 4), torch.tensor([0, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match="is not contiguous"):
        wbt._views.view(torch.zeros(4, 4).T[:2], "x")

    class OnGpu(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda", 1)

    monkeypatch.setattr(wbt._views, "has_cuda", lambda: False)
    with pytest.raises(NotImplementedError, match="logits is on cuda:1; this build of Waybill computes on the CPU only"):
        wbt.router(torch.zeros(2, 4).as_subclass(OnGpu), config)


@pytest.mark.parametrize("element, largest", [("e4m3", 448.0), ("e5m2", 57344.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_codes_come_back_within_half_a_step(element, largest, dtype):
    x = (torch.randn(3, 5, 64) * torch.exp2(4 * torch.randn(3, 5, 64))).to(dtype)
    codes, scales = wbt.quantize_mx(x, element=element)
    assert codes.shape == x.shape and scales.shape == (3, 5, 2)
    top = x.float().view(3, 5, 2, 32).abs().amax(-1)
    scale = torch.exp2(scales.float() - 127)
    assert (top <= largest * scale).all() and (top > largest * scale / 2).all()  # the smallest power of two that does not saturate
    back = wbt.dequantize_mx(codes, scales)
    step = 2.0 ** (-4 if element == "e4m3" else -3)
    smallest = scale[..., None].expand(3, 5, 2, 32).reshape(3, 5, 64) * 2.0 ** (-6 if element == "e4m3" else -14)
    assert ((back - x.float()).abs() <= step * x.float().abs().maximum(smallest)).all()
    assert torch.equal(back, codes.float() * scale.repeat_interleave(32, -1))


def test_mx_ops_compile_and_refuse_with_the_shape():
    x = torch.randn(4, 64)
    function = torch.compile(lambda x: wbt.dequantize_mx(*wbt.quantize_mx(x)), backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x), wbt.dequantize_mx(*wbt.quantize_mx(x)))
    kinds = ("test_autograd_registration", "test_faketensor")  # the others compare codes, which PyTorch cannot
    torch.library.opcheck(torch.ops.waybill.quantize_mx, (x, "e4m3", "round_up"), test_utils=kinds)
    torch.library.opcheck(torch.ops.waybill.dequantize_mx, (*wbt.quantize_mx(x), torch.bfloat16), test_utils=kinds)
    with pytest.raises(ValueError, match=r"x has shape \[4, 40\]: its last dimension must be a multiple of 32"):
        wbt.quantize_mx(torch.randn(4, 40))
    with pytest.raises(ValueError, match="element is 'e2m1', allowed are e4m3, e5m2"):
        wbt.quantize_mx(x, element="e2m1")
    with pytest.raises(ValueError, match=r"scales has shape \[4, 1\], needed is \[4, 2\]"):
        wbt.dequantize_mx(wbt.quantize_mx(x)[0], torch.zeros(4, 1, dtype=torch.uint8))

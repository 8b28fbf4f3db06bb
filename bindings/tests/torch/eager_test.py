# SPDX-License-Identifier: Apache-2.0
"""The eager path of the block and its custom op: the same bits, the same freeing, and each takes the calls that are its own."""

import pytest
import torch
import waybill.torch as wbt
from waybill.torch import _eager


def config_of(**extra):
    return wbt.MoeConfig(H=8, F=6, router=wbt.RouterConfig(E=4, K=2, aux_coefficient=0.05, z_coefficient=0.01), **extra)


@pytest.fixture
def calls(monkeypatch):
    """How often the eager path ran."""
    seen = []
    apply, evaluate = _eager.Block.apply, _eager.evaluate
    monkeypatch.setattr(_eager.Block, "apply", lambda *arguments: seen.append("train") or apply(*arguments))
    monkeypatch.setattr(_eager, "evaluate", lambda *arguments: seen.append("evaluate") or evaluate(*arguments))
    return seen


def run(block, x, d_out, calls, expected):
    block.zero_grad()
    x = x.clone().requires_grad_()
    del calls[:]
    out = block(x)
    out.backward(d_out)
    assert calls == expected
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in block.parameters())]


@pytest.mark.parametrize("extra", [{}, {"shared_F": 5}, {"router_bias": True}, {"expert_bias": True}, {"latent": 4}, {"activation": "relu_squared"}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_both_paths_give_the_same_bits(extra, tokens, calls, monkeypatch):
    block = wbt.MoE(config_of(**extra))
    block.loss_scale = 0.5
    x, d_out = torch.randn(tokens, 8), torch.randn(tokens, 8)
    block(x)  # the layer's handle is made by the custom op's path
    eager = run(block, x, d_out, calls, ["train"])
    again = run(block, x, d_out, calls, ["train"])
    monkeypatch.setattr(_eager, "calls_for", lambda *_: None)
    custom = run(block, x, d_out, calls, [])
    for a, b, c in zip(eager, again, custom, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_evaluation_saves_nothing_and_gives_the_same_bits(calls):
    block = wbt.MoE(config_of()).eval()
    x = torch.randn(10, 8)
    want = block(x)
    with torch.no_grad():
        assert torch.equal(block(x), want) and calls == ["evaluate"]
    assert len(block._layer._spare) >= 1


def test_what_eager_cannot_take_goes_to_the_custom_op(calls):
    block = wbt.MoE(config_of())
    x = torch.randn(10, 8)
    block(x)
    del calls[:]
    block(x.bfloat16())
    block(x, padding_mask=torch.zeros(10, dtype=torch.bool))
    block(x, rounding_seed=3)
    block(x, return_stats=True)
    block(torch.randn(8, 10).T)
    torch.utils.checkpoint.checkpoint(block, x.requires_grad_(), use_reentrant=False)
    torch.func.functional_call(block, dict(block.named_parameters()), (torch.randn(2, 5, 8),))
    assert calls == []
    with pytest.raises(ValueError, match=r"parameter gate: expected f32 \[4, 8\]"):
        block.gate.weight = torch.nn.Parameter(torch.zeros(3, 8))
        block(x)


def test_a_moved_or_replaced_parameter_is_seen(calls):
    block, other = wbt.MoE(config_of()), wbt.MoE(config_of())
    x, d_out = torch.randn(10, 8), torch.randn(10, 8)
    block(x)
    other(x)
    run(block, x, d_out, calls, ["train"])
    block.experts.down_proj = other.experts.down_proj
    block.gate.weight.data = other.gate.weight.data.clone()
    with torch.no_grad():
        block.experts.gate_up_proj.copy_(other.experts.gate_up_proj)
    for a, b in zip(run(block, x, d_out, calls, ["train"]), run(other, x, d_out, calls, ["train"]), strict=True):
        assert torch.equal(a, b)


def test_an_input_changed_behind_the_forward_and_a_second_derivative_are_refused(calls):
    block = wbt.MoE(config_of())
    x = torch.randn(10, 8)
    block(x)
    out = block(x)
    with torch.no_grad():
        block.gate.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|differentiat"):
        dx.sum().backward()
    assert calls == ["train", "train"]


def test_steps_of_dropped_graphs_are_used_again(calls):
    block = wbt.MoE(config_of())
    for _ in range(6):
        block(torch.randn(10, 8, requires_grad=True))
    assert calls == ["train"] * 5 and len(block._layer._spare) == 1

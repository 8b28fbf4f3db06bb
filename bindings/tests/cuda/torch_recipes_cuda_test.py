# SPDX-License-Identifier: Apache-2.0
"""waybill.torch.MoE under the recipes of blocks on CUDA tensors: against the same block on the CPU with the same recipe, and against no rounding at all."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
wbt = pytest.importorskip("waybill.torch")
from conftest import RECIPES, SEED, norm_error  # noqa: E402
from waybill._library import has_cuda  # noqa: E402

pytestmark = [pytest.mark.skipif(not has_cuda(), reason="libwaybill.so was built without CUDA"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")]  # fmt: skip
CONFIG = wbt.MoeConfig(H=128, F=96, router=wbt.RouterConfig(E=8, K=2), recipe="bf16")


def block_of(config, weights, device, dtype):
    block = wbt.MoE(config, device=device, dtype=dtype)
    block.load_state_dict({name: value.to(device, dtype) for name, value in weights.items()})
    return block


def run(block, x, d_out, seed=SEED):
    x = x.clone().requires_grad_()
    out = block(x, rounding_seed=seed)
    gradients = torch.autograd.grad(out, [x, *block.parameters()], d_out)
    names = ("out", "dx", *(name for name, _ in block.named_parameters()))
    return {name: value.detach().double().cpu().numpy() for name, value in zip(names, (out, *gradients), strict=True)}


def inputs(T=200):
    torch.manual_seed(20261201)
    plain = wbt.MoE(CONFIG)
    weights = {name: (torch.randn(value.shape) * value.shape[-1] ** -0.5).bfloat16() for name, value in plain.state_dict().items()}
    return weights, torch.randn(T, CONFIG.H).bfloat16(), torch.randn(T, CONFIG.H).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_that_of_the_cpu(recipe):
    bound, config = RECIPES[recipe], dataclasses.replace(CONFIG, recipe=recipe)
    weights, x, d_out = inputs()
    block = block_of(config, weights, "cuda", torch.bfloat16)
    got = run(block, x.cuda(), d_out.cuda())
    same = run(block_of(config, weights, "cpu", torch.float32), x.float(), d_out.float())
    exact = run(block_of(dataclasses.replace(CONFIG, recipe="fp32"), weights, "cpu", torch.float32), x.float(), d_out.float())
    for name, value in got.items():
        near, far = norm_error(value, same[name]), norm_error(value, exact[name])
        assert near <= bound.near and far <= bound.far and (far >= bound.least or name == "gate.weight"), (name, near, far)
    again = run(block, x.cuda(), d_out.cuda())
    assert all((again[name] == value).all() for name, value in got.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_captured_and_compiled(recipe):
    config = dataclasses.replace(CONFIG, recipe=recipe)
    weights, x, d_out = inputs(96)
    block, x, d_out = block_of(config, weights, "cuda", torch.bfloat16), x.cuda(), d_out.cuda()
    leaf, seed = x.clone().requires_grad_(), torch.tensor(SEED, device="cuda")

    def step(call):
        out = call(leaf, rounding_seed=seed)
        return [out.detach(), *torch.autograd.grad(out, [leaf, *block.parameters()], d_out)]  # no graph may outlive its stream

    def same(a, b):
        return all(torch.equal(one, two) for one, two in zip(a, b, strict=True))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step(block)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(block)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, want)
    seed.fill_(SEED + 1)  # read when a replay runs
    graph.replay()
    torch.cuda.synchronize()
    other = step(block)
    assert same(captured, other) and same(other, want) == (recipe != "nvfp4") and torch.equal(other[0], want[0])
    assert same(step(torch.compile(block, backend="aot_eager", fullgraph=True)), other)

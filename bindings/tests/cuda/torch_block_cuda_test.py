# SPDX-License-Identifier: Apache-2.0
"""waybill.torch.MoE on CUDA tensors against a loop over experts in float32: values, gradients, hard routes, graphs, several batches in flight, refusals."""

import dataclasses
import subprocess
import sys

import pytest
from conftest import reference as load_reference

torch = pytest.importorskip("torch")
wbt = pytest.importorskip("waybill.torch")
from waybill._library import has_cuda  # noqa: E402
from waybill.torch import _fast  # noqa: E402

pytestmark = [pytest.mark.skipif(not has_cuda(), reason="libwaybill.so was built without CUDA"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")]  # fmt: skip
plain = load_reference("torch")
LOSSES = {"aux_coefficient": 0.05, "z_coefficient": 0.01}
CONFIG = wbt.MoeConfig(H=64, F=48, router=wbt.RouterConfig(E=8, K=2, **LOSSES), recipe="bf16")
CONFIGS = {
    "plain": CONFIG,
    "shared": dataclasses.replace(CONFIG, shared_F=40),
    "sigmoid_bias": wbt.MoeConfig(H=64, F=48, router=wbt.RouterConfig(E=16, K=4, score="sigmoid", scaling_factor=2.5, **LOSSES), router_bias=True,
                                  recipe="bf16"),
    "activation_again": dataclasses.replace(CONFIG, recompute="activation"),
    "all_again": dataclasses.replace(CONFIG, recompute="layer", shared_F=40),
    "every_expert": wbt.MoeConfig(H=64, F=48, router=wbt.RouterConfig(E=4, K=4), recipe="bf16"),
    "expert_bias": dataclasses.replace(CONFIG, expert_bias=True),
    "global_loss": dataclasses.replace(CONFIG, router=wbt.RouterConfig(E=8, K=2), global_coefficient=0.05),
    "both_losses": dataclasses.replace(CONFIG, global_coefficient=0.03),
    "budget": dataclasses.replace(CONFIG, mode="captured", receive_factor=1.0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20261130)
    torch.backends.cuda.matmul.allow_tf32 = False


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30)) if want.numel() else 0.0


def make(config, dtype=torch.bfloat16):
    """A block whose weights are exact in bfloat16, of order 1 after each matmul."""
    block = wbt.MoE(config, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_((torch.randn(parameter.shape, device="cuda") * parameter.shape[-1] ** -0.5).bfloat16())
        if config.router_bias:
            block.gate.e_score_correction_bias.copy_(0.1 * torch.randn(config.router.E))
    return block


def rows(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def wide(block):
    return {name: parameter.detach().float().requires_grad_() for name, parameter in block.named_parameters()}


def theirs(x, p, config, bias=None, mask=None):
    """out, losses in float32."""
    router = config.router
    logits = x @ p["gate.weight"].T
    ids, weights = plain.route(logits, router.K, score=router.score, bias=bias, scaling=router.scaling_factor)
    valid = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else ~mask
    out = plain.experts(x, ids, weights * valid[:, None], p["experts.gate_up_proj"], p["experts.down_proj"],
                        p.get("experts.gate_up_proj_bias"), p.get("experts.down_proj_bias"))  # fmt: skip
    if config.shared_F:
        gated = torch.nn.functional.silu(x @ p["shared_experts.gate_proj.weight"].T) * (x @ p["shared_experts.up_proj.weight"].T)
        out = out + gated @ p["shared_experts.down_proj.weight"].T
    loss = x.new_zeros(())
    coefficient = router.aux_coefficient + config.global_coefficient  # one batch of one rank: the same loss twice
    if coefficient and router.score == "softmax":
        loss = loss + plain.aux_loss(logits[valid], ids[valid], coefficient)
    if router.z_coefficient:
        loss = loss + plain.z_loss(logits[valid], router.z_coefficient)
    return out, loss


def compare(block, config, T, mask=None, bound=2e-2):
    x, d_out, p = rows(T, config.H), rows(T, config.H), wide(block)
    mine, want_x = x.clone().requires_grad_(), x.float().requires_grad_()
    bias = block.gate.e_score_correction_bias if config.router_bias else None
    want, want_loss = theirs(want_x, p, config, bias, mask)
    with_loss = config.router.score == "softmax"  # the reference knows no losses of sigmoid scores
    (want * d_out.float()).sum().add(want_loss if with_loss else 0.0).backward()
    out, stats = block(mine, mask, return_stats=True)
    (out.float() * d_out.float()).sum().add(stats.loss if with_loss else 0.0).backward()
    assert out.dtype == x.dtype and relative(out, want) < bound
    if with_loss:
        assert relative(stats.loss, want_loss) < 1e-3
    assert int(stats.valid) == 1 and int(stats.counts.sum()) == (T if mask is None else int((~mask).sum())) * config.router.K
    assert relative(mine.grad, want_x.grad) < bound
    for name, parameter in block.named_parameters():
        assert parameter.grad.dtype == parameter.dtype and relative(parameter.grad, p[name].grad) < bound, name
    return stats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients(name, dtype):
    config = CONFIGS[name]
    compare(make(config, dtype), config, 200)


def test_a_padding_mask_counts_for_nothing():
    compare(make(CONFIG), CONFIG, 150, mask=torch.arange(150, device="cuda") % 3 == 1)


@pytest.mark.parametrize("T", [0, 1, 7, 129])
def test_any_number_of_tokens(T):
    block, x = make(CONFIG), rows(T, CONFIG.H).requires_grad_()
    if T > 1:
        compare(block, CONFIG, T)
        return
    out = block(x)
    out.sum().backward()
    assert out.shape == x.shape and x.grad.shape == x.shape and torch.isfinite(out.float()).all()
    assert T or block.experts.down_proj.grad.abs().max() == 0


def test_all_tokens_to_one_expert():
    config = dataclasses.replace(CONFIG, router=wbt.RouterConfig(E=8, K=1))
    block = make(config)
    with torch.no_grad():
        block.gate.weight.zero_()  # ties go to the lowest id
    stats = compare(block, config, 96)
    assert stats.counts.tolist() == [96] + 7 * [0]


def test_an_exceeded_budget_is_reported_and_changes_nothing():
    config = dataclasses.replace(CONFIG, router=wbt.RouterConfig(E=8, K=1), mode="captured", receive_factor=0.5)
    block, x = make(config), rows(64, 64).requires_grad_()
    out, stats = block(x, return_stats=True)
    out.float().square().sum().backward()
    assert int(stats.valid) == 0 and int(stats.slot_demand) > int(stats.slot_capacity) and out.abs().max() == 0
    assert x.grad.abs().max() == 0 and all(parameter.grad.abs().max() == 0 for parameter in block.parameters())


def test_float32_parameters_get_the_unrounded_gradient():
    narrow = make(CONFIG)
    single = wbt.MoE(CONFIG, device="cuda", dtype=torch.float32)
    single.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    x = rows(100, 64)
    for block in (narrow, single):
        block(x).float().square().sum().backward()
    for (name, a), b in zip(narrow.named_parameters(), single.parameters()):
        assert b.grad.dtype == torch.float32 and torch.equal(a.grad, b.grad.bfloat16()), name


def gradients(block, x, d_out):
    x = x.clone().requires_grad_()
    out = block(x)
    return [out, *torch.autograd.grad(out, [x, *block.parameters()], d_out)]


def equal(a, b):
    return all(torch.equal(one, two) for one, two in zip(a, b, strict=True))


def test_repeats_have_equal_bits_and_a_second_backward_too():
    block, x, d_out = make(CONFIG), rows(3, 40, 64).requires_grad_(), rows(3, 40, 64)
    first = gradients(block, x.detach(), d_out)
    assert all(equal(gradients(block, x.detach(), d_out), first) for _ in range(3))
    out = block(x)
    again = [torch.autograd.grad(out, [x, *block.parameters()], d_out, retain_graph=True) for _ in range(2)]
    assert equal(again[0], first[1:]) and equal(again[1], first[1:])


def test_several_batches_are_in_flight_and_blocks_share_a_layer():
    blocks, xs, d_out = [make(CONFIG) for _ in range(2)], [rows(60, 64) for _ in range(3)], rows(60, 64)
    want = [[gradients(block, x, d_out) for x in xs] for block in blocks]
    leaves = [[x.clone().requires_grad_() for x in xs] for _ in blocks]
    outs = [[block(x) for x in mine] for block, mine in zip(blocks, leaves)]
    for b, block in enumerate(blocks):
        for i in (1, 0, 2):
            got = torch.autograd.grad(outs[b][i], [leaves[b][i], *block.parameters()], d_out)
            assert equal([outs[b][i], *got], want[b][i])


def test_each_loss_has_its_own_weight():
    config = dataclasses.replace(CONFIG, global_coefficient=0.03, router=wbt.RouterConfig(E=8, K=2, **LOSSES))
    block, x = make(config), rows(100, 64)

    def gate_gradient(*factors):
        block.zero_grad()
        out, stats = block(x, return_stats=True)
        (out.sum() * 0 + sum(factor * value for factor, value in zip(factors, (stats.aux_loss, stats.global_loss, stats.z_loss)))).backward()
        return block.gate.weight.grad.float()

    aux, both, z = gate_gradient(1, 0, 0), gate_gradient(0, 1, 0), gate_gradient(0, 0, 1)
    assert relative(both / 0.03, aux / 0.05) < 1e-2 and aux.abs().max() > 0 and z.abs().max() > 0
    assert relative(gate_gradient(2, 3, 4), 2 * aux + 3 * both + 4 * z) < 1e-2


def test_float32_arrays_take_the_plain_path_too():
    """With the bits of the custom op."""
    for dtype, x_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        block, x, d_out = make(dataclasses.replace(CONFIG, expert_bias=True), dtype), rows(60, 64).to(x_dtype), rows(60, 64).to(x_dtype)
        plain = [gradients(block, x, d_out) for _ in range(2)]
        assert len(block._cuda_calls) == 1 and equal(*plain)
        assert equal(gradients(torch.compile(block, backend="aot_eager", fullgraph=True), x, d_out), plain[0])


@pytest.mark.parametrize("name", ["plain", "sigmoid_bias", "shared", "expert_bias"])
def test_the_builtin_functions_have_the_bits_of_ctypes(name, monkeypatch):
    if not _fast.available():
        pytest.skip("no libwaybill_torch.so, or this PyTorch has no table of C functions for its tensors")
    block, x, d_out = make(CONFIGS[name]), rows(2, 30, 64), rows(2, 30, 64)
    for parameter in (block.experts.gate_up_proj_bias, block.experts.down_proj_bias) if name == "expert_bias" else ():
        parameter.data = parameter.data.float()  # as the layer takes them: nothing is converted, which is the other form's
    block.loss_scale = 0.5
    want = gradients(block, x, d_out)
    assert next(iter(block._cuda_calls.values())).fast is not None
    monkeypatch.setattr(_fast, "_load", lambda: None)
    block._forget()
    assert equal(gradients(block, x, d_out), want) and next(iter(block._cuda_calls.values())).fast is None


def test_checkpointing_and_offload_keep_the_bits():
    block, x, d_out = make(CONFIG), rows(60, 64), rows(60, 64)
    want = gradients(block, x, d_out)
    leaf = x.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=False)
    assert equal([out, *torch.autograd.grad(out, [leaf, *block.parameters()], d_out)], want)
    with torch.autograd.graph.save_on_cpu():
        out = block(leaf)
    assert equal([out, *torch.autograd.grad(out, [leaf, *block.parameters()], d_out)], want)


def test_nothing_waits_and_graphs_replay_with_other_data():
    block, x, d_out = make(CONFIG), rows(128, 64), rows(128, 64)
    leaf = x.clone().requires_grad_()

    def step():
        out = block(leaf)
        return [out, *torch.autograd.grad(out, [leaf, *block.parameters()], d_out)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(4):
        with torch.no_grad():
            leaf.copy_(rows(128, 64))
            d_out.copy_(rows(128, 64))
        graph.replay()
        torch.cuda.synchronize()
        got = [part.clone() for part in captured]
        assert equal(got, step())


def test_the_current_stream_is_used():
    block, source = make(CONFIG), rows(64, 64)
    want = block(source).detach()
    x = torch.zeros_like(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(source)
        out = block(x)
    stream.synchronize()
    assert torch.equal(out, want)


def test_compiled_code_has_the_bits_of_eager_code():
    block, x, d_out = make(CONFIG), rows(60, 64), rows(60, 64)
    want = gradients(block, x, d_out)
    assert equal(gradients(torch.compile(block, backend="aot_eager", fullgraph=True), x, d_out), want)


def test_a_block_trains():
    block = make(CONFIG, torch.float32)
    optimizer, x, target = torch.optim.Adam(block.parameters(), 1e-2), rows(256, 64), torch.randn(256, 64, device="cuda")
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (block(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_transformers_model_with_replaced_blocks_has_its_logits():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=64,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
    model = transformers.MixtralForCausalLM(config).cuda().bfloat16()
    tokens = torch.randint(0, 64, (2, 33), device="cuda")
    want = model(tokens).logits
    assert wbt.replace_moe_blocks(model) == 2
    assert relative(model(tokens).logits, want) < 5e-2


def test_refusals_name_what_is_wrong():
    x = rows(16, 64)
    with pytest.raises(NotImplementedError, match="the MoE layer on GPUs does not do recipes"):
        wbt.MoE(dataclasses.replace(CONFIG, recipe="fp32"), device="cuda")(x)
    with pytest.raises(ValueError, match=r"x has 16 rows, this block's T_max is 8"):
        make(dataclasses.replace(CONFIG, T_max=8))(x)
    with pytest.raises(ValueError, match="gate is on cpu, the other tensors are on cuda:0"):
        wbt.MoE(CONFIG)(x)
    with pytest.raises(ValueError, match=r"x has shape \[16, 32\], needed is \[\*, 64\]"):
        make(CONFIG)(rows(16, 32))
    with pytest.raises(ValueError, match="x is float16"):
        make(CONFIG)(x.half())
    with pytest.raises(ValueError, match="rounding_seed has 2 values, one is needed"):
        make(CONFIG)(x, rounding_seed=torch.tensor([3, 4]))
    fresh = make(dataclasses.replace(CONFIG, T_max=77))
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="allocates and cannot be captured"):
        fresh(x)


GRAPHED = """
import copy
import torch
import waybill.torch as wbt

torch.manual_seed(1)
block = wbt.MoE(wbt.MoeConfig(H=64, F=48, router=wbt.RouterConfig(E=8, K=2, aux_coefficient=0.05), recipe="bf16"), device="cuda", dtype=torch.bfloat16)
x, d_out, sample = (torch.randn(60, 64, device="cuda").bfloat16() for _ in range(3))
# A copy: PyTorch refuses to capture what still has a graph of another stream.
graphed = torch.cuda.make_graphed_callables(copy.deepcopy(block), (sample.clone().requires_grad_(),))

def gradients(block, given):
    leaf = given.clone().requires_grad_()
    out = block(leaf)
    return [out.detach().clone(), *torch.autograd.grad(out, [leaf, *block.parameters()], d_out)]

for given in (x, sample, x):
    got = [value.clone() for value in gradients(graphed, given)]
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(block, given), strict=True))
print("equal")
"""


def test_graphed_callables_have_the_bits_of_eager_calls():
    """In a process of its own: a capture that fails leaves CUDA unusable."""
    run = subprocess.run([sys.executable, "-c", GRAPHED], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.split() == ["equal"], run.stderr[-3000:]

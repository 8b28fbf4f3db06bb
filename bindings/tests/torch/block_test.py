# SPDX-License-Identifier: Apache-2.0
"""waybill.torch.MoE against transformers' own blocks and against itself on several ranks."""

import copy

import pytest
import torch
import waybill
import waybill.torch as wbt
from conftest import relative

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def mixtral(**extra):
    config = transformers.MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=50,
                                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, **extra)  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def qwen3(norm_topk_prob=True):
    config = transformers.Qwen3MoeConfig(hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=3,
                                         num_hidden_layers=2, vocab_size=50, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                                         norm_topk_prob=norm_topk_prob, max_position_embeddings=64)  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek():
    config = transformers.DeepseekV3Config(hidden_size=16, intermediate_size=24, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3,
                                           n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5, num_hidden_layers=3,
                                           first_k_dense_replace=1, vocab_size=50, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8,
                                           kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, max_position_embeddings=64)  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


MODELS = {"mixtral": mixtral, "qwen3": qwen3, "qwen3_not_renormalised": lambda: qwen3(False), "deepseek_v3": deepseek}


def randomise(model):
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "norm" not in name and "inv_freq" not in name:
            with torch.no_grad():
                tensor.copy_(torch.randn(tensor.shape) * (0.05 if "bias" in name else 0.3))
    return model


def blocks_of(model):
    return [module for module in model.modules() if type(module).__name__ in wbt.hub.SUPPORTED]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_transformers_block(name):
    theirs = blocks_of(randomise(MODELS[name]()))[0]
    ours = wbt.from_transformers(copy.deepcopy(theirs), transformers.PretrainedConfig())
    assert {key: value.shape for key, value in ours.state_dict().items()} == {key: value.shape for key, value in theirs.state_dict().items()}
    x = torch.randn(3, 7, 16)
    mine, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    d_out = torch.randn_like(x)
    out, expected = ours(mine), theirs(want)
    assert relative(out, expected) < 1e-5
    out.backward(d_out)
    expected.backward(d_out)
    assert relative(mine.grad, want.grad) < 1e-5
    gradients = dict(ours.named_parameters())
    for key, parameter in theirs.named_parameters():
        assert relative(gradients[key].grad, parameter.grad) < 1e-5, key


@pytest.mark.parametrize("name", MODELS)
def test_a_replaced_model_has_the_same_logits_loss_and_gradients(name):
    theirs = randomise(MODELS[name]())
    ours = copy.deepcopy(theirs)
    names = list(ours.state_dict())
    assert wbt.replace_moe_blocks(ours) == len(blocks_of(theirs))
    assert list(ours.state_dict()) == names or set(ours.state_dict()) == set(names)
    tokens = torch.randint(0, 50, (2, 9))
    got, want = ours(tokens, labels=tokens), theirs(tokens, labels=tokens)
    assert relative(got.logits, want.logits) < 1e-4
    got.loss.backward()
    want.loss.backward()
    gradients = dict(ours.named_parameters())
    for key, parameter in theirs.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-7:
            assert relative(gradients[key].grad, parameter.grad) < 1e-3, key


@pytest.mark.parametrize("style", ["qwen", "mixtral"])
def test_hub_names_round_trip_also_cut_over_ranks(style):
    config = wbt.MoeConfig(H=8, F=6, router=wbt.RouterConfig(E=4, K=2), shared_F=10, router_bias=True)
    whole = wbt.MoE(config)
    state = {key: value.clone() for key, value in wbt.to_hub(whole, prefix="model.layers.0.mlp.", style=style).items()}
    up = {"qwen": "up_proj", "mixtral": "w3"}[style]
    assert torch.equal(state[f"model.layers.0.mlp.experts.3.{up}.weight"], whole.experts.gate_up_proj[3, 6:])
    other = wbt.MoE(config)
    wbt.load_hub(other, state, prefix="model.layers.0.mlp.", style=style)
    for key, value in whole.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key

    def body(fabric):
        part = wbt.MoE(config, ep=fabric)
        wbt.load_hub(part, state, prefix="model.layers.0.mlp.", style=style)
        return wbt.to_hub(part, style=style)

    merged = {}
    for part in waybill.Group(2).run(body):
        merged.update(part)
    assert {f"model.layers.0.mlp.{key}" for key in merged} == set(state)
    assert all(torch.equal(merged[key.removeprefix("model.layers.0.mlp.")], value) for key, value in state.items())
    before = {key: value.clone() for key, value in other.state_dict().items()}
    del state[f"model.layers.0.mlp.experts.2.{up}.weight"]
    with pytest.raises(KeyError, match=f"1 of .* tensors are missing, first model.layers.0.mlp.experts.2.{up}.weight"):
        wbt.load_hub(other, state, prefix="model.layers.0.mlp.", style=style)
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


HUB = {"mixtral": ("block_sparse_moe", "mixtral"), "qwen3": ("mlp", "qwen"), "deepseek_v3": ("mlp", "qwen")}  # where a hub file has the block, its style


@pytest.mark.parametrize("name", HUB)
def test_hub_files_go_to_our_blocks_and_back_with_the_same_logits(name, tmp_path):
    """A file that transformers writes with one tensor an expert is loaded into our blocks by load_hub, and one that to_hub writes is loaded by transformers."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    place, style = HUB[name]
    theirs = randomise(MODELS[name]()).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    state = safetensors.load_file(tmp_path / "theirs" / "model.safetensors")
    assert any(f".{place}.experts.5." in key for key in state), sorted(state)[:20]
    tokens = torch.randint(0, 50, (2, 9))
    want = theirs(tokens).logits

    ours = randomise(MODELS[name]()).eval()
    assert relative(ours(tokens).logits, want) > 1e-2
    wbt.replace_moe_blocks(ours)
    blocks = {int(key.split(".")[2]): block for key, block in ours.named_modules() if isinstance(block, wbt.MoE)}
    rest = {key: value for key, value in state.items() if not any(f"layers.{layer}.{place}." in key for layer in blocks)}
    ours.load_state_dict(rest, strict=False)
    for layer, block in blocks.items():
        wbt.load_hub(block, state, prefix=f"model.layers.{layer}.{place}.", style=style)
    assert relative(ours(tokens).logits, want) < 1e-4

    written = dict(rest)
    for layer, block in blocks.items():
        written |= {key: value.contiguous() for key, value in wbt.to_hub(block, prefix=f"model.layers.{layer}.{place}.", style=style).items()}
    assert set(written) == set(state)
    (tmp_path / "ours").mkdir()
    safetensors.save_file({key: value.clone() for key, value in written.items()}, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    theirs.config.save_pretrained(tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    assert relative(again(tokens).logits, want) < 1e-5


def config_of(**extra):
    losses = {"aux_coefficient": 0.05, "z_coefficient": 0.01}
    return wbt.MoeConfig(H=8, F=6, router=wbt.RouterConfig(E=4, K=2, **losses), **extra)


def run_whole(block, x, d_out):
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(d_out)
    return out.detach(), x.grad, {name: parameter.grad.clone() for name, parameter in block.named_parameters()}


@pytest.mark.parametrize("tokens", [[6, 6], [9, 3], [12, 0], [3, 4, 1, 4]])
def test_expert_parallel_ranks_compute_what_one_rank_computes(tokens):
    config = config_of(shared_F=5)
    whole = wbt.MoE(config)
    x, d_out = torch.randn(sum(tokens), 8), torch.randn(sum(tokens), 8)
    out, dx, gradients = run_whole(whole, x, d_out)
    begins = [sum(tokens[:r]) for r in range(len(tokens))]

    def body(fabric):
        rank, P = fabric.rank, fabric.size
        part = wbt.MoE(config, ep=fabric)
        state = whole.state_dict()
        local = slice(part.first_expert, part.first_expert + part.num_local_experts)
        part.load_state_dict({name: value[local] if name.startswith("experts.") else value for name, value in state.items()})
        rows = slice(begins[rank], begins[rank] + tokens[rank])
        return local, rows, run_whole(part, x[rows], d_out[rows]), P

    replicated = {name: 0 for name in gradients if not name.startswith("experts.")}
    for local, rows, (part_out, part_dx, part_gradients), P in waybill.Group(len(tokens)).run(body):
        if part_out.shape[0]:
            assert relative(part_out, out[rows]) < 1e-5 and relative(part_dx, dx[rows]) < 1e-5
        for name, gradient in part_gradients.items():
            if name.startswith("experts."):
                assert relative(gradient, gradients[name][local]) < 1e-5, name
            else:
                replicated[name] = replicated[name] + gradient
    for name, gradient in replicated.items():
        assert relative(gradient, gradients[name]) < 1e-5, name


def test_losses_attached_or_returned_have_the_same_gradient():
    block = wbt.MoE(config_of())
    x = torch.randn(10, 8)
    attached = run_whole(block, x, torch.zeros(10, 8))[2]
    block.zero_grad()
    out, stats = block(x, return_stats=True)
    assert float(stats.loss.detach()) == pytest.approx(float(stats.aux_loss + stats.z_loss), rel=1e-6) and float(stats.valid) == 1
    stats.loss.backward()
    assert relative(attached["gate.weight"], block.gate.weight.grad) < 1e-6 and attached["gate.weight"].abs().max() > 0
    block.eval().zero_grad()
    block(x).backward(torch.zeros(10, 8))
    assert block.gate.weight.grad.abs().max() == 0


def test_a_second_backward_and_a_replaced_token_give_the_same_gradients():
    block = wbt.MoE(config_of())
    x, d_out = torch.randn(10, 8), torch.randn(10, 8)
    want = run_whole(block, x, d_out)[2]
    block.zero_grad()
    out = block(x.requires_grad_())
    out.backward(d_out, retain_graph=True)
    out.backward(d_out)
    assert relative(block.experts.down_proj.grad, 2 * want["experts.down_proj"]) < 1e-6
    block.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = block(x)
    out.backward(d_out)
    assert torch.equal(block.experts.down_proj.grad, want["experts.down_proj"])
    block.zero_grad()
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).backward(d_out)
    assert torch.equal(block.experts.down_proj.grad, want["experts.down_proj"])


def test_steps_are_freed_with_their_graph_and_used_again():
    block = wbt.MoE(config_of())
    for _ in range(5):
        block(torch.randn(10, 8, requires_grad=True))  # never differentiated
    assert len(block._layer._spare) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_block_trains_the_same(backend):
    block = wbt.MoE(config_of(shared_F=5))
    x, d_out = torch.randn(10, 8), torch.randn(10, 8)
    want = run_whole(block, x, d_out)
    block.zero_grad()
    try:
        got = run_whole_compiled(torch.compile(block, backend=backend, fullgraph=True), block, x, d_out)
    except Exception as error:
        if backend == "inductor" and "compiler" in str(error).lower():
            pytest.skip(f"inductor has no C++ compiler here: {error}")
        raise
    assert relative(got[0], want[0]) < 1e-6 and relative(got[1], want[1]) < 1e-6
    for name, gradient in want[2].items():
        assert relative(got[2][name], gradient) < 1e-6, name


def run_whole_compiled(compiled, block, x, d_out):
    compiled(x)  # the layer's handle is made by the first call
    x = x.clone().requires_grad_()
    out = compiled(x)
    out.backward(d_out)
    return out.detach(), x.grad, {name: parameter.grad.clone() for name, parameter in block.named_parameters()}


def test_bfloat16_block_is_near_the_float32_one():
    block = wbt.MoE(config_of())
    x, d_out = torch.randn(30, 8).bfloat16(), torch.randn(30, 8).bfloat16()
    block.bfloat16()
    narrow = run_whole(block, x, d_out)
    wide = run_whole(copy.deepcopy(block).float(), x.float(), d_out.float())
    assert narrow[0].dtype == torch.bfloat16
    for got, want in [(narrow[0], wide[0]), (narrow[1], wide[1]), *((narrow[2][name], wide[2][name]) for name in wide[2])]:
        assert relative(got, want) < 2e-2


def test_padding_tokens_are_left_out():
    block = wbt.MoE(config_of())
    x = torch.randn(2, 5, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 2:] = True
    out, stats = block(x, padding_mask=mask, return_stats=True)
    short, short_stats = block(x[~mask], return_stats=True)
    assert torch.equal(out[~mask], short) and out[mask].abs().max() == 0
    assert int(stats.counts.sum()) == 14 and float(stats.loss.detach()) == pytest.approx(float(short_stats.loss.detach()), rel=1e-6)


def test_expert_bias_follows_the_load():
    block = wbt.MoE(config_of(router_bias=True))
    _, stats = block(torch.randn(64, 8), return_stats=True)
    block.update_expert_bias(stats.counts, 0.001)
    mean = stats.counts.double().mean()
    assert torch.equal(block.gate.e_score_correction_bias.sign(), (mean - stats.counts).sign().float())
    with pytest.raises(ValueError, match="no router bias"):
        wbt.MoE(config_of()).update_expert_bias(stats.counts, 0.001)


def test_refusals_name_what_is_wrong():
    block = wbt.MoE(config_of())
    with pytest.raises(ValueError, match=r"x has shape \[2, 9\], needed is \[\*, 8\]"):
        block(torch.zeros(2, 9))
    with pytest.raises(ValueError, match="x is float64"):
        block(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"padding_mask has shape \[3\], needed is \[2\]"):
        block(torch.zeros(2, 8), padding_mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="x is list, a torch.Tensor is needed"):
        block([[0.0] * 8])
    for wrong, text in (({"K": 5}, "K"), ({"K": 2, "score": "relu"}, "score is 'relu', allowed are softmax")):
        with pytest.raises(ValueError, match=text):  # where the block is made, not at its first call
            wbt.MoE(wbt.MoeConfig(H=8, F=6, router=wbt.RouterConfig(E=4, **wrong)))
    with pytest.raises(ValueError, match="no MoE block that Waybill can replace"):
        wbt.replace_moe_blocks(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="output_router_logits is True"):
        wbt.replace_moe_blocks(mixtral(output_router_logits=True))
    with pytest.raises(NotImplementedError, match="router_jitter_noise = 0.1"):
        wbt.replace_moe_blocks(mixtral(router_jitter_noise=0.1))
    with pytest.raises(ValueError, match="E = 4 experts cannot be spread evenly over 3 ranks"):
        wbt.MoE(config_of(), ep=waybill.Group(3).fabric(0))

    def mixed(fabric):
        other = wbt.MoeConfig(H=8, F=6 + fabric.rank, router=wbt.RouterConfig(E=4, K=2))
        with pytest.raises(ValueError, match="rank 0 has F = 6, rank 1 has 7"):
            wbt.MoE(other, ep=fabric)(torch.zeros(2, 8))

    waybill.Group(2).run(mixed)


@pytest.mark.parametrize("recipe, bound", [("bf16", 2e-2), ("fp8", 0.2), ("mxfp8", 0.2), ("nvfp4", 0.8)])
def test_recipes_round_operands_and_take_their_seed(recipe, bound):
    def block_of(name):
        torch.manual_seed(1)
        return wbt.MoE(wbt.MoeConfig(H=32, F=32, router=wbt.RouterConfig(E=4, K=2), recipe=name))

    x, d_out = torch.randn(64, 32), torch.randn(64, 32)

    def run(block, seed):
        mine = x.clone().requires_grad_()
        out = block(mine, rounding_seed=seed)
        out.backward(d_out, retain_graph=True)
        first = mine.grad.clone()
        out.backward(d_out)  # the forward again, with the same random numbers
        assert torch.equal(mine.grad, 2 * first)
        return out.detach(), first

    wide, narrow = run(block_of("fp32"), None), run(block_of(recipe), 7)
    for got, want in zip(narrow, wide):
        assert 0 < relative(got, want) < bound
    again, other = run(block_of(recipe), torch.tensor(7)), run(block_of(recipe), 8)
    assert all(torch.equal(a, b) for a, b in zip(narrow, again))
    assert torch.equal(narrow[1], other[1]) == (recipe != "nvfp4")

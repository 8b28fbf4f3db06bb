# SPDX-License-Identifier: Apache-2.0
"""Expert weights under the per-expert names of hub files, and MoE blocks of transformers models replaced in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MoeConfig, RouterConfig
from ..group import Fabric
from .moe import MoE

# Names of gate, up and down projection of one expert in hub files.
STYLES = {"qwen": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def _style(style: str) -> tuple[str, str, str]:
    if style not in STYLES:
        raise ValueError(f"style is {style!r}, allowed are {', '.join(STYLES)} (DeepSeek's names are those of qwen)")
    return STYLES[style]


def to_hub(block: MoE, *, prefix: str = "", style: str = "qwen") -> dict[str, Tensor]:
    """The block's state under hub names: prefix + "experts.{e}.gate_proj.weight" (or .w1.) and so on, e counted over all ranks.

    Only this rank's experts are there; gate and shared experts are on every rank. Expert weights are views, not copies.
    """
    gate_name, up_name, down_name = _style(style)
    if block.config.inner_width != 2 * block.config.F or block.config.expert_bias or block.config.latent:
        raise ValueError("hub names are defined for gated experts without biases and latent width")
    state = {prefix + name: value for name, value in block.state_dict().items() if not name.startswith("experts.")}
    F = block.config.F
    for index in range(block.num_local_experts):
        expert = f"{prefix}experts.{block.first_expert + index}."
        state[f"{expert}{gate_name}.weight"] = block.experts.gate_up_proj.detach()[index, :F]
        state[f"{expert}{up_name}.weight"] = block.experts.gate_up_proj.detach()[index, F:]
        state[f"{expert}{down_name}.weight"] = block.experts.down_proj.detach()[index]
    return state


@torch.no_grad()
def load_hub(block: MoE, state: Mapping[str, Tensor], *, prefix: str = "", style: str = "qwen") -> None:
    """Loads what to_hub names from a mapping that may hold more (a whole model's state, all experts). KeyError names what is missing;
    ValueError a wrong shape; nothing is changed then."""
    wanted = to_hub(block, prefix=prefix, style=style)
    missing = [name for name in wanted if name not in state]
    if missing:
        raise KeyError(f"{len(missing)} of {len(wanted)} tensors are missing, first {missing[0]}")
    for name, target in wanted.items():
        if state[name].shape != target.shape:
            raise ValueError(f"{name} has shape {list(state[name].shape)}, needed is {list(target.shape)}")
    for name, target in wanted.items():
        target.copy_(state[name])


def _settings(block: nn.Module, model_config: Any) -> MoeConfig:
    kind = type(block).__name__
    gate: Any = block.gate
    experts: Any = block.experts
    E, H = gate.weight.shape
    F = experts.down_proj.shape[2]
    act = getattr(model_config, "hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise NotImplementedError(f"{kind}: activation {act!r}; Waybill's gated experts are SwiGLU (silu)")
    if kind == "MixtralSparseMoeBlock":
        router = RouterConfig(E=E, K=gate.top_k, score="softmax", renormalise=True)
    elif kind in ("Qwen3MoeSparseMoeBlock", "OlmoeSparseMoeBlock"):
        router = RouterConfig(E=E, K=gate.top_k, score="softmax", renormalise=bool(gate.norm_topk_prob))
    else:
        router = RouterConfig(E=E, K=gate.top_k, score="sigmoid", renormalise=bool(gate.norm_topk_prob), scaling_factor=float(gate.routed_scaling_factor),
                              num_groups=gate.num_group, num_kept_groups=gate.topk_group,
                              normalise_epsilon=1e-20 if gate.norm_topk_prob else 0.0)  # fmt: skip
    shared = getattr(block, "shared_experts", None)
    return MoeConfig(H=H, F=F, router=router, shared_F=shared.up_proj.weight.shape[0] if shared is not None else 0,
                     router_bias=hasattr(gate, "e_score_correction_bias"),
                     recipe="bf16" if experts.down_proj.is_cuda else "fp32")  # fmt: skip


SUPPORTED = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "OlmoeSparseMoeBlock", "DeepseekV3MoE")


def from_transformers(block: nn.Module, model_config: Any, *, ep: Fabric | None = None, world: Fabric | None = None) -> MoE:
    """An MoE with the weights of one transformers block. Without a group the parameters are shared, not copied, so that an optimizer that
    holds them goes on; with one the local experts are cut out. Weights on a GPU: matmuls in bfloat16."""
    if type(block).__name__ not in SUPPORTED:
        raise NotImplementedError(f"{type(block).__name__} is not a block that Waybill can replace; known are {', '.join(SUPPORTED)}")
    if getattr(block, "jitter_noise", 0):
        raise NotImplementedError(f"router_jitter_noise = {block.jitter_noise}: noise on the router's input is not built in; set it to 0")
    config = _settings(block, model_config)
    result = MoE(config, ep=ep, world=world, device="meta")
    given: Any = block  # of a class of transformers
    local = slice(result.first_expert, result.first_expert + result.num_local_experts)
    whole = result.num_local_experts == config.router.E

    def experts(parameter: nn.Parameter) -> nn.Parameter:
        return parameter if whole else nn.Parameter(parameter.detach()[local].clone(), requires_grad=parameter.requires_grad)

    result.gate.weight = given.gate.weight
    if config.router_bias:
        result.gate.e_score_correction_bias = given.gate.e_score_correction_bias
    result.experts.gate_up_proj = experts(given.experts.gate_up_proj)
    result.experts.down_proj = experts(given.experts.down_proj)
    if config.shared_F:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(result.shared_experts, name).weight = getattr(given.shared_experts, name).weight
    return result.train(block.training)


def replace_moe_blocks(model: nn.Module, *, ep: Fabric | None = None, world: Fabric | None = None) -> int:
    """Replaces every MoE block of a transformers model by waybill.torch.MoE, in place; returns their number.

    Known blocks: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3. state_dict() keeps its names. Not combined with output_router_logits (the
    model's own auxiliary loss needs dense logits; use RouterConfig's losses). ValueError where there is no block to replace.
    """
    model_config = getattr(model, "config", None)
    if getattr(model_config, "output_router_logits", False):
        raise ValueError("config.output_router_logits is True: the replaced blocks return no [T, E] logits; set it to False")
    blocks = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children() if type(child).__name__ in SUPPORTED]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no MoE block that Waybill can replace; known are {', '.join(SUPPORTED)}")
    replacements = [from_transformers(child, model_config, ep=ep, world=world) for _, _, child in blocks]  # all or none
    for (parent, name, _), block in zip(blocks, replacements):
        setattr(parent, name, block)
    return len(blocks)

# SPDX-License-Identifier: Apache-2.0
"""waybill.torch.MoE: the MoE block as a module, with the parameter names that current transformers models have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from .. import _core, group
from ..config import MoeConfig
from ..group import Fabric
from . import _block, _device, _eager, _fast, _plain, _views


@dataclass(frozen=True)
class MoEStats:
    """What one call did. loss: this rank's share of all auxiliary losses together, differentiable; the sum over ranks is the loss.

    ids [T, K], weights [T, K]: this rank's routes. counts [E] int64: routes per expert over all ranks. stats: float64, see the properties.
    """

    loss: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor
    stats: Tensor

    @property
    def aux_loss(self) -> Tensor:
        return self.stats[0]

    @property
    def sequence_loss(self) -> Tensor:
        return self.stats[1]

    @property
    def global_loss(self) -> Tensor:
        return self.stats[2]

    @property
    def z_loss(self) -> Tensor:
        return self.stats[3]

    @property
    def valid(self) -> Tensor:
        """0 after a receive overflow on any rank (captured mode), or after a rank was lost (GPUs on several nodes): skip the update."""
        return self.stats[4]

    @property
    def slot_demand(self) -> Tensor:
        return self.stats[5]

    @property
    def slot_capacity(self) -> Tensor:
        return self.stats[6]


class _DeviceStats(MoEStats):
    """Of a call on a GPU: what needs kernels of its own is made when it is asked for."""

    _losses: Tensor
    _status: Tensor
    _counts: Tensor

    def __init__(self, losses: Tensor, status: Tensor, counts: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.__dict__.update(ids=ids, weights=weights, _losses=losses, _status=status, _counts=counts)

    def made(self) -> MoEStats:
        return MoEStats(self.loss, self.ids, self.weights, self.counts, self.stats)

    @property
    def loss(self) -> Tensor:  # type: ignore[override]
        return self._losses.sum()

    @property
    def counts(self) -> Tensor:  # type: ignore[override]
        return self._counts.long()

    @property
    def stats(self) -> Tensor:  # type: ignore[override]
        losses, status = self._losses, self._status
        return torch.cat([losses.double(), status[:3].double(), status[4:5].double(), status[3:4].double(), status[5:].double()])


class _Gate(nn.Module):
    def __init__(self, config: MoeConfig, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.router.E, config.H, device=device, dtype=dtype))
        if config.router_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.router.E, device=device))


class _Experts(nn.Module):
    def __init__(self, config: MoeConfig, L: int, device: Any, dtype: Any) -> None:
        super().__init__()

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.gate_up_proj = new(L, config.inner_width, config.row_width)
        self.down_proj = new(L, config.row_width, config.F)
        if config.expert_bias:
            self.gate_up_proj_bias = new(L, config.inner_width)
            self.down_proj_bias = new(L, config.row_width)


class _Shared(nn.Module):
    """Separate projections, as hub files have them; they are joined for the call."""

    def __init__(self, config: MoeConfig, device: Any, dtype: Any) -> None:
        super().__init__()
        options = {"bias": False, "device": device, "dtype": dtype}
        if config.inner_width == 2 * config.F:
            self.gate_proj = nn.Linear(config.H, config.shared_F, **options)
        self.up_proj = nn.Linear(config.H, config.shared_F, **options)
        self.down_proj = nn.Linear(config.shared_F, config.H, **options)

    def joined(self) -> Tensor:
        return torch.cat([self.gate_proj.weight, self.up_proj.weight]) if hasattr(self, "gate_proj") else self.up_proj.weight


class MoE(nn.Module):
    """Gate, router, dispatch, experts, combine, and their exact backward in one op each way.

    config: waybill.MoeConfig. ep: this rank's end of the expert-parallel group (None = not distributed); L = E / P experts live here,
    experts [rank * L, (rank + 1) * L). world: the group that counts and losses are reduced over (default ep; contains ep's ranks).

    Parameters, as in current transformers: gate.weight [E, H] (and the buffer gate.e_score_correction_bias [E]), experts.gate_up_proj
    [L, 2F, H] (gate, then up), experts.down_proj [L, H, F], shared_experts.*_proj.weight; with biases experts.*_proj_bias; with a latent width
    latent_down, latent_up. The block computes in float32: bfloat16 arrays are widened, results rounded once.

    forward(x [..., H]) -> [..., H]. In training mode the gradient of the auxiliary losses is added to the backward of the output, times
    `loss_scale` (1.0; set it to the loss scale of mixed precision, divided by what the main loss is divided by). With return_stats=True it
    is not: add stats.loss to your loss. Collective over ep and world; ranks may bring different numbers of tokens, none included.

    CUDA tensors (config.recipe "bf16", "fp8", "mxfp8" or "nvfp4", a library with CUDA): matmuls in bfloat16 or the recipe's formats; the gradient of
    a parameter comes in its dtype, of a float32 one unrounded. Calls queue on the current stream and wait for nothing; they can be captured after one
    call of either direction. ep: one process a GPU (one NVLink domain; several with config.hierarchy "two_level"), all ranks with the same T; its group
    must also move CPU tensors, and world must be ep. The first call with more rows than any before allocates and is collective: set config.T_max
    where lengths differ.
    """

    def __init__(self, config: MoeConfig, *, ep: Fabric | None = None, world: Fabric | None = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        _core.check_router(config.router)
        config.struct()  # names of choices are known
        self.config = config
        self._ep, self._world = ep, world
        P = ep.size if ep is not None else 1
        L = config.shapes(P)["w1"][0]
        self.first_expert = (ep.rank if ep is not None else 0) * L
        self.num_local_experts = L
        self.gate = _Gate(config, device, dtype)
        self.experts = _Experts(config, L, device, dtype)
        if config.shared_F:
            self.shared_experts = _Shared(config, device, dtype)
        if config.latent:
            self.latent_down = nn.Parameter(torch.empty(config.latent, config.H, device=device, dtype=dtype))
            self.latent_up = nn.Parameter(torch.empty(config.H, config.latent, device=device, dtype=dtype))
        self.loss_scale = 1.0
        self._has_three = not (config.shared_F or config.latent or config.router_bias or config.expert_bias)  # parameters: gate, w1, w2
        self._layer: _block.Layer | None = None
        self._cuda_layers: dict[tuple[int, int], int] = {}  # (T_max, device) -> number of the layer on that GPU
        self._forget()
        self.reset_parameters()

    def _forget(self) -> None:
        self._cuda_calls: dict[torch.Size, _plain.Calls] = {}  # by shape of x
        self._last_calls: _plain.Calls | None = None  # of them, the one used last, and what a call like it takes
        self._last_states: _plain.States | None = None
        self._call: Any = None

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as torch.nn.Linear; biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                bound = 1 / math.sqrt(parameter.shape[-1])
                nn.init.uniform_(parameter, -bound, bound)

    def __getstate__(self) -> dict[str, Any]:
        if self._ep is not None:
            raise TypeError("an MoE block of a group of ranks cannot be copied or pickled: its fabric belongs to this thread; save its state_dict()")
        return {**self.__dict__, "_layer": None, "_cuda_layers": {}, "_cuda_calls": {}, "_last_calls": None, "_last_states": None, "_call": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        import copy

        result = self.__class__.__new__(self.__class__)
        memo[id(self)] = result
        result.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return result

    def _number(self) -> int:
        if self._layer is None:
            self._layer = _block.Layer(self.config, self._ep or group.single(), self._world)
        return self._layer.number

    def _tensors(self) -> dict[str, Tensor]:
        experts, shared = self.experts, getattr(self, "shared_experts", None)
        named = {"gate": self.gate.weight, "router_bias": getattr(self.gate, "e_score_correction_bias", None), "w1": experts.gate_up_proj,
                 "w2": experts.down_proj, "b1": getattr(experts, "gate_up_proj_bias", None), "b2": getattr(experts, "down_proj_bias", None),
                 "shared_w1": shared.joined() if shared is not None else None, "shared_w2": shared.down_proj.weight if shared is not None else None,
                 "latent_down": getattr(self, "latent_down", None), "latent_up": getattr(self, "latent_up", None)}  # fmt: skip
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's. A plain call on a GPU, without hooks, is made at once: what nn.Module does before forward takes as long as the call's own part."""
        if not is_compiling() and self.__class__ is MoE and not kwargs:
            state = self.__dict__  # an attribute of a module takes several times as long
            call = state["_call"]
            if call is not None:
                out = call(state, *args)
                if out is not None:
                    return out
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, *, rounding_seed: Tensor | int | None = None,
                return_stats: bool = False) -> Any:  # fmt: skip
        """x [..., H] float32 or bfloat16; padding_mask [...] bool or uint8, True = padding (its routed part is 0). rounding_seed: for recipes
        with random numbers, one a layer, step and micro-batch, the same on every rank; a tensor does not recompile, and on a GPU is read when the
        kernels run, so that replays of a graph draw anew (give it on x's device). Returns out, or (out, MoEStats)."""
        if not is_compiling() and self._cuda_calls and padding_mask is None and rounding_seed is None and not return_stats:
            out = self._plain_cuda(x)
            if out is not None:
                return out
        if not isinstance(x, Tensor):
            _views.check(x, "x", _views.FLOATS, [])
        tensors = self._tensors()
        if x.is_cuda:
            return self._forward_cuda(x, tensors, padding_mask, rounding_seed, return_stats)
        if not return_stats and not is_compiling() and self._layer is not None and x.dim() == 2 and x.shape[1] == self.config.H:
            out = self._eager(x, tensors, padding_mask, rounding_seed)
            if out is not None:
                return out
        _views.check(x, "x", _views.FLOATS, [None] * (x.dim() - 1) + [self.config.H])
        rows = x.reshape(-1, self.config.H)
        if padding_mask is not None:
            _views.check(padding_mask, "padding_mask", [torch.bool, torch.uint8], list(x.shape[:-1]))
            padding_mask = padding_mask.reshape(-1).to(torch.uint8)
        seed = torch.as_tensor(rounding_seed, dtype=torch.int64) if rounding_seed is not None else None
        for name, tensor in tensors.items():
            _views.check(tensor, name, _views.FLOATS, tensor.shape)
        save = torch.is_grad_enabled() and (x.requires_grad or any(tensor.requires_grad for tensor in tensors.values()))
        out, loss, ids, weights, counts, stats, _ = torch.ops.waybill.moe(
            rows, list(tensors.values()), padding_mask, seed, ",".join(tensors), self._prepared(), save)  # fmt: skip
        if return_stats:
            return out.view(x.shape), MoEStats(loss, ids, weights, counts, stats)
        if self.training and save:
            out = _AttachLoss.apply(out, loss, self.loss_scale)
        return out.view(x.shape)

    def _forward_cuda(self, x: Tensor, tensors: dict[str, Tensor], padding_mask: Tensor | None, rounding_seed: Any, return_stats: bool) -> Any:
        config, names = self.config, tuple(tensors)
        _views.check(x, "x", _views.FLOATS, [None] * (x.dim() - 1) + [config.H], on_cuda=True)
        seed = None
        if rounding_seed is not None:
            seed = torch.as_tensor(rounding_seed, dtype=torch.int64, device=x.device)
            if seed.numel() != 1:
                raise ValueError(f"rounding_seed has {seed.numel()} values, one is needed")
        for name, tensor in tensors.items():
            if tensor.device != x.device or tensor.dtype not in _views.FLOATS:
                _views.check(tensor, name, _views.FLOATS, tensor.shape, like=x, on_cuda=True)
        rows = x if x.dim() == 2 else x.reshape(-1, config.H)
        T, device = rows.shape[0], x.device.index
        number = self._cuda_layers.get((config.T_max or T, device))
        if number is None:
            number = self._create_cuda(T, device)
        given = tuple(tensors.values())
        save = torch.is_grad_enabled() and (x.requires_grad or any(tensor.requires_grad for tensor in given))
        is_plain = not is_compiling() and type(x) is Tensor and not _are_functorch_transforms_active() and not _len_torch_dispatch_stack()
        if is_plain and not return_stats and padding_mask is None and seed is None:  # for the calls after this one
            if len(self._cuda_calls) >= 64:
                self._cuda_calls.clear()
            self._cuda_calls[x.shape] = _plain.Calls(_device._layer(number), names, given, x)
            out = self._plain_cuda(x)
            if out is not None:
                return out
        if padding_mask is not None:
            _views.check(padding_mask, "padding_mask", [torch.bool, torch.uint8], list(x.shape[:-1]), like=x, on_cuda=True)
            if self._ep is not None and self._ep.size > 1 and _device._layer(number).has_losses:
                raise NotImplementedError("losses with a padding mask over several processes: the number of valid tokens is not summed over GPUs")
            padding_mask = padding_mask.reshape(-1).to(torch.uint8)
        attached = self.training and save and not return_stats
        if is_plain and save:
            scale = self.loss_scale if attached else None if return_stats else 0.0
            out, ids, weights, counts, losses, status = _device.Eager.apply(rows, _device._layer(number), names, padding_mask, seed, scale, *given)
            attached = False
        else:
            out, ids, weights, counts, losses, status, _ = torch.ops.waybill.moe_cuda(rows, list(given), padding_mask, seed, ",".join(names), number, save)
        if return_stats:
            stats = _DeviceStats(losses, status, counts, ids, weights)
            return out.view(x.shape), stats.made() if is_compiling() else stats
        if attached:
            out = _AttachLoss.apply(out, losses.sum(), self.loss_scale)
        return out.view(x.shape)

    def _plain_cuda(self, x: Tensor) -> Tensor | None:
        """One autograd node and two calls of the library; None where the custom op must take the call. Every line here is host time of a step."""
        try:
            modules: dict[str, Any] = self._modules if self._has_three else {}
            experts = modules["experts"]._parameters
            tensors: tuple[Any, ...] = (modules["gate"]._parameters["weight"], experts["gate_up_proj"], experts["down_proj"])
        except KeyError:  # others, or of another kind (torch.nn.utils.parametrize)
            tensors = tuple(self._tensors().values())
        scale, calls = self.loss_scale if self.training else 0.0, self._last_calls
        out = calls.step(calls.states[scale], x, *tensors) if calls is not None else None
        if out is None:
            calls = self._cuda_calls.get(x.shape)
            if calls is not None:
                out = calls.step(calls.states[scale], x, *tensors)
                if out is not None:
                    self._last_calls = calls
                    self._last_states, self._call = calls.states, _fast.module_call(calls.names) if calls.fast is not None else None
        return out

    @torch.compiler.disable(recursive=True)
    def _create_cuda(self, T: int, device: int) -> int:
        """Collective, and waits for the device, where this process has no layer of these settings yet."""
        if self._world is not None and self._world is not self._ep:
            raise NotImplementedError("world: on GPUs counts and losses are those of the expert-parallel group")
        number = _device.layer_for(self.config, T, device, self._ep).number
        self._cuda_layers[(self.config.T_max or T, device)] = number
        return number

    def _eager(self, x: Tensor, tensors: dict[str, Tensor], *others: Any) -> Tensor | None:
        layer = self._layer
        assert layer is not None
        calls = _eager.calls_for(layer, tensors, x, *others)
        if calls is None:
            return None
        given = tuple(tensors.values())
        if torch.is_grad_enabled() and (x.requires_grad or any(tensor.requires_grad for tensor in given)):
            return _eager.Block.apply(x, layer, calls, self.loss_scale if self.training else 0.0, *given)
        return _eager.evaluate(layer, calls, x, given)

    @torch.compiler.disable(recursive=True)
    def _create(self) -> int:
        return self._number()

    def _prepared(self) -> int:
        """Number of the layer's handle, made at the first call (collective)."""
        return self._layer.number if self._layer is not None else self._create()

    def update_expert_bias(self, counts: Tensor, rate: float) -> None:
        """gate.e_score_correction_bias += rate * sign(mean(counts) - counts): once per optimizer step, counts [E] int64 summed over micro-batches."""
        from .. import update_expert_bias

        if not self.config.router_bias:
            raise ValueError("this block has no router bias; set MoeConfig(router_bias=True)")
        update_expert_bias(self.gate.e_score_correction_bias, counts, rate)

    def extra_repr(self) -> str:
        router, last = self.config.router, self.first_expert + self.num_local_experts - 1
        return f"H={self.config.H}, F={self.config.F}, E={router.E}, K={router.K}, score={router.score}, experts {self.first_expert} to {last} here"


class _AttachLoss(torch.autograd.Function):
    """The output itself; its backward adds loss_scale times the gradient of the losses."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, loss_scale: float) -> Tensor:
        ctx.loss_scale = loss_scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return d_out, torch.full((), ctx.loss_scale, device=d_out.device), None

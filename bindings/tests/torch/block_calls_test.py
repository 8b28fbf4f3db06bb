# SPDX-License-Identifier: Apache-2.0
"""The two forms of _plain.Calls on CPU tensors with a library of the test's own: which pointers reach which fields, what is refused."""

import ctypes as c
import gc
import sys
import types

import pytest
import torch
import waybill.torch as wbt
from waybill import _abi
from waybill.torch import _device, _fast, _plain

STATUS = {"forward": 0, "backward": 0}
SEEN = {}


def _fields(struct):
    return {name: getattr(struct, name).data for name, _ in struct._fields_[1:] if getattr(struct, name).rank}


@c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(_abi.MoeTensors), c.POINTER(_abi.Tensor), c.POINTER(_abi.MoeForwardOptions), c.POINTER(_abi.DeviceMoeOutputs),
             c.POINTER(_abi.Stream))  # fmt: skip
def _forward(layer, parameters, x, options, outputs, stream):
    SEEN["forward"] = {**_fields(parameters[0]), "x": x[0].data, "rows": tuple(x[0].shape[:2]), **_fields(outputs[0]), "training": options[0].training}
    return STATUS["forward"]


@c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(_abi.MoeTensors), c.POINTER(_abi.MoeTensors), *[c.POINTER(_abi.Tensor)] * 3, c.POINTER(_abi.MoeForwardOptions),
             c.POINTER(_abi.Tensor), c.c_void_p, c.POINTER(_abi.Stream))  # fmt: skip
def _backward(layer, parameters, gradients, x, d_out, dx, options, saved, weights, stream):
    sums = {f"d_{name}": value for name, value in _fields(gradients[0]).items()}
    SEEN["backward"] = {**_fields(parameters[0]), **sums, "x": x[0].data, "d_out": d_out[0].data, "dx": dx[0].data, "saved": saved[0].data, "weights": weights}
    if d_out[0].data:
        SEEN["d_out"] = c.string_at(d_out[0].data, 2 * d_out[0].shape[0] * d_out[0].shape[1])
    return STATUS["backward"]


class Layer:
    """As _device.Layer, on the CPU."""

    device, saved_bytes, has_losses = -1, 256, False

    def __init__(self, config):
        self.config, self.core = config, types.SimpleNamespace(handle=c.c_void_p(8))
        self.bytes = torch.empty(1, dtype=torch.uint8).expand(self.saved_bytes)

    def check_rows(self, T):
        pass

    def constant(self, scale):
        return torch.full((3,), scale)

    def new_options(self, training):
        return _abi.MoeForwardOptions(struct_size=c.sizeof(_abi.MoeForwardOptions), training=training)

    def new_stream(self):
        return _abi.Stream(struct_size=c.sizeof(_abi.Stream))

    array = _device.Layer.array


@pytest.fixture(params=["builtin", "ctypes"])
def form(request, monkeypatch):
    if request.param == "builtin" and not _fast.available():
        pytest.skip("no libwaybill_torch.so, or this PyTorch has no table of C functions for its tensors")
    if request.param == "ctypes":
        monkeypatch.setattr(_fast, "_load", lambda: None)
    monkeypatch.setattr(_plain, "library", lambda: {"wb_device_moe_forward": _forward, "wb_device_moe_backward": _backward})
    monkeypatch.setattr(_plain, "_cuda_getCurrentRawStream", lambda device: 0)
    STATUS.update(forward=0, backward=0)
    SEEN.clear()
    return request.param


def make(form, dims=(3, 8), **config):
    return make_block(form, dims, **config)[1:]


def make_block(form, dims=(3, 8), **config):
    block = wbt.MoE(wbt.MoeConfig(H=8, F=16, router=wbt.RouterConfig(E=4, K=2), recipe="bf16", **config), dtype=torch.bfloat16)
    x = torch.randn(*dims).bfloat16().requires_grad_()
    tensors = block._tensors()
    for name in {"b1", "b2"} & set(tensors):
        tensors[name].data = tensors[name].data.float()  # as the layer takes them
    calls = _plain.Calls(Layer(block.config), tuple(tensors), tuple(tensors.values()), x)
    assert (calls.fast is not None) == (form == "builtin")
    block._cuda_calls[x.shape] = calls
    return block, calls, x, tensors


def apply(x, calls, *tensors, scale=1.0):
    out = calls.step(calls.states[scale], x, *tensors)
    assert out is not None
    return out


def pointers(tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("config", [{}, {"router_bias": True, "shared_F": 8}, {"expert_bias": True}])
@pytest.mark.parametrize("dims", [(3, 8), (2, 3, 8)])
def test_each_pointer_reaches_its_field(form, dims, config):
    calls, x, tensors = make(form, dims, **config)
    assert calls.accept(x, *tensors.values())
    out = apply(x, calls, *tensors.values())
    seen = SEEN["forward"]
    saved = out.grad_fn.saved_tensors[1]
    assert seen == {**pointers(tensors), "x": x.data_ptr(), "rows": (x.numel() // 8, 8), "out": out.data_ptr(), "saved": saved.data_ptr(), "training": 1}
    d_out = torch.ones_like(out)
    trained = [tensor for name, tensor in tensors.items() if name != "router_bias"]
    dx, *gradients = torch.autograd.grad(out, [x, *trained], d_out)
    seen = SEEN["backward"]
    names = [name for name in tensors if name != "router_bias"]
    assert {name: seen.pop(name) for name in tensors} == pointers(tensors)
    assert seen == {**{f"d_{name}": gradient.data_ptr() for name, gradient in zip(names, gradients)}, "x": x.data_ptr(), "d_out": d_out.data_ptr(),
                    "dx": dx.data_ptr(), "saved": saved.data_ptr(), "weights": None}  # fmt: skip
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in trained] and dx.shape == x.shape


def test_an_evaluation_saves_nothing(form):
    calls, x, tensors = make(form)
    out = _plain.evaluate(x, calls, tuple(tensors.values()))
    assert SEEN["forward"] == {**pointers(tensors), "x": x.data_ptr(), "rows": (3, 8), "out": out.data_ptr(), "training": 0}


def test_a_cotangent_of_another_layout_is_copied(form):
    calls, x, tensors = make(form)
    ones = torch.ones(3, 8, dtype=torch.bfloat16)
    strided = torch.stack([ones, ones * 2], -1)[..., 0]
    out = apply(x, calls, *tensors.values())
    torch.autograd.grad(out, x, strided)
    assert SEEN["backward"]["d_out"] != strided.data_ptr() and SEEN["d_out"] == bytes.fromhex("803f") * 24
    apply(x, calls, *tensors.values()).sum().backward()  # expanded from one value
    assert SEEN["d_out"] == bytes.fromhex("803f") * 24 and tensors["w1"].grad is not None


def test_what_is_not_as_it_was_is_left_to_the_custom_op(form):
    calls, x, tensors = make(form)
    gate, w1, w2 = tensors.values()
    turned = w1.detach().transpose(1, 2).contiguous().transpose(1, 2)
    others = [(x[:2], gate, w1, w2), (x.detach().float(), gate, w1, w2), (x.detach().t().contiguous().t(), gate, w1, w2), (x[None], gate, w1, w2),
              (x, gate.detach().float(), w1, w2), (x, gate, w1[:2], w2), (x, gate, turned, w2), (x, gate, w2, w1)]  # fmt: skip
    if form == "builtin":  # on the CPU ctypes' form cannot tell them apart: no device has a number there
        others.append((x, gate, w1.detach().to("meta"), w2))
    for given in others:
        assert not calls.accept(*given)
    odd = torch.empty(3 * 8 + 1, dtype=torch.bfloat16)[1:].view(3, 8)  # not on 16 bytes
    assert not calls.accept(odd, gate, w1, w2) and calls.accept(x, gate, w1, w2)


def test_a_failed_call_raises_the_librarys_text(form):
    calls, x, tensors = make(form)
    STATUS["forward"] = _abi.INVALID_ARGUMENT
    with pytest.raises(ValueError):
        apply(x, calls, *tensors.values())
    STATUS.update(forward=0, backward=_abi.OUT_OF_MEMORY)
    out = apply(x, calls, *tensors.values())
    with pytest.raises(MemoryError):
        out.backward(torch.ones_like(out))


def test_calls_keep_no_reference(form):
    calls, x, tensors = make(form, router_bias=True)
    given, objects = tuple(tensors.values()), (None, torch.empty_like, calls.bytes, x, *tensors.values())

    def step():
        out = apply(x, calls, *given)
        torch.autograd.grad(out, [x, tensors["w1"]], torch.ones_like(out))
        _plain.evaluate(x, calls, given)

    for _ in range(100):
        step()
    gc.collect()
    before = [sys.getrefcount(value) for value in objects]
    for _ in range(300):
        step()
    gc.collect()
    grown = [sys.getrefcount(value) - count for value, count in zip(objects, before)]
    assert max(grown) < 100, grown


def test_a_loss_scale_becomes_weights_of_the_backward(form):
    calls, x, tensors = make(form)
    calls.layer.has_losses = True
    for scale, wanted in ((1.0, None), (0.5, [0.5] * 3), (0.0, [0.0] * 3)):
        kept = []
        calls.layer.constant = lambda value, kept=kept: kept.append(torch.full((3,), value)) or kept[0]
        calls.states.clear()
        torch.autograd.grad(apply(x, calls, *tensors.values(), scale=scale), x, torch.ones(3, 8).bfloat16())
        assert SEEN["backward"]["weights"] == (kept[0].data_ptr() if kept else None) and [t.tolist() for t in kept] == ([wanted] if wanted else [])


def test_autograd_finds_what_it_always_does(form):
    """Saved tensors go through hooks, changes of them and a second backward are errors, second derivatives are refused when they are asked for."""
    calls, x, tensors = make(form)
    ones, given = torch.ones(3, 8).bfloat16(), tuple(tensors.values())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or len(packed) - 1, lambda index: packed[index].clone()):
        out = apply(x, calls, *given)
    torch.autograd.grad(out, x, ones, retain_graph=True)
    assert len(packed) == 5 and SEEN["backward"]["w1"] != given[1].data_ptr()
    out = apply(x, calls, *given)
    torch.autograd.grad(out, x, ones)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x, ones)
    leaf = x * 1
    out = apply(leaf, calls, *given)
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(out, x, ones)
    d_out = ones.clone().requires_grad_()
    (first,) = torch.autograd.grad(apply(x, calls, *given), x, d_out, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_the_module_calls_what_is_plain_at_once(form, monkeypatch):
    block, calls, x, tensors = make_block(form)
    slow = []
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda self, *args, **kwargs: slow.append(args) or self.forward(*args, **kwargs))

    def path(call=lambda: block(x)):
        SEEN.clear(), slow.clear()
        try:
            out = call()
        except AttributeError:  # of the custom op's way, which this layer of the test's does not have
            out = None
        return "nn.Module" if slow else "at once", out

    plain = "at once" if form == "builtin" else "nn.Module"
    assert path()[0] == "nn.Module" and path()[0] == plain
    out = path()[1]
    assert SEEN["forward"]["training"] == 1 and SEEN["forward"]["w1"] == tensors["w1"].data_ptr() and out.grad_fn is not None
    block.experts.down_proj = torch.nn.Parameter(torch.zeros_like(block.experts.down_proj))
    assert path()[0] == plain and SEEN["forward"]["w2"] == block.experts.down_proj.data_ptr()
    with torch.no_grad():
        assert path()[0] == plain and SEEN["forward"]["training"] == 0
    block.eval()
    assert path()[0] == "nn.Module" and path()[0] == plain and path()[1].grad_fn is not None  # the loss scale of an evaluation is 0: another state
    block.train()
    for hooks in (block.register_forward_hook, block.register_forward_pre_hook, block.register_full_backward_hook,
                  torch.nn.modules.module.register_module_forward_hook, torch.nn.modules.module.register_module_full_backward_hook):  # fmt: skip
        handle = hooks(lambda *_: None)
        assert path()[0] == "nn.Module"
        handle.remove()
        assert path()[0] == plain
    block.forward = block.forward
    assert path()[0] == "nn.Module"
    del block.forward
    other = x.detach()[:2].clone().requires_grad_()
    assert path(lambda: block(other))[0] == "nn.Module" and path()[0] == plain
    assert path(lambda: block(x, None))[0] == "nn.Module"
    slow.clear()
    with pytest.raises(RuntimeError, match="Batching rule"):  # the custom op's: a transform is not for a plain call
        torch.func.vmap(block)(torch.stack([x, x]).detach())
    assert slow


def test_float32_is_narrowed_for_the_layer(form):
    if form == "builtin":
        pytest.skip("float32 is the other form's")
    block = wbt.MoE(wbt.MoeConfig(H=8, F=16, router=wbt.RouterConfig(E=4, K=2), recipe="bf16"))
    x, tensors = torch.randn(3, 8, requires_grad=True), block._tensors()
    calls = _plain.Calls(Layer(block.config), tuple(tensors), tuple(tensors.values()), x)
    out = apply(x, calls, *tensors.values())
    assert out.dtype is torch.float32 and SEEN["forward"]["w1"] != tensors["w1"].data_ptr()
    out.sum().backward()
    assert SEEN["backward"]["d_w1"] == tensors["w1"].grad.data_ptr() and x.grad.dtype is torch.float32

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

    device, saved_bytes = -1, 256

    def __init__(self, config):
        self.config, self.core = config, types.SimpleNamespace(handle=c.c_void_p(8))
        self.bytes = torch.empty(1, dtype=torch.uint8).expand(self.saved_bytes)

    def check_rows(self, T):
        pass

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
    block = wbt.MoE(wbt.MoeConfig(H=8, F=16, router=wbt.RouterConfig(E=4, K=2), recipe="bf16", **config), dtype=torch.bfloat16)
    x = torch.randn(*dims).bfloat16().requires_grad_()
    tensors = block._tensors()
    for name in {"b1", "b2"} & set(tensors):
        tensors[name].data = tensors[name].data.float()  # as the layer takes them
    calls = _plain.Calls(Layer(block.config), tuple(tensors), tuple(tensors.values()), x)
    assert (calls.fast is not None) == (form == "builtin")
    return calls, x, tensors


def pointers(tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("config", [{}, {"router_bias": True, "shared_F": 8}, {"expert_bias": True}])
@pytest.mark.parametrize("dims", [(3, 8), (2, 3, 8)])
def test_each_pointer_reaches_its_field(form, dims, config):
    calls, x, tensors = make(form, dims, **config)
    assert calls.accept(x, *tensors.values())
    out = _plain.Block.apply(x, calls, 1.0, *tensors.values())
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
    out = _plain.Block.apply(x, calls, 1.0, *tensors.values())
    torch.autograd.grad(out, x, strided)
    assert SEEN["backward"]["d_out"] != strided.data_ptr() and SEEN["d_out"] == bytes.fromhex("803f") * 24
    _plain.Block.apply(x, calls, 1.0, *tensors.values()).sum().backward()  # expanded from one value
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
        _plain.Block.apply(x, calls, 1.0, *tensors.values())
    STATUS.update(forward=0, backward=_abi.OUT_OF_MEMORY)
    out = _plain.Block.apply(x, calls, 1.0, *tensors.values())
    with pytest.raises(MemoryError):
        out.backward(torch.ones_like(out))


def test_calls_keep_no_reference(form):
    calls, x, tensors = make(form, router_bias=True)
    given, objects = tuple(tensors.values()), (None, torch.empty_like, calls.bytes, x, *tensors.values())

    def step():
        out = _plain.Block.apply(x, calls, 1.0, *given)
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


def test_float32_is_narrowed_for_the_layer(form):
    if form == "builtin":
        pytest.skip("float32 is the other form's")
    block = wbt.MoE(wbt.MoeConfig(H=8, F=16, router=wbt.RouterConfig(E=4, K=2), recipe="bf16"))
    x, tensors = torch.randn(3, 8, requires_grad=True), block._tensors()
    calls = _plain.Calls(Layer(block.config), tuple(tensors), tuple(tensors.values()), x)
    out = _plain.Block.apply(x, calls, 1.0, *tensors.values())
    assert out.dtype is torch.float32 and SEEN["forward"]["w1"] != tensors["w1"].data_ptr()
    out.sum().backward()
    assert SEEN["backward"]["d_w1"] == tensors["w1"].grad.data_ptr() and x.grad.dtype is torch.float32

# SPDX-License-Identifier: Apache-2.0
"""Several GPUs of one process, as far as a machine without a GPU goes: which rank is where, what is made when a program is lowered, refusals."""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waybill.jax as wbj
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from waybill import _abi
from waybill.jax import _device_block, _ffi, _local

E, T, H, K = 8, 32, 8, 2


def auto_mesh(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


class Gpu(NamedTuple):
    process_index: int
    local_hardware_id: int
    platform: str = "gpu"


def mesh_of(names, rows):
    """A mesh whose devices are `rows` of (process, local number)."""

    class FakeMesh(Mesh):
        axis_names = names
        devices = np.empty((len(rows), len(rows[0])), object)

        def __new__(cls):
            return object.__new__(cls)

        def __del__(self):
            pass

    for i, row in enumerate(rows):
        for j, place in enumerate(row):
            FakeMesh.devices[i, j] = Gpu(*place)
    return FakeMesh()


def test_ranks_of_an_axis_are_groups_along_the_other_axes():
    mesh = mesh_of(("data", "expert"), [[(0, 0), (0, 1)], [(0, 3), (0, 2)]])
    assert _local.groups_of(mesh, "expert", 2).tolist() == [[[0, 0], [0, 1]], [[0, 3], [0, 2]]]
    assert _local.groups_of(mesh, "data", 2).tolist() == [[[0, 0], [0, 3]], [[0, 1], [0, 2]]]
    assert _local.groups_of(mesh, ("expert", "data"), 4).tolist() == [[[0, 0], [0, 3], [0, 1], [0, 2]]]


def test_groups_may_lie_in_several_processes_but_not_across_them():
    mesh = mesh_of(("data", "expert"), [[(0, 0), (0, 1)], [(1, 0), (1, 1)]])
    assert _local.groups_of(mesh, "expert", 2).tolist() == [[[0, 0], [0, 1]], [[1, 0], [1, 1]]]
    with pytest.raises(NotImplementedError, match="axis 'data' has 2 GPUs of processes 0, 1; on GPUs an axis lies within a process, or it has all processes"):
        _local.groups_of(mesh, "data", 2)


def test_a_mesh_that_does_not_say_where_its_ranks_are():
    with pytest.raises(ValueError, match=r"axis 'ep': which GPUs its 2 ranks are is not known; give jax.shard_map a jax.sharding.Mesh"):
        _local.groups_of(jax.sharding.AbstractMesh((2,), ("ep",)), "ep", 2)
    with pytest.raises(RuntimeError, match="platform 'cuda', but the devices of axis 'ep' are cpu"):
        _local.groups_of(auto_mesh((4,), ("ep",)), "ep", 4)


@pytest.fixture
def made(monkeypatch):
    """Lowering for GPUs without one: a list of (function, indices, groups) that would be made."""
    calls = []
    monkeypatch.setattr(_local, "_place", lambda device: ("gpu", 0, device.id))
    monkeypatch.setattr(_local, "make", lambda group, groups: calls.append((group.make, group.indices, groups[:, :, 1].tolist())))
    monkeypatch.setattr(_device_block, "_local_gpus", lambda: jax.local_devices())
    return calls


def there_and_back(x, ids, weights):
    slots = wbj.dispatch(x, ids, weights, E=E, axis_name="ep", platform="cuda")
    return wbj.combine(slots.rows, ids, weights, E=E, axis_name="ep", platform="cuda")


def pairs(x, ids, weights):
    slots = wbj.dispatch_done(wbj.dispatch_start(x, ids, weights, E=E, axis_name="ep", platform="cuda"))
    return wbj.combine_done(wbj.combine_start(slots.rows, ids, weights, E=E, axis_name="ep", platform="cuda"))


ARGUMENTS = (jnp.ones((T, H), jnp.bfloat16), jnp.zeros((T, K), jnp.int16), jnp.ones((T, K)))


def lowered(function, *arguments):
    """Targets of the program's custom calls in order, each with its groups."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @waybill_device_(\w+)\(.*?groups = dense<(.*?)> : tensor<(\d+)xi32>", text)
    return [(target, [int(number) for number in re.findall(r"-?\d+", values)]) for target, values, _ in calls]


def on(mesh, function, **options):
    spec = P(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **options)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("names", [("data", "ep"), ("ep", "data")])
def test_every_call_of_a_step_carries_the_groups_of_its_mesh(made, types, check_vma, names):
    mesh = jax.make_mesh((2, 2), names, axis_types=(types, types))
    step = on(mesh, there_and_back, check_vma=check_vma)
    x, ids, weights = jax.device_put(ARGUMENTS, jax.NamedSharding(mesh, P(names)))
    calls = lowered(jax.grad(lambda x, w: step(x, ids, w).astype(jnp.float32).sum(), argnums=(0, 1)), x, weights)
    groups = [[0, 1], [2, 3]] if names == ("data", "ep") else [[0, 2], [1, 3]]
    flat = [number for row in groups for ordinal in row for number in (0, ordinal)]
    assert sorted(calls) == sorted([("dispatch", flat), ("combine", flat), ("combine_backward", flat)]) or sorted(calls) == sorted(
        [("dispatch", flat), ("combine", flat), ("combine_backward", flat), ("combine", flat)]), calls  # fmt: skip
    assert {call[:2] for call in made} == {("wbx_make_local_exchange", (0,))} and all(call[2] == groups for call in made)


def test_pairs_make_both_exchanges_and_carry_the_groups(made):
    calls = lowered(on(auto_mesh((4,), ("ep",)), pairs), *ARGUMENTS)
    flat = [0, 0, 0, 1, 0, 2, 0, 3]
    assert calls == [(name, flat) for name in ("dispatch_start", "dispatch_done", "combine_start", "combine_done")]
    assert {call[:2] for call in made} == {("wbx_make_local_exchange", (0, 1))}


def test_a_loop_vmap_remat_and_an_inner_jit(made):
    mesh = auto_mesh((4,), ("ep",))
    flat = [0, 0, 0, 1, 0, 2, 0, 3]

    def looped(x, ids, weights):
        body = jax.checkpoint(lambda x, _: (jax.jit(there_and_back)(x, ids, weights).astype(x.dtype), None))
        return jax.lax.scan(body, x, None, length=3)[0]

    many = jax.vmap(on(mesh, looped), in_axes=(0, None, None))
    calls = lowered(jax.grad(lambda x: many(x, *ARGUMENTS[1:]).astype(jnp.float32).sum()), jnp.stack(2 * [ARGUMENTS[0]]))
    assert {name for name, _ in calls} >= {"dispatch", "combine", "combine_backward"} and all(groups == flat for _, groups in calls)


def test_two_meshes_in_one_program_do_not_share_a_lowering(made):
    meshes = [auto_mesh((2, 2), names) for names in (("data", "ep"), ("ep", "data"))]
    both = lambda *arguments: sum(on(mesh, jax.jit(there_and_back))(*arguments) for mesh in meshes)  # noqa: E731
    groups = [groups for name, groups in lowered(both, *ARGUMENTS) if name == "dispatch"]
    assert groups == [[0, 0, 0, 1, 0, 2, 0, 3], [0, 0, 0, 2, 0, 1, 0, 3]]


def test_the_block_makes_layers_of_its_axis(made, monkeypatch):
    monkeypatch.setattr(_device_block._device, "saved_bytes", lambda struct, P: 64)
    config = wbj.MoeConfig(H=H, F=8, router=wbj.RouterConfig(E=E, K=K, aux_coefficient=0.1), recipe="bf16")
    mesh = auto_mesh((2, 2), ("data", "ep"))

    def body(x, params):
        out, moe = wbj.moe_block(x, params, config, axis_name="ep", platform="cuda")
        return (out.astype(jnp.float32).sum() + jax.lax.psum(moe.loss, "ep")).reshape(1)

    step = jax.shard_map(body, mesh=mesh, in_specs=(P(("data", "ep")), wbj.param_specs(config, "ep")), out_specs=P(("data", "ep")))
    calls = lowered(jax.grad(lambda params, x: step(x, params).sum()), wbj.init_params(jax.random.key(0), config, dtype=jnp.bfloat16), ARGUMENTS[0])
    assert calls == [("moe_forward", [0, 0, 0, 1, 0, 2, 0, 3]), ("moe_backward", [0, 0, 0, 1, 0, 2, 0, 3])]
    assert {(call[0], str(call[2])) for call in made} == {("wbx_make_local_layer", "[[0, 1], [2, 3]]")}


def test_only_the_groups_of_this_process_are_made_once_and_all_handles_of_a_call(monkeypatch):
    calls = []

    class Library:
        def wbx_set_process(self, index):
            calls.append(("process", index))

        def wbx_make_local_exchange(self, config, P, ordinals, devices, index):
            calls.append((config._obj.H, P, list(ordinals), list(devices), index))
            return 0

    monkeypatch.setattr(_local, "_made", set())
    monkeypatch.setattr(_ffi, "load", Library)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    group = _local.Group("wbx_make_local_exchange", _abi.ExchangeConfig, bytes(_abi.ExchangeConfig(H=48)), "ep", 2, (0, 1))
    groups = np.array([[[1, 0], [1, 1]], [[0, 3], [0, 2]], [[0, 4], [0, 5]]], np.int32)
    for _ in range(2):
        _local.make(group, groups)
    assert [call for call in calls if call[0] != "process"] == [(48, 2, row, row, index) for row in ([3, 2], [4, 5]) for index in (0, 1)]
    assert ("process", 0) in calls and calls.index(("process", 0)) == 0


def test_what_is_missing_is_said_when_the_program_is_lowered(monkeypatch):
    monkeypatch.setattr(_local, "_place", lambda device: ("gpu", 0, device.id))
    monkeypatch.setattr(_device_block, "_local_gpus", lambda: jax.local_devices())
    step = on(auto_mesh((4,), ("ep",)), there_and_back)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    with pytest.raises(RuntimeError, match="several GPUs of one process need CUDA_MODULE_LOADING=LAZY"):
        lowered(step, *ARGUMENTS)
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    if jax.default_backend() == "cpu":  # no GPU, or a library without CUDA
        with pytest.raises((NotImplementedError, ValueError), match="GPU"):
            lowered(step, *ARGUMENTS)


def test_arrays_on_the_cpu_are_refused_when_it_runs(made):
    step = on(auto_mesh((4,), ("ep",)), there_and_back)
    with pytest.raises(jax.errors.JaxRuntimeError, match="traced for a GPU"):
        jax.block_until_ready(jax.jit(step)(*ARGUMENTS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="traced for a GPU"):
        jax.block_until_ready(step(*ARGUMENTS))
    assert made == []


def test_the_worker_of_several_gpus_is_right_on_cpu_devices():
    """What ep_cuda_test.py runs on two and four GPUs, so that it does not wait for them to be tried: values, gradients, device order, two groups."""
    worker = pathlib.Path(__file__).parent.parent / "cuda" / "jax_ep_worker.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = subprocess.run([sys.executable, worker, "0", "1", "0", "4"], capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert "process 0: passed" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]

# SPDX-License-Identifier: Apache-2.0
"""The path of several GPUs of one process, on one GPU: a group of one rank gives the bits of a process alone, groups of other devices are refused."""

import jax_block_cuda_test as block
import numpy as np
import pytest
from conftest import jax_gpus, needs_jax_gpu

jax = pytest.importorskip("jax")
jnp = jax.numpy
wbj = pytest.importorskip("waybill.jax")
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from waybill.jax import _device_block, _ffi, _local  # noqa: E402

pytestmark = needs_jax_gpu()
E, T, H, K = 8, 96, 64, 3


@pytest.fixture
def local_groups(monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)

    def ensure(what, struct, axis_name, P, indices=(0,)):
        return _local.Group(f"wbx_make_local_{what}", type(struct), bytes(struct), axis_name, P, indices)

    def switch():
        monkeypatch.setattr(_device_block, "ensure", ensure)

    return switch


def on_mesh(function, num_arguments):
    mesh = jax.make_mesh((1,), ("ep",), devices=jax_gpus()[:1], axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P("ep"),) * num_arguments, out_specs=P("ep")))


def block_step():
    """A new function each time, so that JAX does not find the program it has."""

    def step(x, d_out, params):
        def loss(x, params):
            body = lambda x, _: (wbj.moe_block(x, params, block.CONFIG, axis_name="ep")[0], None)  # noqa: E731
            out = jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0]
            again, moe = wbj.moe_block(out, params, block.CONFIG, axis_name="ep")
            return (again.astype(jnp.float32) * d_out.astype(jnp.float32)).sum() + moe.loss

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, params)
        return value.reshape(1), gradients

    return on_mesh(step, 3)


def test_a_group_of_one_gives_the_bits_of_a_process_alone(local_groups):
    x, d_out, params = block.normal(1, T, H), block.normal(2, T, H), block.params_of(block.CONFIG)
    want = jax.tree.map(np.asarray, block_step()(x, d_out, params))
    local_groups()
    step = block_step()
    for _ in range(3):  # the later ones as command buffers
        assert block.same(jax.tree.map(np.asarray, step(x, d_out, params)), want)


def routes():
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int16)
    return rng.integers(-15, 16, (T, H)).astype(np.float32), ids, np.ones((T, K), np.float32)


def test_dispatch_combine_and_pairs_of_a_group_of_one(local_groups):
    local_groups()

    def both(x, ids, weights):
        slots = wbj.dispatch(x, ids, weights, E=E, axis_name="ep")
        direct = wbj.combine(slots.rows, ids, weights, E=E, axis_name="ep")
        begun = wbj.dispatch_done(wbj.dispatch_start(x, ids, weights, E=E, axis_name="ep"))
        return direct, wbj.combine_done(wbj.combine_start(begun.rows, ids, weights, E=E, axis_name="ep")), slots.group_sizes, begun.group_sizes

    x, ids, weights = routes()
    counts = [_ffi.ctypes.c_int64() for _ in range(4)]
    _ffi.load().wbx_device_pair_counts(*counts[:2])
    step = on_mesh(both, 3)
    for _ in range(3):
        direct, paired, sizes, begun_sizes = step(x, ids, weights)
        assert (np.asarray(direct) == K * x).all() and (np.asarray(paired) == K * x).all()
        assert sizes.tolist() == begun_sizes.tolist() == np.bincount(ids.reshape(-1), minlength=E).tolist()
    _ffi.load().wbx_device_pair_counts(*counts[2:])
    done, begun = counts[2].value - counts[0].value, counts[3].value - counts[1].value
    assert done == begun == 6


def test_a_device_outside_of_the_program_s_groups_is_refused(local_groups, monkeypatch):
    local_groups()
    monkeypatch.setattr(_local, "groups_of", lambda mesh, axis_name, P: np.array([[[0, 5]]], np.int32))
    monkeypatch.setattr(_local, "make", lambda group, groups: None)
    step = on_mesh(lambda *arguments: wbj.dispatch(*arguments, E=E, axis_name="ep").rows, 3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="device 0 of process 0 is in no group of this program"):
        jax.block_until_ready(step(*routes()))

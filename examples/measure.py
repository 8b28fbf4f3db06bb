# SPDX-License-Identifier: Apache-2.0
"""measure.py [T H F E K PEAK]: one MoE block over all devices, T tokens each, and its parts. PEAK: TFLOP/s of a device by its vendor."""
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import waybill.jax as wbj
from jax.sharding import AxisType, PartitionSpec as P

# One process a GPU: jax.distributed.initialize() here, and CUDA_MODULE_LOADING=EAGER where the processes start.
T, H, F, E, K, peak = map(int, sys.argv[1:7]) if len(sys.argv) > 6 else (64, 32, 64, 8, 2, 1)
on_gpu, devices = jax.default_backend() == "gpu", jax.device_count()
config = wbj.MoeConfig(H=H, F=F, router=wbj.RouterConfig(E=E, K=K), recipe="bf16" if on_gpu else "fp32")
mesh = jax.make_mesh((devices,), ("ep",), axis_types=(AxisType.Auto,))
axis = {"E": E, "axis_name": "ep" if devices > 1 else None}


def on_mesh(function, *specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))


def ms(function, *operands):
    """Median of 10 calls, each of which is waited for."""
    jax.block_until_ready(function(*operands))
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(function(*operands))
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def gradients(x, params):
    loss = lambda x, params: jnp.square(wbj.moe_block(x, params, config, axis_name=axis["axis_name"])[0].astype(jnp.float32)).sum()
    return jax.grad(loss, argnums=(0, 1))(x, params)


dtype, specs = jnp.bfloat16 if on_gpu else jnp.float32, wbj.param_specs(config, "ep")
x = jax.random.normal(jax.random.key(0), (devices * T, H), dtype)
params = wbj.init_params(jax.random.key(1), config, dtype=dtype)
step = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(P("ep"), specs), out_specs=(P("ep"), specs), check_vma=False))
routes = on_mesh(lambda x, gate: wbj.router((x @ gate.T).astype(jnp.float32), config.router)[:2], P("ep"), P())(x, params["gate"])
send = on_mesh(lambda x, ids, weights: wbj.dispatch(x, ids, weights, **axis)[:2], P("ep"), P("ep"), P("ep"))
multiply = on_mesh(lambda rows, w1, sizes: wbj.grouped_matmul(rows, w1, sizes, layout="LNC"), P("ep"), P("ep"), P("ep"))
back = on_mesh(lambda rows, ids, weights: wbj.combine(rows, ids, weights, **axis), P("ep"), P("ep"), P("ep"))

rows, sizes = send(x, *routes)
whole, matmul = ms(step, x, params), ms(multiply, rows, params["w1"], sizes)
flops = 3 * 2 * 3 * T * K * H * F  # three matrices of H x F an expert; the forward, and as much for either gradient
rate = flops / whole * 1e-9
print(f"{devices} devices, T = {T}, H = {H}, F = {F}, E = {E}, K = {K}")
print(f"step {whole:.4g} ms, {rate:.4g} TFLOP/s a device, MFU {rate / peak:.4g}")
print(f"grouped matmul {matmul:.4g} ms, {2 * 2 * T * K * H * F / matmul * 1e-9:.4g} TFLOP/s a device")
print(f"dispatch {ms(send, x, *routes):.4g} ms, combine {ms(back, rows, *routes):.4g} ms, {int(sizes.sum())} slots in use")

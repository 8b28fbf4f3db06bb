# SPDX-License-Identifier: Apache-2.0
import sys

import jax
import numpy as np

process, processes, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, processes, process)

import jax.numpy as jnp
import waybill.jax as wbj
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
config = wbj.MoeConfig(H=32, F=64, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=1e-2))
specs = wbj.param_specs(config, "ep")


def spread(array, spec):
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


params = {name: spread(value, specs[name]) for name, value in wbj.init_params(jax.random.key(0), config).items()}


def local(x, params):
    out, moe = wbj.moe_block(x, params, config, axis_name="ep")
    return out, jax.lax.psum(moe.loss, "ep")


block = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), specs), out_specs=(P("ep"), P()))


@jax.jit
def step(params, x):
    def loss_of(params):
        out, extra = block(x, params)
        return jnp.square(out - jnp.roll(x, 1, axis=-1)).mean() + extra

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss


losses = []
for number in range(20):
    x = spread(jax.random.normal(jax.random.key(number), (64, 32)), P("ep"))
    params, loss = step(params, x)
    losses.append(float(loss))
print(f"process {process}: learns {losses[-1] < losses[0]}, {jax.device_count()} devices", flush=True)

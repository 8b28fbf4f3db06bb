# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import waybill.jax as wbj

config = wbj.MoeConfig(H=64, F=128, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=1e-2), recipe="bf16")
layers = jax.vmap(lambda key: wbj.init_params(key, config, dtype=jnp.bfloat16))(jax.random.split(jax.random.key(0), 3))
x = jax.random.normal(jax.random.key(1), (256, 64), jnp.bfloat16)

@jax.jit
def loss_of(layers, x):
    def layer(x, params):
        out, moe = wbj.moe_block(x, params, config)
        return x + out, moe.loss
    out, losses = jax.lax.scan(layer, x, layers)
    return jnp.square(out.astype(jnp.float32)).mean() + losses.sum()

gradients = jax.grad(loss_of)(layers, x)
print({name: value.shape for name, value in gradients.items()}, gradients["w1"].dtype)
# -> {'gate': (3, 8, 64), 'w1': (3, 8, 256, 64), 'w2': (3, 8, 64, 128)} bfloat16

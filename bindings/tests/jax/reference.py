# SPDX-License-Identifier: Apache-2.0
"""The MoE block in plain JAX, fp32: every expert on every token, times its weight. Differentiated by JAX alone."""

import dataclasses

import jax
import jax.numpy as jnp


def router(logits, config, bias=None):
    """ids [T, K], weights [T, K]."""
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if config.score == "sigmoid" else jax.nn.softmax(logits)
    _, ids = jax.lax.top_k(scores if bias is None else scores + bias, config.K)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if config.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids, weights * config.scaling_factor


def losses(logits, ids, config, counts=None, tokens=None):
    """Auxiliary and z loss of these rows; counts and tokens of the whole batch where they are given."""
    logits = logits.astype(jnp.float32)
    T, E = logits.shape
    counts = jnp.zeros(E).at[ids.reshape(-1)].add(1.0) if counts is None else counts
    tokens = T if tokens is None else tokens
    aux = config.aux_coefficient * E / (config.K * tokens**2) * (jax.nn.softmax(logits).sum(0) * jax.lax.stop_gradient(counts)).sum()
    z = config.z_coefficient * jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum() / tokens
    return aux, z


def experts(x, ids, weights, w1, w2, b1=0.0, b2=0.0):
    E = w1.shape[0]
    dense = jnp.zeros((x.shape[0], E)).at[jnp.arange(x.shape[0])[:, None], ids].add(weights)
    gate, up = jnp.split(jnp.einsum("th,enh->ten", x, w1) + b1, 2, axis=-1)
    return jnp.einsum("tef,ehf,te->th", jax.nn.silu(gate) * up, w2, dense) + dense @ jnp.broadcast_to(b2, w2.shape[:2])


def block(x, params, config):
    """out, loss: what moe_block gives, for layers without latent width."""
    flat = x.reshape(-1, config.H).astype(jnp.float32)
    params = {name: value.astype(jnp.float32) for name, value in params.items()}
    logits = flat @ params["gate"].T
    ids, weights = router(logits, config.router, params.get("router_bias"))
    out = experts(flat, ids, weights, params["w1"], params["w2"], params.get("b1", 0.0), params.get("b2", 0.0))
    if config.shared_F:
        gate, up = jnp.split(flat @ params["shared_w1"].T, 2, axis=-1)
        out = out + (jax.nn.silu(gate) * up) @ params["shared_w2"].T
    # One batch of one device: the global loss is the auxiliary one with another coefficient.
    coefficients = dataclasses.replace(config.router, aux_coefficient=config.router.aux_coefficient + config.global_coefficient)
    return out.astype(x.dtype).reshape(x.shape), sum(losses(logits, ids, coefficients))

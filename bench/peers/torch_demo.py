#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo's model in PyTorch on the CPU: same weights, same batches, same losses and optimizer; prints the loss of each step and tokens/s.

  python3 bench/peers/torch_demo.py configs/demo.toml --text FILE [--set section.key=value]... [--steps N] [--threads N]
      [--moe sorted|masked] [--compile] [--compare RUN/metrics.jsonl] [--json FILE]

Weights and batches are the functions of the seed that src/model/parameters.cc, src/train/dataset.cc and include/waybill/random.h define, so
the first losses must agree with a run of `waybill train` up to rounding; --compare fails when they do not. One process with --threads
threads holds all experts: the plain way to run such a model on one machine.

Experts: "sorted" orders the (token, expert) pairs by expert once and loops over contiguous slices; "masked" finds each expert's tokens with
torch.where and adds with index_add_, as Hugging Face's transformers did for Mixtral. The faster one is the peer. --compile gives everything
but the expert loop to torch.compile. Needs torch and numpy; nothing of Waybill.
"""
import argparse
import json
import math
import statistics
import sys
import time
import tomllib

import numpy as np
import torch
import torch.nn.functional as F

MASK = (1 << 64) - 1
DEFAULTS = {
    "model": {"qk_norm": False, "tie_embeddings": True, "rope_theta": 10000.0, "norm_epsilon": 1e-5, "init_std": 0.02, "num_dense_layers": 0},
    "moe": {"bias_update_rate": 0.0, "aux_coefficient": 0.0, "z_coefficient": 0.0},
    "router": {"score": "softmax", "renormalise": True, "scaling_factor": 1.0},
    "train": {"seed": 1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0, "warmup_steps": 0, "steps": 600},
    "data": {"held_out_fraction": 0.05},
}


# --- the seed's functions (include/waybill/random.h) ---
def mix64(z):
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix64_array(z):
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_u64(key, counters):
    return mix64_array(np.uint64(mix64(key)) ^ mix64_array(counters * np.uint64(0xD1342543DE82EF95) + np.uint64(1)))


def random_normal(key, count):
    u = random_u64(key, np.arange(count, dtype=np.uint64))
    a = ((u >> np.uint64(40)).astype(np.float64) + 1.0) / 16777217.0
    b = (u & np.uint64(0xFFFFFFFF)).astype(np.float64) / 4294967296.0
    return (np.sqrt(-2.0 * np.log(a)) * np.cos(6.283185307179586 * b)).astype(np.float32)


def stream_key(seed, name):
    value = 0xCBF29CE484222325
    for c in name.encode():
        value = ((value ^ c) * 0x100000001B3) & MASK
    return mix64(seed) ^ mix64(value)


def load_config(path, overrides):
    with open(path, "rb") as file:
        given = tomllib.load(file)
    for text in overrides:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        given.setdefault(section, {})[name] = tomllib.loads(f"x = {value}")["x"]
    sections = set(DEFAULTS) | {k for k, v in given.items() if isinstance(v, dict)}
    config = {section: {**DEFAULTS.get(section, {}), **given.get(section, {})} for section in sections}
    unsupported = [k for k in ("shared_F", "latent", "capacity_factor") if config["moe"].get(k)]
    if unsupported or config["router"]["score"] != "sigmoid" or not config["router"]["renormalise"] or config["model"]["qk_norm"]:
        sys.exit(f"torch_demo: only the demo's recipe is written here (sigmoid, renormalised, no {', '.join(unsupported) or 'qk_norm'})")
    return config


class Batches:
    """Sequences of the training part; sequence b of a step starts where the seed says (src/train/dataset.cc)."""

    def __init__(self, path, config):
        self.tokens = np.fromfile(path, dtype=np.uint8)
        self.length = config["model"]["seq_len"] + 1
        size = len(self.tokens)
        self.train_size = min(max(size - int(config["data"]["held_out_fraction"] * size), self.length), size - self.length)
        self.seed, self.count = config["train"]["seed"], config["train"]["global_batch"]

    def __call__(self, step):
        key = (mix64(self.seed ^ 0x62617463) + step) & MASK
        first = random_u64(key, np.arange(self.count, dtype=np.uint64)) % np.uint64(self.train_size - self.length + 1)
        rows = np.stack([self.tokens[int(f):int(f) + self.length] for f in first]).astype(np.int64)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1)


class Demo(torch.nn.Module):
    def __init__(self, config, moe, compiled):
        super().__init__()
        self.c, m = config, config["model"]
        self.moe_block = self.masked_experts if moe == "masked" else self.sorted_experts
        layers, H, D = m["num_layers"], m["H"], m["head_dim"]
        std, out_std = m["init_std"], m["init_std"] / math.sqrt(2.0 * m["num_layers"])
        seed = config["train"]["seed"]

        def matrix(name, *shape, scale=std):
            values = np.float32(scale) * random_normal(stream_key(seed, name), math.prod(shape))
            return torch.nn.Parameter(torch.from_numpy(values).reshape(shape))

        ones = lambda: torch.nn.Parameter(torch.ones(H))
        self.embedding = matrix("embedding.weight", m["vocab"], H)
        self.head = self.embedding if m["tie_embeddings"] else matrix("head.weight", m["vocab"], H)
        self.final_norm = ones()
        self.layers = torch.nn.ModuleList()
        for i in range(layers):
            layer, n = torch.nn.Module(), f"layers.{i}."
            layer.norm1, layer.norm2 = ones(), ones()
            layer.wq = matrix(n + "attention.wq", m["num_heads"] * D, H)
            layer.wk = matrix(n + "attention.wk", m["num_kv_heads"] * D, H)
            layer.wv = matrix(n + "attention.wv", m["num_kv_heads"] * D, H)
            layer.wo = matrix(n + "attention.wo", H, m["num_heads"] * D, scale=out_std)
            layer.is_moe = i >= m["num_dense_layers"]
            if layer.is_moe:
                E, inner = config["moe"]["E"], config["moe"]["F"]
                layer.gate = matrix(n + "moe.gate", E, H)
                layer.w1 = matrix(n + "moe.w1", E, 2 * inner, H)
                layer.w2 = matrix(n + "moe.w2", E, H, inner, scale=out_std)
                layer.register_buffer("router_bias", torch.zeros(E))
            else:
                layer.w1 = matrix(n + "dense.w1", 2 * m["dense_F"], H)
                layer.w2 = matrix(n + "dense.w2", H, m["dense_F"], scale=out_std)
            self.layers.append(layer)
        t = torch.arange(m["seq_len"], dtype=torch.float64)
        angle = t[:, None] * m["rope_theta"] ** (-2.0 * torch.arange(D // 2, dtype=torch.float64) / D)
        self.register_buffer("cos", angle.cos().float()[None, :, None, :])
        self.register_buffer("sin", angle.sin().float()[None, :, None, :])
        for name in ("attention", "route", "dense", "loss") if compiled else ():
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def norm(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, self.c["model"]["norm_epsilon"])

    def rotate(self, x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1)

    def attention(self, layer, x):
        m = self.c["model"]
        h, L, D = self.norm(x, layer.norm1), m["seq_len"], m["head_dim"]
        q = self.rotate((h @ layer.wq.T).view(-1, L, m["num_heads"], D)).transpose(1, 2)
        k = self.rotate((h @ layer.wk.T).view(-1, L, m["num_kv_heads"], D)).transpose(1, 2)
        v = (h @ layer.wv.T).view(-1, L, m["num_kv_heads"], D).transpose(1, 2)
        group = m["num_heads"] // m["num_kv_heads"]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + o.transpose(1, 2).reshape(x.shape[0], -1) @ layer.wo.T

    def dense(self, layer, x):
        gate, up = (self.norm(x, layer.norm2) @ layer.w1.T).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ layer.w2.T

    def route(self, layer, x):
        """Normed rows, ids and weights [T, K], the layer's losses; counts are constants of the gradient."""
        c = self.c["moe"]
        h = self.norm(x, layer.norm2)
        logits = h @ layer.gate.T
        scores = logits.sigmoid()
        ids = (scores.detach() + layer.router_bias).topk(c["K"], dim=-1).indices
        chosen = scores.gather(-1, ids)
        weights = chosen / chosen.sum(-1, keepdim=True) * self.c["router"]["scaling_factor"]
        counts = torch.bincount(ids.reshape(-1), minlength=c["E"])
        T = x.shape[0]
        share = (scores / scores.sum(-1, keepdim=True)).sum(0)
        losses = c["aux_coefficient"] * c["E"] / (c["K"] * T * T) * (counts.to(share.dtype) * share).sum()
        losses = losses + c["z_coefficient"] * logits.logsumexp(-1).square().mean()
        return h, ids, weights, counts, losses

    def sorted_experts(self, layer, h, ids, weights, counts):
        order = ids.reshape(-1).argsort(stable=True)
        token = order // ids.shape[1]
        rows, scale = h[token], weights.reshape(-1)[order, None]
        parts = []
        for e, slice_ in enumerate(rows.split(counts.tolist())):
            if slice_.shape[0] == 0:
                continue
            gate, up = (slice_ @ layer.w1[e].T).chunk(2, dim=-1)
            parts.append((F.silu(gate) * up) @ layer.w2[e].T)
        return torch.zeros_like(h).index_add(0, token, torch.cat(parts) * scale)

    def masked_experts(self, layer, h, ids, weights, counts):
        out = torch.zeros_like(h)
        for e in counts.nonzero().flatten().tolist():
            token, slot = torch.where(ids == e)
            gate, up = (h[token] @ layer.w1[e].T).chunk(2, dim=-1)
            out = out.index_add(0, token, ((F.silu(gate) * up) @ layer.w2[e].T) * weights[token, slot, None])
        return out

    def loss(self, x, targets):
        return F.cross_entropy(self.norm(x, self.final_norm) @ self.head.T, targets)

    def forward(self, inputs, targets):
        """Cross-entropy in nats, the routers' losses, and the counts of each MoE layer."""
        x, extra, counts = self.embedding[inputs], 0.0, []
        for layer in self.layers:
            x = self.attention(layer, x)
            if not layer.is_moe:
                x = self.dense(layer, x)
                continue
            h, ids, weights, load, losses = self.route(layer, x)
            x = x + self.moe_block(layer, h, ids, weights, load)
            extra = extra + losses
            counts.append(load)
        return self.loss(x, targets), extra, counts

    @torch.no_grad()
    def update_bias(self, counts):
        moe_layers = [layer for layer in self.layers if layer.is_moe]
        for layer, load in zip(moe_layers, counts):
            layer.router_bias += self.c["moe"]["bias_update_rate"] * torch.sign(load.sum() - load * len(load)).float()


def learning_rate(train, step):
    if step < train["warmup_steps"]:
        return train["learning_rate"] * (step + 1) / train["warmup_steps"]
    decay = train["steps"] - 1 - train["warmup_steps"]
    progress = 1.0 if decay <= 0 else min(1.0, (step - train["warmup_steps"]) / decay)
    return train["min_learning_rate"] + 0.5 * (train["learning_rate"] - train["min_learning_rate"]) * (1 + math.cos(math.pi * progress))


def compare(losses, path):
    """Relative differences of the losses by step. The first 3 steps may differ by rounding only; later ones drift apart as routes flip."""
    with open(path) as file:
        wanted = [r["loss"] for r in map(json.loads, file) if r["kind"] == "step"]
    differences = [abs(seen / want - 1) for seen, want in zip(losses, wanted)]
    for step, difference in enumerate(differences, 1):
        allowed = 1e-5 if step <= 3 else 0.05
        if not difference <= allowed:
            sys.exit(f"torch_demo: step {step}: loss {losses[step - 1]:.6f}, {path} says {wanted[step - 1]:.6f}")
    print(f"losses against {path}: largest relative difference {max(differences[:3]):.1e} in 3 steps, {max(differences):.1e} in {len(differences)}")
    return differences


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--text", required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--moe", choices=["sorted", "masked"], default="sorted")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compare")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = load_config(args.config, args.overrides)
    train, batches = config["train"], Batches(args.text, config)
    model = Demo(config, args.moe, args.compile)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": train["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=train["learning_rate"], betas=(train["beta1"], train["beta2"]), eps=train["epsilon"], fused=True)
    losses, seconds = [], []
    for step in range(args.steps):
        start = time.perf_counter()
        inputs, targets = batches(step)
        loss, extra, counts = model(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        (loss + extra).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train["clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        optimizer.step()
        model.update_bias(counts)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        print(f"step {step + 1}: loss {losses[-1]:.6f}, {seconds[-1] * 1e3:.1f} ms", flush=True)
    differences = compare(losses, args.compare) if args.compare else None
    tokens = train["global_batch"] * config["model"]["seq_len"]
    timed = seconds[min(5, len(seconds) - 1):]
    rate = tokens / statistics.median(timed)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.moe} experts{', compiled' if args.compile else ''}: "
          f"{statistics.median(timed) * 1e3:.1f} ms a step, {rate:.0f} tokens/s (median of {len(timed)} steps)")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "moe": args.moe, "compile": args.compile, "tokens_per_s": rate,
                       "step_ms": [s * 1e3 for s in seconds], "losses": losses, "differences": differences}, file)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times an expert-parallel MoE layer in PyTorch, forward + backward in bf16, one process a GPU over NCCL: what the module benchmark compares with.

  python3 bench/peers/torch_moe_ep.py OUT.jsonl [--shape NAME ...] [--variant grouped|compiled|loop ...] [--iterations 160] [--ranks 2]
      [--ranks-per-gpu 1] [--load natural|W0 ...]

The layer: gate matmul, top-k, (token, expert) pairs sorted by expert, counts and then rows and weights by all_to_all_single (one host read of the
counts), a second sort to local experts, gate/up, SwiGLU times the routing weight, down, all_to_all_single back, index_add. Weight gradients are bf16
and stored. "grouped": torch._grouped_mm (more than 1,024 local experts: several calls, as it takes no more); "compiled": the same, SwiGLU under
torch.compile; "loop": one matmul an expert, one leaf tensor an expert. Permutations have gathers as their gradients, not scatter-adds.
Before anything is timed every variant's output and gradients are compared with a dense fp32 layer; a difference ends the program.

Routes are natural by default: x is normal, the rows of the gate have length 1, so that the logits of a token are normal with the same spread for
every expert. --load W0 to W9 replays the routes that bench_cuda_moe replays (loads.py; the scores stay the gate's). A call is timed by two events
behind a barrier and a synchronisation, forward + backward; its time is the slower rank's; the record holds the median over the iterations. TFLOP/s
per GPU count expert matmuls: 3 matmuls x (2 forward + 4 backward) x T K H F (H: the width of rows, which a latent
shape projects to and from). Memory: torch's peak less weights and their gradients. --ranks-per-gpu
N: a process has the tokens of N ranks (and its share of all experts), as a GPU with N virtual ranks has. Shares: kernel time by name in one profiled
call. Environment: NCCL_NVLS_ENABLE=0 is set.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import time
import tomllib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import loads

SHAPES = ["deepseek-v3-slice", "qwen3-30b-a3b", "sparser-ep72", "proxy-512", "sparser-2304"]
MAX_GROUPS = 1024  # of torch._grouped_mm
BF16 = torch.bfloat16


class Exchange(torch.autograd.Function):
    """all_to_all_single; its gradient goes the other way."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.splits = send, receive
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows, receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.splits
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


class Permute(torch.autograd.Function):
    """rows[order] for a bijective order."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def inverse_of(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def swiglu(h, weight):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up * weight[:, None].to(h.dtype)


def grouped_experts(activation, max_groups):
    def call(rows, weight, counts, on_device, w1, w2):
        if len(counts) <= max_groups:
            offsets = on_device.cumsum(0).to(torch.int32)
            h = torch._grouped_mm(rows, w1.transpose(1, 2), offs=offsets)
            return torch._grouped_mm(activation(h, weight), w2.transpose(1, 2), offs=offsets)
        parts = -(-len(counts) // max_groups)
        size = -(-len(counts) // parts)
        sizes = [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
        # split, not slices: one gradient of a tensor's whole size instead of one a part.
        pieces = zip(rows.split(sizes), weight.split(sizes), on_device.split(size), w1.split(size), w2.split(size))
        return torch.cat([call(r, v, c, d, a, b) for (r, v, d, a, b), c in zip(pieces, (counts[i : i + size] for i in range(0, len(counts), size)))])

    return call


def loop_experts(rows, weight, counts, on_device, w1, w2):
    parts = [swiglu(r @ a.T, v) @ b.T for r, v, a, b in zip(rows.split(counts), weight.split(counts), w1, w2)]
    return torch.cat(parts)


class Layer:
    def __init__(self, T, H, inner, E, K, experts, leaves, seed, device, ids=None, latent=0):
        self.T, self.H, self.E, self.K = T, H, E, K
        self.experts, self.P, self.rank, self.device = experts, dist.get_world_size(), dist.get_rank(), device
        self.L = E // self.P
        gate = torch.randn(E, H, device=device, generator=generator(device, seed))
        self.gate = (gate / gate.norm(dim=1, keepdim=True)).to(BF16).requires_grad_()
        own = generator(device, seed + 1 + self.rank)
        W = latent or H
        w1 = torch.randn(self.L, 2 * inner, W, device=device, generator=own, dtype=BF16) * W**-0.5
        w2 = torch.randn(self.L, W, inner, device=device, generator=own, dtype=BF16) * inner**-0.5
        projection = lambda rows, columns: (torch.randn(rows, columns, device=device, generator=own, dtype=BF16) * columns**-0.5).requires_grad_()  # noqa: E731
        self.down, self.up = (projection(latent, H), projection(H, latent)) if latent else (None, None)
        self.w1 = [w.clone().requires_grad_() for w in w1] if leaves else w1.requires_grad_()
        self.w2 = [w.clone().requires_grad_() for w in w2] if leaves else w2.requires_grad_()
        self.ids, self.replay = None, ids

    def weights(self):
        as_list = lambda w: w if isinstance(w, list) else [w]  # noqa: E731
        return [self.gate, *as_list(self.w1), *as_list(self.w2), *([self.down, self.up] if self.down is not None else [])]

    def forward(self, x):
        # Sigmoid of the K largest logits, renormalised: the same as the largest of the sigmoids, without a pass over [T, E].
        logits = (x @ self.gate.T).float()
        top, ids = logits.topk(self.K, dim=-1, sorted=False) if self.replay is None else (logits.gather(1, self.replay), self.replay)
        scores = top.sigmoid()
        weight = scores / scores.sum(-1, keepdim=True)
        self.ids = ids
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // self.K
        sent = torch.bincount(flat, minlength=self.E).view(self.P, self.L)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        host = torch.cat([sent.sum(1), received.sum(1), received.sum(0)]).tolist()  # the host waits here, once a step
        send, receive, counts = host[: self.P], host[self.P : 2 * self.P], host[2 * self.P :]
        seen = x if self.down is None else x @ self.down.T
        rows = Exchange.apply(seen.index_select(0, token), send, receive)
        row_weight = Exchange.apply(Permute.apply(weight.reshape(-1), order, inverse_of(order)), send, receive)
        local = torch.arange(self.L, device=self.device).repeat(self.P)
        by_expert = torch.repeat_interleave(local, received.reshape(-1), output_size=len(rows)).argsort(stable=True)
        back = inverse_of(by_expert)
        y = self.experts(Permute.apply(rows, by_expert, back), Permute.apply(row_weight, by_expert, back), counts, received.sum(0), self.w1, self.w2)
        y = Exchange.apply(Permute.apply(y, back, by_expert), receive, send)
        out = torch.zeros_like(seen).index_add(0, token, y)
        return out if self.up is None else out @ self.up.T

    def step(self, x, d_out):
        for w in self.weights():
            w.grad = None
        x.grad = None
        out = self.forward(x)
        out.backward(d_out)
        return out


def generator(device, seed):
    return torch.Generator(device).manual_seed(seed)


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def check(name, experts, leaves, device, latent=0):
    """Output and gradients of a small layer against a dense loop in fp32 on the same bf16 values and the same ids."""
    T, H, inner, E, K = 96, 256, 128, 16, 3
    layer = Layer(T, H, inner, E, K, experts, leaves, 7, device, latent=latent)
    own = generator(device, 100 + layer.rank)
    x = torch.randn(T, H, device=device, generator=own, dtype=BF16).requires_grad_()
    d_out = torch.randn(T, H, device=device, generator=own, dtype=BF16)
    out = layer.step(x, d_out)
    stack = lambda w: torch.stack(w) if isinstance(w, list) else w  # noqa: E731
    grads = lambda w: torch.stack([v.grad for v in w]) if isinstance(w, list) else w.grad  # noqa: E731
    all_x, all_d, all_ids = (gathered(t.detach()) for t in (x, d_out, layer.ids))
    dense = [t.float().requires_grad_() for t in (all_x, layer.gate.detach(), gathered(stack(layer.w1).detach()), gathered(stack(layer.w2).detach()))]
    rx, rgate, r1, r2 = dense
    scores = (rx @ rgate.T).gather(1, all_ids).sigmoid()
    weight = scores / scores.sum(-1, keepdim=True)
    # A rank's own projections; its tokens lie together.
    down, up = ([p.float() for p in gathered(w.detach()).chunk(dist.get_world_size())] if w is not None else None for w in (layer.down, layer.up))
    seen = rx if down is None else torch.cat([part @ d.T for part, d in zip(rx.chunk(len(down)), down)])
    want = torch.zeros_like(seen)
    for e in range(E):
        t, k = torch.where(all_ids == e)
        want = want.index_add(0, t, swiglu(seen[t] @ r1[e].T, weight[t, k]) @ r2[e].T)
    if up is not None:
        want = torch.cat([part @ u.T for part, u in zip(want.chunk(len(up)), up)])
    want.backward(all_d.float())
    mine = slice(layer.rank * T, layer.rank * T + T)
    own_experts = slice(layer.rank * layer.L, (layer.rank + 1) * layer.L)
    gate_grad = layer.gate.grad.float()
    dist.all_reduce(gate_grad)
    pairs = {"out": (out, want[mine]), "dx": (x.grad, rx.grad[mine]), "d_gate": (gate_grad, rgate.grad),
             "dw1": (grads(layer.w1), r1.grad[own_experts]), "dw2": (grads(layer.w2), r2.grad[own_experts])}  # fmt: skip
    errors = {}
    for what, (got, wanted) in pairs.items():
        errors[what] = float(((got.detach().float() - wanted).norm() / wanted.norm()).detach())
    bad = {what: error for what, error in errors.items() if not error < 2e-2}
    if bad:
        sys.exit(f"torch_moe_ep: {name} differs from the dense fp32 layer, relative norms {bad}; nothing was timed")
    return errors


def shares(layer, x, d_out):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        layer.step(x, d_out)
        torch.cuda.synchronize()
    sums = {"exchange": 0.0, "gemm": 0.0, "other": 0.0}
    for event in profiler.key_averages():
        name, us = event.key.lower(), event.self_device_time_total
        kind = "exchange" if "nccl" in name else "gemm" if any(w in name for w in ("gemm", "cutlass", "nvjet", "xmma")) else "other"
        sums[kind] += us
    total = sum(sums.values())
    return {kind: round(us / total, 4) for kind, us in sums.items()} if total > 0 else {}, total


def routes_of(load, T, K, E, per_gpu, device):
    """This process's ids of the load, those of `per_gpu` ranks of T tokens, and the tokens of all ranks."""
    P, rank = dist.get_world_size() * per_gpu, dist.get_rank() * per_gpu
    ids, bounds = loads.routes(load, T * P, K, E, P)
    return torch.tensor(ids[bounds[rank] : bounds[rank + per_gpu]], device=device, dtype=torch.int64).view(-1, K), bounds[-1]


def measure(shape, variant, experts, leaves, iterations, device, per_gpu, load="natural"):
    T, H, inner, E, K = (shape[k] for k in ("T", "H", "F", "E", "K"))
    case, ids, tokens = f"{shape['name']} T{T} H{H} F{inner} E{E} K{K}", None, T * per_gpu * dist.get_world_size()
    if load != "natural":
        ids, tokens = routes_of(load, T, K, E, per_gpu, device)
    T = T * per_gpu if ids is None else len(ids)
    evidence = "MoE module" if dist.get_world_size() > 1 else "MoE module, one process: nothing crosses a link"
    latent = shape.get("latent", 0)
    case += f" latent {latent}" if latent else ""
    layer = Layer(T, H, inner, E, K, experts, leaves, 1, device, ids, latent)
    own = generator(device, 50 + layer.rank)
    x = torch.randn(T, H, device=device, generator=own, dtype=BF16).requires_grad_()
    d_out = torch.randn(T, H, device=device, generator=own, dtype=BF16)
    for _ in range(3):
        layer.step(x, d_out)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        layer.step(x, d_out)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    peak = torch.cuda.max_memory_allocated()
    parameters = sum(w.numel() * w.element_size() for w in layer.weights())
    slowest = torch.tensor(times + [float(peak - 2 * parameters)], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    *times, extra = slowest.tolist()
    times.sort()
    share, kernel_us = shares(layer, x, d_out)
    at = lambda q: times[int(q * (len(times) - 1) + 0.5)]  # noqa: E731
    median = statistics.median(times)
    return {
        "op": "moe fwd+bwd", "case": case, "variant": f"torch {variant}", "metric": "time", "unit": "us",
        "value": round(median, 1), "spread": round(at(0.9) - at(0.1), 1), "floor": None, "target": None, "peers": {}, "evidence": evidence,
        "ranks": per_gpu * dist.get_world_size(), "gpus": dist.get_world_size(),
        "checked": True, "p50": round(median, 1), "p99": round(at(0.99), 1), "iterations": iterations,
        "tflops": round(18 * tokens / dist.get_world_size() * K * (latent or H) * inner / median * 1e-6, 1),
        "peak_bytes": int(extra), "input_bytes": 2 * x.numel() * 2, "shares": share,
        "kernel_us": round(kernel_us, 1), "host_waits": 1, "graph": False, "load": load, "torch_version": torch.__version__,
    }  # fmt: skip


def fused_activation(device):
    """swiglu under torch.compile, or why not."""
    try:
        fused = torch.compile(swiglu, dynamic=True)
        h = torch.randn(64, 256, device=device, dtype=BF16, requires_grad=True)
        fused(h, torch.rand(64, device=device, requires_grad=True)).sum().backward()
        torch.cuda.synchronize()
        return fused, ""
    except Exception as error:  # noqa: BLE001 (whatever the compiler lacks)
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"


def variants_of(names, device):
    makers = {"grouped": (grouped_experts(swiglu, MAX_GROUPS), False), "loop": (loop_experts, True)}
    notes = {}
    if "compiled" in names:
        fused, why = fused_activation(device)
        agreed = torch.tensor([fused is not None], device=device, dtype=torch.int32)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        if agreed.item():
            makers["compiled"] = (grouped_experts(fused, MAX_GROUPS), False)
        else:
            notes["compiled"] = why or "another rank could not"
    return makers, notes


def work(rank, args, shapes, port):
    if port is not None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("nccl", rank=rank, world_size=args.ranks, device_id=torch.device("cuda", rank))
    else:
        rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    makers, notes = variants_of(args.variant, device)
    out = open(args.out, "w", encoding="utf-8") if rank == 0 else None
    say = lambda text: print(text, flush=True) if rank == 0 else None  # noqa: E731
    for name, why in notes.items():
        say(f"{name}: not run, {why}")
    for name in args.variant:
        if name in makers:
            experts, leaves = makers[name]
            errors = check(name, experts, leaves, device)
            if any("latent" in shape for shape in shapes):
                check(name + ", latent", experts, leaves, device, latent=64)
            if not leaves:  # the same in several calls, as with more experts than one call takes
                check(name + " in parts", grouped_experts(swiglu, 3), leaves, device)
            say(f"{name}: equals the dense fp32 layer, relative norms " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    for shape, load in [(shape, load) for shape in shapes for load in args.load]:
        for name in [v for v in args.variant if v in makers]:
            started = time.perf_counter()
            count = args.iterations if name != "loop" else max(3, args.iterations // (16 if shape["E"] <= 128 else 40))
            record = measure(shape, name, *makers[name], count, device, args.ranks_per_gpu, load)
            torch.cuda.empty_cache()
            say(f"{record['case']:<48} {record['variant']:<15} {load:<7} {record['value'] / 1e3:9.3f} ms  p90-p10 {record['spread'] / 1e3:7.3f}  "
                f"{record['tflops']:6.1f} TFLOP/s/GPU  extra {record['peak_bytes'] / 2**30:5.2f} GiB  shares {record['shares']}  x{count}  "
                f"({time.perf_counter() - started:.0f} s)")  # fmt: skip
            if out:
                out.write(json.dumps(record) + "\n")
                out.flush()
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--variant", nargs="+", default=["grouped", "compiled", "loop"], choices=["grouped", "compiled", "loop"])
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--load", nargs="+", default=["natural"], choices=["natural", *loads.WORKLOADS])
    args = parser.parse_args()
    if args.ranks < 1 or args.ranks_per_gpu < 1:
        parser.error(f"--ranks {args.ranks} and --ranks-per-gpu {args.ranks_per_gpu} must be at least 1")
    with open(pathlib.Path(__file__).parent.parent / "shapes/moe.toml", "rb") as file:
        known = {shape["name"]: shape for shape in tomllib.load(file)["shape"]}
    shapes = [known[name] for name in args.shape]
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if "LOCAL_RANK" in os.environ:  # torchrun
        work(0, args, shapes, None)
        return
    if torch.cuda.device_count() < args.ranks:
        sys.exit(f"torch_moe_ep: {args.ranks} GPUs are needed, {torch.cuda.device_count()} are here")
    mp.spawn(work, args=(args, shapes, 29517), nprocs=args.ranks)


if __name__ == "__main__":
    main()

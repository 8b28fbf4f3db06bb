#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the MoE block in PyTorch: waybill.torch.MoE beside ways to write it in PyTorch, forward and forward + backward, and its host time.

  python3 bench/peers/torch_moe.py [--shape small|demo] [--device cpu] [--threads N] [--seconds S] [--json FILE] [--host-only] [--load W0]

Stacks, same weights and routes: "sorted loop" orders (token, expert) pairs by expert once and loops over slices; "masked loop" finds each
expert's tokens, as transformers' eager experts do; "grouped_mm" is torch's grouped matmul over the sorted rows (bfloat16 only on some builds);
"transformers" is its Mixtral block. Each is checked against the sorted loop, values and gradients, before anything is timed; a stack that
fails the check ends the program, one that is not there is named as such. Stacks take turns, one call each a round; medians and p90.

--device cuda: bfloat16, logits in float32 in every stack (so that all choose the same experts; transformers' gate does not, it is left out), checked against
the sorted loop in float32. A time ends when the device has finished. "waybill, graph" replays a CUDA graph of the call.

--load W0 to W9: logits whose largest are the load's ids (the gate is a unit matrix, x starts with the logits; loads.py).

Host time (CPU; on a GPU: torch_host.py): forward + backward of a block of one token and 8 x 8 experts in eager mode, medians of 1,000 calls: the whole
call, an autograd node that does nothing, the two calls of the library (its kernels), and what is left: the time the binding adds.
"""

import argparse
import json
import platform
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import loads

SHAPES = {"small": (1024, 256, 32, 4, 256), "demo": (1024, 128, 16, 2, 128), "mixtral-8th": (512, 512, 8, 2, 1792),
          "qwen3-30b": (8192, 2048, 128, 8, 768)}  # T, H, E, K, F  # fmt: skip


def route(x, gate, K):
    """Mixtral's: softmax over all, then the K largest, renormalised."""
    weights, ids = (x.float() @ gate.float().T).softmax(-1).topk(K, dim=-1)
    return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def expert(rows, w1, w2):
    gate, up = (rows @ w1.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ w2.T


def sorted_loop(x, gate, w1, w2, K):
    ids, weights = route(x, gate, K)
    order = ids.reshape(-1).argsort(stable=True)
    token = order // K
    counts = torch.bincount(ids.reshape(-1), minlength=len(w1)).tolist()
    # unbind: one stack of gradients at the end, where w1[e] would add up E tensors of the size of w1.
    parts = [expert(rows, a, b) for rows, a, b in zip(x[token].split(counts), w1.unbind(), w2.unbind())]
    return torch.zeros_like(x).index_add(0, token, torch.cat(parts) * weights.reshape(-1)[order, None])


def masked_loop(x, gate, w1, w2, K):
    ids, weights = route(x, gate, K)
    out = torch.zeros_like(x)
    for e, (a, b) in enumerate(zip(w1.unbind(), w2.unbind())):
        token, slot = torch.where(ids == e)
        out = out.index_add(0, token, expert(x[token], a, b) * weights[token, slot, None])
    return out


def grouped_mm(x, gate, w1, w2, K):
    ids, weights = route(x, gate, K)
    order = ids.reshape(-1).argsort(stable=True)
    token = order // K
    offsets = torch.bincount(ids.reshape(-1), minlength=len(w1)).cumsum(0).to(torch.int32)
    gated, up = torch._grouped_mm(x[token], w1.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    y = torch._grouped_mm(F.silu(gated) * up, w2.transpose(1, 2), offs=offsets)
    return torch.zeros_like(x).index_add(0, token, y * weights.reshape(-1)[order, None])


def functional(function, parameters, K):
    return lambda x: function(x, *parameters, K)


def transformers_block(parameters, K):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    gate, w1, w2 = parameters
    config = MixtralConfig(hidden_size=gate.shape[1], intermediate_size=w2.shape[2], num_local_experts=len(gate), num_experts_per_tok=K,
                           router_jitter_noise=0.0)  # fmt: skip
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).to(gate.device)
    block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = parameters
    return lambda x: block(x[None])[0]


def waybill_block(parameters, K):
    import waybill.torch as wbt

    gate, w1, w2 = parameters
    recipe = "bf16" if gate.is_cuda else "fp32"
    block = wbt.MoE(wbt.MoeConfig(H=gate.shape[1], F=w2.shape[2], router=wbt.RouterConfig(E=len(gate), K=K), recipe=recipe))
    block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = parameters
    return block


def run(block, parameters, x, d_out):
    x = x.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    out = block(x)
    out.backward(d_out)
    return [out.detach(), x.grad, *(parameter.grad for parameter in parameters)]


def check(name, got, want, bound):
    for a, b in zip(got, want):
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max())
        if not error < bound:
            sys.exit(f"torch_moe: {name} differs from the sorted loop by {error:.1e} of the largest value; nothing was timed")


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def take_turns(calls, seconds, device):
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in calls.items():
            sync(device)
            begin = time.perf_counter()
            call()
            sync(device)
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: {"median_ms": statistics.median(values), "p90_ms": sorted(values)[int(0.9 * (len(values) - 1))], "calls": len(values)}
            for name, values in times.items()}  # fmt: skip


def evaluated(block, x):
    with torch.no_grad():
        block(x)


def stacks_of(shape, device, load=None):
    T, H, E, K, inner = SHAPES[shape]
    torch.manual_seed(1)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    new = lambda *dims: torch.nn.Parameter((torch.randn(*dims, device=device) * dims[-1] ** -0.5).to(dtype))  # noqa: E731
    parameters = new(E, H), new(E, 2 * inner, H), new(E, H, inner)
    x = torch.randn(T, H, device=device).to(dtype)
    if load is not None:
        wanted = torch.from_numpy(loads.logits(load, T, K, E, lambda size: torch.randn(size).numpy())).to(device)
        x = torch.cat([wanted, torch.randn(len(wanted), H - E, device=device)], 1).to(dtype)
        parameters[0].data = torch.eye(E, H, device=device).to(dtype)
    d_out = torch.randn_like(x)
    makers = {"waybill": lambda: waybill_block(parameters, K), "sorted loop": lambda: functional(sorted_loop, parameters, K),
              "masked loop": lambda: functional(masked_loop, parameters, K), "grouped_mm": lambda: functional(grouped_mm, parameters, K),
              "transformers": lambda: transformers_block(parameters, K)}  # fmt: skip
    if on_gpu:
        del makers["transformers"]
    wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    want, stacks = run(functional(sorted_loop, wide, K), wide, x.float(), d_out.float()), {}
    del wide
    for name, make in makers.items():
        try:
            block = make()
            got = run(block, parameters, x, d_out)
        except (RuntimeError, ImportError, NotImplementedError) as error:
            print(f"{name}: not timed, {str(error).splitlines()[0][:150]}")
            continue
        check(name, got, want, 3e-2 if on_gpu else 1e-4)
        stacks[name] = block
    del want
    return stacks, parameters, x, d_out


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *parameters):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        return d_out, *[None] * (len(ctx.needs_input_grad) - 1)


def captured(block, parameters, x, d_out):
    """The replay of a CUDA graph of forward + backward."""
    leaf = x.detach().clone().requires_grad_()
    step = lambda: torch.autograd.grad(block(leaf), (leaf, *parameters), d_out)  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept=leaf):  # the graph reads its memory
        graph.replay()

    return replay


def host_time():
    """Microseconds of forward + backward of a block with next to no work: the whole call, a node that does nothing, the library's two calls."""
    parameters = tuple(torch.nn.Parameter(torch.randn(*dims)) for dims in ((2, 8), (2, 16, 8), (2, 8, 8)))
    block, x, d_out = waybill_block(parameters, 1), torch.randn(1, 8).requires_grad_(), torch.ones(1, 8)
    block(x)
    calls = {
        "waybill": lambda: torch.autograd.grad(block(x), (x, *parameters), d_out),
        "nothing": lambda: torch.autograd.grad(Nothing.apply(x, *parameters), x, d_out),
    }
    median = lambda values: statistics.median(values) * 1e6  # noqa: E731

    def measure():
        times = {name: [] for name in calls}
        for number in range(1100):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                if number >= 100:
                    times[name].append(time.perf_counter() - begin)
        return {name: median(values) for name, values in times.items()}

    result = measure()
    inner, structs = {"forward": [], "backward": []}, block._layer.calls

    def timed(name, function):
        def call(*arguments):
            begin = time.perf_counter()
            status = function(*arguments)
            inner[name].append(time.perf_counter() - begin)
            return status

        return call

    structs.forward, structs.backward = timed("forward", structs.forward), timed("backward", structs.backward)
    measure()
    result["library"] = median(inner["forward"]) + median(inner["backward"])
    return {**result, "added": result["waybill"] - result["nothing"] - result["library"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json")
    parser.add_argument("--host-only", action="store_true")
    parser.add_argument("--load", choices=loads.WORKLOADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record = {"torch": torch.__version__, "machine": platform.processor() or platform.machine(), "threads": args.threads}
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: PyTorch {torch.__version__} finds no CUDA device (a GPU, its driver and PyTorch with CUDA are needed)")
    if device.type == "cpu":
        record["host_us"] = host_time()
        print("host time of forward + backward: {waybill:.1f} us; a node that does nothing {nothing:.1f} us, inside the library {library:.1f} us, "
              "the rest {added:.1f} us".format(**record["host_us"]))  # fmt: skip
    elif args.host_only:
        parser.error("--host-only is of the CPU; on a GPU: torch_host.py")
    if not args.host_only:
        stacks, parameters, x, d_out = stacks_of(args.shape, device, args.load)
        record |= {"shape": dict(zip("THEKF", SHAPES[args.shape])), "load": args.load or "natural", "device": str(device)}
        record["forward"] = take_turns({name: lambda block=block: evaluated(block, x) for name, block in stacks.items()}, args.seconds / 3, device)
        both_ways = {name: lambda block=block: run(block, parameters, x, d_out) for name, block in stacks.items()}
        if device.type == "cuda":
            both_ways["waybill, graph"] = captured(stacks["waybill"], parameters, x, d_out)
        record["forward_backward"] = take_turns(both_ways, args.seconds, device)
        print(f"{args.shape} {record['shape']}, load {record['load']}, {device}, {args.threads} threads, {x.dtype}; ms, equal results were checked first")
        ours = record["forward_backward"]["waybill"]["median_ms"]
        for name in both_ways:
            both = record["forward_backward"][name]
            forward, ms = record["forward"].get(name, both)["median_ms"], both["median_ms"]
            print(f"| {name} | {forward:.2f} | {ms:.2f} | {both['p90_ms']:.2f} | {ms / ours:.2f} |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()

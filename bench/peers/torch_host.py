#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time that waybill.torch.MoE adds on a GPU: forward + backward in eager mode of a block of one token and 2 x 8 x 8 experts, and what it consists of.

  python3 bench/peers/torch_host.py [--cores 4,1,0] [--rounds 3] [--graphed] [--settings] [--json FILE]

Medians of 1,000 (--calls) calls a round, all kinds of calls taking turns; the device is waited for after every 10 turns.
  builtin, ctypes  torch.autograd.grad(block(x), (x, *parameters), d_out), with the functions of libwaybill_torch.so and with the pointers set by ctypes
  graphed          (--graphed) the same through torch.cuda.make_graphed_callables: a graph each way, x and d_out copied into it
  library          of a call of the first two, the time inside the C functions (kernels are queued there)
  empty node       an autograd.Function of as many inputs that copies x and returns d_out
  same node        one that saves and returns as many tensors as the block does and allocates them, and does nothing else
  waiting node     the same node, which keeps its core busy each way as long as the library did in the calls of "builtin" just before, without Python's lock;
                   that time is subtracted
  bare node        the same node with the library's two calls in it, their arguments made once and for all; the time in them is subtracted
  allocations      the six allocations alone
added = call - library - empty node. Of that, "bare node - empty node" is what any binding pays that saves and allocates those tensors around those calls (code
of PyTorch's that finds its caches full of the driver's, a thread that wakes up late), the rest is this binding's.
"in this thread": the same with torch.autograd.set_multithreading_enabled(False), where backward runs in the calling thread.

--settings: instead, blocks with other parameters, recipes and calls, each beside an empty node of as many inputs: call, library, empty, added.

--cores: the process stays on so many of the cores on which a loop runs fastest at the start (0: on all), one run for each number, in processes of their own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import cores
import timed_library

PARAMETERS = ((2, 8), (2, 16, 8), (2, 8, 8))


def nodes(torch, timed, waits, fixed):
    from torch_moe import Nothing

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, room, *parameters):
            out, saved = torch.empty_like(x), torch.empty_like(room)
            ctx.save_for_backward(x, saved, *parameters)
            return out

        @staticmethod
        def backward(ctx, d_out):
            x, _, *parameters = ctx.saved_tensors
            return torch.empty_like(x), None, *[torch.empty_like(parameter) for parameter in parameters]

    class Waiting(Same):
        @staticmethod
        def forward(ctx, x, room, *parameters):
            out = Same.forward(ctx, x, room, *parameters)
            timed.spin(waits[0])
            return out

        @staticmethod
        def backward(ctx, d_out):
            gradients = Same.backward(ctx, d_out)
            timed.spin(waits[1])
            return gradients

    class Bare(Same):
        @staticmethod
        def forward(ctx, x, room, *parameters):
            out = Same.forward(ctx, x, room, *parameters)
            fixed[0]()
            return out

        @staticmethod
        def backward(ctx, d_out):
            gradients = Same.backward(ctx, d_out)
            fixed[1]()
            return gradients

    return Nothing, Same, Waiting, Bare


def fixed_calls(calls, x, parameters, d_out):
    """The library's two calls with arguments that stay: of the ctypes form, whose structs keep the pointers of its last call."""
    kept = [calls.train(x, *parameters)]
    kept.append(calls.gradients((x, kept[0][1], *parameters), d_out))
    return lambda: calls._forward(*calls._train), lambda: calls._backward(*calls._both, calls._no_factors, calls._back_stream), kept


def make_calls(torch, timed, waits, with_graphed):
    import waybill.torch as wbt
    from waybill.torch import _fast, _plain

    new = lambda *dims: torch.nn.Parameter(torch.randn(*dims, device="cuda").bfloat16())  # noqa: E731
    parameters = tuple(new(*dims) for dims in PARAMETERS)
    x, d_out = torch.randn(1, 8, device="cuda").bfloat16().requires_grad_(), torch.ones(1, 8, device="cuda").bfloat16()
    _plain.library = timed.functions
    grad, wanted, blocks = torch.autograd.grad, (x, *parameters), {}
    forms = ["builtin", "ctypes"] if _fast.available() else ["ctypes"]
    for form in [*forms, "fixed"]:
        if form == "ctypes":
            _fast._load = lambda: None
        block = blocks[form] = wbt.MoE(wbt.MoeConfig(H=8, F=8, router=wbt.RouterConfig(E=2, K=1), recipe="bf16"))
        block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = parameters
        block(x)
        room = block._cuda_calls[x.shape].bytes
    fixed = fixed_calls(blocks.pop("fixed")._cuda_calls[x.shape], x, parameters, d_out)  # structs that no other call touches
    if with_graphed:
        block = wbt.MoE(block.config)
        block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = parameters
        block(x)
        blocks["graphed"] = torch.cuda.make_graphed_callables(block, (torch.randn_like(x).requires_grad_(),))
    Nothing, Same, Waiting, Bare = nodes(torch, timed, waits, fixed)
    calls = {form: lambda block=block: grad(block(x), wanted, d_out) for form, block in blocks.items()} | {
        "empty node": lambda: grad(Nothing.apply(x, *parameters), x, d_out),
        "same node": lambda: grad(Same.apply(x, room, *parameters), wanted, d_out),
        "waiting node": lambda: grad(Waiting.apply(x, room, *parameters), wanted, d_out),
        "bare node": lambda: grad(Bare.apply(x, room, *parameters), wanted, d_out),
        "allocations": lambda: [torch.empty_like(t) for t in (x, room, *wanted)],
    }
    step = calls[forms[0]]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step()
    return calls, forms, graph


def settings(torch, timed):
    """{name: (call, empty node)}: forward + backward, but for the evaluation."""
    import waybill.torch as wbt
    from torch_moe import Nothing
    from waybill.torch import _device

    one = torch.ones((), device="cuda")

    def make(trains_x=True, evaluates=False, recipe="bf16", scale=1.0, call=lambda block, x: block(x), H=8, **config):
        block = wbt.MoE(wbt.MoeConfig(H=H, F=H, router=wbt.RouterConfig(E=2, K=1, aux_coefficient=config.pop("aux", 0)), recipe=recipe, **config),
                        device="cuda", dtype=torch.bfloat16)  # fmt: skip
        block.loss_scale = scale
        if config.get("expert_bias"):
            for bias in (block.experts.gate_up_proj_bias, block.experts.down_proj_bias):
                bias.data = bias.data.float()
        x, d_out = (torch.randn(1, H, device="cuda").bfloat16() for _ in range(2))
        x.requires_grad_(trains_x)
        given = tuple(block.parameters())
        wanted = (x, *given) if trains_x else given
        if evaluates:
            return torch.no_grad()(lambda: call(block, x)), torch.no_grad()(lambda: Nothing.apply(x, *given))
        return (lambda: torch.autograd.grad(call(block, x), wanted, d_out),
                lambda: torch.autograd.grad(Nothing.apply(x, *given), x if trains_x else given[0], d_out, allow_unused=True))  # fmt: skip

    result = {
        "module": make(),
        "x without gradient": make(trains_x=False),
        "evaluation (no_grad)": make(evaluates=True),
        "with a loss, loss_scale 0.5": make(aux=0.1, scale=0.5),
        "router bias, latent width": make(router_bias=True, latent=8),
        "expert biases, float32": make(expert_bias=True),
        "shared expert": make(shared_F=8),
        "fp8": make(recipe="fp8", H=128),
        "mxfp8": make(recipe="mxfp8", H=128),
        "nvfp4": make(recipe="nvfp4", H=128),
        "return_stats (custom op)": make(call=lambda block, x: block(x, return_stats=True)[0]),
        "padding mask (custom op)": make(call=lambda block, x, mask=torch.zeros(1, dtype=torch.bool, device="cuda"): block(x, mask)),
        "rounding seed (custom op)": make(recipe="mxfp8", H=128, call=lambda block, x, seed=one.long(): block(x, rounding_seed=seed)),
    }
    refused = {}
    for name, calls in list(result.items()):
        try:
            [call() for call in calls]
        except (ValueError, NotImplementedError, RuntimeError) as error:
            refused[name] = str(error)
            del result[name]
    for layer in _device._layers.values():  # of the custom op
        functions = timed.functions()
        for form in ("forward", "backward"):
            function = getattr(functions, f"wb_device_moe_{form}")
            function.argtypes = getattr(layer, f"{form}_function").argtypes
            setattr(layer, f"{form}_function", function)
    return result, refused


def measure_settings(torch, timed, count):
    from waybill.torch import _plain

    _plain.library = timed.functions
    result, (kinds, refused) = {}, settings(torch, timed)
    for name, (call, empty) in kinds.items():
        times = {"call": [], "empty": [], "library": [], "left": []}
        for number in range(count + 100):
            for form, function in (("call", call), ("empty", empty)):
                before, begin = timed.nanoseconds, time.perf_counter()
                function()
                spent = time.perf_counter() - begin
                if number >= 100:
                    times[form].append(spent)
                    if form == "call":
                        library = (timed.nanoseconds - before) * 1e-9
                        times["library"].append(library)
                        times["left"].append(spent - library)
            if number % 10 == 9:
                torch.cuda.synchronize()
        us = {form: statistics.median(values) * 1e6 for form, values in times.items()}
        result[name] = us | {"added": us["left"] - us["empty"]}
        print(f"| {name} | {us['call']:.1f} | {us['library']:.1f} | {us['empty']:.1f} | {result[name]['added']:.1f} |", flush=True)
    for name, reason in refused.items():
        print(f"| {name} | not run: {reason} |")
    return result


def measure(torch, calls, forms, timed, waits, count):
    times = {name: [] for name in calls}
    inside, without = ({form: [] for form in forms} for _ in range(2))
    for number in range(count + 100):
        for name, call in calls.items():
            before = timed.nanoseconds
            begin = time.perf_counter()
            call()
            spent = time.perf_counter() - begin
            if name == forms[0]:
                waits[:] = timed.step
            if number < 100:
                continue
            library = (timed.nanoseconds - before) * 1e-9
            times[name].append(spent - {"waiting node": sum(waits) * 1e-9, "bare node": library}.get(name, 0))
            if name in forms:
                inside[name].append(library)
                without[name].append(spent - library)
        if number % 10 == 9:
            torch.cuda.synchronize()
    median = lambda values: statistics.median(values) * 1e6  # noqa: E731
    result = {name: median(values) for name, values in times.items()}
    for form in forms:
        left = median(without[form])
        result[f"{form}: library"] = median(inside[form])
        result |= {f"{form}: added": left - result["empty node"], f"{form}: the binding's": left - result["bare node"]}
    return result


def run(number_of_cores, rounds, count, with_graphed, with_settings):
    chosen, best, worst = cores.take_quiet(number_of_cores)
    timed, waits = timed_library.Timed(), [0, 0]
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no CUDA device (a GPU, its driver and a build of PyTorch with CUDA are needed)")
    if with_settings:
        print(f"PyTorch {torch.__version__}; cores {chosen}, a loop takes {best:.0f} us there and up to {worst:.0f} on others", flush=True)
        print("| setting | call | library | empty node | added |")
        return {"torch": torch.__version__, "cores": chosen, "loop_us": [best, worst], "settings": measure_settings(torch, timed, count)}
    calls, forms, graph = make_calls(torch, timed, waits, with_graphed)
    print(f"PyTorch {torch.__version__}; cores {chosen}, a loop takes {best:.0f} us there and up to {worst:.0f} on others", flush=True)
    record = {"torch": torch.__version__, "cores": chosen, "loop_us": [best, worst], "rounds": []}
    for _ in range(rounds):
        for where in ("", "in this thread"):
            with torch.autograd.set_multithreading_enabled(not where):
                result = measure(torch, calls, forms, timed, waits, count)
            record["rounds"].append({"where": where, **result})
            print("| " + " | ".join([where or "default", *(f"{name} {us:.1f}" for name, us in result.items())]) + " |", flush=True)
    replays = []
    for _ in range(200):
        begin = time.perf_counter()
        graph.replay()
        replays.append((time.perf_counter() - begin) * 1e6 / 10)
        torch.cuda.synchronize()
    record["replay_us"] = statistics.median(replays)
    print(f"in a replayed graph of 10 calls: {record['replay_us']:.2f} us a call, the graph's launch included", flush=True)
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=lambda text: [int(part) for part in text.split(",")], default=[4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--graphed", action="store_true")
    parser.add_argument("--settings", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if len(args.cores) == 1:
        records = [run(args.cores[0], args.rounds, args.calls, args.graphed, args.settings)]
    else:
        records = []
        for number in args.cores:
            with tempfile.NamedTemporaryFile() as file:
                subprocess.run([sys.executable, __file__, "--cores", str(number), "--rounds", str(args.rounds), "--calls", str(args.calls), "--json", file.name,
                                *["--graphed"] * args.graphed, *["--settings"] * args.settings], check=True)  # fmt: skip
                records += json.load(file)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()

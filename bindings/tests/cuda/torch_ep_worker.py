# SPDX-License-Identifier: Apache-2.0
"""One of P processes under torchrun, a GPU each: the block spread over them against the block with all experts on this GPU. Prints "rank R: passed".

With PLAY_NODES=1 every process is a node of its own, as NCCL sees it, and all take GPU 0: rows go over sockets."""

import dataclasses
import os

import torch
import torch.distributed as dist
import waybill.torch as wbt

ROUTER = wbt.RouterConfig(E=8, K=3, aux_coefficient=0.05, z_coefficient=0.01)
CONFIG = wbt.MoeConfig(H=64, F=48, router=ROUTER, recipe="bf16")
CONFIGS = {"plain": CONFIG, "shared, bf16 partials": dataclasses.replace(CONFIG, shared_F=40, combine_wire="bfloat16"),
           "budget": dataclasses.replace(CONFIG, mode="captured", receive_factor=2.5)}  # fmt: skip
T = 120
PLAY_NODES = os.environ.get("PLAY_NODES") == "1"
if PLAY_NODES:
    os.environ.update(NCCL_HOSTID=f"node {os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo")
    CONFIG = dataclasses.replace(CONFIG, hierarchy="two_level")
    CONFIGS = {name: dataclasses.replace(config, hierarchy="two_level") for name, config in CONFIGS.items()}


def relative(got, want):
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))


def sliced(whole, block):
    """The weights of the whole block in one that holds some of its experts."""
    state = whole.state_dict()
    first, last = block.first_expert, block.first_expert + block.num_local_experts
    block.load_state_dict({name: value[first:last] if name.startswith("experts.") else value for name, value in state.items()})


def gradients(block, x, d_out):
    leaf = x.clone().requires_grad_()
    out = block(leaf)
    return out, torch.autograd.grad(out, [leaf, *block.parameters()], d_out)


def compare(config, ep, bound):
    rank, P = ep.rank, ep.size
    torch.manual_seed(7)
    whole = wbt.MoE(config, device="cuda", dtype=torch.bfloat16)
    block = wbt.MoE(config, ep=ep, device="cuda", dtype=torch.bfloat16)
    sliced(whole, block)
    for seed in range(3):
        torch.manual_seed(seed)
        x, d_out = (torch.randn(P * T, 64, device="cuda").bfloat16() for _ in range(2))
        mine = slice(rank * T, (rank + 1) * T)
        want, (want_x, *want_p) = gradients(whole, x, d_out)
        out, (got_x, *got_p) = gradients(block, x[mine], d_out[mine])
        assert relative(out, want[mine]) < bound and relative(got_x, want_x[mine]) < bound, (seed, relative(out, want[mine]), relative(got_x, want_x[mine]))
        for (name, _), got, wanted in zip(block.named_parameters(), got_p, want_p):
            if name.startswith("experts."):
                wanted = wanted[block.first_expert : block.first_expert + block.num_local_experts]
            else:  # this process's tokens only
                got = got.float().cpu()
                dist.all_reduce(got)
                got = got.cuda()
            assert relative(got, wanted) < bound, (name, seed, relative(got, wanted))
    with torch.no_grad():
        out, stats = block(x[mine], return_stats=True)
    assert int(stats.valid) == 1 and int(stats.counts.sum()) == P * T * ROUTER.K, stats.counts
    return block


def replay(block, ep):
    """One graph of forward and backward, replayed with other data, has the bits of eager calls."""
    leaf, d_out = torch.randn(T, 64, device="cuda").bfloat16().requires_grad_(), torch.randn(T, 64, device="cuda").bfloat16()

    def step():
        out = block(leaf)
        return [out, *torch.autograd.grad(out, [leaf, *block.parameters()], d_out)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(5):
        torch.manual_seed(100 + seed + 10 * ep.rank)
        with torch.no_grad():
            leaf.copy_(torch.randn(T, 64))
            d_out.copy_(torch.randn(T, 64))
        graph.replay()
        got = [part.clone() for part in captured]
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True)), seed


def overflow(ep):
    config = dataclasses.replace(CONFIG, router=wbt.RouterConfig(E=8, K=1), mode="captured", receive_factor=0.5)
    block = wbt.MoE(config, ep=ep, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        block.gate.weight.zero_()  # all to expert 0: only rank 0 is exceeded
    x = torch.ones(T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, stats = block(x, return_stats=True)
    out.float().sum().backward()
    assert int(stats.valid) == 0 and out.abs().max() == 0 and x.grad.abs().max() == 0


def differing(ep):
    try:
        wbt.MoE(dataclasses.replace(CONFIG, F=48 + 8 * ep.rank), ep=ep, device="cuda", dtype=torch.bfloat16)(torch.zeros(8, 64, device="cuda").bfloat16())
    except ValueError as error:
        assert "rank 0 has F = 48, rank 1 has 56" in str(error), error
    else:
        raise AssertionError("differing configs were accepted")


def routes(ep):
    """dispatch and combine with experts that change nothing and unit weights: each token comes back K times, exactly."""
    E, K = 8, 3
    torch.manual_seed(5)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(ep.size * T)]).to(torch.int16).cuda()
    x = torch.randint(-15, 16, (ep.size * T, 64), device="cuda").float()
    mine, L = slice(ep.rank * T, (ep.rank + 1) * T), E // ep.size
    exchange = wbt.Exchange(ep, H=64, E=E, K=K, hierarchy=CONFIG.hierarchy)
    for _ in range(3):
        leaf, ones = x[mine].clone().requires_grad_(), torch.ones(T, K, device="cuda")
        slots = exchange.dispatch_slots(leaf, ids[mine], ones)
        out = exchange.combine_slots(slots.rows, ids[mine], ones)
        (gradient,) = torch.autograd.grad(out, leaf, x[mine])
        assert torch.equal(out, K * x[mine]) and torch.equal(gradient, K * x[mine]) and int(slots.valid) == 1
        assert slots.group_sizes.tolist() == torch.bincount(ids.flatten().long(), minlength=E)[ep.rank * L : (ep.rank + 1) * L].tolist()


def main():
    torch.cuda.set_device(0 if PLAY_NODES else int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    ep = wbt.process_group_fabric()
    for name, config in CONFIGS.items():
        block = compare(config, ep, 1e-2)
        print(f"rank {ep.rank}: {name} agrees", flush=True)
    replay(block, ep)
    overflow(ep)
    routes(ep)
    differing(ep)
    torch.cuda.synchronize()
    dist.barrier()
    print(f"rank {ep.rank}: passed", flush=True)
    os._exit(0)  # the groups' arenas go with the process


if __name__ == "__main__":
    main()

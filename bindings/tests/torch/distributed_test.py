# SPDX-License-Identifier: Apache-2.0
"""One process a rank over gloo: the block of P processes is the block of one."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import waybill.torch as wbt
from conftest import relative

CONFIG = wbt.MoeConfig(H=8, F=6, router=wbt.RouterConfig(E=4, K=2, aux_coefficient=0.05), shared_F=5)
TOKENS = [7, 5]


def build(ep=None):
    """The same parameters on every rank, cut to the local experts."""
    torch.manual_seed(3)
    whole = wbt.MoE(CONFIG)
    if ep is None:
        return whole
    part = wbt.MoE(CONFIG, ep=ep)
    local = slice(part.first_expert, part.first_expert + part.num_local_experts)
    part.load_state_dict({name: value[local] if name.startswith("experts.") else value for name, value in whole.state_dict().items()})
    return part


def inputs():
    torch.manual_seed(4)
    return torch.randn(sum(TOKENS), 8), torch.randn(sum(TOKENS), 8)


def worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=len(TOKENS))
    ep = wbt.process_group_fabric()
    block = build(ep)
    x, d_out = inputs()
    rows = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    mine = x[rows].clone().requires_grad_()
    out = block(mine)
    out.backward(d_out[rows])
    try:
        wbt.Exchange(ep, H=8 + rank, E=4, K=2)
        refusal = "none"
    except ValueError as error:
        refusal = str(error)
    gradients = {name: parameter.grad.numpy() for name, parameter in block.named_parameters()}
    queue.put((rank, out.detach().numpy(), mine.grad.numpy(), gradients, refusal))
    dist.barrier()
    dist.destroy_process_group()


def test_processes_over_gloo_compute_what_one_process_computes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(len(TOKENS))]
    for process in processes:
        process.start()
    results = sorted((queue.get(timeout=120) for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    block = build()
    x, d_out = inputs()
    x.requires_grad_()
    out = block(x)
    out.backward(d_out)
    assert relative(torch.cat([torch.from_numpy(result[1]) for result in results]), out.detach()) < 1e-5
    assert relative(torch.cat([torch.from_numpy(result[2]) for result in results]), x.grad) < 1e-5
    for name, parameter in block.named_parameters():
        parts = [torch.from_numpy(result[3][name]) for result in results]
        got = torch.cat(parts) if name.startswith("experts.") else sum(parts)
        assert relative(got, parameter.grad) < 1e-5, name
    assert all("H" in result[4] and "8" in result[4] and "9" in result[4] for result in results)


def test_without_a_process_group_the_error_says_how_to_make_one():
    with pytest.raises(RuntimeError, match="init_process_group"):
        wbt.process_group_fabric()

# SPDX-License-Identifier: Apache-2.0
"""torch_lost_worker.py MODE: one of two processes on GPU 0, each a node of its own. Process 1 ends in the middle of a run; process 0 only calls
torch.cuda.synchronize(), which must end, and its next call of the block must name the rank. Prints "rank 0: passed".

MODE: eager (many steps queued ahead), replayed (a graph of forward and backward, whose step must say that it is worthless)."""

import faulthandler
import os
import sys
import time

rank = int(os.environ["RANK"])
os.environ.update(NCCL_HOSTID=f"node {rank}", NCCL_SOCKET_IFNAME="lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import waybill.torch as wbt  # noqa: E402

T = 120
WANTED = "rank 1 of node 1 is lost, its process has ended"


def main(mode):
    faulthandler.dump_traceback_later(80, exit=True)  # a wait that does not end fails
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    config = wbt.MoeConfig(H=64, F=48, router=wbt.RouterConfig(E=8, K=3), recipe="bf16", hierarchy="two_level")
    block = wbt.MoE(config, ep=wbt.process_group_fabric(), device="cuda", dtype=torch.bfloat16)
    leaf, d_out = torch.randn(T, 64, device="cuda").bfloat16().requires_grad_(), torch.randn(T, 64, device="cuda").bfloat16()

    def step():
        out, stats = block(leaf, return_stats=True)
        torch.autograd.grad(out, [leaf, *block.parameters()], d_out)
        return out, stats.valid

    def captured():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        return graph, results

    graph, (out, valid) = captured() if mode == "replayed" else (None, step())
    if graph is not None:
        graph.replay()
    torch.cuda.synchronize()
    assert int(valid) == 1
    dist.barrier()
    if rank == 1:
        for _ in range(3):
            step() if graph is None else graph.replay()
        time.sleep(0.3)
        os._exit(7)
    refused = ""
    try:
        for _ in range(40):  # also more than the device's queue takes
            out, valid = step() if graph is None else (graph.replay(), (out, valid))[1]
    except RuntimeError as error:
        refused = str(error)
    torch.cuda.synchronize()  # the test: it ends
    if graph is not None:
        assert not refused and int(valid) == 0 and out.abs().max() == 0, (refused, int(valid))
        graph.replay()
        torch.cuda.synchronize()
        assert int(valid) == 0
    for call in (lambda: block(leaf), lambda: block(leaf)):  # every call from now on
        try:
            call()
        except RuntimeError as error:
            assert WANTED in str(error), error
        else:
            raise AssertionError("a call of a group that has lost a rank was not refused")
    assert not refused or WANTED in refused, refused
    print(f"rank {rank}: passed", flush=True)
    os._exit(0)


main(sys.argv[1])

# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of the bindings under torchrun and jax.distributed: one process a GPU, or (nodes = 2) two on one GPU that NCCL takes for two machines.
In JAX also several GPUs of one process."""

import importlib.util
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from waybill._library import has_cuda

HERE = pathlib.Path(__file__).parent
P = 2


def num_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = listed.stdout.count("GPU ") if listed.returncode == 0 else 0
    return found if visible is None else min(found, len([name for name in visible.split(",") if name]))


def needs(package, wanted=P):
    if not has_cuda():
        pytest.skip("libwaybill.so was built without CUDA")
    gpus = num_gpus()
    if gpus < wanted:
        pytest.skip(f"needs {wanted} GPUs, there are {gpus}")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment():
    return {**os.environ, "CUDA_MODULE_LOADING": "EAGER", "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"}


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun(nodes):
    needs("torch", P if nodes == 1 else 1)
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={P}", f"--master-port={free_port()}", HERE / "torch_ep_worker.py"],
                         capture_output=True, text=True, timeout=150, env={**environment(), "PLAY_NODES": str(nodes - 1)}, check=False)  # fmt: skip
    assert all(f"rank {rank}: passed" in run.stdout for rank in range(P)), run.stdout + run.stderr[-6000:]


@pytest.mark.parametrize("nodes", [1, 2])
def test_jax_distributed(nodes):
    needs("jax", P if nodes == 1 else 1)
    port = free_port()
    workers = [subprocess.Popen([sys.executable, HERE / "jax_ep_worker.py", str(index), str(P), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, env={**environment(), "PLAY_NODES": str(nodes - 1)}) for index in range(P)]  # fmt: skip
    try:
        texts = [worker.communicate(timeout=150)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(f"process {index}: passed" in text for index, text in enumerate(texts)), "\n".join(text[-4000:] for text in texts)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_jax_one_process(gpus):
    """One GPU: the same path with a group of one."""
    needs("jax", gpus)
    # Memory that XLA takes in the middle of a step would have to be mapped on the other GPUs, whose kernels wait for this one.
    own = {**environment(), "CUDA_MODULE_LOADING": "LAZY", "XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    command = [sys.executable, HERE / "jax_ep_worker.py", "0", "1", "0", str(gpus)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, env=own, check=False)
    assert "process 0: passed" in run.stdout, run.stdout[-4000:] + run.stderr[-4000:]


def lose_the_second(commands, passed):
    """Two processes, of which the second ends with code 7 in the middle of a run; the first must find out by itself and pass."""
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environment(), **extra})
               for command, extra in commands]  # fmt: skip
    try:
        texts = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert passed in texts[0] and [worker.returncode for worker in workers] == [0, 7], "\n".join(text[-4000:] for text in texts)


@pytest.mark.parametrize("mode", ["eager", "replayed"])
def test_torch_synchronize_ends_where_a_node_is_lost(mode):
    needs("torch", 1)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    lose_the_second([([sys.executable, HERE / "torch_lost_worker.py", mode], {**group, "RANK": str(rank)}) for rank in range(2)], "rank 0: passed")


@pytest.mark.parametrize("mode", ["called", "recorded"])
def test_jax_block_until_ready_ends_where_a_node_is_lost(mode):
    needs("jax", 1)
    port = str(free_port())
    lose_the_second([([sys.executable, HERE / "jax_lost_worker.py", mode, str(index), port], {}) for index in range(2)], "process 0: passed")

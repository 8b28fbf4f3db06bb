# SPDX-License-Identifier: Apache-2.0
"""jax_lost_worker.py MODE PROCESS PORT: one of two processes on GPU 0, each a node of its own. Process 1 ends in the middle of a run; process 0 only waits
by block_until_ready(), which must end. Prints "process 0: passed".

MODE: called (no command buffers: a call that follows must name the rank), recorded (command buffers where XLA records them: a step that was replayed says
that it is worthless, one that was not names the rank)."""

import faulthandler
import os
import sys
import time

mode, index, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(NCCL_HOSTID=f"node {index}", NCCL_SOCKET_IFNAME="lo", XLA_PYTHON_CLIENT_PREALLOCATE="false")
if mode == "called":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax  # noqa: E402

jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, local_device_ids=[0])

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import waybill.jax as wbj  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as Spec  # noqa: E402

T = 120
WANTED = "rank 1 of node 1 is lost, its process has ended"
CONFIG = wbj.MoeConfig(H=64, F=48, router=wbj.RouterConfig(E=8, K=3), recipe="bf16", hierarchy="two_level")


def main():
    faulthandler.dump_traceback_later(80, exit=True)  # a wait that does not end fails
    mesh = jax.make_mesh((2,), ("expert",))
    rng = np.random.default_rng(3)
    specs = wbj.param_specs(CONFIG, "expert")

    def put(array, spec):
        host = np.asarray(jnp.asarray(array).astype(jnp.bfloat16))
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda part: host[part])

    params = {name: put(rng.standard_normal(dims, np.float32) * dims[-1] ** -0.5, specs[name]) for name, dims in CONFIG.shapes().items()}
    x = put(rng.standard_normal((2 * T, CONFIG.H), np.float32), Spec("expert"))

    def body(params, x):
        out, stats = wbj.moe_block(x, params, CONFIG, axis_name="expert")
        return out, stats.status

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, Spec("expert")), out_specs=(Spec("expert"), Spec("expert"))))

    def valid(results):
        status = np.asarray(results[1].addressable_shards[0].data)
        assert status[0] == 1 or status[5] == 8, status
        return int(status[0])

    for _ in range(4):
        results = jax.block_until_ready(step(params, x))
    assert valid(results) == 1
    if index == 1:
        time.sleep(1)  # the other has its results, too
        os._exit(7)
    time.sleep(0.5)
    text, invalid = "", 0
    for _ in range(300):
        try:
            invalid += 1 - valid(jax.block_until_ready(step(params, x)))
        except (RuntimeError, ValueError) as error:
            text = str(error)
            break
        if invalid >= 3:
            break
        time.sleep(0.02)
    assert WANTED in text or (mode == "recorded" and invalid >= 3), (text, invalid)
    print(f"process {index}: passed", flush=True)
    os._exit(0)


main()

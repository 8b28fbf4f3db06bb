# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' clock stands before the library for waybill.jax's ops: calls are counted, timed, and skipped where it is told so."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import timed_library
timed = timed_library.Timed()
import jax.numpy as jnp
import waybill.jax as wbj
route = lambda: wbj.router(jnp.ones((4, 8)), wbj.RouterConfig(E=8, K=2)).counts.block_until_ready()
counts = route()
calls, spent = timed.calls, timed.nanoseconds
assert counts.sum() == 8 and calls == 1 and spent > 0, (calls, spent)
timed.skip(True)
route()
assert timed.calls == 2 and timed.nanoseconds == spent
timed.skip(False)
assert (route() == counts).all() and timed.calls == 3 and timed.nanoseconds > spent and timed.step[1] > 0
before = timed.nanoseconds
timed.spin(2_000_000)
assert timed.nanoseconds == before
print("timed")
"""


def test_calls_of_jax_ops_go_through_the_clock():
    if not os.path.exists(os.environ.get("WAYBILL_CLOCK_LIBRARY", "")):
        pytest.skip("WAYBILL_CLOCK_LIBRARY does not name libwaybill_clock.so (built with WAYBILL_BUILD_BENCH)")
    peers = pathlib.Path(__file__).parents[3] / "bench" / "peers"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(peers), *filter(None, [os.environ.get("PYTHONPATH")])])}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert run.stdout == "timed\n", run.stderr[-3000:]

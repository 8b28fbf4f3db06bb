# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism with several processes (jax.distributed): what one process computes, and one clear error on every process."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


def run(scenario, processes, devices):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, str(HERE / "distributed_worker.py"), scenario]
    workers = [subprocess.Popen([*command, str(process), str(processes), str(devices), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=environment) for process in range(processes)]  # fmt: skip
    results = []
    for worker in workers:
        out, err = worker.communicate(timeout=240)
        assert worker.returncode == 0, err[-3000:]
        results.append(json.loads(out.strip().splitlines()[-1]))
    return results


@pytest.mark.parametrize("scenario, processes, devices", [("block", 2, 1), ("block", 2, 2), ("ops", 2, 1), ("pairs", 2, 1)])
def test_processes_compute_what_one_process_computes(scenario, processes, devices):
    for result in run(scenario, processes, devices):
        assert max(result["errors"]) < 1e-5, result
        assert result.get("equal", True), result  # the same bits at every repetition


def test_processes_compare_what_they_make_before_they_wait_for_each_other():
    for process, result in enumerate(run("given", 2, 1)):
        assert result["values"] == ["000000", "010101"]
        makes = ["layer", "exchange"]
        assert f"process {process} makes a {makes[process]} where process {1 - process} makes a {makes[1 - process]}" in result["error"], result


def test_mixed_configs_are_named_on_every_process():
    for result in run("mixed", 2, 1):
        assert "z_coefficient" in result["error"] and "rank 0" in result["error"], result

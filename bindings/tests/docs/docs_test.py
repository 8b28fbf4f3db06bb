# SPDX-License-Identifier: Apache-2.0
"""Every Python snippet of the README and the how-to pages runs, in the order of its page and in one namespace; lines `# -> text` state what is
printed."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

HOWTO = pathlib.Path(__file__).parents[3] / "docs" / "howto"
README = "../../README.md"
PAGES = ["jax.md", "pytorch.md", README]
NEEDS = {"jax.md": ["jax", "flax", "optax"], "pytorch.md": ["torch", "transformers"], README: ["jax", "torch"]}


def program_of(page):
    snippets = re.findall(r"^```python\n(.*?)^```", (HOWTO / page).read_text(encoding="utf-8"), re.M | re.S)
    assert snippets, f"{page} has no snippet"
    return "\n".join(snippets)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_and_print_what_they_say(page, tmp_path):
    for name in NEEDS[page]:
        pytest.importorskip(name, reason=f"{name} is not installed")
    program = program_of(page)
    path = tmp_path / "page.py"
    path.write_text(f"if __name__ == '__main__':\n{''.join('    ' + line for line in program.splitlines(True))}", encoding="utf-8")
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split("\n")[:-1] == re.findall(r"# -> (.*)", program)


def scripts_of(page):
    """title -> text of the page's whole scripts."""
    return dict(re.findall(r"^```python title=(\S+)\n(.*?)^```", (HOWTO / page).read_text(encoding="utf-8"), re.M | re.S))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(commands, folder):
    """Runs the commands side by side; their output, all lines sorted."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment) for command in commands]
    lines = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        lines += out.splitlines()
    return sorted(line for line in lines if line.startswith(("rank", "process")))


def test_the_torchrun_script_trains_on_two_processes(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "train_torch.py").write_text(scripts_of("distributed.md")["train_torch.py"], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "train_torch.py"]
    assert run_all([command], tmp_path) == ["rank 0: learns True, experts 0 to 3", "rank 1: learns True, experts 4 to 7"]


def test_the_jax_script_trains_on_two_processes(tmp_path):
    pytest.importorskip("jax", reason="jax is not installed")
    (tmp_path / "train_jax.py").write_text(scripts_of("distributed.md")["train_jax.py"], encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, "train_jax.py", str(process), "2", address] for process in range(2)]
    assert run_all(commands, tmp_path) == [f"process {process}: learns True, 2 devices" for process in range(2)]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_measuring_script_says_step_time_rates_and_the_times_of_the_parts(devices, tmp_path):
    pytest.importorskip("jax", reason="jax is not installed")
    (tmp_path / "measure.py").write_text(scripts_of("distributed.md")["measure.py"], encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    run = subprocess.run([sys.executable, "measure.py"], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    first, step, matmul, parts = run.stdout.splitlines()
    assert first == f"{devices} devices, T = 64, H = 32, F = 64, E = 8, K = 2"
    ms, rate, mfu = map(float, re.fullmatch(r"step (\S+) ms, (\S+) TFLOP/s a device, MFU (\S+)", step).groups())
    assert ms > 0 and abs(rate / (18 * 64 * 2 * 32 * 64 / ms * 1e-9) - 1) < 1e-2 and mfu == rate
    assert float(re.fullmatch(r"grouped matmul (\S+) ms, \S+ TFLOP/s a device", matmul)[1]) > 0
    *times, slots = re.fullmatch(r"dispatch (\S+) ms, combine (\S+) ms, (\d+) slots in use", parts).groups()
    assert min(map(float, times)) > 0 and int(slots) == devices * 64 * 2


def test_the_containerfile_has_the_packages_of_the_build():
    """No container engine runs here: instructions, packages and paths are held against the repository."""
    text = (HOWTO / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(re.match(r"(FROM|RUN|COPY|ENV) \S", line) for line in lines), lines
    stages = [re.findall(r"install -y --no-install-recommends ([^&]*)", line) for line in lines if "apt-get" in line]
    build, run = (set(found[0].split()) for found in stages)
    listed = re.search(r"^build_packages='(.*?)'$", (HOWTO.parents[1] / "scripts" / "setup.sh").read_text(encoding="utf-8"), re.M | re.S)
    wanted = {line.split("|")[0] for line in listed.group(1).splitlines()} - {"libspdlog-dev", "libcli11-dev"}  # of the command, which a wheel has not
    assert wanted <= build and {"python3", "python3-venv"} <= build & run, (wanted - build, run)
    assert " -C " not in text, "Debian 12's pip 23.0 knows --config-settings only"
    assert "pip wheel /src" in text and "-m waybill doctor" in text and "COPY --from=build /wheels /wheels" in text

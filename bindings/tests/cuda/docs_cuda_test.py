# SPDX-License-Identifier: Apache-2.0
"""The GPU scripts of the how-to pages run and print what they say."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
from ep_cuda_test import environment, num_gpus
from waybill._library import has_cuda

HOWTO = pathlib.Path(__file__).parents[3] / "docs" / "howto"


@pytest.mark.parametrize("page, title, package", [("pytorch.md", "gpu_torch.py", "torch"), ("jax.md", "gpu_jax.py", "jax")])
def test_a_script_prints_what_it_says(page, title, package, tmp_path):
    if not has_cuda() or num_gpus() < 1 or importlib.util.find_spec(package) is None:
        pytest.skip(f"needs a library with CUDA, a GPU and {package}")
    text = dict(re.findall(r"^```python title=(\S+)\n(.*?)^```", (HOWTO / page).read_text(encoding="utf-8"), re.M | re.S))[title]
    (tmp_path / title).write_text(text, encoding="utf-8")
    run = subprocess.run([sys.executable, title], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(), check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split("\n")[:-1] == re.findall(r"# -> (.*)", text)

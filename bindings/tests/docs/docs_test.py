# SPDX-License-Identifier: Apache-2.0
"""Every Python snippet of the how-to pages runs, in the order of its page and in one namespace; lines `# -> text` state what is printed."""

import pathlib
import re
import subprocess
import sys

import pytest

HOWTO = pathlib.Path(__file__).parents[3] / "docs" / "howto"
PAGES = ["jax.md", "pytorch.md"]
NEEDS = {"jax.md": ["jax", "flax", "optax"], "pytorch.md": ["torch", "transformers"]}


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

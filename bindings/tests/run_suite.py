# SPDX-License-Identifier: Apache-2.0
"""run_suite.py torch|jax|docs|cuda: the pytest files of one framework, or those for GPUs.

Exit code 77 (a skip in ctest) with the reason where it is not installed."""

import importlib.util
import pathlib
import sys

NEEDS = {"torch": ["pytest", "torch"], "jax": ["pytest", "jax"], "docs": ["pytest", "torch", "jax"], "cuda": ["pytest"]}


def main():
    suite = sys.argv[1]
    missing = [name for name in NEEDS[suite] if importlib.util.find_spec(name) is None]
    if missing:
        print(f"python_{suite}: skipped, {', '.join(missing)} not installed for {sys.executable}; pip install {' '.join(missing)}")
        return 77
    import pytest

    return pytest.main(["-q", "-p", "no:cacheprovider", str(pathlib.Path(__file__).parent / suite), *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())

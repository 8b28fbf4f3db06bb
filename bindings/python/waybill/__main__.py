# SPDX-License-Identifier: Apache-2.0
"""`python -m waybill doctor`: what this installation can run, and how to mend what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable


def _library() -> str:
    from ._library import library

    lib = library()
    return f"{lib.waybill_path}: {lib.wb_build_info().decode()}"


def _torch() -> str:
    torch = importlib.import_module("waybill.torch")
    y = torch.grouped_matmul(_ones(2, 3), _ones(1, 4, 3), importlib.import_module("torch").tensor([0, 2], dtype=importlib.import_module("torch").int32))
    if y.tolist() != [[3.0] * 4] * 2:
        raise RuntimeError(f"grouped_matmul of ones gave {y.tolist()}")
    return f"works with PyTorch {importlib.metadata.version('torch')} (CPU tensors)"


def _ones(*shape: int) -> object:
    return importlib.import_module("torch").ones(*shape)


def _jax() -> str:
    ours, numpy = importlib.import_module("waybill.jax"), importlib.import_module("jax.numpy")
    with importlib.import_module("jax").default_device(importlib.import_module("jax").devices("cpu")[0]):
        y = ours.grouped_matmul(numpy.ones((2, 3)), numpy.ones((1, 3, 4)), numpy.array([2], numpy.int32))
    if y.tolist() != [[3.0] * 4] * 2:
        raise RuntimeError(f"grouped_matmul of ones gave {y.tolist()}")
    return f"works with JAX {importlib.metadata.version('jax')} (CPU arrays)"


def doctor() -> int:
    """Prints one line a part; 0 when the library works and no installed framework fails, else 1."""
    from . import __version__

    print(f"waybill {__version__}, Python {sys.version.split()[0]}")
    parts: list[tuple[str, str | None, Callable[[], str]]] = [("library", None, _library), ("torch", "torch", _torch), ("jax", "jax", _jax)]
    failed = 0
    for name, package, probe in parts:
        if package is not None and getattr(importlib.util.find_spec(package), "origin", None) is None:  # a mere folder of that name has none
            print(f"  {name:8} not installed: pip install {package}")
            continue
        try:
            print(f"  {name:8} {probe()}")
        except Exception as error:  # noqa: BLE001 - every fault is a line of the report
            failed += 1
            print(f"  {name:8} FAILS: {error}")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    if arguments != ["doctor"]:
        print("usage: python -m waybill doctor", file=sys.stderr)
        return 2
    return doctor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""GPU tests of the bindings: skipped, with what was needed, where there is no GPU or the library has no CUDA kernels."""

import os
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device
# Also the smallest programs become command buffers.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"


def relative(got, want):
    """Largest error over the largest value, of NumPy arrays."""
    return float(abs(got - want).max(initial=0) / max(abs(want).max(initial=0), 1e-30))


def norm_error(got, want):
    """Norm of the error over the norm of the wanted, of NumPy arrays."""
    return float(((got - want) ** 2).sum() ** 0.5 / max((want**2).sum() ** 0.5, 1e-30))


class Bound(NamedTuple):
    """norm_error to the CPU layer of the same recipe, and the range of that to no rounding; as tests/cuda/moe_recipes_test.cc."""

    near: float
    least: float
    far: float


RECIPES = {"fp8": Bound(0.025, 1e-2, 0.12), "mxfp8": Bound(0.025, 1e-2, 0.12), "nvfp4": Bound(0.06, 5e-2, 0.5)}
SEED = 91


def jax_gpus():
    import jax

    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def needs_jax_gpu():
    """The marks of a module of JAX tests on a GPU."""
    import pytest
    from waybill._library import has_cuda

    return [pytest.mark.skipif(not has_cuda(), reason="libwaybill.so was built without CUDA"),
            pytest.mark.skipif(not jax_gpus(), reason="JAX finds no CUDA device (a GPU and jax[cuda13] are needed)")]  # fmt: skip


def reference(framework):
    """The module tests/FRAMEWORK/reference.py: the block in plain float32."""
    import importlib.util
    import pathlib

    path = pathlib.Path(__file__).parent.parent / framework / "reference.py"
    spec = importlib.util.spec_from_file_location(f"{framework}_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

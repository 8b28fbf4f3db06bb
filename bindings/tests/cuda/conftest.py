# SPDX-License-Identifier: Apache-2.0
"""GPU tests of the bindings: skipped, with what was needed, where there is no GPU or the library has no CUDA kernels."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device
# Also the smallest programs become command buffers.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"


def relative(got, want):
    """Largest error over the largest value, of NumPy arrays."""
    return float(abs(got - want).max(initial=0) / max(abs(want).max(initial=0), 1e-30))


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

# SPDX-License-Identifier: Apache-2.0
import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def relative(got, want):
    """Largest error over the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30)


def assert_trees_close(got, want, bound):
    for (path, a), (_, b) in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, jax.tree_util.keystr(path)
        assert relative(a, b) < bound, (jax.tree_util.keystr(path), relative(a, b))

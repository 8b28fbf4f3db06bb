# SPDX-License-Identifier: Apache-2.0
"""The loads W0 to W9 of bench/shapes/loads.toml for the peers: the same routes as the C++ benchmarks replay, from libwaybill.so (WAYBILL_LIBRARY)."""

import pathlib
import sys

WORKLOADS = tuple(f"W{i}" for i in range(10))


def _waybill():
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings/python"))
    try:
        import waybill

        waybill.build_info()
    except ImportError as error:
        sys.exit(f"loads W0 to W9 come from libwaybill.so: {error}")
    return waybill


def routes(load, T, K, E, P=1, step=0):
    """ids [tokens][K] of the whole batch, and the row bounds [P + 1] of its sources."""
    try:
        ids, bounds = _waybill().workload(load, T, K, E, P=P, step=step)
    except ValueError as error:
        sys.exit(f"load {load}: {error}")
    return ids.tolist(), bounds


def counts(load, groups, rows):
    """Rows of `groups` experts, `rows` of them on average: as load_counts() of bench/loads.h."""
    K = min(4, groups)
    ids, _ = routes(load, groups * rows // K, K, groups)
    result = [0] * groups
    for row in ids:
        for expert in row:
            result[expert] += 1
    return result


def logits(load, T, K, E, normal):
    """Logits [tokens, E] whose top K are the load's ids. normal(shape) makes standard normal numbers as a numpy array."""
    import numpy as np

    ids, _ = routes(load, T, K, E)
    values = 0.25 * normal((len(ids), E)) - 3
    np.put_along_axis(values, np.asarray(ids), np.take_along_axis(values, np.asarray(ids), 1) + 6, 1)
    return values

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20261130)
    torch.set_num_threads(1)


def relative(got, want):
    """Largest error over the largest value."""
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))

"""Norms on a GPU, with its own kernels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.recording import RecordingRoute
from zerokit.runtime.step import all_finite, global_norm


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_on_a_gpu_the_cut_does_not_show_either(norm_type: float) -> None:
    route = RecordingRoute()
    route.device = torch.device("cuda")
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(values.double(), norm_type))
    device = values.cuda()
    for piece in (100_000, 64_000, 1_000):
        found = global_norm([*device.split(piece), device[:0]], norm_type, route)
        assert found.dtype == torch.float64
        assert float(found) == pytest.approx(exact, rel=1e-12)
    assert bool(all_finite(list(device.split(999)), route.device))
    device[77] = math.nan
    assert not bool(all_finite(list(device.split(999)), route.device))

"""Failures in the middle of updates of whole tensors: the others go on, or say whom they wait for."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_ranks_expecting_errors
from zerokit.runtime.collectives.host.node import SWITCH


class Failing(torch.optim.Adafactor):
    """Fails where `fails` says so: at this rank's second tensor."""

    fails = ""
    seen = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        Failing.seen += len(with_gradient)
        if self.fails and with_gradient and Failing.seen > 1:
            if self.fails == "ends":
                os._exit(7)
            raise ArithmeticError("in the middle of an update")
        return super().step(closure)  # type: ignore[no-untyped-call]


def _steps(switch: str, stage: Any, how: str) -> list[str]:
    os.environ[SWITCH] = switch
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(6))
    optimizer = zerokit.ZeroOptimizer(model, Failing, stage=stage, precision="fp32", bucket_mb=1e-6)
    told = []
    for step in range(2):
        optimizer.zero_grad()
        hidden = torch.randn(3, 40)
        for layer in model:
            hidden = layer(hidden)
        optimizer.backward(hidden.square().mean())
        Failing.seen, Failing.fails = 0, how if step and dist.get_rank() == 1 else ""
        try:
            optimizer.step()
            told.append("stepped")
        except ArithmeticError:
            told.append("failed")
            with pytest.raises(zerokit.UsageError, match="an exception ended the last update halfway"):
                optimizer.step()
    dist.barrier()  # others read what this rank has updated
    return told


@pytest.mark.full(default=["1-1", "2-0", "3-*"])
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_others_finish_their_step_where_a_class_raises_on_one_rank(switch: str, stage: int) -> None:
    first, second = run_ranks_expecting_errors(2, _steps, switch, stage, "raises")
    assert first.value == ["stepped", "stepped"], first.describe()
    assert second.value == ["stepped", "failed"], second.describe()


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_rank_that_ends_in_its_update_is_named(switch: str) -> None:
    first, second = run_ranks_expecting_errors(2, _steps, switch, 2, "ends", timeout=5.0)
    assert second.exitcode == 7
    assert first.raised("ScheduleError"), first.describe()
    assert re.search(r"did not get through its (to|from)-owners of unit \d", first.error)
    assert "rank 1 failed, stopped, or is busy elsewhere" in first.error

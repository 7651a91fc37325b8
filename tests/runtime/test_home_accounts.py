"""Memory by home: what is measured where states live on a disk, or in fp8, equals the formulas, to the byte."""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from zerokit import ZeroOptimizer
from zerokit.formulas import MemoryReport

STAGES: dict[int, list[Any]] = {1: [0, 3], 2: [0, 1, 2, 3, {"2": 3, "*": 1}], 4: [(0, 3), (1, 2)]}
CLASSES = ("adamw", "momentum", "muon")

Account = dict[str, MemoryReport]
"""Reports with states on a "disk", in "fp8" and on the "device"."""


def _optimizer(stage: Any, precision: Any, classes: str, home: str) -> tuple[nn.Module, ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 70), nn.Linear(70, 33), nn.Linear(33, 100))
    model[1].bias.requires_grad_(False)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1 and parameter.requires_grad]
    given: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "momentum": torch.optim.SGD,
        "muon": {torch.optim.Muon: matrices, torch.optim.AdamW: rest},
    }
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if classes == "momentum" else {}
    if isinstance(stage, tuple):
        options["mesh"] = (2, 2)
    made = ZeroOptimizer(
        model, given[classes], stage=stage, precision=precision, bucket_mb=0.01, states=home, **options
    )
    return model, made


def _accounts(world: int) -> list[Account]:
    found = []
    for stage, precision, classes in product(STAGES[world], ("fp32", "bf16"), CLASSES):
        reports = {}
        with tempfile.TemporaryDirectory() as folder:
            for home in ("disk", "fp8", "device"):
                where = folder if home == "disk" else home
                model, optimizer = _optimizer(stage, precision, classes, where)
                average = None if classes == "muon" else zerokit.Ema(optimizer)
                for _ in range(2):
                    optimizer.backward(model(torch.randn(4, 100)).float().square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    if average is not None:
                        average.update()
                optimizer.backward(model(torch.randn(4, 100)).float().square().mean())
                reports[home] = optimizer.memory()
                assert reports[home] == optimizer.predicted_memory(), (stage, precision, classes, home)
        found.append(reports)
    return found


@pytest.mark.full(default="1")
@pytest.mark.parametrize("world", STAGES)
def test_memory_by_home_equals_the_formulas(world: int) -> None:
    for accounts in run_ranks(world, _accounts, world):
        assert len(accounts) == len(STAGES[world]) * 2 * len(CLASSES)
        for account in accounts:
            measured, coded, on_device = account["disk"], account["fp8"], account["device"]
            assert (on_device.disk, on_device.visiting) == (0, 0)
            # Masters that are the parameters stay where they are, and these take no bytes of their own.
            padding = on_device.padding - measured.padding
            assert measured.disk == on_device.optimizer + padding > padding
            assert measured.optimizer == 0 < measured.visiting
            assert on_device.total - measured.total == measured.disk
            assert 0 < coded.optimizer < on_device.optimizer
            assert 0 < coded.visiting < measured.visiting
            assert (coded.host, coded.disk) == (0, 0)

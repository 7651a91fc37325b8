"""States that visit a real GPU: bits of states that stay there, no synchronisation, no growing memory, and rates.

NCCL for one rank on one GPU. `test_home_way` tries the order of copies on hosts.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.runtime.test_home_way import Averaged, train_averaged
from tests.support.devices import SCENES, STAGES, alone_on_gpu, at, no_synchronisation, placed, run_on
from tests.support.on_ranks import on_ranks
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.machine.computing import measure_copies

pytestmark = pytest.mark.gpu


@on_ranks(1)
def test_visits_change_no_bit(tmp_path: Path) -> None:
    wrong = []
    with alone_on_gpu("cuda"), warnings.catch_warnings(action="ignore"):
        cases = zip(SCENES, itertools.cycle(("bf16", "fp16", "fp32")), itertools.cycle(STAGES), strict=False)
        for name, precision, stage in cases:
            scene = at(SCENES[name], precision=precision, stage=stage)
            expected = train_averaged(scene, placed("cuda"))
            for states in ("host", str(tmp_path)):
                if train_averaged(scene, placed("cuda"), states=states) != expected:
                    wrong.append(f"{name}, {precision}, stage {stage}, states={states!r}")
    assert wrong == []


@pytest.mark.parametrize("states", ["host", "fp8"])
@on_ranks(1)
def test_no_visit_synchronises(states: str) -> None:
    with alone_on_gpu("cuda"), warnings.catch_warnings(action="ignore"):
        for stage, precision in itertools.product(STAGES, ("bf16", "fp32")):
            scene = at(SCENES["plain"], stage=stage, precision=precision, steps=5)
            training = Averaged(scene, placed("cuda"), states=states)
            training.step(0)
            training.step(1)
            with no_synchronisation():
                for step in range(2, 5):
                    training.step(step)


@pytest.mark.parametrize("home", ["host", "disk", "fp8"])
@on_ranks(1)
def test_steps_need_no_more_memory_with_time(home: str, tmp_path: Path) -> None:
    """What visits has been given back after each step, and no stream keeps memory of its own."""
    with alone_on_gpu("cuda"), warnings.catch_warnings(action="ignore"):
        scene = at(SCENES["plain"], stage=2, precision="bf16", steps=3)
        states = str(tmp_path) if home == "disk" else home
        training = Averaged(scene, placed("cuda"), states=states)
        seen = []
        for step in (0, 1, 2, *range(3), *range(3)):
            training.step(step)
            training.forget()
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert seen[8] == seen[5]
        report = training.optimizer.memory()
        if home != "fp8":
            assert report.as_dict()[home] > 0
            assert report == training.optimizer.predicted_memory()


def _seconds(device: str, folder: str) -> dict[str, float]:
    """Seconds of an update of 67 million parameters by home, and rates of pinned copies in 10⁹ bytes a second."""
    with alone_on_gpu(device):
        found = {}
        for states in ("device", "host", folder, "fp8"):
            model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)]).to(placed(device))
            optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-4, states=states)
            times = []
            for _ in range(6):
                optimizer.backward(model(torch.randn(64, 2048, device=placed(device))).square().mean())
                torch.cuda.synchronize()
                start = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
                optimizer.zero_grad()
            found["disk" if states == folder else states] = min(times[2:])
            zerokit.release(model)
        rates = measure_copies(dist.new_group(backend="gloo"), Accelerator(placed(device), "gloo"))
        return found | {
            "GB/s to the device": rates.to_device_gb_per_s,
            "GB/s to the host": rates.to_host_gb_per_s,
            "GB/s both": rates.both_gb_per_s,
        }


def test_what_visits_cost(record_property: Callable[[str, object], None], tmp_path: Path) -> None:
    """Twelve bytes a parameter come and leave again: an update takes little longer than the link needs for them."""
    (found,) = run_on("cuda", _seconds, str(tmp_path))
    for name, value in found.items():
        record_property(name, value)
        print(f"{name}: {value:.4f}")
    link_s = 12 * 16 * 2048**2 / found["GB/s both"] / 1e9
    print(f"the link alone: {link_s:.4f}")
    assert 0 < found["device"] < found["host"]

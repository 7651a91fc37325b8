"""Every engine trains the same model from the same weights on the same batches, so their losses agree."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_ranks
from zerokit.bench.engines.catalogue import ENGINES
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine import Place
from zerokit.bench.settings import Settings

# fp32 sums in another order differ by some 1e-7; a wrong average, a lost gradient or a skipped clip by 1e-3 and more.
TOLERANCE = 1e-5
STEPS = 4

ROOT = Path(__file__).parents[2]
TINY = Settings(
    model="gpt-tiny",
    precision="fp32",
    device="cpu",
    batch_size=2,
    seq_len=16,
    data=str(ROOT / "README.md"),  # real text, so that losses fall
    lr=1e-2,
    clip=0.5,
    nproc_per_node=2,
)
PEERS = [
    (name, stage)
    for name, engine in ENGINES.items()
    for stage in engine.stages
    if name not in ("compute-only", "deepspeed")
]


@dataclass(frozen=True)
class Curve:
    """What one rank saw: its own losses, and the norms it knows."""

    losses: list[float]
    norms: list[float]


def train(settings: Settings) -> Curve:
    """On a rank: some steps."""
    from zerokit.bench.workloads.build import load

    place = Place(torch.device("cpu"), "gloo")
    loaded = load(settings)
    trainer = make(loaded, settings, place)
    rank = torch.distributed.get_rank()
    curve = Curve([], [])
    for step in range(STEPS):
        batches = [loaded.batch(step, rank, number) for number in range(settings.accumulate)]
        losses, norm = trainer.step(batches)
        curve.losses.extend(float(loss) for loss in losses)
        if norm is not None:
            curve.norms.append(float(norm))
    return curve


def train_all(settings: list[Settings]) -> list[Curve]:
    """On a rank: one bench after the other, in one process group."""
    with warnings.catch_warnings():
        # It compiles its functional optimizers at import (torch 2.13).
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        import torch.distributed.optim  # noqa: F401 - for ZeroRedundancyOptimizer
    return [train(one) for one in settings]


def curves(settings: list[Settings], world: int = 2) -> list[list[Curve]]:
    """By setting, by rank."""
    by_rank = run_ranks(world, train_all, settings)
    return [[rank[number] for rank in by_rank] for number in range(len(settings))]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [0.5, None])
def test_engines_agree(accumulate: int, clip: float | None) -> None:
    cells = [
        replace(TINY, engine=name, stage=stage, accumulate=accumulate, clip=clip) for name, stage in PEERS
    ]
    found = curves(cells)
    reference = found[0]
    assert reference[0].losses[-1] < reference[0].losses[0]
    assert len(reference[0].norms) == (STEPS if clip else 0)
    for cell, ranks in zip(cells, found, strict=True):
        for rank, expected in zip(ranks, reference, strict=True):
            assert rank.losses == pytest.approx(expected.losses, rel=TOLERANCE), (cell.engine, cell.stage)
        assert ranks[0].norms == pytest.approx(reference[0].norms, rel=TOLERANCE), (cell.engine, cell.stage)

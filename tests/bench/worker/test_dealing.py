"""Samples dealt by pace: those of the step, each once, and the losses and weights of equal batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bench.records import make_record
from tests.support.distributed import run_ranks
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.checkpoints import Keeper, mean_over_ranks
from zerokit.bench.worker.dealing import Dealer
from zerokit.bench.worker.rank import with_parts, with_state
from zerokit.bench.worker.training import Loop
from zerokit.bench.workloads.build import load
from zerokit.errors import UsageError

HERE = Accelerator(torch.device("cpu"), "gloo")
EQUAL = Settings(
    model="mlp-mnist",
    stage=3,
    nproc_per_node=2,
    accumulate=2,
    batch_size=4,
    steps=2,
    warmup=20,
    precision="fp32",
)


def train(
    settings: Settings, speeds: tuple[float, float] | None
) -> tuple[list[float], list[float], list[list[int]]]:
    """Three steps: the losses of this rank, how much they weigh, and the slots of each step."""
    loaded = load(settings)
    trainer = make(loaded, settings, HERE)
    loop = Loop(trainer, loaded, settings, HERE)
    losses, counts, slots = [], [], []
    dealer = None
    if speeds is not None and trainer.zero is not None:
        dealer = Dealer(loaded, settings, HERE.device, trainer.zero, position=0)
        dealer.pace.load([[0, list(speeds)]])
    for step in range(3):
        if dealer is None:
            batches, weights = loop.batches(step), [1.0] * settings.accumulate
        else:
            dealt = dealer.next()
            batches, weights = [one.batch for one in dealt], [one.count for one in dealt]
            slots.append([slot for one in dealt for slot in one.slots])
            assert dealer.samples == len(slots[-1])
            assert [len(batch[0]) for batch in batches] == [len(one.slots) for one in dealt] == weights
        found, _ = trainer.step(batches)
        losses.append(
            sum(float(one) * weight for one, weight in zip(found, weights, strict=True)) / sum(weights)
        )
        counts.append(sum(weights))
    return losses, counts, slots


def compare() -> list[Any]:
    paced = replace(EQUAL, pace=True)
    return [train(EQUAL, None), train(paced, (3.0, 1.0)), train(paced, (1.0, 1.0))]


def test_losses_are_those_of_equal_batches_and_every_sample_of_a_step_is_dealt_once() -> None:
    (equal, paced, even), (equal_1, paced_1, even_1) = run_ranks(2, compare)
    usual = mean_over_ranks([equal[0], equal_1[0]], [equal[1], equal_1[1]])
    for one, other, samples in ((paced, paced_1, [12, 4]), (even, even_1, [8, 8])):
        assert mean_over_ranks([one[0], other[0]], [one[1], other[1]]) == pytest.approx(usual, rel=1e-5)
        assert [[len(step) for step in rank] for rank in (one[2], other[2])] == [
            [each] * 3 for each in samples
        ]
        for mine, theirs in zip(one[2], other[2], strict=True):
            assert sorted(mine + theirs) == list(range(16))


def loop_by_pace() -> tuple[Any, Any, int, list[int]]:
    settings = replace(EQUAL, pace=True, shares="3,1")
    loaded = load(settings)
    trainer = make(loaded, settings, HERE)
    loop = Loop(trainer, loaded, settings, HERE)
    measured = loop.run(None, Keeper(settings, None), begin=lambda: None)
    rank = with_state(with_parts(make_record().ranks[dist.get_rank()], trainer, loop), trainer, loop)
    again = [len(batch[0]) for batch in loop.batches(5)]
    assert sum(again) == rank.samples
    return measured, rank, measured.samples, again


def test_a_rank_knows_its_samples_speed_share_and_idle_time() -> None:
    found = run_ranks(2, loop_by_pace)
    ranks = [rank for _, rank, _, _ in found]
    assert [rank.share for rank in ranks] == [3, 1]
    assert sum(rank.samples for rank in ranks) == 16
    assert sum(rank.speed for rank in ranks) == pytest.approx(2.0, rel=0.01)
    for measured, rank, samples, _ in found:
        assert samples == 22 * 16
        assert measured.warmup == 20
        assert len(measured.step_ms) == len(measured.count) == 22
        assert rank.memory_bytes == rank.predicted_memory_bytes
        assert measured.computed_ms > 0.0
        assert measured.waited_ms > 0.0
        assert measured.computed_ms + measured.waited_ms == pytest.approx(sum(measured.step_ms[20:]) / 2)
    assert ranks[0].memory_bytes["total"] > ranks[1].memory_bytes["total"]


OWN = """
import torch
from torch import nn
from zerokit.bench.workloads.own import Own

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, weights):
        return (self.layer(x).squeeze(1).square() * weights).sum() / weights.sum()

def draw(generator, samples):
    return torch.randn(samples, 4, generator=generator), torch.arange(1.0, samples + 1)

def uncounted():
    return Own(Net, draw)

def counted():
    return Own(Net, draw, count=lambda x, weights: weights.sum())
"""


def test_an_own_model_says_what_its_loss_is_a_mean_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own_by_pace.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(model="own_by_pace:counted", nodes=2, pace=True)
    loaded = load(settings)
    assert float(loaded.count(loaded.take([7, 9, 4]))) == 6.0
    with pytest.raises(
        UsageError, match=r"give Own\(count=…\), such as count=lambda x, y: len\(y\), or omit --pace"
    ):
        load(replace(settings, model="own_by_pace:uncounted"))
    assert len(load(replace(settings, model="own_by_pace:uncounted", pace=False)).batch(0)[0]) == 4

"""Skipped steps in checkpoints: how many there were, and the last step before them, which always stays."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import example_content, example_layout, weights_of, write_checkpoint
from tests.support.distributed import run_ranks
from zerokit.checkpoint.latest import Latest, write_latest
from zerokit.checkpoint.run import list_steps, stated_checksum
from zerokit.errors import ZerokitWarning
from zerokit.skips import Skips

LAYOUT = example_layout(1)
GOOD = (0, 0)


def make_run(run: Path, skips: list[tuple[int, int]], weights: tuple[int, ...] = ()) -> Path:
    """A run of steps from 1 on, with all steps that were skipped until each, and those in a row before it."""
    for step, counts in enumerate(skips, 1):
        content = replace(example_content(LAYOUT, step=step), skips=Skips(*counts))
        write_checkpoint(
            run / f"step-{step:08d}", LAYOUT, weights_of(content) if step in weights else content
        )
    name = f"step-{len(skips):08d}"
    write_latest(run, Latest(name, (stated_checksum(run / name) or 0,)))
    return run


@pytest.mark.parametrize(
    ("skips", "weights", "keep_last", "stays"),
    [
        ([GOOD, GOOD, GOOD], (), 1, [3]),
        # For hours: saves among steps that are all skipped are no place to go back to.
        ([GOOD, GOOD, (3, 3), (90, 90), (800, 800)], (), 1, [2, 5]),
        ([GOOD, GOOD, (3, 3), (90, 90), (800, 800)], (), 2, [2, 4, 5]),
        # Nor do they become one by a lone step that was made between them.
        ([GOOD, (500, 500), (600, 99), (700, 199)], (), 1, [1, 4]),
        # It is over: the last step before them stays nevertheless.
        ([GOOD, (2, 2), (3, 0), (3, 0)], (), 1, [1, 4]),
        # Now and then, as with the loss scale of fp16: one step more than asked for.
        ([GOOD, (1, 0), (1, 0), (2, 0), (2, 0)], (), 1, [3, 5]),
        # From the beginning.
        ([(1, 1), (2, 2)], (), 1, [2]),
        # Weights alone do not continue a training.
        ([GOOD, GOOD, (2, 2)], (2,), 1, [1, 3]),
    ],
)
def test_the_last_step_before_skipped_ones_stays(
    tmp_path: Path, skips: Any, weights: Any, keep_last: int, stays: list[int]
) -> None:
    run = make_run(tmp_path / "run", skips, weights)
    for _ in range(2):
        zerokit.prune(run, keep_last=keep_last)
        assert list_steps(run) == stays


def test_islands_keep_the_same_step(tmp_path: Path) -> None:
    """One island has skipped steps, and the others need the step that it may go back to."""
    make_run(tmp_path / "island-0", [GOOD] * 4)
    make_run(tmp_path / "island-1", [GOOD, GOOD, (5, 5), (9, 9)])
    for name in ("island-0", "island-1"):
        zerokit.prune(tmp_path / name, keep_last=1)
        assert list_steps(tmp_path / name) == [2, 4]


def test_inspect_shows_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [GOOD, (1200, 0), (1203, 3)])
    manifests = [json.loads((run / f"step-0000000{n}" / "manifest.json").read_text()) for n in (1, 2, 3)]
    assert [manifest["version"] for manifest in manifests] == [[1, 0], [1, 3], [1, 3]]
    assert [manifest.get("skipped") for manifest in manifests] == [
        None,
        {"total": 1200, "in_a_row": 0},
        {"total": 1203, "in_a_row": 3},
    ]
    done = command(tmp_path, "inspect", "run")
    assert "├── skipped steps  1,203 until this save, the last 3 in a row" in done.stdout
    assert ", 1,200 steps skipped" in done.stdout
    plain = json.loads(command(tmp_path, "inspect", "run", "--json").stdout)
    assert (plain["skipped_steps"], plain["skipped_in_a_row"]) == (1203, 3)
    assert [step["skipped_steps"] for step in plain["run"]["steps"]] == [0, 1200, 1203]
    assert "skipped" not in command(tmp_path, "inspect", "run/step-00000001").stdout


def _optimizer() -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="bf16", lr=0.1)


def _step(model: nn.Module, optimizer: zerokit.ZeroOptimizer, *, bad: bool) -> None:
    loss = model(torch.ones(2, 8)).float().square().mean()
    optimizer.backward(loss * math.inf if bad and dist.get_rank() == 0 else loss)
    optimizer.step()
    optimizer.zero_grad()


def _train(run: Path, blocking: bool) -> list[int]:
    model, optimizer = _optimizer()
    with warnings.catch_warnings(action="ignore", category=ZerokitWarning):
        for step in range(1, 9):
            _step(model, optimizer, bad=step in (1, 5, 6, 7, 8))
            saving = zerokit.save(run, optimizer, step=step, keep_last=1, blocking=blocking)  # type: ignore[call-overload]
            if not blocking:
                _step(model, optimizer, bad=True)  # after the state was taken
                saving.wait()
    return list_steps(run)


def _resume(run: Path, step: int) -> tuple[int, int, int]:
    model, optimizer = _optimizer()
    zerokit.load(run / f"step-{step:08d}", optimizer)
    loaded = optimizer.skipped_steps
    _step(model, optimizer, bad=True)
    before = optimizer.skipped_steps
    zerokit.load(run / f"step-{step:08d}", optimizer, weights_only=True)
    return loaded, before, optimizer.skipped_steps


def test_a_training_goes_on_with_its_count(tmp_path: Path) -> None:
    """On another number of ranks; and weights alone bring no count."""
    run = tmp_path / "run"
    assert run_ranks(2, _train, run, blocking=True) == [[4, 8]] * 2
    assert zerokit.inspect(run).skipped_steps == 5
    zerokit.reshard(run, 3, tmp_path / "three")
    for source in (run, tmp_path / "three"):
        assert run_ranks(3, _resume, source, 8) == [(5, 6, 6)] * 3
    assert run_ranks(1, _resume, run, 4) == [(1, 2, 2)]


def test_a_background_save_has_the_count_of_its_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(2, _train, run, blocking=False)
    assert zerokit.inspect(run).skipped_steps == 5 + 7

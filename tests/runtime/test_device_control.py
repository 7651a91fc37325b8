# mypy: disable-error-code="no-untyped-call"
"""What the host reads the device's way: nothing of a step within it, but for fp16; and what follows a step later."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerokit
from tests.support.devices import PRECISIONS, SCENES, STAGES, Scene, Training, at, lagging, prompt
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.streams import LaggingStream, PromptStream
from zerokit.errors import LayoutMismatch, UsageError

# --- what is read ------------------------------------------------------------------------------------------


class CountedReads(TorchDispatchMode):
    """Counts what the host takes out of tensors: `float()`, `bool()` and the like, and methods of `Tensor`."""

    METHODS = ("tolist", "item", "cpu", "numpy")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.counts["_local_scalar_dense"] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> CountedReads:
        for name in self.METHODS:
            self._patch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._patch.undo()

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def count(tensor: Tensor, *arguments: Any) -> Any:
            self.counts[name] += 1
            return method(tensor, *arguments)

        return count


class NotedStream(LaggingStream):
    """Notes in which step a value was fetched, and in which it was looked at."""

    step = -1
    looked: list[tuple[int, int]]

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        arrived, made = super().fetch(values), NotedStream.step

        def look() -> Tensor | None:
            NotedStream.looked.append((made, NotedStream.step))
            return arrived()

        return look


_STEPS = 4


def _reads(scene: Scene) -> list[tuple[dict[str, int], list[tuple[int, int]]]]:
    """For each step: what was read, and the steps in which what was looked at had been fetched."""
    found = []
    NotedStream.looked = []
    with lagging("cpu", NotedStream) as device:
        training = Training(scene, device)
        for step in range(scene.run.steps):
            NotedStream.step = step
            NotedStream.looked.clear()
            with CountedReads() as reads:
                training.step(step)
            found.append((dict(reads.counts), list(NotedStream.looked)))
    return found


def _all_reads(name: str, precision: str) -> dict[tuple[int, float | None], Any]:
    """With clipping at every second stage; the two scenes of a precision have it at others."""
    clips = (None, 1.0) if name == "unused" else (1.0, None)
    return {
        (stage, clip): _reads(at(SCENES[name], stage=stage, precision=precision, clip=clip, steps=_STEPS))
        for stage, clip in zip(STAGES, clips * 2, strict=True)
    }


@pytest.mark.parametrize(
    ("name", "precision"), [("units used again", "fp32"), ("unused", "bf16"), ("units used again", "fp16")]
)
def test_a_step_reads_what_the_step_before_has_fetched(name: str, precision: str) -> None:
    """fp16 must know whether gradients overflowed, once a step; all else waits for the next step."""
    for rank in run_ranks(2, _all_reads, name, precision):
        for case, steps in rank.items():
            for step, (reads, looked) in enumerate(steps[2:], start=2):
                assert reads == {"tolist": 1}, (case, step)
                assert looked == [(step if precision == "fp16" else step - 1, step)], (case, step)


def test_the_count_sees_reads() -> None:
    value = torch.ones(3)
    with CountedReads() as by_dispatch:
        assert bool(value.sum() > 2)
    with CountedReads() as by_method:
        value.tolist()
        value.cpu()
    assert (by_dispatch.counts, by_method.counts) == ({"_local_scalar_dense": 1}, {"tolist": 1, "cpu": 1})


# --- steps without gradients -------------------------------------------------------------------------------


def _steps_without_backward(precision: str) -> list[str]:
    """What went wrong, at stage 3 and another by turns: `step()` first of all, and between others."""
    wrong = []
    for stage in (PRECISIONS.index(precision), 3):
        with lagging("cpu") as device:
            training = Training(at(SCENES["units used again"], stage=stage, precision=precision), device)
            for step in (None, 0, 1, 2):
                if step is not None:
                    training.step(step)
                before = training.weights()
                try:
                    training.optimizer.step()
                    wrong.append(f"stage {stage}, after step {step}: not refused")
                except UsageError as error:
                    if "before any backward" not in str(error):
                        wrong.append(str(error))
                if training.weights() != before:
                    wrong.append(f"stage {stage}, after step {step}: weights changed")
            training.step(3)
    return wrong


@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_without_any_backward_is_refused_before_anything_changes(precision: str) -> None:
    assert run_ranks(2, _steps_without_backward, precision) == [[], []]


def _one_rank_without_backward(precision: str) -> dict[int, list[str]]:
    """Rank 1 runs forward alone in step 2; by stage, the weights at the end, late and at stage 0 prompt too."""
    found: dict[int, list[str]] = {}
    for stage in STAGES:
        for way in (lagging,) if stage else (prompt, lagging):
            with way("cpu") as device:
                training = Training(at(SCENES["units used again"], stage=stage, precision=precision), device)
                for step in range(4):
                    if step == 2 and dist.get_rank() == 1:
                        training.case.loss(training.model, training.batches[step][0])
                    else:
                        training.differentiate(step)
                    training.update()
                found.setdefault(stage, []).append(training.weights())
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_which_one_rank_has_no_gradients_goes_on(precision: str) -> None:
    ranks = run_ranks(2, _one_rank_without_backward, precision)
    digests = {digest for found in ranks for ways in found.values() for digest in ways}
    assert len(digests) == 1, ranks


# --- ranks on different paths ------------------------------------------------------------------------------


def _freeze_another(training: Training) -> None:
    blocks = training.model.get_submodule("blocks")
    blocks.get_submodule(str(1 + dist.get_rank())).requires_grad_(False)


def _change_the_schedule(training: Training) -> None:
    if dist.get_rank() == 1:
        training.optimizer.runtime.collectives._schedule[0] += 1


def _part_ways_at_each_stage(how: Callable[[Training], None]) -> list[list[list[str]]]:
    return [[_part_ways(how, stage, precision) for precision in ("bf16", "fp16")] for stage in (0, 3)]


def _part_ways(how: Callable[[Training], None], stage: int, precision: str) -> list[str]:
    """Part ways in step 2; what steps 2 and 3 said."""
    with lagging("cpu") as device:
        training = Training(at(SCENES["units used again"], stage=stage, precision=precision), device)
        said = []
        for step in range(4):
            if step == 2:
                how(training)
            try:
                training.step(step)
                said.append("")
            except LayoutMismatch as error:
                said.append(str(error))
                break
        return said[2:]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (_freeze_another, "have frozen different parameters"),
        (_change_the_schedule, "different sequences of collectives"),
    ],
)
def test_different_paths_are_an_error_one_step_later(how: Callable[[Training], None], words: str) -> None:
    for found in run_ranks(2, _part_ways_at_each_stage, how):
        for later, at_once in found:
            assert later[0] == ""
            assert words in later[1]
            assert words in at_once[0], "fp16 looks at once"


def _save(training: Training) -> None:
    zerokit.save(os.environ["SAVED_IN"], training.optimizer, step=3)


def _take_state(training: Training) -> None:
    training.optimizer.state_dict()


def _gather(training: Training) -> None:
    with training.optimizer.gathered():
        pass


def _look_after_parting(what: Callable[[Training], None], stage: int, part: bool) -> str:
    with lagging("cpu") as device:
        training = Training(at(SCENES["units used again"], stage=stage), device)
        for step in range(3):
            if part and step == 2:
                _change_the_schedule(training)
            training.step(step)
        try:
            what(training)
        except LayoutMismatch as error:
            return str(error)
        training.step(3)
    return ""


def _look_at_all(folder: Path) -> dict[str, str]:
    os.environ["SAVED_IN"] = str(folder)
    return {
        f"{what.__name__}, stage {stage}, {part}": _look_after_parting(what, stage, part)
        for what, stage in ((_take_state, 3), (_gather, 1), (_save, 3))
        for part in (False, True)
    }


def test_what_shows_the_state_looks_at_the_last_step_first(tmp_path: Path) -> None:
    for found in run_ranks(2, _look_at_all, tmp_path):
        for case, said in found.items():
            assert ("different sequences of collectives" in said) == case.endswith("True"), case


# --- a device that does not get on -------------------------------------------------------------------------


class SilentStream(PromptStream):
    """From the second step on nothing that was fetched arrives."""

    silent = False

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        arrived = super().fetch(values)
        return lambda: None if SilentStream.silent else arrived()

    def unfinished(self) -> str | None:
        return "all-gather of unit 3"


def _wait_for_ever(precision: str) -> None:
    with lagging("cpu", SilentStream) as device:
        scene = at(SCENES["units used again"], precision=precision)
        training = Training(scene, device, timeout=datetime.timedelta(seconds=3))
        training.step(0)
        SilentStream.silent = True
        training.step(1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_device_that_hangs_is_an_error_within_the_time_out(precision: str) -> None:
    for rank, outcome in enumerate(run_ranks_expecting_errors(2, _wait_for_ever, precision, timeout=20.0)):
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert f"rank {rank} of 2 did not get through its all-gather of unit 3" in outcome.error
        assert "timed out after 3 s" in outcome.error
        assert f"rank {1 - rank} waits for the all-gather of unit 3" in outcome.error or (
            f"rank {1 - rank} gave up waiting for the all-gather of unit 3" in outcome.error
        )


# --- a state that is loaded while gathers are in flight ----------------------------------------------------


def _load_after_a_step(stage: int, precision: str) -> list[list[str]]:
    found = []
    for way in (prompt, lagging):
        with way("cpu") as device:
            training = Training(at(SCENES["units used again"], stage=stage, precision=precision), device)
            training.step(0)
            state = training.optimizer.state_dict()
            state["masters"] = [master.clone() for master in state["masters"]]
            training.step(1)
            training.optimizer.load_state_dict(state)
            training.step(2)
            found.append(training.bits())
    return found


@pytest.mark.parametrize(
    ("precision", "stage"), [("fp32", 0), ("bf16", 1), ("fp32", 2), ("bf16", 3), ("fp32", 3)]
)
def test_a_state_can_be_loaded_right_after_a_step(stage: int, precision: str) -> None:
    for at_once, late in run_ranks(2, _load_after_a_step, stage, precision):
        assert late == at_once

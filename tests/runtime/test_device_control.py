# mypy: disable-error-code="no-untyped-call"
"""What the host reads the device's way: nothing of a step within it, but for fp16; and what follows a step later."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import warnings
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
from tests.support.devices import PRECISIONS, SCENES, STAGES, Training, at, lagging, prompt
from tests.support.distributed import run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from tests.support.streams import LaggingStream, PromptStream
from zerokit.errors import LayoutMismatch, ScheduleError, UsageError


class CountedReads(TorchDispatchMode):
    """Counts what makes a host wait for a device: reading values, and assigning numbers to elements.

    `tensor[0] = 1.0` copies the number from pageable memory on CUDA (torch 2.11).
    """

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
        assign = torch.Tensor.__setitem__
        counted = self._counting("assigned number", assign)

        def set_item(tensor: Tensor, index: Any, value: Any) -> None:
            (assign if isinstance(value, Tensor) else counted)(tensor, index, value)

        self._patch.setattr(torch.Tensor, "__setitem__", set_item)
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


STACK = SCENES["units used again"]


@on_ranks(
    2,
    [
        (name, precision, stage, clip)
        for name, precision, clips in (
            ("units used again", "fp32", (1.0, None)),
            ("unused", "bf16", (None, 1.0)),
            ("units used again", "fp16", (1.0, None)),
            ("whole tensors", "bf16", (1.0, None)),
        )
        for stage, clip in zip(STAGES, clips * 2, strict=True)
    ],
)
def test_a_step_reads_what_the_step_before_has_fetched(given: tuple[str, str, int, float | None]) -> None:
    """fp16, and a class that cannot leave out a step on a device, must know whether gradients are finite, once a step;
    all else waits for the next step.

    With clipping at every second stage; the two scenes of a precision have it at others.
    """
    name, precision, stage, clip = given
    NotedStream.looked = []
    with lagging("cpu", NotedStream) as device:
        training = Training(at(SCENES[name], stage=stage, precision=precision, clip=clip, steps=4), device)
        for step in range(4):
            NotedStream.step = step
            NotedStream.looked.clear()
            with CountedReads() as reads:
                training.step(step)
            if step > 1:
                assert reads.counts == {"tolist": 1}
                at_once = precision == "fp16" or name == "whole tensors"
                assert NotedStream.looked == [(step if at_once else step - 1, step)]


def test_the_count_sees_reads() -> None:
    value = torch.ones(3)
    with CountedReads() as by_dispatch:
        assert bool(value.sum() > 2)
    with CountedReads() as by_method:
        value.tolist()
        value.cpu()
        value[0] = 2.0
        value[1] = value[0]
    expected = {"tolist": 1, "cpu": 1, "assigned number": 1}
    assert (by_dispatch.counts, by_method.counts) == ({"_local_scalar_dense": 1}, expected)


@on_ranks(2, [(precision, stage) for number, precision in enumerate(PRECISIONS) for stage in (number, 3)])
def test_step_without_any_backward_is_refused_before_anything_changes(given: tuple[str, int]) -> None:
    """At stage 3 and another by turns: `step()` first of all, and between others."""
    precision, stage = given
    with lagging("cpu") as device:
        training = Training(at(STACK, stage=stage, precision=precision), device)
        for step in (None, 0, 1, 2):
            if step is not None:
                training.step(step)
            before = training.weights()
            with pytest.raises(UsageError, match="before any backward"):
                training.optimizer.step()
            assert training.weights() == before
        training.step(3)


@on_ranks(2, ("bf16", "fp16"))
def test_a_step_in_which_one_rank_has_no_gradients_goes_on(precision: str) -> None:
    """Rank 1 runs forward alone in step 2; at every stage, late and at stage 0 prompt too."""
    found = set()
    for stage, way in ((0, prompt), *((stage, lagging) for stage in STAGES)):
        with way("cpu") as device:
            training = Training(at(STACK, stage=stage, precision=precision), device)
            for step in range(4):
                if step == 2 and dist.get_rank() == 1:
                    training.case.loss(training.model, training.batches[step][0])
                else:
                    training.differentiate(step)
                training.update()
            found.add(training.weights())
    digests: list[Any] = [None, None]
    dist.all_gather_object(digests, found)
    assert len(found) == 1
    assert digests[0] == digests[1]


def _freeze_another(training: Training) -> None:
    blocks = training.model.get_submodule("blocks")
    blocks.get_submodule(str(1 + dist.get_rank())).requires_grad_(False)


def _change_the_schedule(training: Training) -> None:
    if dist.get_rank() == 1:
        training.optimizer.runtime.collectives._schedule[0] += 1


PARTINGS = {
    "have frozen different parameters": _freeze_another,
    "different sequences of collectives": _change_the_schedule,
}


@on_ranks(2, itertools.product(PARTINGS, (0, 3), ("bf16", "fp16")))
def test_different_paths_are_an_error_one_step_later(given: tuple[str, int, str]) -> None:
    """fp16 looks at once."""
    words, stage, precision = given
    with lagging("cpu") as device:
        training = Training(at(STACK, stage=stage, precision=precision), device)
        training.step(0)
        training.step(1)
        PARTINGS[words](training)
        if precision != "fp16":
            training.step(2)
        with pytest.raises(LayoutMismatch, match=words):
            training.step(3)


def _take_state(training: Training, folder: Path) -> None:
    training.optimizer.state_dict()


def _gather(training: Training, folder: Path) -> None:
    with training.optimizer.gathered():
        pass


def _save(training: Training, folder: Path) -> None:
    zerokit.save(folder, training.optimizer, step=3)


@on_ranks(2, itertools.product(((_take_state, 3), (_gather, 1), (_save, 3)), (False, True)))
def test_what_shows_the_state_looks_at_the_last_step_first(given: Any, tmp_path: Path) -> None:
    (look, stage), part = given
    with lagging("cpu") as device:
        training = Training(at(STACK, stage=stage), device)
        for step in range(3):
            if part and step == 2:
                _change_the_schedule(training)
            training.step(step)
        refusal = pytest.raises(LayoutMismatch, match="different sequences of collectives")
        with refusal if part else contextlib.nullcontext():
            look(training, tmp_path)
        if not part:
            training.step(3)


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
        training = Training(at(STACK, precision=precision), device, timeout=datetime.timedelta(seconds=3))
        training.step(0)
        SilentStream.silent = True
        training.step(1)


@pytest.mark.full(default="bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_device_that_hangs_is_an_error_within_the_time_out(precision: str) -> None:
    for rank, outcome in enumerate(run_ranks_expecting_errors(2, _wait_for_ever, precision, timeout=20.0)):
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert f"rank {rank} of 2 did not get through its all-gather of unit 3" in outcome.error
        assert "timed out after 3 s" in outcome.error
        assert f"rank {1 - rank} waits for the all-gather of unit 3" in outcome.error or (
            f"rank {1 - rank} gave up waiting for the all-gather of unit 3" in outcome.error
        )


@on_ranks(1, ["state_dict", "weights"], timeout=1.0)
def test_weights_that_other_ranks_do_not_gather_are_an_error_within_the_time_out(call: str) -> None:
    """As where one rank alone asks for them."""
    with lagging("cpu") as device:
        training = Training(at(STACK, stage=3), device)
        training.step(0)
        LaggingStream.stuck.append("all-gather of unit 0")
        with pytest.raises(ScheduleError, match=r"did not get through its all-gather of unit 0.*timed out"):
            training.model.state_dict() if call == "state_dict" else list(training.optimizer.weights())
        LaggingStream.stuck.clear()


@on_ranks(2, [("fp32", 0), ("bf16", 1), ("fp32", 2), ("bf16", 3), ("fp32", 3)])
def test_a_state_can_be_loaded_right_after_a_step(given: tuple[str, int]) -> None:
    precision, stage = given
    found = []
    for way in (prompt, lagging):
        with way("cpu") as device:
            training = Training(at(STACK, stage=stage, precision=precision), device)
            training.step(0)
            state = training.optimizer.state_dict()
            state["masters"] = [master.clone() for master in state["masters"]]
            training.step(1)
            training.optimizer.load_state_dict(state)
            training.step(2)
            found.append(training.bits())
    assert found[0] == found[1]


@on_ranks(2, STAGES)
def test_no_accumulating_node_outlives_the_passes_that_use_it(stage: int) -> None:
    """Autograd's nodes keep the stream of the forward that made them, for which later passes would wait."""
    with prompt("cpu") as device, warnings.catch_warnings(action="ignore"):
        training = Training(at(SCENES["plain"], stage=stage), device)

        def metadata() -> list[dict[str, Any]]:
            parameters = [p for p in training.model.parameters() if p.requires_grad]
            with training.optimizer.gathered():
                nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
                return [node.metadata for node in nodes]

        training.step(0)
        for each in metadata():
            each["seen"] = True
        training.step(1)
        assert not any(metadata())

"""Every access of the device's way waits for the ones before it, by torch's sanitizer for CUDA, on hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.devices import PRECISIONS, SCENES, STAGES, WIRE, Training, at, run_on, train
from tests.support.happens_before import FakeCuda, followed
from tests.support.missing_waits import MUTATIONS, all_steps
from zerokit.runtime.collectives import nccl as streams
from zerokit.runtime.collectives.nccl import CudaEvent, CudaStream, Operation


def _races(device: str, cases: Sequence[tuple[str, Any, int]]) -> list[str]:
    """What does not wait, in these scenes at a precision and a stage each."""
    found = []
    for name, precision, stage in cases:
        with followed() as cuda:
            train(at(SCENES[name], precision=precision, stage=stage, steps=3), torch.device(device))
        found += [f"{name}, {precision}, stage {stage}: {fault}" for fault in cuda.faults]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_races(stage: int) -> None:
    """Each scene at two of the stages, in all precisions by turns."""
    ways, scenes = [*PRECISIONS, WIRE], list(enumerate(SCENES))
    cases = [
        (name, ways[(place // 2 + stage) % 4], stage) for place, name in scenes if (place + stage) % 2 == 0
    ]
    assert run_on("cpu", _races, cases) == [[], []]


# --- one wait, or one record, taken away -------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def _launch(*, waits: bool = True, chained: bool = True, records_first: bool = False) -> Callable[..., Any]:
    """`CudaStream.launch` without one of its parts."""

    def launch(self: CudaStream, operation: Operation, after: Any = None) -> CudaEvent:
        cuda = _torch().cuda
        if isinstance(after, CudaEvent) and chained:
            self.stream.wait_event(after.event)
        elif waits and after is None:
            self.stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(self.stream):
            early = self.stream.record_event()
            operation.run()
            event = early if records_first else self.stream.record_event()
        return CudaEvent(event, self._device)

    return launch


def _torch() -> Any:
    """What the module of streams takes for torch: the fake."""
    return vars(streams)["torch"]


def _fetch_early(self: CudaStream, values: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """The event stands before the copy."""
    arrived = _torch().empty(values.shape, dtype=values.dtype, pin_memory=True)
    with _torch().cuda.stream(self.stream):
        event = self.stream.record_event()
        arrived.copy_(values, non_blocking=True)
    return lambda: arrived if event.query() else None


STREAM_PATCHES: dict[str, Patch] = {
    "work begins before the computation has written": (
        lambda patch: patch.setattr(CudaStream, "launch", _launch(waits=False))
    ),
    "a gather begins before its reduction": (
        lambda patch: patch.setattr(CudaStream, "launch", _launch(chained=False))
    ),
    "the event stands before the work": (
        lambda patch: patch.setattr(CudaStream, "launch", _launch(records_first=True))
    ),
    "the computation does not wait": (lambda patch: patch.setattr(CudaEvent, "wait", lambda self: None)),
    "the host reads before the copy": (lambda patch: patch.setattr(CudaStream, "fetch", _fetch_early)),
}


def _faults(device: str, apply: Patch, loop: Callable[[Training], None], scene: str, stage: int) -> int:
    with followed() as cuda, pytest.MonkeyPatch.context() as patch:
        apply(patch)
        loop(Training(at(SCENES[scene], stage=stage, steps=2), torch.device(device)))
    return len(cuda.faults)


def _noticed(device: str) -> dict[str, int]:
    """The number of races without this part of a stream."""
    scene = "repeated reductions"
    # Only stage 0 chains a gather to its reduction.
    return {
        f"{name}, stage {stage}": _faults(device, apply, all_steps, scene, stage)
        for name, apply in STREAM_PATCHES.items()
        for stage in ((0,) if "a gather begins" in name else (3,))
    }


def test_a_stream_without_one_of_its_waits_races() -> None:
    for found in run_on("cpu", _noticed):
        assert all(found.values()), found


def _noticed_elsewhere(device: str) -> dict[str, tuple[int, int]]:
    """Races of a loop as it is, where no other test looks for them, and without one of its waits."""
    found = {}
    for name, mutation in MUTATIONS.items():
        loop, scene = mutation.loop, mutation.scene
        stage = mutation.stages[-1]
        before = 0 if loop is all_steps else _faults(device, lambda patch: None, loop, scene, stage)
        found[f"{name}, stage {stage}"] = before, _faults(device, mutation.apply, loop, scene, stage)
    return found


def test_a_wait_that_is_missing_elsewhere_races() -> None:
    for found in run_on("cpu", _noticed_elsewhere):
        for place, (before, after) in found.items():
            assert (before, after > 0) == (0, True), place


# --- threads -----------------------------------------------------------------------------------------------


def test_a_thread_that_has_set_no_device_is_refused() -> None:
    """It would make a context on the first GPU, from every rank."""
    cuda = FakeCuda()
    stream = cuda.Stream()
    event = stream.record_event()

    def ask() -> None:
        for call in (event.query, stream.record_event, lambda: stream.wait_event(event), cuda.current_stream):
            with pytest.raises(AssertionError, match="without set_device"):
                call()
        cuda.set_device(0)
        assert not event.query()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask).result()


# --- and none too many -------------------------------------------------------------------------------------


def _wait_at_once(patch: pytest.MonkeyPatch) -> None:
    launch = CudaStream.launch

    def launch_and_wait(self: CudaStream, operation: Operation, after: Any = None) -> Any:
        work = launch(self, operation, after)
        work.wait()
        return work

    patch.setattr(CudaStream, "launch", launch_and_wait)


def _overlaps(device: str, stage: int) -> list[int]:
    """How many waits of a step find several operations of the computation between the collective and themselves.

    As it is, and where every collective is waited for at once.
    """
    found = []
    for apply in (lambda patch: None, _wait_at_once):
        with followed() as cuda, pytest.MonkeyPatch.context() as patch:
            apply(patch)
            training = Training(at(SCENES["plain"], stage=stage), torch.device(device))
            training.step(0)
            training.step(1)
            cuda.overlaps.clear()
            training.differentiate(2)
            found.append(sum(behind >= 8 for behind in cuda.overlaps))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_run_beside_the_computation(stage: int) -> None:
    """The model has five units: reductions behind backward, and gathers ahead of the units that use them."""
    for beside, at_once in run_on("cpu", _overlaps, stage):
        assert beside >= 7
        assert at_once == 0

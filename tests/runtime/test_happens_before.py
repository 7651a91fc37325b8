"""Every access of the device's way waits for the ones before it, by torch's sanitizer for CUDA, on hosts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.devices import PRECISIONS, SCENES, STAGES, WIRE, Training, at, train
from tests.support.happens_before import FakeCuda, followed
from tests.support.missing_waits import MUTATIONS, all_steps
from tests.support.on_ranks import on_ranks
from zerokit.runtime.collectives import nccl as streams
from zerokit.runtime.collectives.nccl import CudaEvent, CudaStream, Operation

CPU = torch.device("cpu")


@on_ranks(2, STAGES)
def test_nothing_races(stage: int) -> None:
    """Each scene at two of the stages, in all precisions by turns."""
    ways = [*PRECISIONS, WIRE]
    for place, name in enumerate(SCENES):
        if (place + stage) % 2 == 0:
            scene = at(SCENES[name], precision=ways[(place // 2 + stage) % 4], stage=stage, steps=3)
            with followed() as cuda:
                train(scene, CPU)
            assert cuda.faults == [], name


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


def _faults(
    scene: str, stage: int, apply: Patch = lambda patch: None, loop: Callable[[Training], None] = all_steps
) -> int:
    with followed() as cuda, pytest.MonkeyPatch.context() as patch:
        apply(patch)
        loop(Training(at(SCENES[scene], stage=stage, steps=2), CPU))
    return len(cuda.faults)


@on_ranks(2, STREAM_PATCHES)
def test_a_stream_without_one_of_its_waits_races(name: str) -> None:
    # Only stage 0 chains a gather to its reduction.
    stage = 0 if "a gather begins" in name else 3
    assert _faults("repeated reductions", stage, STREAM_PATCHES[name])


@on_ranks(2, MUTATIONS)
def test_a_wait_that_is_missing_elsewhere_races(name: str) -> None:
    """And none does in a loop as it is; of the usual one other tests see to that."""
    mutation = MUTATIONS[name]
    stage = mutation.stages[-1]
    if mutation.loop is not all_steps:
        assert _faults(mutation.scene, stage, loop=mutation.loop) == 0
    assert _faults(mutation.scene, stage, mutation.apply, mutation.loop)


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


def _wait_at_once(patch: pytest.MonkeyPatch) -> None:
    launch = CudaStream.launch

    def launch_and_wait(self: CudaStream, operation: Operation, after: Any = None) -> Any:
        work = launch(self, operation, after)
        work.wait()
        return work

    patch.setattr(CudaStream, "launch", launch_and_wait)


@on_ranks(2, STAGES)
def test_collectives_run_beside_the_computation(stage: int) -> None:
    """Waits of a step find several operations of the computation between the collective and themselves.

    The model has five units: reductions behind backward, and gathers ahead of the units that use them. Where every
    collective is waited for at once, there is nothing between.
    """
    found = []
    for apply in (lambda patch: None, _wait_at_once):
        with followed() as cuda, pytest.MonkeyPatch.context() as patch:
            apply(patch)
            training = Training(at(SCENES["plain"], stage=stage), CPU)
            training.step(0)
            training.step(1)
            cuda.overlaps.clear()
            training.differentiate(2)
            found.append(sum(behind >= 8 for behind in cuda.overlaps))
    assert found[0] >= 7
    assert found[1] == 0

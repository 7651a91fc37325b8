"""What zerokit holds over one step, by kind.

Every operation of torch is seen, and the storages of what it returns are followed for as long as they
live; what the optimizer holds from step to step it says itself. What torch allocates within an operation is not seen.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerokit.bench.record.measured import MemoryTimeline
from zerokit.formulas import KIND_OF_LINE, MEMORY_KINDS
from zerokit.sizes import ELSEWHERE

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Trainer
    from zerokit.bench.measure.clock import Batches
    from zerokit.runtime import ZeroOptimizer


READINGS = 100
"""At most, in a record."""
_TEMPORARY = MEMORY_KINDS[-1]

Held = tuple[str, Tensor, int]
"""What memory is for (of `MEMORY_KINDS`), a tensor in it, and the bytes in use."""
Reading = tuple[float, dict[str, int]]
"""Seconds since the step began, and bytes by kind."""


@dataclass(slots=True)
class _Followed:
    """A storage, what it is for, and the bytes of it that are in use where these are not all."""

    storage: weakref.ref[torch.UntypedStorage]
    kind: str = _TEMPORARY
    used: int | None = None


class MemoryTracker(TorchDispatchMode):
    """Records the memory of a `device` ("cpu", "cuda"), after operations within its context and when `read` is called.

    `held` says what the engine holds. A reading looks at every storage, so there are `interval_s` between two.
    """

    def __init__(
        self, held: Callable[[], Iterable[Held]], device: str = "cpu", interval_s: float = 0.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._held = held
        self._device = device
        self._interval_s = interval_s
        self._followed: dict[int, _Followed] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the readings so far, but keep the kinds of storages."""
        self._started = self._due = time.perf_counter()
        self.readings: list[Reading] = []
        self.parts: dict[str, list[float]] = {}

    def mark(self, part: str) -> None:
        """Mark the start of a phase."""
        self.parts.setdefault(part, []).append(time.perf_counter() - self._started)
        self.read()

    def read(self) -> None:
        """Take a reading now."""
        for one in self._followed.values():
            one.used = None
        for kind, tensor, used in self._held():
            if tensor.device.type == self._device:
                one = self._follow(tensor)
                one.kind, one.used = kind, max(used, one.used or 0)
        sizes = dict.fromkeys(MEMORY_KINDS, 0)
        for key, one in list(self._followed.items()):
            if (storage := one.storage()) is None:
                del self._followed[key]
            else:
                sizes[one.kind] += storage.nbytes() if one.used is None else one.used
        now = time.perf_counter()
        self.readings.append((now - self._started, sizes))
        self._due = now + self._interval_s

    def _follow(self, tensor: Tensor) -> _Followed:
        storage = tensor.untyped_storage()
        one = self._followed.get(storage._cdata)
        if one is None or one.storage() is None:  # the address may have been another's
            one = self._followed[storage._cdata] = _Followed(weakref.ref(storage))
        return one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if not isinstance(value, Tensor):
                continue
            if value.device.type == self._device and value.layout == torch.strided:
                self._follow(value)
        if time.perf_counter() >= self._due:
            self.read()
        return result


def held_by(zero: ZeroOptimizer) -> Iterator[Held]:
    """What the optimizer holds on the device now."""
    from zerokit.runtime.measure import list_holdings  # no part of other engines' memory

    runtime = zero.runtime
    for one in list_holdings(runtime):
        coded, visits = runtime.home.coded(one.tensor), one.line in ELSEWHERE
        kind = KIND_OF_LINE["optimizer" if visits else one.line]
        if coded is not None:
            yield from ((kind, tensor, tensor.nbytes) for tensor in (coded.codes, coded.scales))
        if visits or coded is not None:
            # In a buffer while it is here, else in the four bytes of a nan that stand for it.
            yield kind, one.tensor, one.tensor.untyped_storage().nbytes()
        else:
            yield kind, one.tensor, one.used + one.padding


def measure_timeline(trainer: Trainer, batches: Batches, step_ms: float) -> MemoryTimeline | None:
    """Rank 0's memory over the second of two extra steps of about `step_ms`; None on other ranks. Collective.

    In the first step it becomes known what storages are for. None for engines that do not say what they hold.
    """
    zero = trainer.zero
    if zero is None:
        return None
    tracker = None
    if dist.get_rank() == 0:
        device = trainer.accelerator.device.type
        tracker = MemoryTracker(lambda: held_by(zero), device, step_ms / 1000.0 / READINGS)
    for step in range(2):
        if tracker is None:
            trainer.step(batches(step))
            continue
        ready = batches(step)
        tracker.begin_step()
        with tracker:
            trainer.step(ready, tracker.mark)
            tracker.read()
    if tracker is None:
        return None
    readings = condense(tracker.readings, READINGS)
    series = {kind: [sizes[kind] for _, sizes in readings] for kind in MEMORY_KINDS}
    return MemoryTimeline(tracker.parts, [seconds for seconds, _ in readings], series)


def condense(readings: Sequence[Reading], most: int) -> list[Reading]:
    """At most `most` readings: the largest of each share."""
    share = -(-len(readings) // most)
    shares = [readings[at : at + share] for at in range(0, len(readings), share)]
    return [max(some, key=lambda reading: sum(reading[1].values())) for some in shares]

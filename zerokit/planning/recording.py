"""The recording of a traced step: storages and work, followed through every operation on fake tensors.

Every storage that an operation returns is followed until it dies, as the bench's `MemoryTracker` follows real ones, so
activations include temporaries, logits and the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerokit.errors import UsageError
from zerokit.layout import Layout
from zerokit.planning.products import products_of
from zerokit.planning.work import ModelWork, Product, UnitWork, Work


class Moment(Enum):
    """An event between two operations of a traced step."""

    ENTER = "a module is about to use units"
    LEAVE = "a module that used units has returned"
    END_FORWARD = "the model has returned its loss"
    BACKWARD = "an output made by units has its gradient"
    RECOMPUTE = "a checkpoint runs a module of units again"
    GRADIENT = "a parameter's gradient is ready"
    END = "backward has ended"


@dataclass(frozen=True, slots=True)
class Event:
    """A moment, the units it is about, and the first of `ModelTrace.levels` from then on.

    `parameter` is the position of a gradient's parameter in its unit, `gradient_bytes` the gradient's memory. `watched`
    says of a module that returned whether backward will show when it comes to its units.
    """

    moment: Moment
    sample: int
    units: tuple[int, ...] = ()
    parameter: int = 0
    gradient_bytes: int = 0
    watched: bool = True


@dataclass(frozen=True)
class ModelTrace:
    """One micro-batch through a model.

    Attributes:
        layout: of one rank; `Layout.for_world` cuts it for others.
        samples: sequences or images of the micro-batch.
        events: in order.
        levels: bytes of activations after each operation and at each event.
        work: of units in the order of forward, for the time of a step.
        kept_lazily: units whose uses are all announced by modules, so that they are gathered when those are entered.
        buffer_bytes: of the model's buffers.
        has_blocks: whether the model has blocks that can be recomputed.
        own_stages: of units whose modules have a stage of their own, by index.
    """

    layout: Layout
    samples: int
    events: tuple[Event, ...]
    levels: NDArray[np.int64]
    work: ModelWork
    kept_lazily: frozenset[int]
    buffer_bytes: int
    has_blocks: bool
    own_stages: Mapping[int, int] = field(default_factory=dict)


SAMPLES = 997
"""Samples of the micro-batch that stands for those of all sizes. It is a prime that hardly any other dimension is a
multiple of, so a dimension, or a tensor's bytes, that it divides grows with the samples, and others do not. What it
divides twice compares all samples with all others, as contrastive losses do."""


def _divided(size: int) -> tuple[int, int]:
    """A size as so many times a power of the samples, at most their square."""
    power = 0
    while size and power < 2 and size % SAMPLES == 0:
        size, power = size // SAMPLES, power + 1
    return size, power


_MOST_OPERATIONS = 300_000
"""Ten times those of a transformer of 80 blocks; so many take about a minute."""


@dataclass(slots=True)
class Stretch:
    """Work being collected until the next unit is entered; moved bytes by the power of the samples they grow with."""

    unit: int
    products: list[Product] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    kernels: int = 0

    def work(self, samples: int | None) -> Work:
        """The trace as recorded or, if it is general, for this number of samples."""
        if samples is None:
            return Work(tuple(self.products), self.moved_bytes[0], self.kernels)
        products = tuple(
            Product(*(_grown(size, samples) for size in (one.m, one.n, one.k, one.count)))
            for one in self.products
        )
        moved = sum(size * samples**power for power, size in enumerate(self.moved_bytes))
        return Work(products, moved, self.kernels)


def _grown(size: int, samples: int) -> int:
    rest, power = _divided(size)
    return int(rest * samples**power)


@dataclass(frozen=True)
class Recording:
    """A recorded step of one micro-batch; a `general` one, of `SAMPLES`, gives the traces of all sizes."""

    general: bool
    trace: ModelTrace
    growth: NDArray[np.int64]
    """Bytes that each level grows by with the samples, and with their square."""
    uses: tuple[tuple[Stretch, Stretch, Stretch], ...]
    units_per_sample: int

    def at(self, samples: int) -> ModelTrace:
        """The trace of a micro-batch of this size; a recording that is not general has only its own size."""
        count = samples if self.general else None
        units = tuple(UnitWork(use[0].unit, *(part.work(count) for part in use)) for use in self.uses)
        levels = self.trace.levels + self.growth @ np.array([samples, samples**2])
        work = ModelWork(units, samples * self.units_per_sample, _fresh_bytes(self.trace, levels))
        return replace(self.trace, samples=samples, levels=levels, work=work)


def _fresh_bytes(trace: ModelTrace, levels: NDArray[np.int64]) -> int:
    """By how much activations outgrow what the heap still has, where it hands freed memory back at three moments.

    These are the end of forward, and when backward comes to the first and to the last unit (`runtime.engine`).
    """
    scoped = [
        event.sample
        for event in trace.events
        if event.moment is Moment.BACKWARD and any(trace.layout.units[unit].scopes for unit in event.units)
    ]
    end = next(event.sample for event in trace.events if event.moment is Moment.END_FORWARD)
    first, last = (scoped[0], scoped[-1]) if scoped else (end, end)
    # The next pass begins with what this one leaves.
    after = max(levels[last:].max(), levels[: end + 1].max())
    stretches = ((end, levels[end : first + 1].max()), (first, levels[first : last + 1].max()), (last, after))
    return int(sum(most - levels[start] for start, most in stretches))


class Recorder(TorchDispatchMode):
    """Follows storages and work through every operation."""

    def __init__(self, held: Iterable[Tensor], *, general: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._divided = _divided if general else lambda size: (size, 0)
        self.events: list[Event] = []
        self.levels: list[tuple[int, ...]] = []
        """Bytes, by the power of the samples that they grow with."""
        self.forward: list[Stretch] = []
        self.backward: list[Stretch] = []
        self.recomputed: list[Stretch] = []
        self.recomputing = 0
        self._held = [tensor.untyped_storage() for tensor in held]
        self._alive: dict[int, weakref.ref[Any] | None] = {storage._cdata: None for storage in self._held}
        self._level = [0, 0, 0]
        self._operations = 0
        self._into = Stretch(-1)
        """What operations before the first unit are counted in: the first unit takes it over."""

    def note(self, moment: Moment, units: Iterable[int] = (), **more: Any) -> None:
        """Record an event."""
        units = tuple(units)
        self.events.append(Event(moment, len(self.levels), units, **more))
        self.levels.append(tuple(self._level))
        if not units:
            return
        if moment is Moment.ENTER:
            before = self._into
            self._into = Stretch(units[0])
            if not self.forward:
                self._into = replace(before, unit=units[0])
            self.forward.append(self._into)
        elif moment is Moment.BACKWARD:
            self._begin_backward(units[0])

    def end_forward(self) -> None:
        """Assign what follows to the unit used last, until an output of another unit has its gradient."""
        self.note(Moment.END_FORWARD)
        self._begin_backward(self.forward[-1].unit if self.forward else -1)

    def _begin_backward(self, unit: int) -> None:
        if self.backward and self.backward[-1].unit == unit:
            return
        self._into = Stretch(unit)
        self.backward.append(self._into)
        self.recomputed.append(Stretch(unit))

    def hold(self, tensor: Tensor) -> None:
        """Count the tensor's memory as activations, although no operation made it."""
        self._follow(tensor)

    def _follow(self, tensor: Tensor) -> bool:
        """Count the tensor's storage. Returns whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return False
        size, power = self._divided(storage.nbytes())
        self._level[power] += size

        def gone(_: object) -> None:
            self._level[power] -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # which autograd asks for more often than for all else
            return args[0].fake_device
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise UsageError(
                f"the model runs more than {_MOST_OPERATIONS:,} operations in one micro-batch, as in a loop over "
                "tokens: give a smaller --seq-len, or measure it with zerokit bench"
            )
        result = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if not made:
            return result
        new = [self._follow(value) for value in made]
        self.levels.append(tuple(self._level))
        if any(new) or func._schema.is_mutable:
            self._count(func, args, kwargs, made)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        name = func.name().split("::")[-1].split(".")[0]
        if name.startswith(("empty", "new_empty")):
            return
        into = self.recomputed[-1] if self.recomputing and self.recomputed else self._into
        into.kernels += 1
        products = products_of(name, args, made)
        if products:
            into.products += products
            return
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if name == "embedding":  # of the table only the rows that are looked up
            given = made
        for value in (*given, *made):
            size, power = self._divided(value.numel() * value.element_size())
            into.moved_bytes[power] += size


_DEVICE = torch.ops.prim.device.default


def uses_of(recorder: Recorder) -> tuple[tuple[Stretch, Stretch, Stretch], ...]:
    """Each use of a unit in forward with the backward work that belongs to it: later uses come first in backward."""
    backward: dict[int, list[tuple[Stretch, Stretch]]] = {}
    for stretch, again in zip(recorder.backward, recorder.recomputed, strict=True):
        backward.setdefault(stretch.unit, []).append((stretch, again))
    found: list[tuple[Stretch, Stretch, Stretch]] = []
    for stretch in reversed(recorder.forward):
        parts = backward.get(stretch.unit, [])
        found.append((stretch, *(parts.pop(0) if parts else (Stretch(-1), Stretch(-1)))))
    return tuple(reversed(found))

"""Tensors' bytes on their way between files and a device: through pinned memory, one piece after the other.

Copies from and into other memory of the host reach a tenth of the speed of the link, and each would wait for the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from zerokit.checkpoint.requests import VECTOR_BYTES
from zerokit.checkpoint.state import host_bytes
from zerokit.runtime import homes
from zerokit.runtime.homes import Elements, in_memory
from zerokit.runtime.homes.copies import CopyStream
from zerokit.runtime.homes.staging import Staging

T = TypeVar("T")

_Part = tuple[int, Tensor]
"""The number of a tensor, and some or all of its elements, flat."""


@contextmanager
def through(device: torch.device, make: Callable[[CopyStream], T]) -> Iterator[T | None]:
    """A context with what `make` makes of pinned memory for copies to or from `device`; with None on a host."""
    streams = homes.streams_for(device)
    if streams is None:
        yield None
        return
    stream, _ = streams
    try:
        yield make(stream)
    finally:
        stream.arrive()  # before the memory is given back


def staging_for(purpose: str) -> Callable[[CopyStream], Staging]:
    """Makes what `contents` needs."""
    return lambda stream: Staging(stream, VECTOR_BYTES, purpose)


def device_of(elements: Iterable[Elements]) -> torch.device:
    """The device of the first tensor that is on one, else the host."""
    devices = (one.device for one in elements if isinstance(one, Tensor))
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def contents(
    elements: Iterable[Elements], staging: Staging | None
) -> Iterator[Sequence[tuple[int, memoryview]]]:
    """The bytes of each, one behind the other, with its number; a batch is there until the next one is asked for."""
    if staging is None:
        for batch in _batches(elements):
            yield [(number, host_bytes(part)) for number, part in batch]
        return
    device, under_way = staging.stream.device, deque[Sequence[_Part]]()

    def on_device() -> Iterator[list[Tensor]]:
        for batch in _batches(elements):
            under_way.append(batch)
            yield [part.view(torch.uint8) for _, part in batch if part.device == device]

    for arrived in staging.bring(on_device()):
        brought = iter(arrived)
        yield [
            (number, next(brought) if part.device == device else host_bytes(part))
            for number, part in under_way.popleft()
        ]


def _batches(elements: Iterable[Elements]) -> Iterator[list[_Part]]:
    """The elements in batches of at most `VECTOR_BYTES`; larger ones are cut."""
    batch: list[_Part] = []
    size = 0
    for number, one in enumerate(elements):
        flat = in_memory(one).detach().reshape(-1)
        for part in flat.split(VECTOR_BYTES // flat.itemsize):
            if batch and size + part.nbytes > VECTOR_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((number, part))
            size += part.nbytes
    if batch:
        yield batch

"""Copies between a device and its host on streams of their own: events order them, and the host seldom waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Where to, and where from."""


class Issued:
    """What a stream has been given up to a moment. `wait` makes the current stream wait for it, not the host.

    It keeps the memory of copies: the allocator would hand out what is dropped while a stream uses it.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device, pairs: Pairs) -> None:
        self.event, self._device, self._pairs = event, device, pairs

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def arrive(self) -> None:
        """Let the calling thread wait until it has ended."""
        self.event.synchronize()


def using(device: torch.device) -> tuple[Callable[[torch.device], None], tuple[torch.device]] | tuple[()]:
    """What a `ThreadPoolExecutor` is to call first in its threads: a new one's current GPU is the first of the machine,
    on which it would begin a context, of some hundred MB, for any call of CUDA.
    """
    return (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()


class CopyStream:
    """A stream for copies between a device and pinned memory. There are few, and they are made once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> Issued:
        """What the computation has issued so far, in the calling thread."""
        return Issued(torch.cuda.current_stream(self.device).record_event(), self.device, ())

    def copy(self, pairs: Pairs, after: Sequence[Issued]) -> Issued:
        """Start copies, behind those before and behind what is `after`."""
        with torch.cuda.stream(self._stream):
            for one in after:
                self._stream.wait_event(one.event)
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
            return Issued(self._stream.record_event(), self.device, pairs)

    def arrive(self) -> None:
        """Let the host wait until all copies have ended."""
        self._stream.synchronize()

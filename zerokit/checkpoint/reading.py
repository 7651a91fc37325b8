"""How a load gets the bytes of a checkpoint, and what it does where they are wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zerokit.checkpoint.checksum import Pieces
from zerokit.checkpoint.landing import Landing
from zerokit.checkpoint.manifest import WEIGHT_KINDS
from zerokit.checkpoint.requests import VECTOR_BYTES, Request, read, requests_for
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.state import Held, InTensor
from zerokit.layout import Interval


class Reading(ABC):
    """A checkpoint that is loaded, and the way to its bytes. All ranks call the same methods, in the same order."""

    source: Source

    @abstractmethod
    def read(self, requests: Iterable[Request]) -> Pieces:
        """Fill memory; returns the checksums of what was read. Raises `CheckpointError`."""

    @abstractmethod
    def settle(self, by_rank: Sequence[Pieces]) -> bool:
        """Whether what ranks have read since the last call is right; False where it is to be read again.

        Raises `CheckpointError` where it is wrong and there is no other way to it.
        """

    @abstractmethod
    def bring(self, names: Iterable[str]) -> None:
        """Make sure that this rank's `source` has files of these names. Raises `CheckpointError`."""


class FromFiles(Reading):
    """A checkpoint that every rank sees."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def read(self, requests: Iterable[Request]) -> Pieces:
        return read(self.source, requests)

    def settle(self, by_rank: Sequence[Pieces]) -> bool:
        self.source.require_right(by_rank)
        return True

    def bring(self, names: Iterable[str]) -> None:
        pass


def requests_of(
    checkpoint: Source,
    sources: Mapping[str, int],
    held: Iterable[Held],
    scaled: list[tuple[Tensor, Tensor]],
    landing: Landing | None,
) -> Iterator[Request]:
    """What is needed of the parameters in `sources`, which gives their positions in the checkpoint.

    Tensors that get codes are added to `scaled`, with those that get the scales.
    """
    streams = checkpoint.manifest.numbers
    # A parameter is in one of the two streams of weights, and its values come from that one.
    weights = {position: number for (kind, position), number in streams.items() if kind in WEIGHT_KINDS}
    for one in held:
        position = sources.get(one.part.parameter.name)
        if position is None:
            continue
        number = weights[position] if one.kind in WEIGHT_KINDS else streams.get((one.kind, position))
        lacking = (
            checkpoint.manifest.frozen == "" and number is not None and checkpoint.manifest.apart(number)
        )
        if number is not None and not lacking:
            assert isinstance(one.tensor, Tensor)
            yield from _into(checkpoint, number, position, one.part.interval, one.tensor, landing)
            if (scales := checkpoint.manifest.scales(number, position)) is not None:
                every = checkpoint.streams[scales].elements(one.part.interval)
                scaled.append((one.tensor, torch.empty(every.numel, device=one.tensor.device)))
                yield from _into(checkpoint, scales, position, every, scaled[-1][1], landing)


def _into(
    checkpoint: Source,
    stream: int,
    position: int,
    interval: Interval,
    tensor: Tensor,
    landing: Landing | None,
) -> Iterator[Request]:
    """What brings a stream's elements of a parameter into a flat tensor."""
    elements = InTensor(tensor, checkpoint.streams[stream].dtype, landing)
    for request in requests_for(checkpoint, stream, position, interval, elements, 0):
        yield from request.split(VECTOR_BYTES)

"""How a load gets the bytes of a checkpoint, and what it does where they are wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from zerokit.checkpoint.checksum import Pieces
from zerokit.checkpoint.requests import Request, read
from zerokit.checkpoint.source import Source


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

"""How a rank reads what another rank of its node offers: the interface of the two ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Access(Protocol):
    """One way; tensors are contiguous and lie on the host."""

    @property
    def route(self) -> str:
        """Its name in records."""

    def lend(self, pieces: Tensor, rows: Sequence[int]) -> int:
        """Let the others read `rows` of `pieces` [n × piece]; row r is r pieces behind the returned number."""

    def take_back(self, number: int, size_bytes: int) -> None:
        """The others have read what was lent."""

    def read(self, peer: int, number: int, into: Tensor) -> None:
        """Copy what rank `peer` lends under `number`. Raises `RuntimeError` if it is gone."""

    def look_at(self, peer: int, number: int, scratch: Tensor) -> Tensor:
        """The same without a copy where that is possible, else in `scratch`. Not to be written to."""

    def trim(self) -> None:
        """Give back memory that is kept for what will be lent soon."""

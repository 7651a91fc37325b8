"""Where masters and the optimizer's states are between steps; the interface of all homes, and the device itself.

States that live elsewhere visit the device unit by unit. The tensors stay the same objects, in `inner.state` and in
`param_groups`: one that is away shows nan in its shape, in no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.runtime.homes.codes import Codes
from zerokit.runtime.masters import Master, OwnedUnit, WholeMaster
from zerokit.runtime.trials import tensors_in

T = TypeVar("T", bound=OwnedUnit)


class Stored(Protocol):
    """A tensor that is away, or elements of a flat one: `read` brings them into memory of their own."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, elements: slice) -> Stored: ...
    def read(self) -> Tensor: ...


Elements: TypeAlias = Tensor | Stored


def in_memory(elements: Elements) -> Tensor:
    """The elements, read if they are away."""
    return elements if isinstance(elements, Tensor) else elements.read()


class Home:
    """The device: masters and states are always there."""

    name = "device"
    """The name of the kind of home, equal on all ranks."""

    most = 0
    """Bytes that visiting states took at most at once in the last step."""

    def attach(self, inner: Optimizer) -> None:
        """Take the states of masters from `inner` from now on."""

    def leave(self, unit: OwnedUnit) -> None:
        """Send a unit's masters and states home, as they are now."""

    def forget(self, unit: OwnedUnit) -> None:
        """Give up what a unit has here: it is managed no more."""

    def move_in(self, unit: OwnedUnit, room: int) -> None:
        """Have other masters and states of a unit than before, which are here and need `room` bytes, now or soon."""
        self.leave(unit)

    def reserve(self, nbytes: int) -> None:
        """Make sure of room for so many bytes more. Raises `StorageError` where there is none."""

    def renew(self) -> None:
        """Note that all that is away is about to be written anew, whatever has become of it."""

    def away(self, unit: OwnedUnit) -> Sequence[Tensor]:
        """The tensors of a unit that are elsewhere between steps."""
        return ()

    def tour(
        self,
        units: Sequence[T],
        work: Callable[[Sequence[T]], None],
        *,
        writes: bool,
        agree: Callable[[bool], None] | None = None,
    ) -> None:
        """Call `work` with units whose masters and states are here then, each unit once; with `writes` they may change.

        Where all ranks make the tour together, `agree` raises an error on this one if any rank has `failed`, and is
        called before each unit.
        """
        work(units)

    @contextmanager
    def visiting(self, unit: OwnedUnit, *, writes: bool) -> Iterator[None]:
        """A context in which a unit's masters and states are here; with `writes` they may change."""
        yield

    def elements(self, unit: OwnedUnit, tensor: Tensor) -> Elements:
        """A master or state of a unit without a visit."""
        return tensor.detach()

    def coded(self, tensor: Tensor) -> Codes | None:
        """The codes that stand for a state between steps; None where it is kept as it is."""
        return None

    def keep(self) -> Callable[[Stored], Stored]:
        """Keep all that is away as it is now, whatever the next steps write. Raises `ZerokitError` where it cannot.

        Returns a function that gives the kept form of what `elements` gave.
        """
        return lambda stored: stored


def states_of(master: Master, inner: Optimizer) -> list[Tensor]:
    """The states of a master that may be elsewhere: those of a slice's shape, and of a whole tensor all but numbers."""
    state = inner.state.get(master.tensor, {})
    if isinstance(master, WholeMaster):
        return [value for value in tensors_in(state) if value.dim() and value.numel()]
    alike = (v for v in state.values() if isinstance(v, Tensor) and v.shape == master.tensor.shape)
    return [value for value in alike if value.numel()]

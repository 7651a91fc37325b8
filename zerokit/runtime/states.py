"""`optimizer.state`: the states of flat tensors, and those of the model's own parameters as torch would show them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.guard import FlatParameter, Ticket, ticket_of
from zerokit.runtime.storage import FlatUnit

if TYPE_CHECKING:
    from zerokit.runtime.build import Parts


EMA = "ema"
"""The name of an average of the weights among the states of a flat tensor, and of its stream in a checkpoint."""


class Average(Protocol):
    """What an average of the weights is to others: `zerokit.Ema`."""

    decay: float

    def update(self) -> None: ...

    def restart(self) -> None: ...

    def applied(self) -> AbstractContextManager[None]: ...


class States(MutableMapping[Any, Any]):
    """The inner optimizer's states by flat tensor.

    Inside `gathered()` a parameter of the model gives whole arrays, which all ranks must ask for alike; changes made in
    place are kept at its end. Anything else that is asked by a parameter raises `UsageError`.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._shown: dict[tuple[int, int], dict[str, Any]] = {}
        """What is shown inside `gathered()`, by unit and position."""

    def __getitem__(self, key: Any) -> Any:
        ticket = _ticket_of_model(key)
        if ticket is None:
            return self._parts.inner.state[key]
        if not self._parts.gathering.is_open:
            self._refuse(ticket)
        place = ticket.unit, ticket.positions[0]
        if place not in self._shown:
            self._shown[place] = self._gather(self._parts.storages[ticket.unit], ticket.positions[0])
        return self._shown[place]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._require_flat(key)
        self._parts.inner.state[key] = value

    def __delitem__(self, key: Any) -> None:
        self._require_flat(key)
        del self._parts.inner.state[key]

    def __contains__(self, key: object) -> bool:
        return bool(self._parts.inner.state) if _ticket_of_model(key) else key in self._parts.inner.state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts.inner.state)

    def __len__(self) -> int:
        return len(self._parts.inner.state)

    def __repr__(self) -> str:
        return repr(self._parts.inner.state)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dictionary, by flat tensor."""
        self._require_flat(key)
        return self._parts.inner.state.pop(key, *default)

    def take_changes(self) -> None:
        """The end of `gathered()`: what was changed in place goes to the flat tensors' states."""
        for (index, position), arrays in self._shown.items():
            storage = self._parts.storages[index]
            part = storage.unit.slices[position]
            for flat in storage.flats:
                both, own = (
                    part.memory.intersection(flat.interval),
                    self._parts.inner.state.get(flat.tensor, {}),
                )
                for kind, whole in arrays.items():
                    if (
                        both.numel
                        and isinstance(own.get(kind), Tensor)
                        and own[kind].shape == flat.tensor.shape
                    ):
                        piece = whole.reshape(-1)[both.start - part.offset : both.stop - part.offset]
                        own[kind][both.start - flat.interval.start : both.stop - flat.interval.start] = piece
        self._shown.clear()

    def _gather(self, storage: FlatUnit, position: int) -> dict[str, Any]:
        """All states of one parameter: arrays in its shape, and the numbers beside them."""
        parts, part = self._parts, storage.unit.slices[position]
        owned = [(flat, parts.inner.state.get(flat.tensor, {})) for flat in storage.flats]
        here = [own for flat, own in owned if part.memory.intersection(flat.interval).numel]
        numbers = torch.tensor(
            [
                [float(bool(own)), *(float(own.get(name) or 0.0) for name in parts.states.others)]
                for own in here
            ]
            or [[0.0] * (1 + len(parts.states.others))],
            dtype=torch.float64,
        )
        most = numbers.amax(0).to(parts.collectives.device)
        parts.collectives.all_reduce(most, dist.ReduceOp.MAX)
        stepped, *others = parts.collectives.read(most)
        if not stepped:
            return {}
        shown: dict[str, Any] = {}
        for kind in sorted(parts.states.kinds):
            whole = torch.zeros(storage.unit.numel, dtype=parts.states.dtypes[kind], device=storage.device)
            for flat, own in owned:
                if kind in own:
                    whole[flat.interval.start : flat.interval.stop] = own[kind]
            if sum(flat.interval.numel for flat in storage.flats) < storage.unit.numel:
                parts.collectives.all_gather(storage.unit, whole).wait()
                parts.collectives.wait_for_readers()
            shown[kind] = whole[part.memory.start : part.memory.stop].clone().view(part.parameter.shape)
        return shown | {
            name: torch.tensor(value) for name, value in zip(parts.states.others, others, strict=True)
        }

    def _require_flat(self, key: Any) -> None:
        if (ticket := _ticket_of_model(key)) is not None:
            self._refuse(ticket)

    def _refuse(self, ticket: Ticket) -> NoReturn:
        raise UsageError(
            f"optimizer.state of {ticket.name} is divided over ranks: read it, and change its arrays in place "
            "(state[p]['exp_avg'].zero_()), inside `with optimizer.gathered():`, which all ranks enter; it cannot be "
            "removed or replaced"
        )


def _ticket_of_model(key: object) -> Ticket | None:
    """The ticket of a parameter of the model; None for a flat tensor and for anything else."""
    if not isinstance(key, Tensor) or isinstance(key, FlatParameter):
        return None
    ticket = ticket_of(key)
    return None if ticket is None or ticket.name.startswith("flat ") else ticket

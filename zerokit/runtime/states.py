"""The optimizer's state: by flat tensor, by parameter as torch shows it, and as one rank saves and loads its part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import LayoutMismatch, UsageError
from zerokit.runtime.build import Parts
from zerokit.runtime.flats import cut_flats
from zerokit.runtime.guard import FlatParameter, Ticket, ticket_of
from zerokit.runtime.step import write_back
from zerokit.runtime.storage import UnitState

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

    def _gather(self, storage: UnitState, position: int) -> dict[str, Any]:
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


class RankState(OrderedDict[str, Any]):
    """One rank's part of the state; looking up torch's keys in it raises an error with advice."""

    def __missing__(self, key: str) -> NoReturn:
        raise UsageError(
            f"{key!r} is not in the state_dict of a ZeroOptimizer, which is one rank's part over flat tensors: use "
            "zerokit.save() and zerokit.load() instead of torch.distributed.checkpoint's functions for optimizers"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load(weights_only=True) knows that one


def take_state(parts: Parts) -> RankState:
    """This rank's part, apart from the loss scale."""
    parts.walk.absorb_changes()  # weights that were changed in place: masters are what is taken
    return RankState(
        {
            "inner": parts.inner.state_dict(),
            "flats": [
                [(flat.group, flat.interval.start, flat.interval.stop) for flat in storage.flats]
                for storage in parts.storages
            ],
            "masters": [flat.tensor.detach() for storage in parts.storages for flat in storage.flats],
            "place": _origin(parts),
        }
    )


def load_state(parts: Parts, state: Mapping[str, Any]) -> None:
    """Take back what `take_state` gave. Raises `LayoutMismatch` for another layout, stage or rank."""
    if state.get("place") != _origin(parts):
        raise LayoutMismatch(
            "this state was saved by another rank, stage, precision or layout; a "
            "rank's state_dict fits only the same rank of an equal run. "
            "Use a zerokit checkpoint to change world size or stage"
        )
    parts.gathering.make_current()  # what the last step has updated may still be on its way
    for storage, pieces in zip(parts.storages, state["flats"], strict=True):
        cut_flats(storage, parts.inner, pieces)
    parts.inner.load_state_dict(state["inner"])
    masters = iter(state["masters"])
    with torch.no_grad():
        for storage in parts.storages:
            for flat in storage.flats:
                flat.tensor.copy_(next(masters))
        write_back(parts.storages)
    parts.gathering.gather_updated()


def _origin(parts: Parts) -> tuple[str, str, int, str]:
    rank = parts.collectives.rank
    return (parts.layout.digest().hex(), str(parts.placement), rank, str(parts.precision.as_dict()))

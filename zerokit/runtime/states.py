"""The optimizer's state: by flat tensor, by parameter as in torch, and one rank's part for saving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import LayoutMismatch, UsageError
from zerokit.runtime.build import Runtime
from zerokit.runtime.guard import MasterParameter, Ticket, ticket_of
from zerokit.runtime.rounding import RESIDUAL
from zerokit.runtime.unit import UnitState

EMA = "ema"
"""The name of an average of the weights among the states of a flat tensor, and of its stream in a checkpoint."""


class Average(Protocol):
    """The interface of an average of the weights: `zerokit.Ema`."""

    decay: float

    def update(self) -> None: ...
    def restart(self) -> None: ...
    def applied(self) -> AbstractContextManager[None]: ...


class BetweenIslands(Protocol):
    """The interface of local steps for the optimizer and its checkpoints: `zerokit.LocalSteps`."""

    def after_step(self) -> None: ...
    def synchronize(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def streams(self) -> dict[str, dict[int, Tensor]]: ...
    def plain_state(self) -> dict[str, Any]: ...
    def expect(self, names: Iterable[str]) -> dict[str, dict[int, Tensor]]: ...
    def restore(
        self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None
    ) -> None: ...
    def committed(self, step: int) -> None: ...
    def agree_on_step(self, steps: set[int]) -> int | None: ...


class States(MutableMapping[Any, Any]):
    """The inner optimizer's states by master.

    Inside `gathered()` a parameter of the model gives whole arrays, which all ranks must ask for alike; changes made in
    place are kept at its end. Anything else that is asked by a parameter raises `UsageError`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._shown: dict[tuple[int, int], dict[str, Any]] = {}  # inside `gathered()`, by unit and position

    @property
    def _of(self) -> MutableMapping[Any, Any]:
        return self._runtime.inner.state

    def __getitem__(self, key: Any) -> Any:
        ticket = _ticket_of_model(key)
        if ticket is None:
            return self._of[key]
        if not self._runtime.gathering.is_open:
            raise _refusal(ticket)
        place = ticket.index, ticket.positions[0]
        if place not in self._shown:
            self._shown[place] = self._gather(self._runtime.units[ticket.index], ticket.positions[0])
        return self._shown[place]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of[_master(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._of[_master(key)]

    def __contains__(self, key: object) -> bool:
        return bool(self._of) if _ticket_of_model(key) else key in self._of

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __repr__(self) -> str:
        return repr(self._of)

    def pop(self, key: Any, *default: Any) -> Any:
        """The item of a master, as in a dictionary."""
        return self._of.pop(_master(key), *default)

    def take_changes(self) -> None:
        """Copy in-place changes to the masters' states at the end of `gathered()`."""
        for (index, position), arrays in self._shown.items():
            for kind in self._runtime.states.kinds & arrays.keys():
                for master, both, piece in self._runtime.units[index].pieces_of(position, arrays[kind]):
                    if (value := self._of.get(master.tensor, {}).get(kind)) is not None:
                        master.part(value, both).copy_(piece)
        self._shown.clear()

    def _gather(self, unit: UnitState, position: int) -> dict[str, Any]:
        """All states of one parameter: arrays in its shape, and the numbers beside them."""
        collectives, states = self._runtime.collectives, self._runtime.states
        part = unit.unit.slices[position]
        owned = [(master, self._of.get(master.tensor, {})) for master in unit.masters]
        numbers = [[0.0] * (1 + len(states.others))]
        for master, own in owned:
            if part.memory.intersection(master.interval).numel:
                numbers.append([float(bool(own)), *(float(own.get(name) or 0.0) for name in states.others)])
        most = torch.tensor(numbers, dtype=torch.float64).amax(0).to(collectives.device)
        collectives.all_reduce(most, dist.ReduceOp.MAX)
        stepped, *others = collectives.read(most)
        if not stepped:
            return {}
        shown: dict[str, Any] = {}
        for kind in sorted(states.kinds):
            whole = torch.zeros(unit.unit.numel, dtype=states.dtypes[kind], device=unit.device)
            for master, own in owned:
                if kind in own:
                    whole[master.interval.start : master.interval.stop] = own[kind]
            if sum(master.interval.numel for master in unit.masters) < unit.unit.numel:
                collectives.all_gather(unit.unit, whole).wait()
                collectives.wait_for_readers()
            shown[kind] = whole[part.memory.start : part.memory.stop].clone().view(part.parameter.shape)
        return shown | {name: torch.tensor(value) for name, value in zip(states.others, others, strict=True)}


def _master(key: Any) -> Any:
    """`key` itself. Raises `UsageError` where it is a parameter of the model."""
    if (ticket := _ticket_of_model(key)) is not None:
        raise _refusal(ticket)
    return key


def _refusal(ticket: Ticket) -> UsageError:
    return UsageError(
        f"optimizer.state of {ticket.name} is sharded across ranks: read it, and change its arrays in place "
        "(state[p]['exp_avg'].zero_()), inside `with optimizer.gathered():`, which all ranks enter; it cannot be "
        "removed or replaced"
    )


def _ticket_of_model(key: object) -> Ticket | None:
    """The ticket of a parameter of the model; None for a master and for anything else."""
    if not isinstance(key, Tensor) or isinstance(key, MasterParameter):
        return None
    ticket = ticket_of(key)
    return None if ticket is None or ticket.name.startswith("master of ") else ticket


class RankState(OrderedDict[str, Any]):
    """One rank's part of the state; looking up torch's keys in it raises an error with advice."""

    def __missing__(self, key: str) -> NoReturn:
        raise UsageError(
            f"{key!r} is not in the state_dict of a ZeroOptimizer, which is one rank's part over flat tensors: use "
            "zerokit.save() and zerokit.load() instead of torch.distributed.checkpoint's functions for optimizers"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load(weights_only=True) knows that one


def take_state(runtime: Runtime) -> RankState:
    """This rank's part, apart from the loss scale."""
    runtime.gathering.take_changes()  # weights that were changed in place: masters are what is taken
    return RankState(
        {
            "inner": runtime.inner.state_dict(),
            "divided": [unit.divided for unit in runtime.units],
            "masters": [master.tensor.detach() for _, master, _ in runtime.masters()],
            "rounding": [rounding.state() for _, rounding in runtime.gradients.roundings()],
            "place": _origin(runtime),
        }
    )


def load_state(runtime: Runtime, state: Mapping[str, Any]) -> None:
    """Restore the result of `take_state`. Raises `LayoutMismatch` for another layout, stage or rank."""
    if state.get("place") != _origin(runtime) or "divided" not in state:
        raise LayoutMismatch(
            "this state was saved by another rank, stage, precision or layout; a "
            "rank's state_dict fits only the same rank of an equal run. "
            "Use a zerokit checkpoint to change world size or stage"
        )
    runtime.gathering.make_current()  # what the last step has updated may still be on its way
    for unit, divided in zip(runtime.units, state["divided"], strict=True):
        unit.divide(runtime.inner, by_parameter=divided)
    runtime.inner.load_state_dict(state["inner"])
    with torch.no_grad():
        for (_, master, _), values in zip(runtime.masters(), state["masters"], strict=True):
            master.tensor.copy_(values)
        for (_, rounding), saved in zip(runtime.gradients.roundings(), state["rounding"], strict=True):
            rounding.load_state(saved)
        runtime.publish()


@contextmanager
def residuals_shown(runtime: Runtime) -> Iterator[None]:
    """A context in which the owners' residuals are a state of each master, for saving."""
    masters = [
        (master, rounding.shown(master))
        for unit, rounding in runtime.gradients.roundings()
        if rounding.residual is not None
        for master in unit.masters
    ]
    for master, residual in masters:
        runtime.inner.state[master.tensor][RESIDUAL] = residual
    try:
        yield
    finally:
        _pop_residuals(runtime)


def take_residuals(runtime: Runtime, epoch: object) -> None:
    """Move residuals that were loaded as masters' states to their units."""
    loaded = _pop_residuals(runtime)
    for unit, rounding in runtime.gradients.roundings():
        pairs = [(master, loaded[master.tensor]) for master in unit.masters if master.tensor in loaded]
        rounding.take(pairs, epoch)


def _pop_residuals(runtime: Runtime) -> dict[Tensor, Tensor]:
    found = {}
    for tensor, state in list(runtime.inner.state.items()):
        if RESIDUAL in state:
            found[tensor] = state.pop(RESIDUAL)
            if not state:
                del runtime.inner.state[tensor]
    return found


def _origin(runtime: Runtime) -> tuple[str, str, int, str]:
    place = runtime.layout.digest().hex(), str(runtime.placement), runtime.collectives.rank
    return (*place, str(runtime.precision.as_dict()))

"""What torch sees of the optimizer, which is that of flat tensors: groups, states, and one rank's part for saving."""

from __future__ import annotations

import copy
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.errors import LayoutMismatch, StorageError, UsageError
from zerokit.runtime.build import Runtime
from zerokit.runtime.changes import checksums
from zerokit.runtime.guard import SCALES_ITSELF
from zerokit.runtime.interface import TorchInterface
from zerokit.runtime.step import INTERRUPTED
from zerokit.runtime.unit import UnitState
from zerokit.skips import Skips

EMA = "ema"
"""The name of an average of the weights among the states of a flat tensor, and of its stream in a checkpoint."""


class Average(Protocol):
    """The interface of an average of the weights: `zerokit.Ema`."""

    decay: float

    def update(self) -> None: ...
    def restart(self) -> None: ...
    def applied(self) -> AbstractContextManager[None]: ...


_T = TypeVar("_T")


class Islands(Protocol):
    """The interface of groups of ranks that train apart from each other; `index` is that of this rank's group."""

    @property
    def count(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def rank(self) -> int: ...  # among the ranks of all islands


class AfterSteps(Protocol):
    """The interface of what is done after each step, with the state of then: `zerokit.Copies`."""

    def after_step(self) -> None: ...


class BetweenIslands(Protocol):
    """The interface of local steps for the optimizer and its checkpoints: `zerokit.LocalSteps`."""

    def after_step(self) -> None: ...
    def synchronize(self) -> None: ...
    def streams(self) -> dict[str, dict[int, Tensor]]: ...
    def plain_state(self) -> dict[str, Any]: ...
    def accepted(self, names: Iterable[str]) -> list[str]: ...
    def expect(self, names: Iterable[str]) -> dict[str, dict[int, Tensor]]: ...
    def require_loadable(
        self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None
    ) -> None: ...
    def restore(
        self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None
    ) -> None: ...
    def at_save(self, step: int, value: _T) -> list[_T]: ...
    def at_load(self, value: _T) -> list[_T]: ...


AVERAGED = "the model has its averaged weights: leave `with ema.applied():` first"
"""Why steps are refused while weights and averages are exchanged."""

_RELEASED = "its model was released, or given to another trainer, and is not sharded any more"
HALF_CUT = (
    "an exception ended recut() halfway, so this rank may have parts of two cuts: build the model and the optimizer "
    "anew, and load a checkpoint"
)
"""Why steps, saves and loads are refused after that."""


def _forwarded(name: str) -> Any:
    """An attribute of the inner optimizer, to read and to set."""

    def assign(optimizer: ForwardingOptimizer, value: Any) -> None:
        setattr(optimizer._inner, name, value)

    return property(lambda optimizer: getattr(optimizer._inner, name), assign)


class ForwardingOptimizer(TorchInterface):
    """An optimizer whose groups, options and states are those of `inner`, and whose steps may be refused."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__()
        self._inner = inner
        self.refusal = ""  # why `step` is refused; "" where it is not

    param_groups: list[dict[str, Any]] = _forwarded("param_groups")
    defaults: dict[str, Any] = _forwarded("defaults")
    state: Any = _forwarded("state")

    def refuse(self, reason: str) -> None:
        """Refuse steps and saves for this `reason` from now on; "" allows them again."""
        self.refusal = reason

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """A context in which `step` and saves are refused."""
        before = self.refusal
        self.refusal = before or reason
        try:
            yield
        finally:
            self.refusal = before

    @contextmanager
    def refusing_if_lost(self) -> Iterator[None]:
        """A context after which `step` and saves are refused, if states were lost in it on the way to their home."""
        try:
            yield
        except StorageError:
            self.refuse(INTERRUPTED)
            raise

    def note_release(self) -> None:
        """Drop all states and refuse to step: `zerokit.release` makes the model a plain one now."""
        self.require_own_weights("release()")
        self.zero_grad()
        self.refusal = _RELEASED
        self._inner.state.clear()

    def require_own_weights(self, call: str) -> None:
        """Raise `UsageError` while the model has its averaged weights."""
        if self.refusal == AVERAGED:
            raise UsageError(
                f"{call} inside `with ema.applied():`, where weights and averages are exchanged: leave the "
                "context first"
            )

    def require_loadable(self) -> None:
        """Raise `UsageError` where no load can make up for what has become of this optimizer."""
        if self.refusal in (_RELEASED, HALF_CUT):
            raise UsageError(f"load refused: {self.refusal}")

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise UsageError(
            "the layout is fixed when ZeroOptimizer is built: pass all groups as params=[...], and freeze before"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # torch.amp.GradScaler asks for this before it steps, also on ranks whose gradients it has found nothing in.
        raise UsageError(SCALES_ITSELF)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a ZeroOptimizer cannot be copied or pickled, because its communicators belong to this process: use "
            "state_dict(), or zerokit.save(), which any number of ranks can load"
        )


class RankState(dict[str, Any]):
    """One rank's part of a state. It has no members of torch's optimizers, and says so to whoever looks for them."""

    def __missing__(self, name: str) -> NoReturn:
        if name not in ("state", "param_groups"):
            raise KeyError(name)
        raise UsageError(
            f"optimizer.state_dict() has no {name!r}: it is this rank's part of flat tensors, so torch's "
            "get_optimizer_state_dict() cannot read it. Use zerokit.save(), and `zerokit convert RUN --format dcp` for "
            "a state of torch's by names; options are in optimizer.param_groups"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """As a plain mapping, which `torch.load(…, weights_only=True)` reads."""
        return OrderedDict, (), None, None, iter(self.items())


def take_state(runtime: Runtime) -> dict[str, Any]:
    """This rank's part, apart from the loss scale."""
    runtime.engine.take_changes()  # weights that were changed in place: masters are what is taken
    here: dict[int, Tensor] = {}
    """What is away, in memory of its own, by the identity of its tensor."""

    def bring(units: Sequence[UnitState]) -> None:
        here.update((id(tensor), tensor.detach().clone()) for u in units for tensor in runtime.home.away(u))

    def shown(value: Any) -> Any:
        if isinstance(value, Tensor):
            return here[id(value)] if id(value) in here else value.clone() if here else value
        if isinstance(value, dict):
            return {key: shown(one) for key, one in value.items()}
        return type(value)(map(shown, value)) if isinstance(value, list | tuple) else value

    runtime.home.tour(runtime.units, bring, writes=False)
    inner = runtime.inner.state_dict()
    return RankState(
        inner=inner | {"state": shown(inner["state"])},
        divided=[unit.divided for unit in runtime.units],
        masters=[shown(master.tensor).detach() for _, master, _ in runtime.masters()],
        draws=runtime.gradients.draws.state(),
        skips=astuple(runtime.control.skips),
        place=_origin(runtime),
    )


def load_state(runtime: Runtime, state: Mapping[str, Any]) -> None:
    """Restore the result of `take_state`. Raises `LayoutMismatch` for another layout, stage or rank."""
    if state.get("place") != _origin(runtime) or "divided" not in state:
        raise LayoutMismatch(
            "this state was saved by another rank, stage, precision or layout, and fits only the same rank of an "
            "equal run: use a zerokit checkpoint to change world size or stage"
        )
    # Replicas must be alike, and on all ranks or on none: the next step's agreement shows it.
    whole = all(len(unit.placement.owners(unit.unit)) == 1 for unit in runtime.units)
    runtime.collectives.note_path(
        zlib.crc32(repr(checksums(state["masters"]) if whole else "loaded").encode())
    )
    runtime.home.renew()
    runtime.engine.make_current()  # what the last step has updated may still be on its way
    for unit, divided in zip(runtime.units, state["divided"], strict=True):
        if divided and not unit.divided:
            unit.divide(runtime.inner)
        elif unit.divided and not divided:
            raise LayoutMismatch(
                f"this state is older than the freezing of some parameters of {unit.unit.name}, which have masters of "
                "their own since then: load it into a new optimizer"
            )
    # torch takes the very tensors, and those that go elsewhere would show nan to the caller.
    own = state["inner"] if runtime.home.name == "device" else copy.deepcopy(state["inner"])
    runtime.inner.load_state_dict(own)
    masters = dict(zip((master for _, master, _ in runtime.masters()), state["masters"], strict=True))

    def take(units: Sequence[UnitState]) -> None:
        for master in (master for unit in units for master in unit.masters):
            master.values.tensor.copy_(masters[master].reshape(-1))

    with torch.no_grad():
        runtime.home.tour(runtime.units, take, writes=True)
        runtime.publish()
    runtime.gradients.draws.begin(*state.get("draws", (None,)))
    runtime.control.resume(Skips(*state.get("skips", ())))


def _origin(runtime: Runtime) -> tuple[str, str, int, str]:
    place = runtime.layout.digest().hex(), str(runtime.placement), runtime.collectives.rank
    return (*place, str(runtime.precision.as_dict()))

"""One rank's part of the optimizer's state, which only the same rank of an equal run can load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from zerokit.errors import LayoutMismatch, UsageError
from zerokit.runtime.build import Parts
from zerokit.runtime.flats import cut_flats
from zerokit.runtime.update import write_back


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

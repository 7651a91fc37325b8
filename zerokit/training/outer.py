"""What a rank keeps between synchronisations: pieces of the anchor, and the outer optimizer that steps on them."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.runtime.trials import probe
from zerokit.training.differences import KNOWN, LOST
from zerokit.training.fragments import Part

OuterOptimizer = Callable[[list[nn.Parameter]], Optimizer]

ANCHOR = "anchor"
KEPT_APART = {ANCHOR, KNOWN, LOST}
"""Streams that are no states of the outer optimizer."""


class Outer:
    """The parts of all fragments, and the outer optimizer, which steps on one part at a time.

    Raises:
        UsageError: where `make` does not make an optimizer.
        UnsupportedOptimizer: where that is not elementwise.
    """

    def __init__(self, parts: list[Part], make: OuterOptimizer | None) -> None:
        self.parts = parts
        self.narrow = parts[0].differences is not None
        self.kinds: frozenset[str] = frozenset()
        """The names of the outer optimizer's states of a piece's shape."""
        self.optimizer: Optimizer | None = None
        if make is not None:
            made = make([part.anchor for part in parts if part.anchor is not None])
            if not isinstance(made, Optimizer):
                raise UsageError(
                    f"outer returned a {type(made).__name__}: expected a torch optimizer over the parameters that it "
                    "is given"
                )
            named: Any = functools.update_wrapper(functools.partial(make), type(made), updated=())
            states = probe(named, {}, torch.float32)
            if states.whole is not None:
                raise UsageError(
                    f"outer is {type(made).__name__}, which updates whole tensors, and each rank has pieces: take an "
                    "elementwise optimizer, such as SGD with Nesterov momentum"
                )
            self.kinds, self.optimizer = states.kinds, made

    def stepping(self) -> Optimizer | None:
        """The outer optimizer as it is now, for `update`: a schedule may change its options before that."""
        if self.optimizer is None:
            return None
        now: Optimizer = object.__new__(type(self.optimizer))
        groups = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in self.optimizer.param_groups
        ]
        now.__dict__.update(self.optimizer.__dict__, param_groups=groups)
        now.__dict__.pop("step", None)  # what a scheduler has put around the step of the other
        self.optimizer.__dict__["_opt_called"] = True  # schedulers warn of steps that they have not seen
        return now

    @torch.no_grad()
    def update(self, part: Part, optimizer: Optimizer | None, mean: Tensor) -> None:
        """Replace the islands' `mean` of this rank's piece by its new values; `optimizer` is from `stepping`."""
        if part.anchor is None:
            return
        if part.differences is not None:
            mean += part.anchor  # it is the mean movement
        if self.optimizer is None or optimizer is None:
            part.anchor.copy_(mean)
            return
        part.anchor.grad = part.anchor.detach() - mean
        before = [dict(group) for group in optimizer.param_groups]
        optimizer.step()  # the other fragments have no gradients
        part.anchor.grad = None
        mean.copy_(part.anchor)
        for group, old, new in zip(self.optimizer.param_groups, before, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in new.items() if value is not old.get(name)})

    def describe(self) -> str | None:
        """The outer optimizer and its options; None where the mean is taken as it is."""
        if self.optimizer is None:
            return None
        options = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return f"{type(self.optimizer).__name__} {options}"

    def memory(self) -> dict[str, int]:
        """Bytes by line of a `MemoryReport`: anchors, outer states and what a narrow wire needs under `optimizer`."""
        lines: Counter[str] = Counter()
        for part in self.parts:
            kept = [("optimizer", tensor, part.own) for tensor in self.arrays(part).values()]
            if part.differences is not None:
                for tensor in (part.differences.known, part.differences.lost):
                    kept.append(("optimizer", tensor, slice(0, part.numel)))
            for line, tensor, place in kept:
                payload = part.payload(place)
                lines[line] += payload * tensor.element_size()
                lines["padding"] += (tensor.numel() - payload) * tensor.element_size()
            for value in self.scalars(part).values():
                lines["scalars"] += value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0
        return lines

    # ---- the state

    def _state(self, part: Part) -> dict[str, Any]:
        if self.optimizer is None or part.anchor is None:
            return {}
        state: dict[str, Any] = self.optimizer.state.get(part.anchor, {})
        return state

    def arrays(self, part: Part) -> dict[str, Tensor]:
        """The tensors of a piece's shape that this rank keeps for a part, by name."""
        if part.anchor is None:
            return {}
        shape = part.anchor.shape
        states = {n: v for n, v in self._state(part).items() if isinstance(v, Tensor) and v.shape == shape}
        return {ANCHOR: part.anchor.detach()} | states

    def scalars(self, part: Part) -> dict[str, Any]:
        """The outer optimizer's other states of a part, such as its step."""
        arrays = self.arrays(part)
        return {name: value for name, value in self._state(part).items() if name not in arrays}

    def plain_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside arrays: the fragments, options, scalars."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            "fragments": self.fragment_names(),
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "scalars": [
                {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.scalars(part).items()}
                for part in self.parts
            ],
        }

    def restore_plain(self, plain: Mapping[str, Any]) -> None:
        """Take over what `plain_state` gave, of an outer optimizer of the same kind."""
        if self.optimizer is None:
            return
        for group, saved in zip(self.optimizer.param_groups, plain["groups"], strict=False):
            if self.optimizer.defaults.keys() <= saved.keys():
                group.update(saved)
        alike = plain["fragments"] == self.fragment_names()
        # Where fragments are others: theirs differ by one step at most.
        some: dict[str, Any] = next(filter(None, plain["scalars"]), {})
        for number, part in enumerate(self.parts):
            if part.anchor is None or (self.kinds and part.anchor not in self.optimizer.state):
                continue
            scalars = plain["scalars"][number] if alike else some
            if scalars or not some:
                self.optimizer.state[part.anchor].update(copy.deepcopy(scalars))
            else:
                del self.optimizer.state[part.anchor]  # it has not been synchronised yet

    def restore_arrays(self, part: Part, regions: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of `regions`, by name: the anchor's, what is owed on a narrow wire, outer states."""
        part.set_anchor(regions[ANCHOR])
        if part.differences is not None:
            part.differences.known.view(-1).copy_(regions[KNOWN])
            part.differences.lost.zero_()
            if LOST in regions:
                part.differences.lost[part.island] = regions[LOST][part.own]
        states = {n: region[part.own].clone() for n, region in regions.items() if n not in KEPT_APART}
        if self.optimizer is not None and part.anchor is not None and states:
            self.optimizer.state[part.anchor] = states

    def fragment_names(self) -> list[list[str]]:
        """The names of the units of each fragment."""
        return [[unit.name for unit in part.fragment.units] for part in self.parts]

    def require_loadable(
        self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None
    ) -> None:
        """Raise `UsageError` where a checkpoint has in flight, or owes, what would be lost here."""
        if plain is not None and plain["pending"] and plain["fragments"] != self.fragment_names():
            raise UsageError(
                f"the checkpoint was saved while a fragment was in flight, and has {len(plain['fragments'])} fragments "
                f"of other units than the {len(self.parts)} here: build LocalSteps and ZeroOptimizer with the "
                "fragments, units and bucket_mb that were saved, or save after synchronize()"
            )
        if not self.narrow and any(shard.any() for shard in streams.get(LOST, {}).values()):
            raise UsageError(
                "the checkpoint holds what a narrow wire between islands has rounded away, which would be lost here: "
                "build LocalSteps with wire='int8' or 'int4', or save without it"
            )

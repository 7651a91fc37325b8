"""Batches whose samples do not depend on the number of ranks, and that take all ranks about as long.

The samples form one endless line: those of epoch 0 in an order drawn from (seed, 0), those of epoch 1 behind them, and
so on. A step takes the next ones, so a place in the line is a place in the data, for any number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from zerokit.errors import UsageError
from zerokit.training.pace import Pace
from zerokit.training.partition import Bin, Costs, share_out

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the line of samples: `sample` of those of `epoch` comes next, in the step `step`."""

    step: int = 0
    epoch: int = 0
    sample: int = 0


class Batches:
    """A batch sampler of steps that cost all ranks the same, however long their samples are.

        batches = zerokit.Batches(lengths, samples=256, micro_tokens=16_384, seed=1)
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=pad, num_workers=4)
        for step in batches.steps(loader):
            for batch in step:  # this rank's micro-batches
                loss_sum, tokens = model(**batch)
                optimizer.backward(loss_sum, count=tokens)
            optimizer.step()
            optimizer.zero_grad()
            zerokit.save("run", optimizer, step=…, extra={"batches": batches.state_dict()})

    The samples of step t depend on `seed` and t alone, and each comes once an epoch; a step may end one epoch and begin
    the next. Within a step samples are divided among ranks and micro-batches by their costs, longest first. All ranks
    run equally many micro-batches, as stage 3 needs them to, and those that they run at a time cost about the same. A
    load on other ranks continues with the next sample.

    Args:
        costs: of each sample, as long as the dataset: its tokens, or better an estimate of its time, such as
            `length + length**2 / 8192`.
        samples: of a step, over all ranks; or
        tokens: of a step, over all ranks: it takes samples while their `lengths` stay within it, and one at least.
        micro_batches: of a step on each rank; by default as few as `micro_tokens` allows, or one.
        micro_tokens: the most of `lengths` in a micro-batch, but for a single longer sample.
        lengths: tokens of each sample; by default its costs.
        seed: of the orders; the same on all ranks.
        pace: relative speeds of the ranks, such as measured samples per second, or a `zerokit.Pace`, which measures
            them while training: a rank's part is in proportion. One of speed 0 gets no samples (see `steps`).
        rank, world: by default those of the default process group, or one rank.

    Raises `UsageError` for arguments that leave a rank without a sample.
    """

    def __init__(
        self,
        costs: ArrayLike,
        *,
        samples: int | None = None,
        tokens: float | None = None,
        micro_batches: int | None = None,
        micro_tokens: float | None = None,
        lengths: ArrayLike | None = None,
        seed: int = 0,
        pace: Sequence[float] | Pace | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        self._costs = _amounts("costs", costs)
        self._lengths = self._costs if lengths is None else _amounts("lengths", lengths)
        if len(self._lengths) != len(self._costs):
            raise UsageError(
                f"{len(self._costs)} costs, but {len(self._lengths)} lengths: give one a sample each"
            )
        in_group = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if in_group else 0
        self._world = world if world is not None else dist.get_world_size() if in_group else 1
        self._pace = pace if isinstance(pace, Pace) else None
        given = [1.0] * self._world if pace is None or isinstance(pace, Pace) else pace
        self._speeds = tuple(float(each) for each in given)
        self._samples, self._tokens, self._seed = samples, tokens, seed
        self._micro_batches, self._micro_tokens = micro_batches, micro_tokens
        self._check()
        self._place = Place()
        self._planned: deque[tuple[int, float, Place]] = deque()
        """Micro-batches of each step that a loader has fetched ahead of `steps`, their cost, and the place after it."""
        self._line = lru_cache(maxsize=2)(self._order_of)
        self._handed_out = False

    def _check(self) -> None:
        if (self._samples is None) == (self._tokens is None):
            raise UsageError("a step needs a size: give samples= or tokens=, one of them")
        if not 0 <= self._rank < self._world:
            raise UsageError(f"rank {self._rank} of {self._world}: expected 0 to {self._world - 1}")
        if self._pace is not None and (self._pace.rank, self._pace.world) != (self._rank, self._world):
            raise UsageError(
                f"batches for rank {self._rank} of {self._world}, but a pace of rank {self._pace.rank} of "
                f"{self._pace.world}: give Pace the optimizer of these ranks"
            )
        speeds = self._speeds
        if len(speeds) != self._world or not all(0 <= each < math.inf for each in speeds) or not any(speeds):
            raise UsageError(
                f"pace={list(speeds)}: expected a positive number for each of {self._world} ranks, or 0 for some that "
                "get no samples"
            )
        least = sum(map(bool, speeds)) * (self._micro_batches or 1)
        if self._samples is not None and not least <= self._samples <= len(self._costs):
            raise UsageError(
                f"samples={self._samples}: expected {least} to {len(self._costs)}, a sample for each rank and "
                "micro-batch of a step, and none twice in a step"
            )
        for name, value in (("tokens", self._tokens), ("micro_tokens", self._micro_tokens)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name}={value!r}: expected a positive number")
        if self._micro_batches is not None and (self._micro_tokens is not None or self._micro_batches < 1):
            raise UsageError(
                f"micro_batches={self._micro_batches}, micro_tokens={self._micro_tokens}: give one of them, positive"
            )
        if self._tokens is not None and self._tokens > self._lengths.sum():
            raise UsageError(
                f"tokens={self._tokens:g}: the dataset has {self._lengths.sum():g}, and a step takes no sample twice"
            )
        if self._tokens is not None and self._tokens < least * self._lengths.max(initial=0):
            raise UsageError(
                f"tokens={self._tokens:g}: {least} ranks and micro-batches of the longest sample have "
                f"{least * self._lengths.max():g}, and each of them needs one: give at least that"
            )

    # ---- the line

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._costs))

    def _take(self, place: Place) -> tuple[Bin, Place]:
        """The samples of the step at `place`, and the place behind it."""
        taken: list[Bin] = []
        epoch, at, left = place.epoch, place.sample, self._tokens
        wanted = self._samples
        while True:
            coming = self._line(epoch)[at:]
            if wanted is not None:
                part = coming[:wanted]
                wanted -= len(part)
                full = wanted == 0
            else:
                assert left is not None
                sums = np.cumsum(self._lengths[coming])
                part = coming[: int(np.searchsorted(sums, left, side="right"))]
                left -= float(sums[len(part) - 1]) if len(part) else 0.0
                full = len(part) < len(coming)
            taken.append(part)
            at += len(part)
            if at == len(self._costs):
                epoch, at = epoch + 1, 0
            if full:
                return np.concatenate(taken), Place(place.step + 1, epoch, at)

    def _divide(self, samples: Bin, step: int) -> list[list[Bin]]:
        """The samples of a step as micro-batches of each rank; a rank of speed 0 has none."""
        speeds = self._speeds if self._pace is None else self._pace.plan(step)
        parts = iter(self._share_out(samples, [speed for speed in speeds if speed]))
        return [next(parts) if speed else [] for speed in speeds]

    def _share_out(self, samples: Bin, speeds: Sequence[float]) -> list[list[Bin]]:
        """The samples of a step as micro-batches of each rank of these speeds."""
        costs, lengths = self._costs[samples], self._lengths[samples]
        if self._micro_batches is not None:
            count = self._micro_batches
        elif self._micro_tokens is None:
            count = 1
        else:
            count = max(math.ceil(float(lengths.sum()) / (len(speeds) * self._micro_tokens)), 1)
        most = len(samples) // len(speeds)
        limit = math.inf if self._micro_tokens is None else self._micro_tokens
        while True:
            count = min(count, most)
            parts = share_out(costs, lengths, speeds, count, limit)
            bins = [each for part in parts for each in part]
            fits = all(len(each) == 1 or lengths[each].sum() <= limit for each in bins)
            if fits or count == most or self._micro_batches is not None:
                return [[samples[each] for each in part] for part in parts]
            count += 1

    # ---- for a loader

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches from the current place on, without end: what a `DataLoader` asks for."""
        if not self._speeds[self._rank]:
            raise UsageError(
                f"rank {self._rank} has speed 0 and so no samples: loop over batches.steps(loader), which asks for none"
            )
        place = self._place
        self._planned.clear()
        self._handed_out = True
        while True:
            samples, behind = self._take(place)
            own = self._divide(samples, place.step)[self._rank]
            place = behind
            self._planned.append((len(own), sum(float(self._costs[each].sum()) for each in own), behind))
            yield from (each.tolist() for each in own)

    def steps(self, loader: Iterable[T], stand_in: T | None = None) -> Iterator[Iterator[T]]:
        """The loader's batches step by step, from the current place on.

        The place moves when a step's last micro-batch has been taken, so a save after that continues with the next
        step; what workers have fetched ahead does not count.

        A rank of speed 0 does not ask the loader. It is given `stand_in`, a batch to be trained on with its loss and
        its count times 0, as often as other ranks have micro-batches, because ranks must make equally many passes.

        Raises `UsageError` where such a rank has none.
        """
        if self._speeds[self._rank]:
            return self._loaded_steps(loader)
        if stand_in is None:
            raise UsageError(
                f"rank {self._rank} has speed 0, and must make as many passes as the others: give "
                "steps(loader, stand_in=a_batch), and train on it with its loss and its count times 0"
            )
        return self._idle_steps(stand_in)

    def _loaded_steps(self, loader: Iterable[T]) -> Iterator[Iterator[T]]:
        batches = iter(loader)
        while True:
            if self._pace is not None:
                self._pace.begin()
            first = next(batches)
            self._handed_out = False
            count, cost, behind = self._planned.popleft()
            if self._pace is not None:
                self._pace.note(cost)
            yield from _to_its_end(self._step(first, batches, count, behind))

    def _step(self, first: T, batches: Iterator[T], count: int, behind: Place) -> Iterator[T]:
        for number in range(count):
            batch = first if number == 0 else next(batches)
            if number == count - 1:
                self._place = behind
            yield batch

    def _idle_steps(self, stand_in: T) -> Iterator[Iterator[T]]:
        """The steps of a rank without samples."""
        while True:
            samples, behind = self._take(self._place)
            passes = max(map(len, self._divide(samples, self._place.step)))
            yield from _to_its_end(self._step(stand_in, repeat(stand_in), passes, behind))

    # ---- the place

    @property
    def step(self) -> int:
        """The number of steps whose batches have been taken."""
        return self._place.step

    @property
    def epoch(self) -> float:
        """Epochs that have been taken, with a part of the current one."""
        return self._place.epoch + self._place.sample / len(self._costs)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, to be saved: a few integers, equal on all ranks, and what a `Pace` has agreed on.

        Raises `UsageError` where the loader is not read through `steps`, which alone knows the place.
        """
        if self._handed_out:
            raise UsageError(
                "the place in the data is known only in `for step in batches.steps(loader):`, because workers fetch "
                "ahead: loop over that, and not over the loader"
            )
        pace = {} if self._pace is None else {"pace": self._pace.state(self._place.step)}
        return {**asdict(self._place), "seed": self._seed, "samples": len(self._costs), **pace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved place; loops that begin after this do.

        Raises `UsageError` for the place of another seed or dataset.
        """
        here = {"seed": self._seed, "samples": len(self._costs)}
        saved = {name: state.get(name) for name in here}
        if saved != here:
            raise UsageError(f"the saved place is of {saved}, but these batches have {here}: give the same")
        self._place = Place(*(int(state[name]) for name in ("step", "epoch", "sample")))
        if self._pace is not None:
            self._pace.load(state.get("pace", ()))


def _to_its_end(step: Iterator[T]) -> Iterator[Iterator[T]]:
    """A step, of which nothing is left for the next one where a loop leaves it early."""
    yield step
    for _ in step:
        pass


def _amounts(name: str, values: ArrayLike) -> Costs:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all() or (array < 0).any():
        raise UsageError(f"{name}: expected a number of at least 0 for each sample, not {str(values)[:60]}")
    return array

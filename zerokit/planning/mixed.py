"""A cell on different devices: shares, batches and memory by kind, and what equal shares and batches would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from zerokit.planning.kinds import Kind
from zerokit.planning.memory import PlannedMemory, lacking_bytes
from zerokit.planning.timeline import StepTime

_LISTED = 16
"""The most ranks whose numbers stand one by one."""


@dataclass(frozen=True)
class Part:
    """The ranks with one kind of device.

    Attributes:
        kind: the device and the ranks.
        share: of each of them.
        samples: in a micro-batch of the one with the most.
        memory: of the one that holds most.
        away_room_bytes: what the host or disk has for its states; None where that is not known.
        time: of a step, if it fits and all devices' speeds are known, without what it waits for slower ranks.
    """

    kind: Kind
    share: int
    samples: int
    memory: PlannedMemory
    away_room_bytes: int | None = None
    time: StepTime | None = None

    @property
    def room_bytes(self) -> int:
        """The memory of the device."""
        return self.kind.device.memory_bytes

    @property
    def missing_bytes(self) -> int:
        """The bytes that the device lacks, or else the host or disk; 0 if it fits."""
        return lacking_bytes(self.memory, self.room_bytes, self.away_room_bytes)


def tightest(parts: Sequence[Part]) -> Part:
    """The part that lacks most, or has least to spare for its size."""
    return max(parts, key=lambda part: (part.missing_bytes, part.memory.needed / part.room_bytes))


@dataclass(frozen=True)
class Equal:
    """The same cell with equal shares and batches.

    Attributes:
        tight: the kind that lacks memory then; None if it fits.
        tight_shares: the kind that lacks memory with equal shares and the batches of the plan; None if it fits.
        longer: how many times as long its step takes; where no times are known, computes by the devices' paces. None
            where it does not fit.
    """

    tight: Part | None
    tight_shares: Part | None
    longer: float | None


@dataclass(frozen=True)
class Mixed:
    """The division of a cell among ranks with different devices.

    Attributes:
        shares: of ranks, or of those of the inner axis; empty where all are equal.
        pace: the speed of each rank.
        batches: the samples of each rank in a micro-batch.
        parts: by kind.
        equal: what equal shares and batches would do.
    """

    shares: tuple[int, ...]
    pace: tuple[float, ...]
    batches: tuple[int, ...]
    parts: tuple[Part, ...]
    equal: Equal

    @property
    def is_equal(self) -> bool:
        """Whether shares and batches are equal."""
        return not self.shares and len(set(self.batches)) == 1

    @property
    def shares_argument(self) -> str:
        """What `ZeroOptimizer` is given; empty for equal shares."""
        return f", shares={listed(self.shares, '(', ')')}" if self.shares else ""

    def batches_call(self, accumulate: int) -> str:
        """The call of `Batches` with costs and the place of samples left out."""
        several = f", micro_batches={accumulate}" if accumulate > 1 else ""
        pace = f", pace={listed(self.pace, '[', ']')}" if len(set(self.pace)) > 1 else ""
        return f"zerokit.Batches(lengths, samples={sum(self.batches) * accumulate}{several}{pace})"

    @property
    def shares_in_words(self) -> str:
        """The shares of kinds, such as 32:15."""
        return ":".join(str(part.share) for part in self.parts)

    @property
    def batches_in_words(self) -> str:
        """The samples of kinds, such as 5:3, or 5:2-3 where ranks of a kind have several numbers of them."""
        return ":".join(
            "-".join(map(str, sorted({self.batches[rank] for rank in part.kind.ranks})))
            for part in self.parts
        )

    @property
    def beside_equal(self) -> str:
        """What equal shares and batches do to this cell, in a few words."""
        if self.equal.tight is not None:
            return "does not fit"
        return "" if self.equal.longer is None else f"{self.equal.longer:.2f}x"

    @property
    def bought(self) -> str:
        """What unequal shares and batches are good for, in sentences."""
        if self.is_equal:
            return "Equal shares and batches suit these devices."
        equal = self.equal
        if equal.tight is not None:
            text = f"With equal shares and batches it does not fit: {_lack(equal.tight)}."
        else:
            what = "a step takes" if self.parts[0].time is not None else "the slowest rank computes"
            long = "" if equal.longer is None else f", and {what} {_times(equal.longer)}"
            text = f"With equal shares and batches it fits{long}."
        if not self.shares:
            return text
        if equal.tight_shares is not None:
            return f"{text} With equal shares and these batches it does not fit: {_lack(equal.tight_shares)}."
        return f"{text} Equal shares fit with these batches too, and use NCCL's own collectives."


def _times(longer: float) -> str:
    return "as long" if f"{longer:.2f}" == "1.00" else f"{longer:.2f} times as long"


def _lack(part: Part) -> str:
    return f"{part.kind} lacks {part.missing_bytes / 2**30:,.1f} GiB"


def listed(values: Sequence[float], opening: str, closing: str) -> str:
    """The values as Python has them, runs of many equal ones as a product."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    if len(values) <= _LISTED:
        return f"{opening}{', '.join(f'{value:g}' for value in values)}{closing}"
    comma = "," if closing == ")" else ""
    return " + ".join(f"{opening}{value:g}{comma}{closing} * {count}" for value, count in runs)

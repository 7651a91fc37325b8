"""Which steps are complete in what several directories hold together: a decision without I/O, for tools and `load`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from zerokit.checkpoint.nodes.record import NodeRecord

_RANK = re.compile(r"rank-(\d+)-of-\d+\.safetensors")
_NAMED = 8
"""Ranks, files or places that a sentence lists."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one directory has of a step.

    `holder`: who reads it, such as a rank that sees it, or the number of a directory that was given to a command.
    `whole`: there is an optimizer's state. `record` is None of an ordinary step, and where it is damaged. `lacks`: the
    names of the step's files that are not there, or of another size.
    """

    place: str
    holder: int
    step: int
    manifest_crc: int
    whole: bool
    record: NodeRecord | None = None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step of one manifest, and the directories that have files of it, in the order in which they were given."""

    step: int
    manifest_crc: int
    holdings: tuple[Holding, ...]

    @property
    def whole(self) -> bool:
        return self.holdings[0].whole

    @property
    def saved(self) -> int:
        """When nodes saved it, in seconds since the epoch; −1 of an ordinary step, which does not say."""
        return max(-1 if one.record is None else one.record.saved for one in self.holdings)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of files that no directory has, sorted."""
        return tuple(sorted(set.intersection(*(set(one.lacks) for one in self.holdings))))

    @property
    def complete(self) -> bool:
        return not self.missing

    def fault(self) -> str:
        """Which files are missing, and the nodes that have them, as a sentence; "" of a complete step."""
        if not (missing := self.missing):
            return ""
        record = next((one.record for one in self.holdings if one.record is not None), None)
        if record is None:
            places = _listed([one.place for one in self.holdings])
            return f"step {self.step}: {_listed(missing)} {_are(missing)} missing in {places}"
        return f"step {self.step}: {'; '.join(self._absent(record, missing))}"

    def _absent(self, record: NodeRecord, missing: Sequence[str]) -> Iterable[str]:
        ranks: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for name in missing:
            if (rank := _rank_of(name, record)) is not None:
                wrote = next(node for node, own in enumerate(record.wrote) if rank in own)
                have = tuple(node for node, held in enumerate(record.holds) if rank in held)
                ranks.setdefault((wrote, have), []).append(rank)
            else:
                yield f"{name} is missing, which every node has"
        asked = {one.record.node: one.place for one in self.holdings if one.record is not None}
        for (wrote, have), own in ranks.items():
            own = sorted(set(own))
            lost = "".join(
                f", though {asked[node]} of node {node} does not" for node in have if node in asked
            )
            yield (
                f"files of rank{'s' * (len(own) > 1)} {_listed(own)} are missing: node {wrote} wrote them, "
                f"node{'s' * (len(have) > 1)} {_listed(have)} ha{'ve' if len(have) > 1 else 's'} them{lost}"
            )


@dataclass(frozen=True, slots=True)
class Standing:
    """All steps that directories hold, the newest first, and what was passed over in `notes`, as sentences."""

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    def newest(self, besides: Collection[Candidate] = ()) -> Candidate | None:
        """The newest complete step, apart from `besides`, which could not be read; None if there is none."""
        complete = (one for one in self.candidates if one.complete and one not in besides)
        return next(complete, None)

    def told(self, taken: Candidate | None) -> tuple[str, ...]:
        """The notes, and what is missing of steps that are newer than the one that is taken, or of all."""
        newer = self.candidates[: self.candidates.index(taken)] if taken is not None else self.candidates
        return (*self.notes, *(one.fault() for one in newer if not one.complete))


def standing(holdings: Sequence[Holding], *, whole: bool = False) -> Standing:
    """The steps of these holdings; with `whole`, those with an optimizer's state.

    Of several trainings that saved into nodes' own directories the one that saved last counts. Where two saves have
    made the same step, the last one comes first, and one by nodes before an ordinary one, which does not say when.
    """
    kept, notes = _of_last_run(holdings)
    groups: dict[tuple[int, int], list[Holding]] = {}
    for one in kept:
        groups.setdefault((one.step, one.manifest_crc), []).append(one)
    found = [Candidate(*key, tuple(group)) for key, group in groups.items()]
    if whole and (weights := sorted({one.step for one in found if not one.whole})):
        notes.append(
            f"step{'s' * (len(weights) > 1)} {_listed(weights)} {_are(weights)} weights without an optimizer's "
            "state: passed over"
        )
        found = [one for one in found if one.whole]
    found.sort(key=lambda one: (one.step, one.saved), reverse=True)
    return Standing(tuple(found), tuple(notes))


def _of_last_run(holdings: Sequence[Holding]) -> tuple[list[Holding], list[str]]:
    """The holdings without other trainings', and a note about each of these."""
    saved: dict[str, int] = {}
    for one in holdings:
        if one.record is not None:
            saved[one.record.run] = max(one.record.saved, saved.get(one.record.run, -1))
    last = max(saved, key=lambda run: (saved[run], run), default=None)
    others = [run for run in saved if run != last]
    notes = []
    for run in others:
        own = [one for one in holdings if one.record is not None and one.record.run == run]
        steps = sorted({one.step for one in own})
        notes.append(
            f"{_listed(dict.fromkeys(one.place for one in own))} {_are(own)} of another training (step"
            f"{'s' * (len(steps) > 1)} {_listed(steps)}), which saved before this one: passed over"
        )
    return [one for one in holdings if one.record is None or one.record.run == last], notes


def _rank_of(name: str, record: NodeRecord) -> int | None:
    """The rank that wrote a file; None of those that every node has."""
    if match := _RANK.fullmatch(name):
        rank = int(match[1])
        return rank if rank < len(record.uncut) else None
    return next((rank for rank, names in enumerate(record.uncut) if name in names), None)


def _are(some: Collection[object]) -> str:
    return "are" if len(some) > 1 else "is"


def _listed(some: Iterable[object]) -> str:
    """ "1", "1 and 2", "1, 2 and 3", "1, 2, … and 9 more"."""
    texts = [str(one) for one in some]
    if len(texts) > _NAMED:
        return f"{', '.join(texts[: _NAMED - 1])} and {len(texts) - _NAMED + 1} more"
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))

"""Which steps are complete over some directories: arithmetic on what each of them has, without reading anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerokit.checkpoint.nodes.record import NodeRecord
from zerokit.checkpoint.safetensors import RANK_FILE

Key = tuple[int, int]
"""A save: the step, and the CRC-32 that its manifest begins with."""

_NAMED = 8
"""Ranks, files or directories that a sentence lists."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A step's directory `place`, as the rank (or the number of the argument) `holder` sees it.

    `lacks`: the names of the step's files that are not there with the right size. Ordinary steps have no `record`.
    `damaged`: why the directory is of no use, such as a manifest that does not match its checksum. `note`: what else is
    wrong there.
    """

    place: str
    holder: int
    step: int
    manifest_crc: int = 0
    whole: bool = False
    """Whether the step has an optimizer's state."""
    superseded: bool = False
    record: NodeRecord | None = None
    lacks: tuple[str, ...] = ()
    damaged: str = ""
    note: str = ""
    adopted: bool = False
    """Whether the manifest is another directory's, because the one there is damaged."""

    @property
    def key(self) -> Key:
        return self.step, self.manifest_crc


@dataclass(frozen=True, slots=True)
class Choice:
    """The complete steps, the newest first, and sentences on what was passed over and why."""

    complete: tuple[Key, ...]
    notes: tuple[str, ...]


def choose(holdings: Iterable[Holding], *, whole: bool) -> Choice:
    """The steps of which these directories have all files together; with `whole` those with an optimizer's state.

    Where nodes' directories have steps of several trainings, those of the one that saved a complete one last count.
    Superseded steps are left out, also those that nobody could mark: the training has gone back since and saved an
    earlier one.
    """
    every = list(holdings)
    notes = [text for one in every for text in (one.damaged, one.note) if text]
    sound = [one for one in every if not one.damaged and not one.superseded and (one.whole or not whole)]
    own, others = _of_newest_training(sound)
    notes += [f"{one.place}: step {one.step} is of another training: it is passed over" for one in others]
    steps = _by_save(own)
    complete = sorted((key for key, there in steps.items() if not lacking(there)), reverse=True)
    for key in _before_going_back(complete, steps):
        complete.remove(key)
        notes.append(
            f"step {key[0]}{_other_save(key, steps)} was saved before the training went back: it is passed over"
        )
    newest = complete[0][0] if complete else -1
    for key, there in sorted(steps.items(), reverse=True):
        if key not in complete and key[0] >= newest:
            notes.append(f"step {key[0]}{_other_save(key, steps)} is incomplete: {describe_lack(there)}")
    return Choice(tuple(complete), tuple(dict.fromkeys(notes)))


def _before_going_back(complete: Sequence[Key], steps: Mapping[Key, Sequence[Holding]]) -> list[Key]:
    """Those of these steps, the newest first, that were saved before an earlier one of them."""
    saved = {
        key: max((one.record.saved for one in steps[key] if one.record), default=None) for key in complete
    }
    gone, latest = [], -1
    for key in reversed(complete):
        when = saved[key]
        if when is not None and when < latest:
            gone.append(key)
        latest = max(latest, -1 if when is None else when)
    return gone


def lacking(there: Sequence[Holding]) -> set[str]:
    """The files of a step that none of its directories has."""
    return set.intersection(*(set(one.lacks) for one in there))


def describe_lack(there: Sequence[Holding]) -> str:
    """Which files of a step no directory has, and which nodes have them, as a sentence; "" if nothing is missing."""
    lacks = sorted(lacking(there))
    record = next((one.record for one in there if one.record is not None), None)
    files = {} if record is None else _files(record)
    ranks: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    others = []
    for name in lacks:
        match = RANK_FILE.fullmatch(name)
        if (found := files.get(int(match[1]) if match else name)) is None:
            others.append(name)
        else:
            rank, wrote, have = found
            ranks.setdefault((wrote, have), set()).add(rank)
    seen = {one.record.node: one.place for one in there if one.record is not None}
    parts = [_away(wrote, have, sorted(own), seen) for (wrote, have), own in ranks.items()]
    if others:
        parts.append(f"{listed(others)} {'are' if len(others) > 1 else 'is'} missing")
    return "; ".join(parts)


def _away(wrote: int, have: Sequence[int], ranks: Sequence[int], seen: Mapping[int, str]) -> str:
    """Which nodes have the files of these ranks. `seen`: by node, the directory that was looked at."""
    lost = "".join(f", though {seen[node]} of node {node} does not" for node in have if node in seen)
    many = len(have) > 1
    who = (
        f"node{'s' * many} {listed(have)} {'have' if many else 'has'} them{lost}"
        if have
        else "no node has them"
    )
    return (
        f"files of rank{'s' * (len(ranks) > 1)} {listed(ranks)} are missing: node {wrote} wrote them, {who}"
    )


def _files(record: NodeRecord) -> dict[int | str, tuple[int, int, tuple[int, ...]]]:
    """By rank, and by name of a file of states, the rank, the node that wrote its files, and those that have them.

    What every node has is not in it.
    """
    have: dict[int, list[int]] = {}
    for node, ranks in enumerate(record.holds):
        for rank in dict.fromkeys(ranks):
            have.setdefault(rank, []).append(node)
    found: dict[int | str, tuple[int, int, tuple[int, ...]]] = {}
    for node, ranks in enumerate(record.wrote):
        for rank in ranks:
            of_rank = rank, node, tuple(have.get(rank, ()))
            found[rank] = of_rank
            found |= dict.fromkeys(record.uncut[rank], of_rank)
    return found


def listed(some: Iterable[object]) -> str:
    """ "1", "1 and 2", "1, 2 and 3", "1, 2, … and 9 more"."""
    texts = [str(one) for one in some]
    if len(texts) > _NAMED:
        return f"{', '.join(texts[: _NAMED - 1])} and {len(texts) - _NAMED + 1} more"
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def _of_newest_training(holdings: Sequence[Holding]) -> tuple[list[Holding], list[Holding]]:
    """Holdings of the training that has saved last, with ordinary ones, and of others.

    Of two trainings the one with a complete step counts: the other was killed in its first save, or its nodes are gone.
    """
    ordinary = [one for one in holdings if one.record is None]
    by_run: dict[str, list[Holding]] = {}
    for one in holdings:
        if one.record is not None:
            by_run.setdefault(one.record.run, []).append(one)

    def order(run: str) -> tuple[bool, int, str]:
        own = {one.key for one in by_run[run]}
        saves = _by_save(one for one in (*by_run[run], *ordinary) if one.key in own)
        return (
            any(not lacking(there) for there in saves.values()),
            max(one.record.saved for one in by_run[run] if one.record is not None),
            run,
        )

    newest = max(by_run, key=order, default="")
    own = [one for one in holdings if one.record is None or one.record.run == newest]
    return own, [one for run, found in by_run.items() if run != newest for one in found]


def _by_save(holdings: Iterable[Holding]) -> dict[Key, list[Holding]]:
    steps: dict[Key, list[Holding]] = {}
    for one in holdings:
        steps.setdefault(one.key, []).append(one)
    return steps


def _other_save(key: Key, steps: Iterable[Key]) -> str:
    return (
        f" (manifest {key[1]:08x})"
        if any(step == key[0] and (step, crc) != key for step, crc in steps)
        else ""
    )

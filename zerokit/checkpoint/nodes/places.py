"""The places of a load: what each rank's node has there, and the newest step that all of them have together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from zerokit.checkpoint.disk import is_there, read_whole
from zerokit.checkpoint.manifest import NAME, own_checksum
from zerokit.checkpoint.nodes.complete import Choice, Holding, Key, choose, lacking
from zerokit.checkpoint.nodes.fetching import FromNodes, OnNodes
from zerokit.checkpoint.nodes.locally import go_on
from zerokit.checkpoint.nodes.members import require_private, require_trusted
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.nodes.scan import adopted, scan
from zerokit.checkpoint.run import committed
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, MissingPath, UsageError, ZerokitWarning
from zerokit.files import path_of
from zerokit.runtime import ZeroOptimizer
from zerokit.text import printable

_NAMED = 5
"""Notes that a warning lists."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def places_of(path: Paths, together: Together) -> list[Path] | None:
    """The places of a load; None where it is one path without a node's own steps on any rank. Collective.

    Raises `UsageError` for an empty list.
    """
    if isinstance(path, str | os.PathLike):
        one = path_of(path)
        own = together.each(lambda: any(is_there(step / NODE_NAME) for step in [one, *committed(one)]))
        return [one] if any(together.exchange(own)) else None
    places = [path_of(each) for each in path]
    counts = together.exchange(len(places))
    if len(set(counts)) > 1 or not places:
        raise UsageError(
            f"ranks name {', '.join(map(str, sorted(set(counts))))} places: name at least one, and on all ranks as many"
        )
    return places


class StepsOnNodes:
    """The steps that ranks see at some places, and those that were tried. All methods but `failure` are collective."""

    def __init__(self, places: Sequence[Path], together: Together, *, whole: bool) -> None:
        self._places, self._together, self._whole = places, together, whole
        self._notes: list[str] = []
        self._runs: dict[Key, str] = {}
        self._saved: dict[str, int] = {}
        self._seen = False

    def steps(self) -> list[int]:
        """The steps that are complete, ascending; of later places those that are newer."""
        return sorted({step for step, _ in self._look(lazily=True)[1]})

    def readings(self) -> Iterator[FromNodes]:
        """Ways to read the complete steps, the newest first. One more is asked for where the last one has failed.

        A step that several places have is read from all of them, then from each alone.
        """
        tried: set[tuple[Holding, ...]] = set()
        for lazily in (True, False):
            by_place, complete = self._look(lazily=lazily)
            # Where the newest step is damaged, later places may have it, or a newer one than earlier places.
            for key in complete[:1] if lazily else complete:
                each = [[one for one in found if one.key == key] for found in by_place]
                for there in (tuple(chain(*each)), *map(tuple, each)):
                    if there in tried or not there or lacking(there):
                        continue
                    tried.add(there)
                    try:
                        reading = self._opened(there)
                    except CheckpointError as error:
                        self.note_failure(error)
                    else:
                        yield reading

    def note_failure(self, error: CheckpointError) -> None:
        """Note why a step was not loaded."""
        self._notes.append(str(error))

    def take(self, reading: FromNodes, optimizer: ZeroOptimizer) -> None:
        """Say what the user should know of the step that was loaded."""
        key = (reading.source.step, reading.source.manifest_crc)
        if run := self._runs.get(key):
            go_on(optimizer, run, self._saved[run])
        notes = self._notes + reading.repaired
        if notes and self._together.rank == 0:
            more = [f"and {len(notes) - _NAMED} more"] if len(notes) > _NAMED else []
            text = f"step {reading.source.step} is loaded: {'; '.join([*notes[:_NAMED], *more])}"
            warnings.warn(printable(text), ZerokitWarning, stacklevel=3)

    def failure(self) -> CheckpointError:
        """The error where no step could be loaded."""
        where = ", ".join(map(str, self._places))
        if not self._seen:
            return MissingPath(f"{where}: no step of zerokit's on any rank's node")
        return CheckpointError(f"{where}: no step that is complete and undamaged: {'; '.join(self._notes)}")

    def _look(self, *, lazily: bool) -> tuple[list[list[Holding]], tuple[Key, ...]]:
        """What all ranks have, by place, and the complete steps.

        `lazily` reads of later places only what is newer.
        """
        by_place: list[list[Holding]] = []
        choice = Choice((), ())
        faults: list[str] = []
        for place in self._places:
            above = choice.complete[0][0] if lazily and choice.complete else -1
            found, wrong = self._scanned(place, above)
            by_place.append(found)
            faults += wrong
            choice = choose(chain(*by_place), whole=self._whole)
        self._seen = self._seen or any(by_place)
        self._notes = list(dict.fromkeys([*self._notes, *faults, *choice.notes]))
        for one in chain(*by_place):
            if one.record is not None:
                run, saved = one.record.run, one.record.saved
                self._runs[one.key] = run
                self._saved[run] = max(saved, self._saved.get(run, 0))
        return by_place, choice.complete

    def _scanned(self, place: Path, above: int) -> tuple[list[Holding], list[str]]:
        """All ranks' holdings at a place, and what is wrong with it on some."""
        together, wrong, own = self._together, "", list[Holding]()
        try:
            wrong = _distrust(place)
            own = [] if wrong else scan(place, holder=together.rank, above=above)
        except CheckpointError as error:
            wrong = str(error)
        answers = together.exchange((own, wrong))
        ranks: dict[str, list[str]] = {}
        for rank, (_, text) in enumerate(answers):
            if text:
                ranks.setdefault(text, []).append(str(rank))
        faults = [f"rank {', '.join(who)}: {text}" for text, who in ranks.items()]
        return self._adopted([holding for found, _ in answers for holding in found]), faults

    def _adopted(self, found: list[Holding]) -> list[Holding]:
        """Steps whose manifests are damaged, by those that other ranks have of them: all nodes have the same."""
        together, wanted = self._together, {Path(one.place).name for one in found if one.damaged}
        sound = {
            one.key: one for one in reversed(found) if not one.damaged and Path(one.place).name in wanted
        }
        if not sound:
            return found
        sent: dict[Key, bytes] = {}
        for key, one in sound.items():
            if one.holder == together.rank:
                with suppress(CheckpointError):
                    sent[key] = read_whole(Path(one.place) / NAME)
        manifests = {key: content for own in together.exchange(sent) for key, content in own.items()}
        own = [adopted(one, manifests) for one in found if one.holder == together.rank]
        return [one for each in together.exchange(own) for one in each]

    def _opened(self, holdings: Sequence[Holding]) -> FromNodes:
        together = self._together
        own = [one for one in holdings if one.holder == together.rank]
        content, sound = None, [one for one in own if not one.adopted]
        with suppress(CheckpointError):
            content = read_whole(Path(sound[0].place) / NAME) if sound else None
            if content is not None and own_checksum(content) != sound[0].manifest_crc:
                content = None  # replaced since
        first = next((rank for rank, has in enumerate(together.exchange(content is not None)) if has), None)
        if first is None:
            raise CheckpointError(f"{holdings[0].place}: was removed while it was looked at")
        manifest = together.exchange(content if together.rank == first else None)[first]
        assert manifest is not None
        step = Path(own[0].place) if own else Path(self._places[0], Path(holdings[0].place).name)
        source = OnNodes(step, manifest, own)
        names = [file.name for file in source.manifest.all_files]
        holders = {name: [one for one in holdings if name not in one.lacks] for name in names}
        return _reading_of(source, together, holders)


def _reading_of(source: OnNodes, together: Together, holders: Mapping[str, Sequence[Holding]]) -> FromNodes:
    """The way to read a step. `holders`: by file's name, the directories that have it."""
    ranks = {name: sorted({one.holder for one in there}) for name, there in holders.items()}
    # Ranks of a node see the same directory: one of them is enough to try it.
    nodes = {
        name: sorted(
            {
                one.record.node if one.record is not None else one.place: one.holder
                for one in reversed(there)
            }.values()
        )
        for name, there in holders.items()
    }
    return FromNodes(source, together, ranks, nodes)


def _distrust(place: Path) -> str:
    """Why a place is not trusted: a node's own directory, or any to which all may write; "" if it is."""
    try:
        if is_there(place):
            if any(is_there(step / NODE_NAME) for step in committed(place)):
                require_private(place)
            require_trusted(place)
    except CheckpointError as error:
        return str(error)
    return ""

"""A checkpoint whose files lie in several directories, such as nodes' own ones after a copy to one machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from zerokit.checkpoint.bases import base_of
from zerokit.checkpoint.checksum import Pieces, crc32
from zerokit.checkpoint.disk import (
    check_size,
    is_file,
    is_there,
    opened,
    read_exactly,
    read_whole,
    size_of,
)
from zerokit.checkpoint.manifest import NAME, Manifest, read_manifest
from zerokit.checkpoint.nodes.complete import Holding, Key, choose, describe_lack, lacking, listed
from zerokit.checkpoint.nodes.directories import Directory, Report
from zerokit.checkpoint.nodes.held import NAME_THEM, own_lacks
from zerokit.checkpoint.nodes.scan import adopted
from zerokit.checkpoint.reader import Checkpoint, file_checksum
from zerokit.checkpoint.run import Choice
from zerokit.errors import CheckpointError, StorageError

_GATHER = ": zerokit gather takes each slice from a directory where it is right"


class Joined(Checkpoint):
    """One step in several directories; its `path` is the first of them that has everything but cut files.

    `holdings` say what each has, and their holders are indices into `directories`. A file is taken from the first one
    where it is right, as far as its size and its header tell, or its checksum if it is small.
    """

    def __init__(
        self,
        holdings: Sequence[Holding],
        directories: Sequence[Directory],
        manifest: Manifest,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.holdings, self.directories = tuple(holdings), tuple(directories)
        step, run = Path(holdings[0].place), self.directories[holdings[0].holder].path
        choice = Choice(step, run if run != step else None, notes=notes)
        self._describe(choice, manifest, holdings[0].manifest_crc)
        self._wholes = {file.name: file for file in manifest.whole_files}
        self._ranks = {file.name: file for file in manifest.files}
        self._found: dict[str, Path] = {}
        self._bad: set[Path] = set()

    @property
    def shown(self) -> str:
        """What its `path` is called to the user."""
        return self.named(str(self.path))

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(directory.path for directory in self.directories)

    @property
    def missing(self) -> str:
        """Which files no directory has, and which nodes have them, as a sentence; "" if nothing is missing."""
        return describe_lack(self.holdings)

    def named(self, text: str) -> str:
        """A message, with the directories' names for their paths here."""
        for directory in self.directories:
            text = directory.named(text)
        return text

    def copies(self, name: str) -> list[tuple[Directory, Path]]:
        """A file's paths, with the directory of each: those of the right size first, and this machine's."""
        found = [
            (name in one.lacks, self.directories[one.holder], Path(one.place, name)) for one in self.holdings
        ]
        found.sort(key=lambda one: (one[0], one[1].distant))
        return [
            (where, path)
            for lacks, where, path in found
            if path not in self._bad and not (lacks and not is_file(path))
        ]

    def pass_over_unreadable(self) -> list[str]:
        """Try to read all files that are in use here, and use copies of those that cannot be; what they are."""
        told = []
        for name, path in list(self._found.items()):
            try:
                with opened(path) as fd:
                    file_checksum(fd, size_of(fd, path), path)
            except CheckpointError as error:
                if path not in self._bad:
                    self._bad.add(path)
                    del self._found[name]
                    told.append(self.named(str(error)))
        return told

    def place(self, name: str) -> Path:
        if name not in self._found:
            self.settle([name])
        return self._found[name]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Say it where an error of the body comes from a step that a training has removed meanwhile."""
        try:
            yield
        except CheckpointError as error:
            if gone := [one.place for one in self.holdings if not is_there(one.place)]:
                raise CheckpointError(
                    f"{gone[0]}: was removed while it was read: a training goes on saving there: try again, or stop it"
                ) from error
            raise

    def parts(self) -> Iterator[Joined]:
        """Each directory's part alone."""
        for one in self.holdings:
            yield Joined([one], self.directories, self.manifest)

    def settle(self, names: Iterable[str], report: Report | None = None) -> None:
        """Find for each of these files a directory where it is right; files of other machines are brought here."""
        copies_of = {name: self.copies(name) for name in names}
        pending, turn = dict(copies_of), 0
        while pending:
            wanted: dict[int, list[Path]] = {}
            for name, copies in list(pending.items()):
                if turn < len(copies):
                    wanted.setdefault(self.directories.index(copies[turn][0]), []).append(copies[turn][1])
                else:  # damaged everywhere, which whoever reads it says, or nowhere
                    self._found[name] = copies[0][1] if copies else self.path / name
                    del pending[name]
            for number, paths in wanted.items():
                self.directories[number].fetch(paths, report)
                for path in paths:
                    if self._seems_right(path):
                        self._found[path.name] = path
                        del pending[path.name]
                        for _, other in copies_of[path.name][:turn]:
                            self.notes += (
                                f"{self.named(str(other))}: damaged: taken from another directory",
                            )
            turn += 1

    def _seems_right(self, path: Path) -> bool:
        with suppress(CheckpointError), opened(path) as fd:
            if path.name in self._wholes:
                file = self._wholes[path.name]
                check_size(fd, file.size, path)
                return file_checksum(fd, file.size, path) == file.crc
            file = self._ranks[path.name]
            check_size(fd, file.size, path)
            header = bytearray(file.header_size)
            read_exactly(fd, [header], 0, path)
            return crc32(header) == file.crc
        return False

    def held_files(self) -> list[tuple[str, int]]:
        """The files that are there."""
        missing = lacking(self.holdings)
        return [(name, size) for name, size in super().held_files() if name not in missing]

    def check_files(self) -> None:
        if missing := self.missing:
            raise CheckpointError(f"{self.path}: {missing}: {NAME_THEM}")

    def check_header(self, fd: int, rank: int) -> None:
        try:
            super().check_header(fd, rank)
        except StorageError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._advice}") from error

    @property
    def _advice(self) -> str:
        return _GATHER if len(self.holdings) > 1 else ""

    def require_right(self, by_rank: Sequence[Pieces], advice: str = "") -> None:
        super().require_right(by_rank, f"{advice}{self._advice}")

    @cached_property
    def base(self) -> Checkpoint:
        there = [one for one in self.holdings if self.manifest.frozen not in one.lacks]
        return Checkpoint(base_of(Path(there[0].place) if there else self.path, self.manifest)[0])


class Look:
    """What directories have of steps. `holdings` say what is damaged; `notes` what was passed over, as sentences."""

    def __init__(self, directories: Sequence[Directory], *, whole: bool = False) -> None:
        self.directories = tuple(directories)
        self.holdings = [
            directory.rename(one)
            for number, directory in enumerate(directories)
            for one in directory.look(number)
        ]
        self._manifests = {one.key: Path(one.place) for one in reversed(self.holdings) if not one.damaged}
        if any(one.damaged for one in self.holdings):
            manifests = {key: read_whole(path / NAME) for key, path in self._manifests.items()}
            every = (adopted(one, manifests) for one in self.holdings)
            self.holdings = sorted(every, key=lambda one: one.adopted)
        choice = choose(self.holdings, whole=whole)
        notes = choice.notes
        for directory in directories:
            notes = tuple(map(directory.named, notes))
        self.complete, self.notes = choice.complete, notes
        self._sound = [one for one in self.holdings if not one.damaged and not one.superseded]

    @property
    def where(self) -> str:
        return listed(directory.shown for directory in self.directories)

    @property
    def newest(self) -> Key | None:
        """The newest complete step; without any, the newest of the training that saved last. None if there is none."""
        if self.complete:
            return self.complete[0]
        return max(self._sound, key=_saved).key if self._sound else None

    def keys(self) -> list[Key]:
        """All saves of the training that saved last, the oldest first, complete or not."""
        last = max(self._sound, key=_saved, default=None)
        runs = {None, last.record.run} if last is not None and last.record is not None else {None}
        return sorted({one.key for one in self._sound if (one.record and one.record.run) in runs})

    def joined(self, key: Key) -> Joined:
        """The step of this save, with notes about directories that have nothing of it."""
        own = [one for one in self._sound if one.key == key]
        lack = describe_lack(own)
        notes = [note for note in self.notes if not (lack and note.endswith(f"is incomplete: {lack}"))]
        for number, directory in enumerate(self.directories):
            if all(one.holder != number for one in own):
                others = sorted({one.step for one in self._sound if one.holder == number})
                only = f", only {listed(others)}" if others else ""
                notes.append(f"{directory.shown}: has nothing of this save of step {key[0]}{only}")
        manifest, crc = read_manifest(self._manifests[key])
        if (manifest.step, crc) != key:
            raise CheckpointError(f"{self._manifests[key]}: was replaced while it was looked at: try again")
        for one in own:
            if lost := own_lacks(one, manifest):
                where = self.directories[one.holder].named(one.place)
                notes.append(
                    f"{where}: {listed(lost)} should be there, and {'are' if lost[1:] else 'is'} not whole"
                )
        return Joined(own, self.directories, manifest, tuple(notes))


def _saved(holding: Holding) -> tuple[int, int]:
    return -1 if holding.record is None else holding.record.saved, holding.step


def join(directories: Sequence[Directory], *, whole: bool = False) -> Joined:
    """The newest step that the directories have together; with `whole` one with an optimizer's state.

    Raises `CheckpointError` that says what is missing and which nodes have it.
    """
    look = Look(directories, whole=whole)
    if look.complete:
        return look.joined(look.complete[0])
    told = f": {'; '.join(look.notes)}" if look.notes else ""
    advice = f": {NAME_THEM}" if look.holdings else ": give directories of steps, or of runs"
    raise CheckpointError(f"{look.where}: no step that is complete{told}{advice}")

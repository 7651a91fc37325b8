"""The nodes of a save: ranks that see the same run directory, which nobody else may change."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import explained, is_there
from zerokit.checkpoint.nodes.holders import held_by, holders
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Nodes:
    """The ranks by node, and which nodes hold copies of whose files.

    Ranks are those of files: their positions among the owners of shards.
    """

    rank: int
    members: tuple[tuple[int, ...], ...]
    """By node, its ranks; nodes in the order of their first ones."""
    holders: tuple[tuple[int, ...], ...]
    """By node, the nodes that hold its files, itself first."""

    @property
    def node(self) -> int:
        """The node of this rank."""
        return next(node for node, ranks in enumerate(self.members) if self.rank in ranks)

    @property
    def first(self) -> int:
        """The rank that writes what this rank's node has once."""
        return self.members[self.node][0]

    @property
    def holds(self) -> tuple[tuple[int, ...], ...]:
        """By node, the ranks whose files it holds: its own, and copies."""
        return tuple(
            tuple(rank for other in held_by(self.holders, node) for rank in self.members[other])
            for node in range(len(self.members))
        )

    def rounds(self) -> list[list[tuple[int, int]]]:
        """Who sends its files to whom, `(sender, receiver)`; a rank sends once in a round, and receives once."""
        rounds = []
        for copy in range(1, len(self.holders[0])):
            pairs = [
                (rank, number, self.members[holding[copy]])
                for node, holding in enumerate(self.holders)
                for number, rank in enumerate(self.members[node])
            ]
            for turn in range(1 + max(number // len(there) for _, number, there in pairs)):
                rounds.append(
                    [
                        (rank, there[number % len(there)])
                        for rank, number, there in pairs
                        if number // len(there) == turn
                    ]
                )
        return rounds


def find_nodes(together: Together, run: Path, copies: int) -> Nodes:
    """The nodes by the run directories that ranks see, which are made where they are missing. Collective.

    Raises `CheckpointError` for a directory that others could change, and where ranks see files one-sidedly.
    """
    # Named as a writer's leftover, which the next save removes if this process is killed now.
    mark = files.temporary(run / "node")

    def leave() -> None:
        make_private(run)
        with explained(mark, "created"):
            os.close(files.system().create(mark))

    try:
        together.each(leave)
        marks = together.exchange(mark.name)
        seen = together.exchange(
            together.each(lambda: [other for other, name in enumerate(marks) if is_there(run / name)])
        )
    finally:
        with explained(mark, "removed"):
            mark.unlink(missing_ok=True)
    for rank, others in enumerate(seen):
        if any(seen[other] != others for other in others) or rank not in others:
            raise CheckpointError(
                f"{run}: ranks {', '.join(map(str, others))} see each other's files there, but not all alike: is it a "
                "shared directory that shows new files late? Save with shared=True, or choose one of the node's own"
            )
    mesh = together.mesh
    members = sorted(set(map(tuple, seen)), key=lambda ranks: min(map(mesh.rank, ranks)))
    groups = [{mesh.rank(rank) // mesh.inner for rank in ranks} for ranks in members]
    nested = all(len(group) == 1 for group in groups) and mesh.outer > 1
    found = holders(len(members), copies, mesh.outer if nested and len(members) % mesh.outer == 0 else 1)
    return Nodes(together.rank, tuple(members), tuple(map(tuple, found)))


def make_private(run: Path) -> None:
    """Make a directory that only this user may use, or take one that only this user may change.

    Raises `CheckpointError` for one that is a link, is another user's, or that others may write to.
    """
    with explained(run, "created"):
        files.make_directories(run.parent)
        with suppress(FileExistsError):
            os.mkdir(run, _PRIVATE)
    require_private(run)


def require_private(run: Path) -> None:
    """Raise `CheckpointError` where another user could have put files into the directory `run`, or put it there."""
    with explained(run, "looked at"):
        status = run.lstat()
    wrong = ""
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a link or no directory"
    elif status.st_uid != os.geteuid():
        wrong = f"is user {status.st_uid}'s, and this is user {os.geteuid()}"
    elif status.st_mode & _OTHERS_WRITE:
        wrong = f"can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod 700 {run}"
    _refuse(run, wrong)
    require_trusted(run)


def require_trusted(place: Path) -> None:
    """Raise `CheckpointError` where any user could have put the directory there: on its way, also behind links.

    In a directory that all may write to, such as /dev/shm, only what is this user's or root's is trusted, and only
    where others cannot rename it (its sticky bit).
    """
    with explained(place, "looked at"):
        if place.stat().st_mode & stat.S_IWOTH:
            _refuse(place, "can be written to by others")
    for way in dict.fromkeys((place.absolute(), place.resolve())):
        for child, above in zip((way, *way.parents), way.parents, strict=False):
            with explained(place, "looked at"):
                mode, owner = above.stat().st_mode, child.lstat().st_uid
            if not mode & stat.S_IWOTH:
                continue
            if not mode & stat.S_ISVTX:
                _refuse(place, f"can be replaced by anybody, who may write to {above}")
            if owner not in (os.geteuid(), 0):
                _refuse(
                    place, f"lies in {child}, which is user {owner}'s, in {above}, to which all may write"
                )


def _refuse(place: Path, wrong: str) -> None:
    if wrong:
        raise CheckpointError(
            f"{place}: {wrong}: what others can change is not trusted: choose a directory of your own"
        )

"""A save into the nodes' own directories: what it does beside a save into a shared one."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from zerokit.checkpoint.disk import write_file
from zerokit.checkpoint.manifest import own_checksum
from zerokit.checkpoint.nodes.generations import remove_older
from zerokit.checkpoint.nodes.members import Nodes, find_nodes
from zerokit.checkpoint.nodes.record import NODE_NAME, NodeRecord
from zerokit.checkpoint.nodes.room import require_room
from zerokit.checkpoint.nodes.sending import Sent, send_copies
from zerokit.checkpoint.staging import remove_gone
from zerokit.checkpoint.together import Together
from zerokit.checkpoint.writing import Written, require_written, write_rest
from zerokit.errors import ZerokitWarning
from zerokit.runtime import ZeroOptimizer

_RUNS: WeakKeyDictionary[ZeroOptimizer, tuple[str, int]] = WeakKeyDictionary()
"""The random name of the training that an optimizer makes, or goes on with, and when it was saved last."""

_TOLD: WeakKeyDictionary[ZeroOptimizer, tuple[int, int]] = WeakKeyDictionary()
"""The copies and nodes of the optimizer's last save."""


def go_on(optimizer: ZeroOptimizer, run: str, saved: int) -> None:
    """Note that the optimizer has loaded a step of the training with this name, which had last been saved then."""
    _RUNS[optimizer] = run, saved


@dataclass(frozen=True)
class Locally:
    """The nodes of a save, and the name of its training. `generations` of steps are kept, this one included."""

    nodes: Nodes
    run: str
    saved: int
    """When, in seconds since the epoch, by the clock of rank 0; later than all saves before."""
    generations: int
    paced: bool

    @classmethod
    def begin(
        cls,
        optimizer: ZeroOptimizer,
        together: Together,
        run: Path,
        copies: int,
        generations: int,
        *,
        paced: bool,
    ) -> Locally:
        """Find the nodes. Collective. Raises `CheckpointError` for directories that others could change."""
        nodes = find_nodes(together, run, copies)

        def look() -> tuple[str, int]:
            if _TOLD.get(optimizer) != (told := (copies, len(nodes.members))):
                _TOLD[optimizer] = told
                _warn_of_few(run, *told)
            name, saved = _RUNS.get(optimizer, (secrets.token_hex(16), 0))
            return name, max(int(time.time()), saved + 1)  # the clock of another node may be behind

        name, now = _RUNS[optimizer] = together.on_first(look)
        return cls(nodes, name, now, generations, paced)

    def prepare(self, together: Together, target: Path, size: int, *, overwrite: bool) -> bool:
        """Make room for a step to which each rank brings `size` bytes; whether what is at `target` is to be replaced.

        Collective. Raises `CheckpointError` where there is too little room.
        """
        sizes = together.exchange(size)
        replaces = remove_older(together, self.nodes, target, self.run, self.generations - 1)
        needed = sum(sizes[rank] for rank in self.nodes.holds[self.nodes.node])

        def look() -> None:
            # What killed writers have left takes room, too. No rank of another host writes into a node's own directory.
            remove_gone(target.parent, elsewhere=True)
            require_room(target.parent, needed)

        together.on_first(look, self.nodes.first)
        return replaces or overwrite

    def copy(self, together: Together, work: Path, written: Sequence[Written]) -> None:
        """Write the copies that this node holds. Collective."""
        sent = [Sent(tuple(own.files())) for own in written]
        errors = send_copies(together, self.nodes, work, sent, paced=self.paced)

        def tell() -> None:
            if errors:
                raise errors[0]

        together.each(tell)

    def complete(
        self, work: Path, rest: tuple[bytes, bytes, bytes], written: Sequence[Written], step: int
    ) -> None:
        """Write what each node has whole, and its record."""
        holds = self.nodes.holds
        require_written(work, (written[rank] for rank in holds[self.nodes.node]))
        write_rest(work, *rest)
        crc = own_checksum(rest[-1])
        assert crc is not None
        uncut = tuple(tuple(one.name for one in own.uncut) for own in written)
        record = NodeRecord(
            self.run, self.saved, step, crc, self.nodes.node, self.nodes.members, holds, uncut
        )
        write_file(work / NODE_NAME, record.to_bytes())


def _warn_of_few(run: Path, copies: int, nodes: int) -> None:
    """Warn where there are fewer nodes than copies: more may be lost than the user expects."""
    if nodes >= copies:
        return
    text = f"copies={copies}, and there are {nodes} nodes: each file is on all of them"
    if nodes == 1:
        text = (
            f"copies={copies}, and all ranks see this one directory: no other node has a copy, so with this node its "
            "steps are lost. On several nodes, name a directory that they do not share, or save with shared=True"
        )
    warnings.warn(f"{run}: {text}", ZerokitWarning, stacklevel=2)

"""How a save's parts become a step: staged on every node, agreed by all ranks, and put in place by a rename a node."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from zerokit import files
from zerokit.checkpoint import run as runs
from zerokit.checkpoint.bases import holds
from zerokit.checkpoint.by_rank import Member, differing, members_of
from zerokit.checkpoint.disk import explained, is_there, write_file
from zerokit.checkpoint.frozen import write_base
from zerokit.checkpoint.latest import LATEST_NAME, Latest, readable_latest, write_latest
from zerokit.checkpoint.manifest import own_checksum, streams_in_files
from zerokit.checkpoint.nodes.locally import Locally
from zerokit.checkpoint.prune import Retention, foreign_to_step, prune_after_save
from zerokit.checkpoint.safetensors import rank_file
from zerokit.checkpoint.snapshot import Card, Part, complete, require_agreement
from zerokit.checkpoint.staging import Staging, remove_gone
from zerokit.checkpoint.state import merge
from zerokit.checkpoint.together import Together
from zerokit.checkpoint.writing import (
    Contents,
    contents_of,
    final_manifest,
    require_written,
    write_rank,
    write_rest,
)
from zerokit.errors import CheckpointError, ScheduleError, ZerokitWarning

T = TypeVar("T")

_NAMED: dict[Path, set[str]] = {}
"""By run, the steps that this process has saved, and so may be named by `latest`."""


def commit(
    together: Together,
    taken: Part | Exception,
    retention: Retention,
    others: Others,
    find_nodes: Callable[[Path], Locally] | None = None,
) -> Path:
    """Write what all ranks have taken, as the directory returned; on each node as one of its own with `find_nodes`."""
    part = together.each(lambda: or_raise(taken))
    cards = together.exchange(part.card)
    require_agreement(cards)
    arguments, layout, rank, step = part.card.arguments, part.layout, together.rank, part.card.arguments.step
    target = Path(arguments.run) / runs.step_name(step)
    streams, scalars, values = merge(layout, [card.description for card in cards])
    extras = _extras(together, part, cards)
    in_files = streams_in_files(streams, apart=part.apart is not None)
    file = rank_file(layout, in_files, step, rank)
    locally = None if find_nodes is None else find_nodes(target.parent)
    first, replaces = 0, arguments.overwrite
    if locally is not None:
        size = file.size + sum(one.size for one in part.uncut)
        first, replaces = locally.nodes.first, locally.prepare(together, target, size, overwrite=replaces)
    with ExitStack() as stack:
        staging: list[Staging] = []
        contents: list[Contents] = []
        asked: list[Retention] = []

        def begin() -> Path:
            if rank == 0:
                asked.append(retention.asked({*runs.list_steps(target.parent), step}))
                if not arguments.weights_only:
                    complete(part, cards, scalars, values)
                part.rest.add_extra(part.extra, extras)
                contents.append(
                    contents_of(
                        arguments, layout, streams, tuple(scalars), part.rest, part.apart, part.all_uncut
                    )
                )
            saves = others.hear(runs.saved_with(target) if runs.is_step(target) else None)
            # What only some islands have, as one was killed in this save, counts nowhere.
            void = any(one != saves[0] for one in saves)
            staging.append(_begin(target, overwrite=replaces or void))
            stack.callback(staging[0].discard)
            return staging[0].work

        work = together.on_first(begin, first)
        if part.apart is not None and part.apart.new:
            write_base(together, part.apart, arguments, layout, streams, part.slices)
        own = together.each(lambda: write_rank(work, file, in_files, part.slices, layout, part.uncut))
        written = together.exchange(own)

        def describe() -> tuple[bytes, bytes, bytes]:
            return contents[0].common, contents[0].extra, final_manifest(contents[0], written)

        def put_in_place(manifest: bytes) -> None:
            if part.apart is not None and part.apart.base and not holds(target.parent / part.apart.base):
                raise CheckpointError(
                    f"{target.parent / part.apart.base}: another process has removed or changed it, which this step "
                    "needs: save again"
                )
            _publish(staging[0], manifest, weights_only=arguments.weights_only)

        def finish() -> None:
            require_written(work, written)
            rest = describe()
            write_rest(work, *rest)
            manifests = others.hear(own_checksum(rest[-1]))
            if len(manifests) > 1:
                write_file(work / runs.ISLANDS_NAME, "".join(f"{crc:08x}\n" for crc in manifests).encode())
            others.settled = True
            put_in_place(rest[-1])
            try:
                others.hear("committed")  # a step that only some islands have replaces no older one
                remove_gone(target.parent, target.name, LATEST_NAME)
                prune_after_save(target.parent, asked[0])
            except (CheckpointError, ScheduleError) as error:
                what = (
                    "older files stay" if others.alone else "older files stay, and other islands may lack it"
                )
                warnings.warn(f"{target} is saved, but {what}: {error}", ZerokitWarning, stacklevel=2)

        if locally is None:
            together.on_first(finish)
        else:
            locally.copy(together, work, written)
            rest = together.on_first(describe)
            # All nodes have all files before one of them has a step.
            together.on_first(lambda: locally.complete(work, rest, written, step), first)
            together.on_first(lambda: put_in_place(rest[-1]), first)
    return target


def or_raise(value: T | Exception) -> T:
    """The value. Raises it if it is an error."""
    if isinstance(value, Exception):
        raise value
    return value


class Others:
    """The other islands, in a save that they commit together or not at all; without islands there are none.

    One rank of each island talks to them. `tell` returns every island's message, in order.
    """

    def __init__(self, tell: Callable[[tuple[str, Any]], list[tuple[str, Any]]] | None) -> None:
        self._tell = tell
        self.alone = tell is None
        self.settled = self.alone
        """Nothing that fails from now on keeps other islands from their step."""

    def hear(self, value: T) -> list[T]:
        """Every island's `value`.

        Raises `CheckpointError` where one has given up, and `ScheduleError` where one does not come.
        """
        if self._tell is None:
            return [value]
        settled, self.settled = self.settled, True  # an error below is theirs
        heard = self._tell(("", value))
        if failed := [f"island {index}" for index, (lost, _) in enumerate(heard) if lost]:
            raise CheckpointError(
                f"{', '.join(failed)} could not save, so no island has this step: see the error there"
            )
        self.settled = settled
        return [each for _, each in heard]

    def give_up(self) -> None:
        """Tell them that there is no step of this island."""
        if self._tell is not None and not self.settled:
            with suppress(ScheduleError):
                self._tell(("failed", None))


def _extras(together: Together, part: Part, cards: Sequence[Card]) -> dict[Member, list[Any]]:
    """All ranks' values, by the rank's number, of the members of `extra` that differ."""
    names = differing([card.extra for card in sorted(cards, key=attrgetter("rank"))])
    if not names:
        return {}
    own = {name: members_of(part.extra).get(name) if name is not None else part.extra for name in names}
    by_rank = dict(together.exchange((part.card.rank, own)))
    return {name: [by_rank[rank][name] for rank in sorted(by_rank)] for name in names}


def _warn_of_another_job(run: Path) -> None:
    latest, named = readable_latest(run), _NAMED.get(run.resolve())
    if latest is not None and named and latest.name not in named:
        warnings.warn(
            f"{run}: another process has saved {latest.name} since this one saved {max(named)}: two jobs in one run "
            "directory supersede each other's steps: give each a directory of its own",
            ZerokitWarning,
            stacklevel=2,
        )


def _begin(target: Path, *, overwrite: bool) -> Staging:
    runs.require_run(target.parent)
    _warn_of_another_job(target.parent)
    replaces = overwrite
    if is_there(target) and not overwrite:
        if not runs.unreferenced(target):
            raise CheckpointError(
                f"{target}: this step is already saved: pass overwrite=True to replace it, or save another step, "
                "or in another run directory (zerokit.check_run checks this before training)"
            )
        replaces = True  # its writer was killed before it was announced
    with explained(target.parent, "created"):
        files.make_directories(target.parent)
    return Staging(target, force=replaces, foreign=foreign_to_step)


def _publish(staging: Staging, manifest: bytes, *, weights_only: bool) -> None:
    """Commit a step, and make it the run's newest."""
    run, name = staging.target.parent, staging.target.name
    crc = own_checksum(manifest)
    assert crc is not None
    later = runs.steps_to_supersede(run, name)
    begins = not (weights_only and later)  # weights alone begin no training before later steps
    latest, replaced = readable_latest(run), runs.stated_checksum(run / name)
    if begins:
        _NAMED.setdefault(run.resolve(), set()).add(name)
    if begins and replaced is not None and latest is not None and latest.name == name:
        write_latest(run, Latest(name, (crc, replaced)))
    staging.commit()
    if begins:
        runs.mark_superseded(later)
        write_latest(run, Latest(name, (crc,)))
    staging.discard()

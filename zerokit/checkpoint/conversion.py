"""A directory made out of a checkpoint, whole or not at all, which a later command can continue after a kill.

The work directory holds an order: what is to be written, out of which source. Where its writer is gone, a conversion
with the same order takes the directory over, by a rename to a name of its own. Nothing in it is trusted: everything is
read and verified again, and files are written only where their bytes differ.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zerokit import __version__, files
from zerokit.checkpoint.copying import Copier, Progress
from zerokit.checkpoint.disk import explained, read_whole
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import (
    ORDER_NAME,
    Foreign,
    Leftover,
    Staging,
    leftovers,
    remove,
    require_apart,
)
from zerokit.checkpoint.strict import member, parse_json, typed
from zerokit.errors import CheckpointError, ZerokitWarning


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a conversion: threads, replacing an output, resuming, and a progress callback."""

    jobs: int | None = None
    force: bool = False
    resume: bool = False
    progress: Progress | None = None

    def copier(self, total: int) -> Copier:
        """What copies `total` bytes."""
        return Copier(jobs=self.jobs, total=total, progress=self.progress)


@dataclass(frozen=True, slots=True)
class Order:
    """What a conversion is to write: equal orders write equal bytes.

    `target` is the name of the output directory, `source` the CRC-32 of the source's manifest; `wanted` is all
    else that makes a difference.
    """

    target: str
    source: int
    wanted: dict[str, str | int | None]

    def differences(self, other: Order) -> str:
        """In what `other` differs, as text; "" if in nothing."""
        if self.source != other.source:
            return f"of another source (its manifest is {other.source:08x}, not {self.source:08x})"
        both = self.wanted | other.wanted
        names = [name for name in both if self.wanted.get(name) != other.wanted.get(name)]
        names = ["format"] if "format" in names else names  # another format's options cannot be compared
        reasons = (f"{name} {other.wanted.get(name)}, not {self.wanted.get(name)}" for name in names)
        return f"of another request ({'; '.join(reasons)})" if names else ""


def read_order(work: Path) -> Order | None:
    """The order of the conversion that has written in the directory `work`; None where there is none."""
    # What cannot be read, or is none of ours, is no order.
    with suppress(CheckpointError, ValueError, RecursionError):
        plain = typed(parse_json(read_whole(work / ORDER_NAME)), dict, "the order")
        return Order(
            member(plain, "target", str), member(plain, "source", int), member(plain, "wanted", dict)
        )
    return None


@contextmanager
def converting(
    source: Source, target: Path, wanted: dict[str, str | int | None], options: Options, foreign: Foreign
) -> Iterator[Path]:
    """A directory beside `target`, renamed to it durably when the body succeeds.

    With `resume` it takes over what an interrupted one of the same order has written. One that is not taken over
    causes a `ZerokitWarning`, and is removed when this conversion succeeds. If the body fails, its work is removed,
    unless it was resumed and only interrupted again. Raises as `Staging` does, and where one of `source` and `target`
    lies in the other.
    """
    require_apart(source.run or source.path, target)
    wanted = wanted | {"of a run": source.run is not None, "zerokit": __version__}
    order = Order(target.name, source.manifest_crc, wanted)
    with Staging(target, force=options.force, foreign=foreign) as staging:
        origin = _taken_over(staging, order, resume=options.resume)
        if origin is None:
            with explained(staging.work / ORDER_NAME, "written"):
                files.write_aside(staging.work / ORDER_NAME, json.dumps(asdict(order)).encode())
        try:
            yield staging.work
        except BaseException as error:
            if origin is not None and not _of_contents(error):
                with suppress(OSError):  # with what was added to it since
                    files.system().rename(staging.work, origin)
            raise
        with explained(staging.work / ORDER_NAME, "removed"):
            files.system().unlink(staging.work / ORDER_NAME)
        staging.commit()
    for left, _ in _interrupted(staging.target):
        if left.gone:
            remove(left)


def _taken_over(staging: Staging, order: Order, *, resume: bool) -> Path | None:
    """The former path of the work directory that `staging` took over; None where there is none to resume."""
    for left in _usable(staging.target, order, resume=resume):
        # Over the empty directory that is there. One of several processes that try succeeds.
        with suppress(OSError):
            files.system().rename(left.path, staging.work)
            return left.path
    return None


def _of_contents(error: BaseException) -> bool:
    """Whether the source was damaged, rather than a disk or a signal to blame: a resumed run would fail again."""
    return isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError)


def _usable(target: Path, order: Order, *, resume: bool) -> list[Leftover]:
    """Interrupted conversions that can be resumed, the largest first; warns of all others."""
    usable = []
    for left, other in _interrupted(target):
        described = f"{left.path}: an interrupted conversion to {target.name}, {left.size:,} bytes"
        remedy = f"zerokit prune {target.parent} removes it"
        if not left.gone:
            if resume:
                _warn(f"{left.path}: {left.describe()}: it is not used, and this conversion starts over")
        elif different := order.differences(other):
            _warn(f"{described}, {different}{', so that it is not taken over' if resume else ''}: {remedy}")
        elif resume:
            usable.append(left)
        else:
            _warn(f"{described}: --resume (resume=True) continues it, {remedy}")
    return sorted(usable, key=lambda left: -left.size)


def _interrupted(target: Path) -> list[tuple[Leftover, Order]]:
    """Conversions to `target` that have begun."""
    found = [(left, read_order(left.path)) for left in leftovers(target.parent)]
    return [(left, order) for left, order in found if order is not None and order.target == target.name]


def _warn(text: str) -> None:
    warnings.warn(text, ZerokitWarning, stacklevel=2)

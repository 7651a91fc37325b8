"""A directory made out of a checkpoint, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zerokit.checkpoint.copying import Copier, Progress
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import Foreign, Staging, require_apart

NOT_WRITTEN = ": nothing was written: take another checkpoint"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a conversion: threads, replacing an output, and a progress callback."""

    jobs: int | None = None
    force: bool = False
    progress: Progress | None = None

    @contextmanager
    def copying(self, source: Source, total: int | None = None) -> Iterator[Copier]:
        """What copies `total` bytes, or all of the source's; they are compared with its checksums at the end."""
        size = source.data_size if total is None else total
        with Copier(jobs=self.jobs, total=size, progress=self.progress) as copier:
            yield copier
        source.require_right([copier.pieces], NOT_WRITTEN)


@contextmanager
def converting(source: Source, target: Path, options: Options, foreign: Foreign) -> Iterator[Path]:
    """A directory beside `target`, renamed to it durably when the body succeeds, and removed when it fails.

    Raises as `Staging` does, and where one of `source` and `target` lies in the other.
    """
    require_apart(source.run or source.path, target)
    with Staging(target, force=options.force, foreign=foreign) as staging:
        yield staging.work
        staging.commit()

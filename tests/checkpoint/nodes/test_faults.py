"""Faults of one rank amid a save into nodes' directories: every rank's error, and the step before is still there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
import zerokit.checkpoint.nodes.sending as sending
from tests.support.distributed import AT_ONCE, run_ranks
from tests.support.nodes import Training, place
from tests.support.saving import in_turn
from zerokit.checkpoint.disk import explained
from zerokit.checkpoint.run import step_name


def _own(folder: str) -> Path:
    return place(folder, dist.get_rank())


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in _own(folder).iterdir())


def _a_piece_that_cannot_be_read_or_written(folder: str) -> None:
    """An error on all ranks, none of which waits; the older step is loaded, and the next save succeeds."""
    rank = dist.get_rank()
    training = Training()
    training.train(0, 2)
    training.save(_own(folder), 2, shared=False)
    step = 2
    for name, at in (("read_exactly", 0), ("read_exactly", 3), ("write_exactly", 0), ("write_exactly", 3)):
        step += 2
        training.train(step - 2, step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sending, "PIECE_BYTES", 4096)
            if rank == 1:
                patch.setattr(sending, name, _failing(getattr(sending, name), at))
            with pytest.raises(zerokit.CheckpointError, match=rf"rank 1: .*{os.strerror(errno.EIO)}"):
                training.save(_own(folder), step, shared=False)
        assert Training().load([_own(folder)])[0] == {"step": 2}
        assert _names(folder) == ["latest", step_name(2)]
    training.save(_own(folder), step, shared=False)
    assert Training().load([_own(folder)])[0] == {"step": step}
    assert _names(folder) == ["latest", step_name(2), step_name(step)]


def _failing(before: Callable[..., Any], at: int) -> Callable[..., Any]:
    calls = 0

    def call(fd: int, buffers: Any, offset: int, path: Path) -> Any:
        nonlocal calls
        calls += 1
        with explained(path, "read or written"):
            if calls > at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return before(fd, buffers, offset, path)

    return call


def _ranks_that_disagree(folder: str) -> None:
    rank = dist.get_rank()
    training = Training()
    training.train(0, 2)
    training.save(_own(folder), 2, shared=False)
    differing: list[tuple[dict[str, Any], str]] = [
        ({"copies": 1 + rank}, "copies differs between ranks: 1 on rank 0; 2 on rank 1"),
        ({"step": 4 + rank}, "step differs between ranks"),
        ({"shared": rank == 0}, "copies differs between ranks"),
    ]
    for options, text in differing:
        with pytest.raises(zerokit.ZerokitError, match=text):
            zerokit.save(_own(folder), training.optimizer, **{"step": 4, "shared": False, **options})
        dist.barrier()
    assert Training().load([_own(folder)])[0] == {"step": 2}


def _interrupted(folder: str) -> None:
    """Ctrl-C on both ranks while pieces travel: the next save removes what it leaves."""
    training = Training()
    training.train(0, 2)
    training.save(_own(folder), 2, shared=False)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "read_exactly", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.save(_own(folder), 4, shared=False)
    dist.barrier()
    training.save(_own(folder), 6, shared=False)
    assert _names(folder) == ["latest", step_name(2), step_name(6)]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fifty_copies(folder: str) -> None:
    training = Training()
    copies = zerokit.Copies(training.optimizer, _own(folder), every=1)
    sizes = []
    for number in range(70):
        training.step(number)
        copies.wait()
        sizes.append(_resident())
    assert copies.saved == 70
    assert sizes[-1] - sizes[19] < 4 << 20, sizes[::10]


WORKS: list[Callable[[str], None]] = [
    _a_piece_that_cannot_be_read_or_written,
    _ranks_that_disagree,
    _interrupted,
    _fifty_copies,
]


@pytest.mark.full(default=["_a_piece_*", "_ranks_*", "_interrupted"])
@pytest.mark.parametrize("work", WORKS)
def test_faults(tmp_path: Path, work: Any) -> None:
    run_ranks(2, in_turn, [work], str(tmp_path), **AT_ONCE)


def _alone(folder: str) -> None:
    training = Training(timeout=timedelta(seconds=2))
    training.train(0, 2)
    training.save(_own(folder), 2, shared=False)
    if dist.get_rank() == 0:
        with pytest.raises(zerokit.ScheduleError, match="rank"):
            training.save(_own(folder), 4, shared=False)
        assert _names(folder) == ["latest", step_name(2)]


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    run_ranks(2, _alone, str(tmp_path), **AT_ONCE)

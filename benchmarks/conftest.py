"""What the micro-benchmarks share: one thread, flat units without communication, a pair of gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks.pair import Pair, start_pair


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A rank of a CPU job has one thread; with more, small machines time their neighbours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake_world() -> Iterator[dist.ProcessGroup]:
    """Rank 0 of two ranks, of which the other does not exist: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Rank 0 here and rank 1 in another process, over gloo."""
    with start_pair() as started:
        yield started

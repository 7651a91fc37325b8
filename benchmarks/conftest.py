"""What the micro-benchmarks share: one thread, a group without communication."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


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

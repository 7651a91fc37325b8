"""The parts of the device's way by themselves, with fakes in place of CUDA: streams, communicators, refusals."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.support.happens_before import FakeCuda, FakeStream
from tests.support.on_ranks import on_ranks
from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.runtime import collectives
from zerokit.runtime.collectives import groups, make_collectives, nccl
from zerokit.runtime.collectives import nccl as streams
from zerokit.runtime.collectives.stalls import StallReporter

GPU = torch.device("cuda", 0)

# --- one GPU a rank ----------------------------------------------------------------------------------------


class NcclGroup:
    """A group whose only backend is NCCL's, on CUDA."""

    group_name = "fake"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def _get_backend(self, device: torch.device) -> object:
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return object()


def test_a_model_on_another_gpu_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(UsageError, match=r"lies on cuda:1.*current device.*set_device\("):
        nccl.require_current_device(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        # What is said of a group of NCCL alone, which has no backend to ask for its time-out.
        (str(dist.distributed_c10d.BackendConfig(dist.Backend("nccl"))), ""),
        # Under `init_process_group()` without a backend, whose group serves both.
        ("cpu:gloo,cuda:nccl", ".*'gloo'"),
    ],
)
def test_a_model_on_the_cpu_is_refused_under_nccl_where_there_are_gpus(
    config: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nccl" in config
    group: Any = NcclGroup()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    if said:
        assert collectives._backend_of(group, torch.device("cpu")) == "gloo"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=rf"the model lies on cpu.*model\.to\('cuda'\){said}"):
        make_collectives(group, torch.device("cpu"), None, units=1)


# --- communicators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("bound", [None, GPU])
def test_a_clone_is_never_split_from_a_bound_default_group(
    monkeypatch: pytest.MonkeyPatch, bound: torch.device | None, fails: bool
) -> None:
    default = SimpleNamespace(bound_device_id=bound)
    made = dist.ProcessGroup(0, 2)  # type: ignore[call-arg]
    seen: list[tuple[object, dict[str, Any]]] = []

    def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        seen.append((default.bound_device_id, {"ranks": ranks, **options}))
        if fails:
            raise RuntimeError("no connection")
        return made

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 2])
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="no connection") if fails else contextlib.nullcontext():
        assert groups.clone(made, "nccl", None, GPU) is made
    ((hidden, options),) = seen
    assert hidden is None
    assert default.bound_device_id == bound
    assert options == {
        "ranks": [0, 2],
        "backend": "nccl",
        "timeout": None,
        "use_local_synchronization": True,  # the others of the world know nothing of it
        "device_id": GPU,
    }


@contextlib.contextmanager
def _communicators_on_hosts() -> Iterator[list[dist.ProcessGroup]]:
    """`communicators_of` makes gloo's; yields what was made."""
    made: list[dist.ProcessGroup] = []
    clone = groups.clone

    def make(
        group: dist.ProcessGroup, backend: str, timeout: Any, device: torch.device, members: Any = None
    ) -> dist.ProcessGroup:
        assert backend == "nccl"
        made.append(clone(group, "gloo", timeout))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "clone", make)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        yield made


@on_ranks(1)
def test_communicators_are_made_once_a_group_and_time_out() -> None:
    cpu, short = torch.device("cpu"), datetime.timedelta(seconds=7)
    with _communicators_on_hosts() as made:
        group = dist.new_group([0])
        first = nccl.communicators_of(group, Mesh(1, 1), cpu, None, StallReporter(group))
        assert len(made) == 3
        assert nccl.communicators_of(group, Mesh(1, 1), cpu, None, StallReporter(group)) is first
        assert len(made) == 3, "a second optimizer takes over the first one's"
        assert nccl.communicators_of(group, Mesh(1, 1), cpu, short, StallReporter(group)) is not first
        assert len(made) == 6
        other = dist.new_group([0])
        assert nccl.communicators_of(other, Mesh(1, 1), cpu, None, StallReporter(other)) is not first
        assert len(made) == 9


@on_ranks(1)
def test_communicators_are_made_anew_after_all_groups_were_destroyed() -> None:
    """As by a user who begins again."""
    store = dist.distributed_c10d._get_default_store()
    with _communicators_on_hosts() as made:
        for number in range(2):
            if number:
                dist.destroy_process_group()
                dist.init_process_group("gloo", store=PrefixStore("again", store), rank=0, world_size=1)
            group = dist.distributed_c10d._get_default_group()
            nccl.communicators_of(group, Mesh(1, 1), torch.device("cpu"), None, StallReporter(group))
        assert len(made) == 6


# --- streams -----------------------------------------------------------------------------------------------


def test_a_side_stream_has_high_priority_and_names_its_first_unfinished_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its work waits for is the business of `test_happens_before`."""
    cuda, priorities = FakeCuda(), []

    def make_stream(device: torch.device, priority: int) -> FakeStream:
        priorities.append(priority)
        return FakeStream(cuda, 1)

    fake = SimpleNamespace(
        Stream=make_stream, current_stream=cuda.current_stream, stream=cuda.stream, Event=object
    )
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=fake))
    side = streams.CudaStream(GPU)
    assert priorities == [-1]
    assert side.unfinished() is None
    for name in ("first", "second"):
        side.launch(streams.Operation(name, lambda: None))
        assert side.unfinished() == "first"
    cuda.host_waits = True
    assert side.unfinished() is None
    side.launch(streams.Operation("third", lambda: None))
    assert len(side._launched) == 1, "what has ended is forgotten"

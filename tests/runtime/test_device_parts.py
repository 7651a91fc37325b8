"""The parts of the device's way by themselves, without a GPU: fakes in place of CUDA."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from tests.support.on_ranks import on_ranks
from tests.support.recording import Group, plain_unit
from tests.support.streams import PromptStream
from zerokit.errors import ScheduleError, UsageError
from zerokit.layout import Interval
from zerokit.placement import Mesh
from zerokit.runtime import collectives
from zerokit.runtime.collectives import communicators, groups, make_collectives, nccl, stalls, streams
from zerokit.runtime.collectives.communicators import Communicators, communicators_of
from zerokit.runtime.collectives.nccl import make_nccl
from zerokit.runtime.collectives.route import Wire
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.memory import ResizedMemory
from zerokit.runtime.shards import Shards

GPU = torch.device("cuda", 0)


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


@pytest.fixture
def _nccl_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own, or where it has no NCCL, names that anything can be written to."""
    stand_in = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", getattr(dist, "ProcessGroupNCCL", stand_in), raising=False)


@pytest.mark.usefixtures("_nccl_options")
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
        assert groups.clone(made, "nccl", datetime.timedelta(seconds=7), GPU, small=fails) is made
    ((hidden, options),) = seen
    assert hidden is None
    nccl_options = options.pop("pg_options")
    assert nccl_options._timeout == options["timeout"], "torch warns of another one"
    assert nccl_options.config.blocking == 1
    # Memory is linear in channels.
    assert (getattr(nccl_options.config, "max_ctas", None) == 1) == fails
    assert default.bound_device_id == bound
    assert options == {
        "ranks": [0, 2],
        "backend": "nccl",
        "timeout": datetime.timedelta(seconds=7),
        "use_local_synchronization": True,  # the others of the world know nothing of it
        "device_id": GPU,
    }


@contextlib.contextmanager
def _communicators_on_hosts() -> Iterator[list[dist.ProcessGroup]]:
    """`communicators_of` makes gloo's; yields what was made."""
    made: list[dist.ProcessGroup] = []
    clone = groups.clone

    def make(
        group: dist.ProcessGroup,
        backend: str,
        timeout: Any,
        device: torch.device,
        members: Any = None,
        *,
        small: bool = False,
    ) -> dist.ProcessGroup:
        assert (backend, small) == ("nccl", len(made) % 3 == 0), "the first of three is for control values"
        made.append(clone(group, "gloo", timeout))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "clone", make)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        yield made


@on_ranks(1)
def test_communicators_are_made_once_a_group_and_time_out() -> None:
    cpu, short = torch.device("cpu"), datetime.timedelta(seconds=7)
    with _communicators_on_hosts() as made:
        group = dist.new_group([0])
        first = communicators_of(group, Mesh(1, 1), cpu, None, StallReporter(group))
        assert len(made) == 3
        assert communicators_of(group, Mesh(1, 1), cpu, None, StallReporter(group)) is first
        assert len(made) == 3, "a second optimizer takes over the first one's"
        assert communicators_of(group, Mesh(1, 1), cpu, short, StallReporter(group)) is not first
        assert len(made) == 6
        other = dist.new_group([0])
        assert communicators_of(other, Mesh(1, 1), cpu, None, StallReporter(other)) is not first
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
            communicators_of(group, Mesh(1, 1), torch.device("cpu"), None, StallReporter(group))
        assert len(made) == 6


@on_ranks(2)
def test_what_a_step_will_call_is_rehearsed_once_and_nothing_else() -> None:
    """An all-to-all connects every pair: on eight GPUs its first call takes gigabytes of each (nccl#1685)."""
    called: list[object] = []
    group = dist.distributed_c10d._get_default_group()

    def note(name: str) -> Any:
        return lambda *given, op=None, **options: called.append((name, op))

    with _communicators_on_hosts() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "all_gather", note("gather"))
        patch.setattr(communicators, "reduce_scatter", note("reduce"))
        patch.setattr(dist, "all_to_all_single", note("all-to-all"))
        for packs in (False, False, True, True, False):
            cpu, reporter = torch.device("cpu"), StallReporter(group)
            communicators_of(group, Mesh(1, 2), cpu, None, reporter, packs=packs)
            expected = [("gather", None), ("reduce", dist.ReduceOp.AVG)]
            if packs or ("all-to-all", None) in called:
                expected.append(("all-to-all", None))
            assert called == expected
        assert len(made) == 3


@pytest.mark.parametrize("size", [1, 2])
def test_one_rank_is_not_asked_for_a_mean(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """NCCL before 2.29.7 leaves out the last elements of a small one (nccl#1950)."""
    asked: list[object] = []
    monkeypatch.setattr(nccl, "reduce_scatter", lambda out, flat, *, op, group: asked.append(op))
    group, side = Group(0, size), PromptStream(GPU)
    unit = plain_unit(0, 16_704 * size, size)
    bucket = Shards(unit, torch.ones(unit.numel))
    route = nccl.NcclRoute((group, group), (side, side), StallReporter(Group(0, 1)))
    cut = unit.cut
    route.reduction(bucket, cut, torch.zeros(cut.piece(0).numel), Wire(torch.float32))(None).wait()
    assert asked == [dist.ReduceOp.SUM if size == 1 else dist.ReduceOp.AVG]


class FakeStream:
    """A stream that appends its calls, and the work that runs on it, to a list shared by all streams."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def record_event(self) -> SimpleNamespace:
        self.told.append(f"{self.name} records")
        return SimpleNamespace(of=self.told[-2], query=lambda: "all has ended" in self.told)

    def wait_event(self, event: SimpleNamespace) -> None:
        self.told.append(f"{self.name} waits for: {event.of}")

    def wait_stream(self, other: FakeStream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The record of streams, whose names are those of their priorities."""
    told: list[str] = []
    current = [FakeStream("computation", told)]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Arrived(torch.Tensor):
        def copy_(self, *given: Any, **options: Any) -> Arrived:
            told.append(f"{current[-1].name} copies")
            return self

    fake = SimpleNamespace(
        Stream=lambda device, priority: FakeStream(f"side {priority}", told),
        current_stream=lambda device: current[-1],
        stream=on,
    )
    empty = torch.empty(1).as_subclass(Arrived)
    monkeypatch.setattr(
        streams, "torch", SimpleNamespace(cuda=fake, empty=lambda shape, dtype, pin_memory: empty)
    )
    return told


def test_streams_wait_for_each_other(told: list[str]) -> None:
    """Work for the computation or for the work it follows, the computation for work, the host for copies."""
    side = streams.CudaStream(GPU)
    reduction = side.launch(streams.Operation("a reduction", lambda: told.append("reduces")))
    assert told == ["side -1 waits for computation", "reduces", "side -1 records"]
    told.clear()
    gather = side.launch(streams.Operation("its gather", lambda: told.append("gathers")), after=reduction)
    assert told == ["side -1 waits for: reduces", "gathers", "side -1 records"]
    told.clear()
    gather.wait()
    side.join()
    assert told == ["computation waits for: gathers", "computation waits for side -1"]
    told.clear()
    fetch = side.fetch(torch.ones(1))
    assert told == ["side -1 copies", "side -1 records"]
    assert fetch() is None
    told.append("all has ended")
    assert fetch() is not None


def test_a_dropped_stream_is_waited_for(told: list[str]) -> None:
    """With an optimizer: the memory of its last work is handed out again to the computation."""
    side = streams.CudaStream(GPU)
    side.launch(streams.Operation("control values", lambda: told.append("sums")))
    told.clear()
    del side
    assert told == ["computation waits for side -1"]


def test_a_side_stream_names_its_first_unfinished_work(told: list[str]) -> None:
    side = streams.CudaStream(GPU)
    assert side.unfinished() is None
    for name in ("first", "second"):
        side.launch(streams.Operation(name, lambda: None))
        assert side.unfinished() == "first"
    told.append("all has ended")
    assert side.unfinished() is None
    side.launch(streams.Operation("third", lambda: None))
    assert len(side._launched) == 1, "what has ended is forgotten"


class _NamedStream(PromptStream):
    """Notes which threads ask for what is unfinished."""

    asked: ClassVar[set[str]] = set()

    def unfinished(self) -> str:
        self.asked.add(threading.current_thread().name)
        return "all-gather of unit 7"


def test_a_device_is_asked_by_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would have set no device, and begin a context on the first one."""
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(stalls, "OTHERS_S", 0.0)
    group = Group(0, 2)
    route = make_nccl(
        Communicators(group, ((group, group),)),
        Mesh(1, 2),
        torch.device("cuda"),
        StallReporter(group),
        datetime.timedelta(seconds=0.5),
        make_stream=_NamedStream,
    )
    _NamedStream.asked.clear()
    with pytest.raises(ScheduleError, match="did not get through its all-gather of unit 7"):
        route.until(lambda: None)
    assert _NamedStream.asked == {threading.current_thread().name}
    assert "all-gather of unit 7" in store.get(f"zerokit/{group.group_name}/0").decode()


def test_communicators_outlive_every_wait_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[datetime.timedelta] = []

    def make(
        group: object,
        mesh: object,
        device: object,
        timeout: datetime.timedelta,
        reporter: object,
        *,
        packs: bool,
    ) -> Communicators:
        assert packs
        made.append(timeout)
        return Communicators(Group(0, 1), ((Group(0, 1), Group(0, 1)),))

    monkeypatch.setattr(collectives, "communicators_of", make)
    monkeypatch.setattr(collectives, "require_current_device", lambda device: None)
    monkeypatch.setattr(collectives, "_backend_of", lambda group, device: "nccl")
    monkeypatch.setattr(make_nccl, "__kwdefaults__", {"make_stream": PromptStream, "averages": True})
    wait = datetime.timedelta(seconds=30)
    route = make_collectives(Group(0, 1), torch.device("cuda"), wait, units=1, packs=True)
    assert made == [2 * wait + datetime.timedelta(minutes=1)]
    assert route._timeout == wait


def test_memory_that_is_there_is_not_allocated_anew() -> None:
    whole = torch.arange(8.0)
    memory = ResizedMemory(Shards(plain_unit(0, 8, 2), whole), Interval(0, 4))
    address = whole.data_ptr()
    memory.grow()
    assert whole.data_ptr() == address
    memory.shrink()
    memory.grow()
    assert whole.untyped_storage().nbytes() == 32

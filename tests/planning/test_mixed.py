"""Plans for ranks with different devices: shares, batches and memory by kind, beside equal ones and the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.bench.records import make_record
from tests.planning.test_memory import Peaks, require_close
from tests.support.distributed import run_ranks
from zerokit.bench.measure.memory import MemoryTracker, held_by
from zerokit.bench.plans.ask import plain, plan
from zerokit.bench.plans.subjects import subject_named
from zerokit.bench.record.measured import Phases
from zerokit.bench.record.record import write_record
from zerokit.bench.workloads.build import build
from zerokit.errors import UsageError
from zerokit.formulas import MEMORY_KINDS, predict_memory
from zerokit.placement import Mesh, require_stage, stage_of
from zerokit.planning.cells import Cell, Question
from zerokit.planning.efficiency import of_device
from zerokit.planning.estimates import Estimates
from zerokit.planning.hardware import DEVICES, USUAL_DISK, Cluster
from zerokit.planning.kinds import Kind, by_rank, stand_in, world_of
from zerokit.planning.memory import context_bytes, fullest_rank
from zerokit.planning.mixed import Part, listed
from zerokit.planning.mixture import Mixture
from zerokit.planning.planner import plan_cells
from zerokit.planning.replay import Step
from zerokit.planning.trace import Traces
from zerokit.runtime import ZeroOptimizer

SUBJECT = subject_named("gpt-tiny", seq_len=64)
STAGES = [(0, 0), (1, 1), (2, 2), (3, 3)]
PAIRS = [(outer, inner) for inner in range(4) for outer in range(inner + 1)]


@cache
def traces(optimizer: str) -> Traces:
    return Traces(SUBJECT, on_cuda=True, optimizer=optimizer)


def kinds_of(names: str, memory: Sequence[int], speed: Sequence[float], outer: int = 1) -> tuple[Kind, ...]:
    """Kinds by the letters of `names`, so many bytes beside CUDA's and NCCL's, so many times an H100's speed."""
    h100 = DEVICES["h100-80"]
    found = []
    for letter, nbytes, times in zip(sorted(set(names)), memory, speed, strict=False):
        ranks = tuple(rank for rank, each in enumerate(names) if each == letter)
        device = replace(
            h100, name=letter, memory_bytes=context_bytes(Mesh(outer, len(names) // outer)) + nbytes
        )
        efficiency = replace(of_device(h100, "bf16"), scale=1 / times, launch_s=0.0)
        found.append(Kind(device, ranks, {"bf16": efficiency}))
    return tuple(found)


def question_of(kinds: tuple[Kind, ...], nodes: int = 1, **more: Any) -> Question:
    world = world_of(kinds)
    device = stand_in(kinds)
    cluster = Cluster(device, world // nodes, device.inner, device.inner)
    speeds = dict(kinds[0].efficiencies)
    return Question(cluster, world, speeds, ["bf16"], room_bytes=device.memory_bytes, kinds=kinds, **more)


def cell_of(mesh: Mesh, stages: tuple[int, int], micro_batch: int, states: str = "device") -> Cell:
    return Cell(mesh, stages, micro_batch, 1, recompute=False, precision="bf16", states=states)


def test_equal_devices_are_planned_as_without_kinds() -> None:
    """By one name the plan is the same; by two names all figures are."""
    options: dict[str, Any] = {"seq_len": 64, "nodes": 2, "batch_size": (1, 4)}
    own = plain(plan("gpt-tiny", gpus=8, device="h100-80", **options))
    for devices in ("h100-80x8", "h100-80x3,h100-80x5"):
        assert plain(plan("gpt-tiny", devices=devices, **options)) == own
    kinds = kinds_of("aabbaabb", [80 << 30] * 2, [1, 1])
    question = question_of(kinds, nodes=2, micro_batches=(1, 4))
    device = replace(question.cluster.device, flops=DEVICES["h100-80"].flops)
    equal = replace(question, kinds=(), cluster=replace(question.cluster, device=device))
    planned, alike = (plan_cells(SUBJECT, each) for each in (question, equal))
    assert len(planned.fitting) == (10 + 4) * 2 * 2
    for one, other in zip(planned.fitting, alike.fitting, strict=True):
        assert one.mixed is not None
        assert one.mixed.is_equal
        assert one.mixed.equal.longer == 1.0
        assert replace(one, mixed=None) == other


LETTERS = st.lists(st.sampled_from("abc"), min_size=2, max_size=8).filter(lambda names: len(set(names)) > 1)
MEMORY = st.lists(st.integers(200_000, 40_000_000), min_size=3, max_size=3)
SPEED = st.lists(st.sampled_from([0.5, 1.0, 1.7, 2.0, 3.3]), min_size=3, max_size=3)


@given(
    LETTERS,
    MEMORY,
    SPEED,
    st.sampled_from(PAIRS),
    st.integers(1, 2),
    st.integers(1, 4),
    st.sampled_from(["device", "host", "fp8"]),
    st.sampled_from(["adamw", "adamw", "muon"]),
)
@settings(max_examples=60)
def test_a_cell_keeps_its_accounts(
    names: list[str],
    memory: list[int],
    speed: list[float],
    stages: tuple[int, int],
    outer: int,
    micro_batch: int,
    states: str,
    optimizer: str,
) -> None:
    """Shares and batches sum up, what is said to fit fits on every rank, and the fullest rank is the fullest."""
    kinds = kinds_of("".join(names * outer), memory, speed)
    mesh = Mesh(outer, len(names)) if outer > 1 else Mesh(1, len(names))
    stages = stages if outer > 1 else (stages[1], stages[1])
    question = question_of(kinds, nodes=outer, optimizer=optimizer)
    estimates = Estimates(SUBJECT, question, traces(optimizer))
    cell = cell_of(mesh, stages, micro_batch, states)
    planned = Mixture(estimates, question).plan(cell)
    mixed, numbers = planned.mixed, by_rank(kinds)
    assert mixed is not None
    assert sum(mixed.batches) == micro_batch * mesh.world
    assert len(mixed.batches) == len(mixed.pace) == mesh.world
    assert len(mixed.shares) in (0, mesh.inner)
    assert stages[1] or not mixed.shares
    shares = mixed.shares * mesh.outer
    setup = estimates.setup(cell, shares)
    for rank in range(mesh.world):
        part = mixed.parts[numbers[rank]]
        assert mixed.batches[rank] <= part.samples
        assert not shares or shares[rank] == part.share
        own = predict_memory(
            setup.layout,
            rank=rank,
            placement=setup.placement,
            sizes=setup.sizes,
            buffers=part.memory.held.buffers,
        )
        if optimizer == "adamw":
            # With states elsewhere the rank with most of them there stands for its kind: numbers that stay may be more.
            more = 0 if states == "device" else max(0, own.scalars - part.memory.held.scalars)
            assert own.total <= part.memory.held.total + more
            alone = estimates.memory(cell, setup, (rank,), part.samples)
            assert alone.needed <= part.memory.needed + more
    fits = all(part.memory.needed <= part.kind.device.memory_bytes for part in mixed.parts)
    assert fits == (planned.missing_bytes == 0) == (planned.time is not None)
    assert planned.missing_bytes == max(part.missing_bytes for part in mixed.parts)
    if planned.time is not None:
        assert planned.time.total_s == max(part.time.total_s for part in mixed.parts if part.time is not None)


@given(MEMORY, st.sampled_from(STAGES[1:]), st.integers(1, 40_000_000))
@settings(max_examples=30)
def test_more_memory_of_a_device_gives_it_a_larger_part(
    memory: list[int], stages: tuple[int, int], more: int
) -> None:
    parts = []
    for own in (memory, [memory[0] + more, *memory[1:]]):
        question = question_of(kinds_of("aabbbc", own, [1, 2, 1.5]))
        mixture = Mixture(Estimates(SUBJECT, question, traces("adamw")), question)
        mixed = mixture.plan(cell_of(Mesh(1, 6), stages, 2)).mixed
        assert mixed is not None
        parts.append((mixed.shares or (1,) * 6)[0] / sum(mixed.shares or (1,) * 6))
    if any(each > 10_000_000 for each in memory):  # so that some device has memory to spare
        assert parts[1] >= parts[0]


def test_what_does_not_fit_equally_fits_in_proportion() -> None:
    question = question_of(kinds_of("aaab", [1, 1], [1, 1]))
    equal = Estimates(SUBJECT, question, traces("adamw")).plan(cell_of(Mesh(1, 4), (3, 3), 1))
    held = equal.memory.held
    own = held.parameters + held.gradients + held.optimizer
    whole = equal.memory.total - own
    # All together have room for 1.1 times what is sharded; b has room for 0.6 of an equal part.
    tight = [whole + own * 19 // 15, whole + own * 3 // 5]
    question = question_of(kinds_of("aaab", tight, [1, 1]))
    planned = Mixture(Estimates(SUBJECT, question, traces("adamw")), question).plan(equal.cell)
    assert planned.missing_bytes == 0
    mixed = planned.mixed
    assert mixed is not None
    assert mixed.equal.tight is not None
    assert str(mixed.equal.tight.kind) == "b"
    assert mixed.beside_equal == "does not fit"
    assert "With equal shares and these batches it does not fit: b lacks 0.0 GiB." in mixed.bought
    assert mixed.shares[0] >= 2 * mixed.shares[3]


def test_a_slow_device_gets_fewer_samples_and_the_step_is_shorter() -> None:
    question = question_of(kinds_of("aabb", [80 << 30] * 2, [2, 1]))
    planned = Mixture(Estimates(SUBJECT, question, traces("adamw")), question).plan(
        cell_of(Mesh(1, 4), (2, 2), 48)
    )
    mixed = planned.mixed
    assert mixed is not None
    assert mixed.pace == pytest.approx((2, 2, 1, 1), rel=0.06)
    assert mixed.batches[:2] == pytest.approx((64, 64), abs=2)
    slow = mixed.parts[1].time
    assert slow is not None
    assert mixed.equal.longer is not None
    assert 1.1 < mixed.equal.longer < 1.5
    # Bytes of the device are moved and its products computed: the rate is that of all ranks over the slowest.
    assert planned.units_per_s == pytest.approx(48 * 64 / max(p.time.total_s for p in mixed.parts if p.time))


def test_states_elsewhere_fit_where_those_of_a_whole_node_do() -> None:
    """Unequal shares fill a node's disk as equal ones do: what counts is the sum over its ranks."""
    kinds = kinds_of("abab", [40_000_000, 5_000_000], [1, 1], outer=2)
    question = question_of(kinds, nodes=2)
    cell = cell_of(Mesh(2, 2), (0, 3), 1, "disk")
    free = Mixture(Estimates(SUBJECT, question, traces("adamw")), question).plan(cell).mixed
    assert free is not None
    assert free.shares[0] > free.shares[1]
    away = [part.memory.away for part in free.parts]
    assert away[0] > away[1]
    for room, fits in ((sum(away), True), (sum(away) - 4, False)):
        cluster = replace(question.cluster, disk=replace(USUAL_DISK, room_bytes=room))
        tight = replace(question, cluster=cluster)
        planned = Mixture(Estimates(SUBJECT, tight, traces("adamw")), tight).plan(cell)
        assert (planned.missing_bytes == 0) == fits


# ---- the runtime's own accounts


def _parts(shares: tuple[int, ...]) -> dict[str, list[int]]:
    """Ranks of equal shares, as kinds have them."""
    found: dict[str, list[int]] = {}
    for rank, share in enumerate(shares):
        found.setdefault("abcd"[sorted(set(shares)).index(share)], []).append(rank)
    return found


@pytest.mark.full(default=["adamw-abca-*", "muon-aabb-*"])
@pytest.mark.parametrize(
    ("names", "memory", "mesh"),
    [
        ("aabb", [30_000_000, 12_000_000], Mesh(1, 4)),
        ("abca", [30_000_000, 12_000_000, 7_000_000], Mesh(1, 4)),
        ("abab", [30_000_000, 12_000_000], Mesh(2, 2)),
        ("ab", [30_000_000, 1_000], Mesh(1, 2)),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_memory_by_kind_is_that_of_the_runtimes_ranks(
    names: str, memory: list[int], mesh: Mesh, optimizer: str
) -> None:
    """To the byte, with the shares that the plan gives, on the rank of each kind that holds most."""
    question = question_of(
        kinds_of(names, memory, [1, 2, 3], mesh.outer), nodes=mesh.outer, optimizer=optimizer
    )
    estimates = Estimates(SUBJECT, question, traces(optimizer))
    found_unequal = False
    for stages in STAGES if mesh.outer == 1 else PAIRS:
        cell = cell_of(mesh, stages, 2)
        mixed = Mixture(estimates, question).plan(cell).mixed
        assert mixed is not None
        found_unequal |= bool(mixed.shares)
        setup = estimates.setup(cell, mixed.shares * mesh.outer)
        for part in mixed.parts:
            rank = fullest_rank(
                Step(setup.layout, setup.placement, setup.sizes, on_cuda=True, ranks=part.kind.ranks)
            )
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world)
            try:
                _require_runtimes_account(part, setup.layout.digest(), cell, mixed.shares, optimizer)
            finally:
                dist.destroy_process_group()
    assert found_unequal


def _require_runtimes_account(
    part: Part, digest: bytes, cell: Cell, shares: tuple[int, ...], optimizer: str
) -> None:
    model = build("gpt-tiny")
    classes: Any = torch.optim.AdamW
    if optimizer == "muon":
        matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]  # type: ignore[union-attr]
        known = set(matrices)
        classes = {
            torch.optim.Muon: matrices,
            torch.optim.AdamW: [p for p in model.parameters() if p not in known],
        }
    outer, inner = cell.mesh.outer, cell.mesh.inner
    made = ZeroOptimizer(
        model,
        classes,
        stage=require_stage(cell.stages if outer > 1 else cell.stages[1]),  # type: ignore[arg-type]
        mesh=(outer, inner) if outer > 1 else None,
        precision="bf16",
        shares=shares or None,
        on_nonfinite="ignore",
    )
    assert made.layout.digest() == digest
    assert part.memory.held == made.predicted_memory()
    if optimizer == "adamw":
        made.backward(model(*SUBJECT.batch(part.samples)))
        made.step()
        made.zero_grad()
        made.backward(model(*SUBJECT.batch(part.samples)))
        held, planned = made.memory(), part.memory.held
        assert (held.parameters, held.gradients, held.optimizer) == (
            planned.parameters,
            planned.gradients,
            planned.optimizer,
        )
        assert held.padding == planned.padding


def _peaks(stages: Sequence[int], shares: tuple[int, ...], batches: tuple[int, ...]) -> list[Peaks]:
    """This rank's peaks, at the most and by kind, in a third step with its own number of samples."""
    torch.set_num_threads(1)
    found = []
    for stage in stages:
        model = build("gpt-tiny")
        made = ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision="bf16", shares=shares)
        tracker = MemoryTracker(partial(held_by, made), "cpu")
        tokens = torch.zeros(batches[dist.get_rank()], 64, dtype=torch.int64)
        for number in range(3):
            tracker.begin_step()
            with tracker if number == 2 else nullcontext():
                made.backward(model(tokens, tokens))
                made.step()
                made.zero_grad()
                tracker.read()
        readings = [sizes for _, sizes in tracker.readings]
        highest = {kind: max(sizes[kind] for sizes in readings) for kind in MEMORY_KINDS}
        found.append((max(readings, key=lambda sizes: sum(sizes.values())), highest))
        dist.barrier()
    return found


def test_the_peak_of_real_ranks_with_shares_and_batches_of_their_own() -> None:
    shares, batches, stages = (3, 1), (12, 4), (1, 2, 3)
    measured = run_ranks(2, _peaks, stages, shares, batches)
    on_hosts = Traces(SUBJECT, on_cuda=False)
    question = replace(question_of(kinds_of("ab", [1, 1], [1, 1])), on_cuda=False)
    estimates = Estimates(SUBJECT, question, on_hosts)
    for number, stage in enumerate(stages):
        cell = cell_of(Mesh(1, 2), (stage, stage), 8)
        setup = estimates.setup(cell, shares)
        for rank in range(2):
            planned = estimates.memory(cell, setup, (rank,), batches[rank])
            require_close(measured[rank][number], (planned.peak, planned.highest))


# ---- what is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpus": 8},
            "--devices h100-80x4,a100-40x4 says which devices there are .*: omit --gpus and --device",
        ),
        ({"device": "h100-80"}, "omit --gpus and --device"),
        ({"nodes": 3}, "8 devices cannot be divided equally among 3 nodes"),
        ({"mesh": "2x4"}, "mesh 2x4: its 2 groups of 4 consecutive ranks have different devices"),
        ({"mesh": "2x3"}, "mesh 2x3 has 6 ranks on its axes, and there are 8"),
        ({"devices": "h100-80x4,a100-40"}, "'a100-40' has no name and number"),
        ({"devices": None}, "no ranks: give --gpus, or --devices"),
    ],
)
def test_what_contradicts_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"devices": "h100-80x4,a100-40x4", "seq_len": 64, "batch_size": 1} | options
    with pytest.raises(UsageError, match=message):
        plan("gpt-tiny", **given)


def test_meshes_are_considered_where_all_groups_have_the_same_kinds() -> None:
    options: dict[str, Any] = {"seq_len": 64, "nodes": 2, "network_gbit": 400, "batch_size": 8}
    alike = plan("gpt-tiny", devices="h100-80x2,a100-40x2,h100-80x2,a100-40x2", stage=3, **options)
    assert {one.cell.mesh for one in alike.fitting} == {Mesh(1, 8), Mesh(2, 4)}
    for one in alike.fitting:
        assert one.mixed is not None
        assert len(one.mixed.shares) == one.cell.mesh.inner
        assert one.mixed.shares[:2] == (one.mixed.parts[0].share,) * 2
    apart = plan("gpt-tiny", devices="h100-80x4,a100-40x4", stage=3, **options)
    assert {one.cell.mesh for one in apart.fitting} == {Mesh(1, 8)}


def test_devices_without_measured_speeds_have_shares_and_paces_but_no_times() -> None:
    found = plan(
        "gpt-tiny", devices="h100-80x4,l40s-48x4", seq_len=64, batch_size=4, stage=3, recompute=False
    )
    assert found.best is not None
    mixed = found.best.mixed
    assert mixed is not None
    assert found.best.time is None
    assert mixed.pace == (2.7,) * 4 + (1.0,) * 4
    assert mixed.batches == (6,) * 4 + (2,) * 4
    assert mixed.equal.longer == pytest.approx(4 / (6 / 2.7))
    assert "the slowest rank computes 1.80 times as long" in mixed.bought
    assert any(
        text.startswith("Batches in bf16 follow the peaks of data sheets") for text in found.assumptions
    )


def test_a_record_gives_the_speed_of_its_own_kind(tmp_path: Path) -> None:
    """l40s has none in the table, so that times come from the record; a record of another device is refused."""
    made = make_record()
    settings = replace(made.settings, nodes=1, precision="bf16", stage=2, device="cuda")
    environment = replace(made.environment, accelerator="NVIDIA L40S") if made.environment else None
    ranks = [replace(made.ranks[0], device="NVIDIA L40S", device_id="GPU-0")]
    phases = Phases(3, 30.0, 60.0, 10.0, None, "clock")
    file = tmp_path / "l40s.json"
    write_record(
        replace(
            made, settings=settings, cell=settings.key, environment=environment, ranks=ranks, phases=phases
        ),
        file,
    )
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "stage": 2, "recompute": False, "record": file}
    found = plan("gpt-tiny", devices="h100-80x2,l40sx2", **options)
    assert found.best is not None
    mixed = found.best.mixed
    assert mixed is not None
    assert all(part.time is not None for part in mixed.parts)
    # The record's tiny model took 200 ms a step there: some thousand times as long as an H100's table says.
    assert mixed.pace[0] > 100
    assert mixed.batches == (7, 7, 1, 1)
    assert "The speed of l40s is that of record 00000000, gpt-tiny." in found.assumptions
    with pytest.raises(UsageError, match="measured on l40s, and h100-80, a100-40 are planned"):
        plan("gpt-tiny", devices="h100-80x2,a100-40x2", **options)


def test_many_ranks_are_listed_in_short() -> None:
    assert listed((3, 3, 1.5), "(", ")") == "(3, 3, 1.5)"
    text = listed((3,) * 16 + (1,) * 16, "(", ")")
    assert text == "(3,) * 16 + (1,) * 16"
    assert eval(listed((2.5,) * 32, "[", "]")) == [2.5] * 32

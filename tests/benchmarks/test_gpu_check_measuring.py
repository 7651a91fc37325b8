"""The measuring parts of scripts/gpu-check at small sizes on a host, their arithmetic, and the page made of them."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_check import cells, report
from benchmarks.gpu_check.bars import MODEL, bars, to_floor
from benchmarks.gpu_check.cells import measure_rows
from benchmarks.gpu_check.engines import Row, row_of, traces_of
from benchmarks.gpu_check.place import CheckFailed, Place
from benchmarks.gpu_check.step_trace import read_trace
from benchmarks.gpu_check.wire import OnWire, Wire
from benchmarks.gpu_check.workloads import SIZES, load_sized, model_named, name_of
from tests.support.distributed import run_alone
from zerokit import ZeroOptimizer
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.plans.subjects import PlanBeside
from zerokit.bench.workloads.own import resolve
from zerokit.placement import Mesh, Placement, stage_of
from zerokit.runtime.precision import Precision

CPU = torch.device("cpu")
HERE = "benchmarks.gpu_check"


def run_part(function: str, out: str) -> dict[str, Any]:
    module, name = function.split(":")
    part = getattr(importlib.import_module(f"{HERE}.{module}"), name)
    found: dict[str, Any] = part(Place(CPU, True, Path(out)))
    json.dumps(found, allow_nan=False)
    assert not dist.is_initialized()
    return found


PARTS = {
    "cells:cells_a": ["bf16 floor", "zerokit 3", "FSDP2 3"],
    "cells:cells_b": [
        *("bf16 floor", "zerokit 2", "zerokit 1", "zerokit 0", "compute only 0", "DDP"),
        *("bf16 floor", "zerokit 3", "FSDP2 3", "zerokit 3 · states fp8", "zerokit 2"),
    ],
    "eighth:eighth": ["zerokit 3", "FSDP2 3", "zerokit 2"],
    "host_time:host": ["bf16 floor", "FSDP2 3", "zerokit 3", "zerokit 2", "zerokit 1", "zerokit 0"],
    "compiled:compile_blocks": ["zerokit 3", "zerokit 0"],
}


@pytest.mark.full(default=["cells:cells_a", "eighth:eighth", "host_time:host"])
@pytest.mark.parametrize("function", PARTS)
def test_each_part_measures_all_its_rows_on_a_host(function: str, tmp_path: Path) -> None:
    found = run_alone(run_part, function, str(tmp_path))
    assert [row["row"] for row in found["rows"]] == PARTS[function]
    assert found["left_out"] == {}
    for row in found["rows"]:
        assert row["median_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["median_ms"] * 1e3)
        assert row["mfu"] is None, "the peak of a host is not known"
        if row["row"].startswith("zerokit"):
            assert row["reported_bytes"] == row["predicted_bytes"]
            assert row["planned_peak_bytes"] > row["predicted_bytes"]
        if function == "eighth:eighth":
            assert row["trace"]["received_bytes"] > 0
        if "trace" in row:
            with gzip.open(tmp_path / row["trace"]["file"]) as file:
                assert json.load(file)["traceEvents"]
    if function == "cells:cells_a":
        floor, *others = (row["losses"] for row in found["rows"])
        assert all(other == floor for other in others), "a floor computes what it is the floor of"
    if function == "compiled:compile_blocks":
        assert all(row["frames"] for row in found["rows"])


def test_models_are_found_by_the_names_of_settings() -> None:
    for name, size in SIZES.items():
        assert name_of(model_named(name)) == name
        if size.config.parameters < 1_000_000:
            own = resolve(model_named(name))
            assert sum(p.numel() for p in own.build().parameters()) == size.config.parameters
            tokens, targets = own.batch(torch.Generator().manual_seed(0), 3)
            assert tokens.shape == targets.shape == (3, size.length)
            assert tokens[:, 1:].equal(targets[:, :-1])
    many = SIZES["gpt-350m-100-layers"].config
    with torch.device("meta"):
        tensors = [p.shape for p in resolve(model_named("gpt-350m-100-layers")).build().parameters()]
    assert len(tensors) > 1000
    assert many.parameters == pytest.approx(350e6, rel=0.03)


class StubLive:
    """`Live` without an engine: what happens at construction is the next of `outcomes`."""

    outcomes: Sequence[Exception | None] = ()
    losses: Sequence[float] = (1.0,)
    told: list[str]

    def __init__(self, row: Row, accelerator: Accelerator, dress: object) -> None:
        cls = type(self)
        outcome, *cls.outcomes = [*cls.outcomes, None]
        cls.told.append(f"build {row.name}")
        if outcome is not None:
            raise outcome
        self.row, self.seconds, self.step_s, self.transient_bytes = row, 10.0, 2.0, 0

    def turn(self, steps: int) -> float:
        self.told.append(f"turn of {self.row.name}")
        return 1.0

    def warnings_of_waits(self) -> None:
        return None

    def trace(self, folder: Path, part: str) -> dict[str, Any]:
        self.told.append(f"trace of {self.row.name}")
        return {}

    def figures(self) -> dict[str, Any]:
        figures = {"row": self.row.name, "model": "m", "median_ms": 1.0, "losses": self.losses}
        return {**figures, "skipped_steps": 0}


ROWS = [row_of("gpt-tiny", "zerokit", stage) for stage in (3, 2, 1)]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubLive]:
    class Stub(StubLive):
        told: list[str] = []  # noqa: RUF012  # each test's own

    monkeypatch.setattr(cells, "Live", Stub)
    return Stub


def measured(left_s: float = math.inf) -> dict[str, Any]:
    place = Place(CPU, True, Path(), limit_s=left_s)
    return measure_rows(place, "part", ROWS, Accelerator(CPU, "gloo"))


def test_an_engine_that_fails_is_a_fault_and_the_others_are_measured(stub: type[StubLive]) -> None:
    stub.outcomes = [None, ValueError("no such stage")]
    with pytest.raises(CheckFailed, match="zerokit 2, gpt-tiny: ValueError: no such stage") as raised:
        measured()
    assert [row["row"] for row in raised.value.data["rows"]] == ["zerokit 3", "zerokit 1"]


def test_what_has_no_room_beside_others_is_measured_behind_them(stub: type[StubLive]) -> None:
    stub.outcomes = [None, torch.OutOfMemoryError("full")]
    found = measured()
    assert [row["row"] for row in found["rows"]] == ["zerokit 3", "zerokit 2", "zerokit 1"]
    assert [row["beside"] for row in found["rows"]] == [0, 1, 1]
    first = stub.told.index("turn of zerokit 3")
    assert stub.told[:first] == ["build zerokit 3", "build zerokit 2"]
    assert stub.told[first + cells.ROUNDS] == "build zerokit 2"
    traced = ["trace of zerokit 2", "trace of zerokit 1", "build zerokit 3", "trace of zerokit 3"]
    assert stub.told[-4:] == traced, "once all is measured"


def test_what_never_fits_is_a_fault(stub: type[StubLive]) -> None:
    stub.outcomes = [torch.OutOfMemoryError("full"), torch.OutOfMemoryError("full")]
    with pytest.raises(CheckFailed, match="zerokit 3, gpt-tiny: OutOfMemoryError: full") as raised:
        measured()
    assert len(raised.value.data["rows"]) == 2


def test_rows_for_which_no_time_is_left_are_named(stub: type[StubLive]) -> None:
    """Ten seconds build a row, and three steps of two seconds measure it."""
    found = measured(left_s=1.3 * (10 + 2 * 6) - 0.1)
    assert [row["row"] for row in found["rows"]] == ["zerokit 3"]
    assert list(found["left_out"]) == ["zerokit 2, gpt-tiny", "zerokit 1, gpt-tiny"]
    assert "left out: zerokit 2, gpt-tiny" in found["row"]


def test_steps_that_train_nothing_are_a_fault(stub: type[StubLive]) -> None:
    stub.losses = [1.0, math.nan]
    with pytest.raises(CheckFailed, match="losses"):
        measured()


def pass_over_wire(stage: int) -> tuple[int, int, bool]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    zero = ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), bucket_mb=0.001, lr=1e-2)
    wire = Wire(None)
    with zero.runtime.collectives.observed(OnWire(zero, wire)):
        for _ in range(3):
            wire.taken()
            loss = model(torch.ones(2, 16)).sum()
            zero.backward(loss)
            zero.step()
            zero.zero_grad()
    moved = zero.traffic().received_bytes
    return wire.taken(), moved, math.isfinite(loss.item())


@pytest.mark.parametrize("stage", [2, 3])
def test_the_wire_is_given_what_a_rank_receives(stage: int) -> None:
    passed, received, finite = run_alone(pass_over_wire, stage)
    assert passed == received > 0
    assert finite, "gathered pieces of others are values"


def test_a_device_waits_as_long_as_the_bytes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    wire = Wire(cycles_per_s=1.7e9, bytes_per_s=340e9)
    wire.pass_bytes(340_000_000)
    wire.pass_bytes(68_000_000)
    assert slept == [1_700_000, 340_000], "a millisecond, and a fifth of one"
    assert (wire.taken(), wire.taken()) == (408_000_000, 0)


def test_what_a_gpu_row_is_compared_with_is_planned_and_counted_on_a_host() -> None:
    row = row_of("gpt3-1.3b", "zerokit", 3)
    loaded = load_sized(row.settings)
    products = SIZES["gpt3-1.3b"].config.parameters - 2048 * 2048
    assert loaded.model.flops_per_unit == 6 * products + 12 * 24 * 2048 * 1024
    peaks = []
    for world in (1, 8):
        placement, traces = Placement.of(3, Mesh(1, world)), traces_of(loaded, on_cuda=True)
        settings = replace(row.settings, nproc_per_node=world)
        name = "NVIDIA H100 80GB HBM3"
        plan = PlanBeside(settings, loaded, placement, Precision.of("bf16"), name, traces).planned
        assert plan.total_bytes is not None
        assert plan.step_ms is not None
        peaks.append(plan.total_bytes)
    assert peaks[0] - peaks[1] == pytest.approx(row.state_bytes * 7 / 8, rel=0.05)
    assert row.state_bytes < peaks[0] < 80 << 30


def event(
    category: str, name: str, start: float, length: float, number: int, **args: object
) -> dict[str, Any]:
    about = {"correlation": number, **args}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": about}


def launched(number: int, host: float, start: float, length: float, name: str) -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", host, 1, number),
        event("kernel", name, start, length, number),
    ]


def test_a_trace_says_what_a_step_launches_copies_waits_for_and_exposes() -> None:
    """Microseconds: computation from 100 to 200 and from 300 to 401, communication from 150 to 350, a copy in it."""
    events = [
        *launched(1, 0, 10, 1, "mark"),
        event("cuda_runtime", "cudaDeviceSynchronize", -5, 3, 0),  # of the profiler's own start
        *launched(2, 20, 100, 100, "gemm"),
        *launched(3, 30, 150, 200, "ncclDevKernel_AllGather_RING_LL"),
        event("cuda_runtime", "cudaMemcpyAsync", 40, 1, 4),
        event("gpu_memcpy", "Memcpy DtoD", 210, 40, 4, bytes=4096),
        event("cuda_runtime", "cudaStreamSynchronize", 50, 5, 0),
        event("cuda_runtime", "cudaEventQuery", 56, 1, 0),
        *launched(5, 60, 300, 101, "gemm"),
        event("gpu_user_annotation", "nccl:all_gather", 150, 200, 6),
        *launched(9, 500, 501, 1, "mark"),
        event("cuda_runtime", "cudaDeviceSynchronize", 502, 3, 0),
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    random.Random(0).shuffle(events)
    found = read_trace(events)
    assert found is not None
    assert (found.launches, found.copies, found.copied_bytes, found.syncs) == (3, 1, 4096, 1)
    assert found.busy_ms == pytest.approx(0.301)
    assert found.communication_ms == pytest.approx(0.2)
    assert found.exposed_ms == pytest.approx(0.1 - 0.04)
    assert found.top[0] == {"name": "gemm", "calls": 2, "ms": pytest.approx(0.201)}


def test_a_trace_without_launches_says_nothing() -> None:
    assert read_trace([event("cpu_op", "aten::add", 0, 1, 1)]) is None


def row(name: str, ms: float, model: str = MODEL, **more: Any) -> dict[str, Any]:
    figures = {
        "row": name,
        "model": model,
        "parameters": 1_316_000_000,
        "tokens": 8192,
        "median_ms": ms,
        "tokens_per_s": 8192e3 / ms,
        "host_process_ms": ms / 2,
    }
    return {**figures, "mfu": None, "flops_formula": "6N", "trace": {}, **more}


def verdicts(**parts: list[dict[str, Any]]) -> dict[str, str]:
    data = {name.replace("_", "-"): {"rows": rows} for name, rows in parts.items()}
    return {one.what: one.verdict for one in bars(data)}


def test_without_figures_nothing_is_met() -> None:
    assert set(verdicts().values()) == {"not measured"}


@pytest.mark.parametrize("seed", range(20))
def test_bars_of_speed_compare_with_the_floor_of_the_same_part(seed: int) -> None:
    draw = random.Random(seed)
    floors = [draw.uniform(100, 200) for _ in range(2)]
    ratios = {name: draw.uniform(0.98, 1.1) for name in ("zerokit 1", "zerokit 2", "zerokit 3", "FSDP2 3")}
    of_part = {
        "cells_a": [row("bf16 floor", floors[0])]
        + [row(name, floors[0] * ratios[name]) for name in ("zerokit 3", "FSDP2 3")],
        "cells_b": [row("bf16 floor", floors[1]), row("bf16 floor", 1.0, "another")]
        + [row(name, floors[1] * ratios[name]) for name in ("zerokit 1", "zerokit 2")],
    }
    found = verdicts(**of_part)
    for name in ("zerokit 1", "zerokit 2", "zerokit 3"):
        met = "met" if ratios[name] <= 1.02 else "not met"
        assert found[f"{name}: step over the bf16 floor's"] == met
        met = "met" if ratios[name] <= ratios["FSDP2 3"] else "not met"
        assert found[f"{name}: step over FSDP2 3's"] == met
    assert to_floor(row("x", 3.0, "unknown"), of_part["cells_a"]) is None


def test_bars_of_the_host_of_waits_and_of_memory() -> None:
    host = [row("FSDP2 3", 40.0), row("zerokit 3", 19.0), row("zerokit 2", 21.0)]
    plan = {"peak_allocated_bytes": 1_009, "planned_peak_bytes": 1_000}
    quiet = row("zerokit 3", 1.0, waits=[], trace={"syncs": 0}) | plan
    found = verdicts(host=host, cells_a=[quiet])
    assert found["zerokit 3: the host's time over FSDP2 3's"] == "met"
    assert found["zerokit 2: the host's time over FSDP2 3's"] == "not met"
    assert found["zerokit 0: the host's time over FSDP2 3's"] == "not measured"
    waits = "zerokit: the most waits of the host for the device in a step"
    assert found[waits] == "met"
    memory = f"zerokit 3, {MODEL}, cells-a: peak beside the plan's"
    assert found[memory] == "met"
    loud = [replaced | {"peak_allocated_bytes": 989} for replaced in (quiet | {"waits": ["x.py:1"]},)]
    found = verdicts(cells_a=[quiet, *loud])
    assert found[waits] == "not met"
    assert found[memory] == "not met"
    assert verdicts(cells_a=[quiet | {"trace": {"syncs": 2}}])[waits] == "not met"
    # What keeps states elsewhere may wait for them.
    assert verdicts(cells_a=[loud[0] | {"row": "zerokit 3 · states host"}])[waits] == "not measured"


def line(part: str, data: dict[str, Any] | None, error: str = "") -> str:
    told = {"part": part, "ok": not error, "seconds": 12.3, "error": error, "data": data}
    return json.dumps(told) + "\n"


USED = {"mfu": 0.42, "peak_flops_per_s": 989.4e12, "precision": "bf16", "device": "A GPU"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        row("bf16 floor", 100.0, mfu=USED, peak_allocated_bytes=40 << 30),
        row("zerokit 3", 101.0, mfu=USED, waits=[], trace={"launches": 1234, "syncs": 0, "exposed_ms": 1.5}),
    ]
    left_out = {"FSDP2 3, gpt3-1.3b": "the part's time was nearly over"}
    path = tmp_path / "results.jsonl"
    path.write_text(
        line("env", {"device": "A GPU", "driver": "580.1", "torch": "2.11.0"})
        + line("cells-a", {"rows": rows, "left_out": left_out})
        + line("cells-a", None, "was not over after 75 s")
        + line("eighth", None, "RuntimeError: no | wire\nat all")
        + '{"part": "host", "ok"'
    )
    return path


def test_the_page_says_what_was_measured_and_what_is_missing(results: Path) -> None:
    page = report.page(report.read_lines(results), date="2026-12-01", command="scripts/gpu-check --short")
    assert "device A GPU, driver 580.1, torch 2.11.0" in page
    assert "| zerokit 3: step over the bf16 floor's | 1.010 | 1.02 | met |" in page
    assert "| zerokit 2: step over the bf16 floor's |  | 1.02 | not measured |" in page
    assert "| zerokit 3 | 101.00 | 1.010 |" in page, "an earlier run's figures stay"
    assert "1,234" in page
    assert "MFU is of 989.4 TFLOP/s" in page
    assert "Left out: FSDP2 3, gpt3-1.3b (the part's time was nearly over)." in page
    assert "| eighth | FAILED | 12 | RuntimeError: no \\| wire at all |" in page
    assert "| host | not run |" in page
    assert page.count("Not measured.") == len(report.MEASURING) - 1
    assert "| zerokit 3 | 101.0 | 1.010 |" in page.partition("README")[2]


def test_a_page_without_a_machine_says_so() -> None:
    page = report.page([], date="2026-12-01", command="scripts/gpu-check")
    assert "The part env is missing" in page
    assert f"{MODEL} was not measured." in page


def test_the_command_writes_the_page(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([str(results), "--date", "2026-12-01"])
    printed = capsys.readouterr().out
    report.main([str(results), "--date", "2026-12-01", "--output", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == printed
    assert printed.startswith("# A check on one GPU, 2026-12-01")


def test_rows_know_what_they_hold() -> None:
    parameters = SIZES["gpt-tiny"].config.parameters
    floor = row_of("gpt-tiny", "compute-only", floor=True)
    assert (floor.name, floor.state_bytes) == ("bf16 floor", 18 * parameters)
    eighth = row_of("gpt-tiny", "zerokit", 3, world=8)
    assert eighth.state_bytes == 18 * parameters // 8
    fp8 = replace(eighth, settings=replace(eighth.settings, states="fp8"))
    assert fp8.name == "zerokit 3 · states fp8"
    assert fp8.state_bytes == 12 * parameters // 8

"""Figures that README and docs/ quote are those of their records, and `zerokit compare` decides as they say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from zerokit.bench.comparison.cells import Cell, make_cells
from zerokit.bench.comparison.differences import difference, disagreements
from zerokit.bench.tracking.store import load_run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
STEP, PEAK = "step/p50_ms", "memory/peak_host_mib"

PEERS = {
    "every rank alone": "compute only 0",
    "DDP": "DDP",
    "ZeroRedundancyOptimizer": "ZeroRedundancy",
    "zerokit stage 1": "zerokit 1",
    "zerokit stage 2": "zerokit 2",
    "FSDP2": "FSDP2 3",
    "FSDP2, stage 3": "FSDP2 3",
    "zerokit stage 3": "zerokit 3",
}
WIRES = {
    "DDP": "DDP · fp32 · own wire",
    "DDP, PyTorch's bf16 hook": "DDP · fp32 · bf16 wire",
    "stage 2": "zerokit 2 · fp32 · own wire",
    "stage 2, `--wire bf16`": "zerokit 2 · fp32 · bf16 wire",
    "stage 2, `--wire bf16 --precision bf16`": "zerokit 2 · bf16 · bf16 wire",
    "FSDP2": "FSDP2 3 · fp32 · own wire",
    "stage 3": "zerokit 3 · fp32 · own wire",
    "stage 3, `--wire bf16`": "zerokit 3 · fp32 · bf16 wire",
}
COMMANDS, CALLS = "2026-11-25-2-core-checkpoint-commands", "2026-11-25-2-core-checkpoints"
DEEPSPEED = "2026-11-25-2-core-deepspeed-checkpoint"
CHECKPOINTS = {
    "`zerokit reshard --to 8`, verified and synced": [
        (COMMANDS, "zerokit reshard --to 8"),
        (COMMANDS, "cp + sync (checkpoint)"),
    ],
    "`zerokit consolidate`": [
        (COMMANDS, "zerokit consolidate"),
        (COMMANDS, "cp + sync (weights)"),
        (CALLS, "torch consolidate_safetensors (weights)"),
    ],
    "`zerokit.save`": [(CALLS, "zerokit.save"), (CALLS, "write and sync"), (CALLS, "dcp.save")],
    "`zerokit.load`, verified": [(CALLS, "zerokit.load"), (CALLS, "dcp.load")],
    "`zerokit convert --to 8`": [
        (DEEPSPEED, "zerokit convert --to 8"),
        (DEEPSPEED, "cp + sync (checkpoint)"),
    ],
    "`zerokit reshard --to 8`, as DeepSpeed's": [
        (DEEPSPEED, "zerokit reshard --to 8"),
        (DEEPSPEED, "cp + sync (checkpoint)"),
    ],
    "`zerokit convert --format dcp`": [
        (DEEPSPEED, "zerokit convert --format dcp"),
        (DEEPSPEED, "cp + sync (checkpoint)"),
    ],
    "`zerokit consolidate --dtype bf16`": [
        (DEEPSPEED, "zerokit consolidate, bf16"),
        (DEEPSPEED, "read masters, cp + sync (bf16 weights)"),
    ],
    "`zerokit convert` of that DCP checkpoint": [
        (DEEPSPEED, "zerokit convert, of DCP"),
        (DEEPSPEED, "cp + sync (DCP checkpoint)"),
    ],
    "DeepSpeed's `zero_to_fp32`, parameters only": [(DEEPSPEED, "DeepSpeed zero_to_fp32 (parameters)")],
    "torch's `dcp_to_torch_save`": [(DEEPSPEED, "torch dcp_to_torch_save")],
}


def rows(page: Path, words: str) -> list[list[str]]:
    """The rows of the first table after these words, a list of cells each, without the two lines of its head."""
    text = page.read_text().partition(words)[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None, (page, words)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def cells_of(folder: str, baseline: str) -> dict[str, Cell]:
    """What `zerokit compare FOLDER --baseline BASELINE` compares, by label."""
    found = {cell.label: cell for cell in make_cells([load_run(str(RESULTS / folder))], baseline)}
    assert baseline in found
    return found


def assert_ratio(said: str, cell: Cell, other: Cell, metric: str = STEP) -> None:
    """`said` is "0.86 ≈", or "0.86, within the noise", where the record does not decide, else "1.47"."""
    change = difference(cell, other, metric)
    assert change is not None
    assert float(said.split()[0].rstrip(",")) == pytest.approx(1 + change.relative, abs=0.00501)
    assert (change.verdict == "within noise") == ("≈" in said or "within the noise" in said), (said, change)


def assert_table(table: Sequence[Sequence[str]], folder: str, names: dict[str, str]) -> None:
    """Each row: a name, milliseconds, their ratio to DDP or FSDP2, and what it is a ratio of if that is not DDP."""
    by_ddp = cells_of(folder, names["DDP"])
    by_fsdp = cells_of(folder, names["FSDP2"])
    for name, ms, ratio, *_ in table:
        cell = by_ddp[names[name]]
        assert float(ms) == pytest.approx(cell.value(STEP), abs=0.51), name
        for said in re.findall(r"[\d.]+[^;()]*", ratio):
            cells = by_fsdp if "FSDP2" in said else by_ddp
            assert_ratio(said, cells[names[name]], cells[names["FSDP2" if "FSDP2" in said else "DDP"]])


@pytest.mark.parametrize("page", [README, PERFORMANCE], ids=lambda path: path.name)
def test_engines(page: Path) -> None:
    table = rows(page, "## Benchmark" if page == README else "## Engines")
    assert_table(table, "2026-11-22-2-core-peers", PEERS)
    by_ddp, by_fsdp = (cells_of("2026-11-22-2-core-peers", one) for one in ("DDP", "FSDP2 3"))
    for name, _, _, peak, *ratios in table:
        cell = by_ddp[PEERS[name]]
        assert float(peak) == pytest.approx(cell.value(PEAK), abs=0.51), name
        for said in re.findall(r"[\d.]+[^;()]*", " ".join(ratios)):
            cells, other = (by_fsdp, "FSDP2 3") if "FSDP2" in said else (by_ddp, "DDP")
            assert_ratio(said, cells[PEERS[name]], cells[other], PEAK)


def test_engines_have_bitwise_identical_losses() -> None:
    assert disagreements(list(cells_of("2026-11-22-2-core-peers", "DDP").values()), 0.0) == []


def test_the_first_lines_of_the_readme() -> None:
    """Stages 1 and 2 do not differ from DDP by more than the noise, and stage 3 does from FSDP2."""
    text = " ".join(README.read_text().split())
    (said,) = re.findall(r"stage 3 takes ([\d.]+) of FSDP2's step", text)
    cells = cells_of("2026-11-22-2-core-peers", "FSDP2 3")
    assert_ratio(said, cells["zerokit 3"], cells["FSDP2 3"])
    assert "Stages 1 and 2 differ from DDP by less than the noise of that record" in text
    cells = cells_of("2026-11-22-2-core-peers", "DDP")
    verdicts = [difference(cells[f"zerokit {stage}"], cells["DDP"], STEP) for stage in (1, 2)]
    assert [one and one.verdict for one in verdicts] == ["within noise"] * 2
    mib = int(re.findall(r"less time than `cp -r` and `sync`, and (\d+) MiB", text)[0])
    figures = figures_of(COMMANDS)
    ours, copied = figures["zerokit reshard --to 8"], figures["cp + sync (checkpoint)"]
    assert mib == round(median(ours["peak_bytes"]) / 2**20)
    assert all(mine < its for mine, its in zip(ours["seconds"], copied["seconds"], strict=True))


def test_a_slow_link() -> None:
    folder, table = "2026-11-22-2-core-wire", rows(PERFORMANCE, "## A slow link")
    assert_table(table, folder, WIRES)
    cells = cells_of(folder, WIRES["DDP"])
    for name, _, _, megabytes in table:
        if megabytes:
            traffic = cells[WIRES[name]].first.traffic
            assert traffic is not None
            assert int(megabytes) == round(traffic.bytes / 1e6)


def figures_of(record: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((RESULTS / f"{record}.json").read_text())["figures"]
    return figures


def test_checkpoints() -> None:
    tables = rows(PERFORMANCE, "## Checkpoints") + rows(PERFORMANCE, "A DeepSpeed checkpoint of 2.8 GB")
    assert {row[0] for row in tables} == CHECKPOINTS.keys()
    for name, seconds, others, peak in tables:
        said = [seconds, *re.findall(r": ([\d.]+)", others)]
        figures = [figures_of(record)[figure] for record, figure in CHECKPOINTS[name]]
        assert [f"{median(one['seconds']):.2f}" for one in figures] == said, name
        if peak:
            assert f"{median(figures[0]['peak_bytes']) / 2**20:,.0f} MiB" == peak, name


def test_local_steps() -> None:
    text = " ".join((ROOT / "docs" / "slow-links.md").read_text().split())
    jobs = json.loads((RESULTS / "2026-11-24-2-core-local-steps-loss.json").read_text())["jobs"]
    means = {
        kind: fmean(job["held_out"] for name, job in jobs.items() if name.endswith(f", {kind}"))
        for kind in ("every step", "local SGD (mean)", "DiLoCo")
    }
    ((averaged, diloco),) = re.findall(r"was ([\d.]+) \(local SGD\) to ([\d.]+) \(DiLoCo\) times", text)
    assert float(averaged) == pytest.approx(means["local SGD (mean)"] / means["every step"], abs=0.0051)
    assert float(diloco) == pytest.approx(means["DiLoCo"] / means["every step"], abs=0.0051)

    runs = json.loads((RESULTS / "2026-11-25-2-core-islands.json").read_text())["runs"]
    every = {name: [rank for run in case for rank in run] for name, case in runs.items()}
    steps = {name: median(rank["step_ms"] for rank in ranks) for name, ranks in every.items()}
    flying = "H = 50, 3 fragments in flight"
    ((pace, peak),) = re.findall(r"reach ([\d.]+) of the throughput .*? over 100 ms is ([\d.]+) of its", text)
    assert float(pace) == pytest.approx(steps["alone"] / steps[flying], abs=0.0051)
    assert float(peak) == pytest.approx(
        median(one["peak"] / one["mean"] for one in every[flying]), abs=0.0051
    )
    (waited,) = re.findall(r"that is waited for reaches ([\d.]+)", text)
    assert float(waited) == pytest.approx(steps["alone"] / steps["H = 50"], abs=0.0051)


def test_every_record_that_is_named_is_there() -> None:
    for page in (README, *(ROOT / "docs").glob("*.md")):
        for name in re.findall(
            r"(?:benchmarks/results/)?(\d{4}-\d\d-\d\d-2-core-[\w.-]*\w)", page.read_text()
        ):
            assert (RESULTS / name).exists(), (page.name, name)


def test_every_result_is_named_with_the_script_that_makes_it() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert not [path for path in RESULTS.iterdir() if path.name != "README.md" and path.name not in text]
    scripts = set(re.findall(r"python (benchmarks/\w+\.py)", text))
    assert scripts
    assert not [script for script in scripts if not (ROOT / script).is_file()]

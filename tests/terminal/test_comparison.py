"""What benches and sweeps print, on wide and narrow terminals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.records import MIB, make_cell, make_failure, make_record, make_sweep, paced
from zerokit.bench.benches import write_report
from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.comparison.details import notes
from zerokit.bench.record.journal import Part
from zerokit.bench.record.record import Record, Run, summarise
from zerokit.terminal.comparison import show
from zerokit.terminal.display import Display
from zerokit.text import mib, ms, rate

WIDTHS = (80, 160)


def table(records: Sequence[Record], width: int) -> str:
    """On a terminal."""
    console = Console(width=width, highlight=False, force_terminal=True, color_system=None)
    with console.capture() as capture:
        show(console, make_cells([Run("", tuple(records))]))
    return capture.get()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_is_shown_at_any_width(width: int) -> None:
    shown = table(make_sweep(), width)
    lines = shown[: shown.index(": unsupported: ")].splitlines()[:-1]
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("gpt-34m (33.7 M parameters)")
    assert "…" not in shown
    words = " ".join(shown.split())
    for record in make_sweep():
        if record.results is not None:
            assert f"{record.results.step.p50:,.0f}" in words
    for text in ("unsupported", "out of memory", "failed", "ValueError: not today", "7.5 GiB are available"):
        assert text in words


def test_the_optimizer_and_its_share_of_the_step_are_named() -> None:
    (share,) = re.findall(r"^optimizer's share +10.2 % +(.*)", table([make_cell()], 160), re.MULTILINE)
    assert share.strip() == "adamw: clipping, its step and zeroing of these steps"
    muon = [make_cell("ddp", 0, optimizer="muon"), make_cell("fsdp2", 3, optimizer="muon")]
    both = table([make_cell("ddp", 0), *muon], 160)
    for text in ("DDP · adamw", "DDP · muon", "FSDP2 3 · muon", "optimizer's share"):
        assert text in both
    assert table(muon, 160).startswith("gpt-34m (33.7 M parameters), fp32, muon, 2 ranks")
    # With many cells, one of which has another optimizer than AdamW.
    assert "optimizer's share" not in " ".join(table(make_sweep(), 200).split())
    assert "optimizer's share" in " ".join(table([*make_sweep(), *muon], 300).split())


def test_states_elsewhere_are_named_with_what_they_cost() -> None:
    away = make_cell(states="/nvme")
    state = {"parameters": 6 * MIB, "disk": 5 * MIB, "visiting": MIB, "total": 6 * MIB}
    away = replace(away, ranks=[replace(rank, memory_bytes=state) for rank in away.ranks])
    shown = table([away], 160)
    assert re.search(
        r"^states elsewhere +5\.00 MiB +a rank's masters and states, on /nvme between", shown, re.MULTILINE
    )
    assert "visits of states are part of it" in shown
    both = table([make_cell(), away], 160)
    for text in ("states device", "states /nvme", "states elsewhere", "optimizer's share"):
        assert text in both
    assert "states elsewhere" not in table([make_cell(), make_cell(stage=3)], 160)


def test_rounds_have_an_error_and_single_runs_say_that_nothing_is_known() -> None:
    single, shown = table(make_sweep(), 200), table(make_sweep(3), 200)
    assert single.startswith("gpt-34m (33.7 M parameters), fp32, 2 ranks on 2 nodes, batch 2, gloo\n")
    (row,) = re.findall(r"^zerokit 3 .*", single, re.MULTILINE)
    assert "% ?" in row
    assert "±" not in row.split("%")[0]
    assert "? is not known: a single run does not show" in single
    assert re.search(r"^zerokit 3 +9\d\d ±\d+ +\+2\d %", shown, re.MULTILINE)
    assert "means of 3 rounds" in shown
    assert " ? " not in shown
    partly = [make_cell("ddp", 0), replace(make_failure("failed", "boom", "ddp", 0, repeat=1), sweep=None)]
    assert "DDP (1 of 2 rounds): failed: boom" in table(partly, 100)


def test_a_sweep_is_compared_with_the_cell_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = make_sweep(3)
    Display(2).table(records, "FSDP2 3")
    shown = capsys.readouterr().out
    assert "Changes are against FSDP2 3." in shown
    assert write_report(records, tmp_path / "page.html", pytest.fail, "FSDP2 3")
    assert "are against FSDP2 3" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_figure_that_decides_is_named(tmp_path: Path) -> None:
    """Where milliseconds and paced steps of a row point in different directions."""
    records = make_sweep(3)
    words = " ".join(table(records, 200).split())
    assert "so that the machine's speed cancels: it decides where milliseconds say otherwise." in words
    assert write_report(records, tmp_path / "page.html", pytest.fail)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (
        "The machine's speed cancels from the paced step: it decides where milliseconds say otherwise."
        in page
    )


def test_a_cost_below_its_error_is_within_noise() -> None:
    noisy = [make_cell(stage=stage, step_ms=500.0) for stage in (1, 2)]
    assert re.search(r"communication +ms +within noise", table(noisy, 160))
    assert re.search(r"communication +within noise +±", table([noisy[0]], 160))


def test_drift_is_said_first() -> None:
    lines = table([paced(1.0), paced(1.33, repeat=1), paced(1.1, repeat=2)], 160).splitlines()
    assert lines[1] == "The machine's speed changed between runs: the same work took up to 34 % longer."
    assert "speed changed" not in table([paced(1.0), paced(1.05, repeat=1)], 160)
    other = paced(1.33, repeat=1)
    assert other.environment is not None
    other = replace(other, environment=replace(other.environment, cores=64))
    assert "speed changed" not in table([paced(1.0), other], 160)


def test_a_loss_that_was_not_finite_is_said_first() -> None:
    record = make_record(loss=[5.5, 5.0, None, 4.5])
    assert table([record], 160).splitlines()[1] == "zerokit 2: the loss was not finite at step 3."


def test_stages_that_an_engine_does_not_have_share_a_reason() -> None:
    records = [
        make_failure("unsupported", f"ddp has no stage {stage}: it has 0", "ddp", stage) for stage in (1, 2)
    ]
    assert "DDP 1, DDP 2: unsupported: it has 0\n" in table(records, 100)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_bench_fits(width: int, device: str) -> None:
    record = make_cell(device=device, precision="bf16")
    shown = table([record], width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    assert record.results is not None
    for text in ("communication", "exposed", "forward", "reduce-scatter", "GB/s"):
        assert text in shown
    assert ("MFU" in shown) == (device == "cuda")
    assert ("peak CUDA" in shown) == (device == "cuda")
    assert ("step mean, wall" in shown) == (device == "cuda")
    assert ("of the device" in " ".join(shown.split())) == (device == "cuda")


def test_a_few_steps_have_no_interval() -> None:
    said = [notes(record)["step/p50_ms"].split("; ")[1] for record in (make_record(), make_cell())]
    assert said[0] == "all between 100.0 ms and 300.0 ms"
    assert said[1].startswith("95 % between ")


def test_a_job_that_was_restarted_tells_its_parts() -> None:
    parts = [Part(4, 2, 1, 23, 0, 16, "rank 1 was killed\nlogs: x"), Part(2, 1, 21, 41, 320, 8, "finished")]
    record = replace(make_cell(), parts=parts)
    shown = table([record], 160)
    assert "1×  all figures except losses belong to the last part" in shown
    assert "steps 1–23  4 ranks; rank 1 was killed\n" in re.sub(" +\n", "\n", shown)
    assert "steps 21–41  2 ranks; finished" in shown
    for rank in record.ranks:
        rank.step_ms.clear()
    without = table([replace(record, results=None)], 160)
    assert "all steps were trained before the restart" in without
    assert "steps 21–41  2 ranks; finished" in without


def test_on_cuda_clocks_and_memory_are_beside_each_other_and_a_shared_device_counts_once() -> None:
    record = make_cell(device="cuda", precision="bf16", host_mib=1000, steps=4)
    rank = max(record.ranks, key=lambda rank: rank.window_ms or 0.0)
    assert rank.window_ms is not None
    shown = table([record], 160)
    assert f"for all steps on rank {rank.rank}; its events add up to {ms(sum(rank.step_ms))}" in shown
    assert re.search(rf"step mean, wall +{rank.window_ms / 4:,.0f} ms", shown)
    assert re.search(r"peak CUDA +800 MiB +torch's peak in these steps, 850\.0 MiB before", shown)
    assert f"of the device {mib(1400 * 2**20)} of 80.0 GiB are used" in shown
    assert "a rank;" in shown
    assert record.model is not None
    shared = [replace(rank, device_id="GPU-1") for rank in record.ranks]
    results = summarise(record.settings, record.model, shared, record.loss)
    shown = table([replace(record, ranks=shared, results=results)], 160)
    assert f"{rate(results.throughput)} a device (1 device);" in shown

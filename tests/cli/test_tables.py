"""What benches and sweeps print, on wide and narrow terminals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console, Group, RenderableType

from tests.bench.records import make_cell, make_failure, make_sweep
from zerokit.bench.record import Record, summarise
from zerokit.bench.record.journal import Part
from zerokit.bench.sweeps.sweep import Cell, Sweep
from zerokit.cli.bench_tables import result_tables
from zerokit.cli.numbers import count, mib, ms, rate
from zerokit.cli.sweep_table import sweep_table

WIDTHS = (40, 60, 80, 100, 160)


def drawn(parts: Sequence[RenderableType], width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(Group(*parts))
    return capture.get()


def table(records: Sequence[Record], width: int) -> str:
    """As asked for: precision and bucket were left open."""
    cells = [
        Cell(number, "", record.cell, replace(record.settings, precision=None, bucket_mb=None))
        for number, record in enumerate(records)
    ]
    return drawn(sweep_table(Sweep("s" * 32, "2030-01-01", {}, cells), records, width), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_is_told_at_any_width(width: int) -> None:
    shown = table(make_sweep(), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    words = " ".join(shown.split())
    for record in make_sweep():
        if record.results is not None:
            assert f"{record.results.step.p50:,.1f} ±" in words
            assert mib(record.results.peak_host_bytes) in words
    for told in ("unsupported", "out of memory", "failed", "ValueError: not today", "7.5 GiB are available"):
        assert told in words


def test_a_wide_table_compares_with_the_first_row() -> None:
    records = make_sweep()
    shown = table(records, 160)
    assert re.search(r"engine +stage +step p50, ms +tokens/s +peak host +comm\., ms +exposed, ms", shown)
    first, other = records[0].results, records[3].results
    assert first is not None
    assert other is not None
    (row,) = re.findall(r"^zerokit +3 .*", shown, re.MULTILINE)
    assert f"{other.throughput / first.throughput:.2f}×" in row
    assert f"{other.peak_host_bytes / first.peak_host_bytes:.2f}×" in row
    assert f"{other.communication_ms:,.1f}" in row
    (row,) = re.findall(r"^zerokit +0 .*", shown, re.MULTILINE)
    assert "×" not in row
    assert shown.startswith("gpt-34m, fp32, 2 ranks on 2 nodes, batch 2, seq 128, gloo\n")


def test_repetitions_are_one_row() -> None:
    once, thrice = table(make_sweep(), 120), table(make_sweep(3), 120)
    assert len(re.findall(r"^(?:zerokit|ddp|fsdp2) ", thrice, re.MULTILINE)) == len(
        re.findall(r"^(?:zerokit|ddp|fsdp2) ", once, re.MULTILINE)
    )
    assert "medians of 3 rounds" in thrice
    partly = [make_cell("ddp", 0), replace(make_failure("failed", "boom"), sweep=None)]
    partly[1] = replace(partly[1], cell="other")
    settings = replace(partly[0].settings, precision=None, bucket_mb=None)
    cells = [Cell(0, "", partly[0].cell, settings), Cell(1, "", "other", replace(settings, repeat=1))]
    shown = drawn(sweep_table(Sweep("s" * 32, "2030-01-01", {}, cells), partly, 100), 100)
    assert len(re.findall(r"^ddp +0 +\d", shown, re.MULTILINE)) == 1
    assert "ddp stage 0: failed: boom" in shown


def test_stages_that_an_engine_does_not_have_share_a_reason() -> None:
    records = [make_failure("unsupported", f"ddp has no stage {stage}", "ddp", stage) for stage in (1, 2)]
    assert "ddp stage 1; ddp stage 2: unsupported: it has stage 0\n" in table(records, 100)


def test_what_varies_has_a_column() -> None:
    shown = table([make_cell(batch_size=batch, precision=None) for batch in (2, 4)], 120)
    assert re.search(r"engine +stage +batch +step", shown)
    assert "batch 2" not in shown


def test_a_sweep_without_numbers_is_a_table_of_reasons() -> None:
    shown = table([make_failure("out of memory", "too much", "zerokit", stage) for stage in (0, 1)], 100)
    assert re.search(r"zerokit +1 +out of memory", shown)
    assert "zerokit stage 0; zerokit stage 1: out of memory: too much" in shown
    assert "×" not in shown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_bench_fits(width: int, device: str) -> None:
    record = make_cell(device=device, precision="bf16")
    shown = drawn(result_tables(record, width), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    assert record.results is not None
    for told in ("communication", "exposed", "phases", "reduce-scatter", "GB/s"):
        assert told in shown
    assert ("MFU" in shown) == (device == "cuda")
    assert ("peak CUDA" in shown) == (device == "cuda")
    assert ("by wall clock" in shown) == (device == "cuda")
    assert ("CUDA memory" in shown) == (device == "cuda")


def test_a_bf16_wire_is_told() -> None:
    assert "fp32, bf16 wire, 2 ranks" in drawn(result_tables(make_cell(wire="bf16"), 160), 160)
    assert "fp32, bf16 wire, 2 ranks" in table([make_cell(stage=stage, wire="bf16") for stage in (1, 2)], 160)
    assert "wire" not in drawn(result_tables(make_cell(), 160), 160)


def test_a_job_that_was_restarted_tells_its_parts() -> None:
    parts = [Part(4, 2, 1, 23, 0, 16, "rank 1 was killed\nlogs: x"), Part(2, 1, 21, 41, 320, 8, "finished")]
    record = replace(make_cell(), parts=parts)
    shown = drawn(result_tables(record, 160), 160)
    assert "1×  all figures but the losses are of the last part" in shown
    assert "steps 1–23  4 ranks; rank 1 was killed\n" in re.sub(" +\n", "\n", shown)
    assert "steps 21–41  2 ranks; finished" in shown
    for rank in record.ranks:
        rank.step_ms.clear()
    without = drawn(result_tables(replace(record, results=None), 160), 160)
    assert "a restart found all steps trained" in without
    assert "steps 21–41  2 ranks; finished" in without


def test_on_cuda_clocks_and_memory_are_beside_each_other_and_a_shared_device_counts_once() -> None:
    record = make_cell(device="cuda", precision="bf16", host_mib=1000, steps=4)
    rank = max(record.ranks, key=lambda rank: rank.window_ms or 0.0)
    assert rank.window_ms is not None
    shown = drawn(result_tables(record, 160), 160)
    assert f"for all on rank {rank.rank}; its events add up to {ms(sum(rank.step_ms))}" in shown
    assert re.search(rf"by wall clock +{re.escape(ms(rank.window_ms / 4))} +a step of", shown)
    assert re.search(r"CUDA memory +800\.0 MiB +torch's peak in these steps, 850\.0 MiB before", shown)
    assert f"of the device {mib(1400 * 2**20)} of 80.0 GiB are used" in shown
    assert "a rank;" in shown
    assert record.model is not None
    shared = [replace(rank, device_id="GPU-1") for rank in record.ranks]
    results = summarise(record.settings, record.model, shared, record.loss)
    shown = drawn(result_tables(replace(record, ranks=shared, results=results), 160), 160)
    assert f"{rate(results.throughput)} a device (1 device);" in shown


def test_numbers_are_short() -> None:
    assert (ms(1234.56), ms(12_345.6)) == ("1,234.6 ms", "12.35 s")
    assert (mib(1.5 * 2**20), mib(20 * 2**30)) == ("1.5 MiB", "20.0 GiB")
    assert (count(35_712), count(124.4e6), count(7), count(8e9)) == ("35.7 K", "124.4 M", "7", "8.0 B")
    assert (rate(1234.5), rate(7.654)) == ("1,234", "7.65")

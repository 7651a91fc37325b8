"""The comparison measures what it says, notices disagreement, and survives an engine that fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import compare_engines
from benchmarks.cells import CellFailed, CellResult, CellSpec, RankResult, run_cell
from benchmarks.compare_engines import FLOOR, check_losses, disagreement, run_rounds, summarise
from zerokit.launch.interrupts import Interrupted

TINY = CellSpec(
    engine="ddp",
    model="gpt-tiny",
    world=2,
    backend="gloo",
    device="cpu",
    precision="fp32",
    batch_size=2,
    seq_len=16,
    steps=2,
    warmup=1,
)


def cell(engine: str, losses: list[float], *, step_ms: tuple[float, ...] = (5.0, 7.0, 6.0)) -> CellResult:
    """A result of two ranks, the second a millisecond slower and a megabyte larger."""
    ranks = [
        RankResult(
            [time + rank for time in step_ms], losses, peak_rss_bytes=(100 + rank) * 10**6, peak_cuda_bytes=0
        )
        for rank in range(2)
    ]
    return CellResult(engine, ranks)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    result = cell("ddp", [1.0])
    assert result.step_ms == [6.0, 8.0, 7.0]
    assert result.median_step_ms == 7.0
    assert result.peak_rss_bytes == 101 * 10**6


def test_summary_is_the_median_of_rounds_with_its_spread() -> None:
    rounds = [cell("ddp", [1.0], step_ms=(time,) * 3) for time in (10.0, 30.0, 11.0)]
    assert summarise("ddp", rounds).step_ms == (12.0, 11.0, 31.0)


def test_losses_that_differ_are_named() -> None:
    runs = {"ddp": [2.0, 1.0], "zerokit-2": [2.0, 1.0 + 1e-7], "fsdp2": [2.0, 1.1], FLOOR: [2.0, 9.0]}
    summaries = {name: summarise(name, [cell(name, losses)]) for name, losses in runs.items()}
    (wrong,) = check_losses(summaries, 1e-5)
    assert "fsdp2" in wrong
    assert "ddp" in wrong


def test_nan_agrees_with_nothing() -> None:
    assert disagreement([1.0, float("nan")], [1.0, 1.0]) == float("inf")


def test_engines_train_alike_in_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deeper" / "record.json"
    options = "--model gpt-tiny --seq-len 16 --steps 2 --warmup 1 --repeats 1 --engines ddp zerokit-3"
    assert compare_engines.main([*options.split(), "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    cells = record["cells"]
    assert set(cells) == {"ddp", "zerokit-3"}
    for (run,) in cells.values():
        for rank in run["ranks"]:
            assert len(rank["step_ms"]) == 2
            assert len(rank["losses"]) == 3
            assert rank["peak_rss_bytes"] > 50e6
    assert "zerokit-3" in capsys.readouterr().out


def test_a_failed_rank_is_named_and_its_words_shown() -> None:
    with pytest.raises(CellFailed, match=r"no-such-engine: rank \d ended with code 1") as caught:
        run_cell(replace(TINY, engine="no-such-engine", world=1))
    assert "KeyError" in str(caught.value)


def test_a_cell_past_its_time_limit_is_stopped() -> None:
    with pytest.raises(CellFailed, match="had not finished at the time limit"):
        run_cell(TINY, timeout_s=0.2)


def test_a_signal_stops_a_cell_and_its_ranks() -> None:
    strike = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    strike.start()
    started = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM"):
        run_cell(replace(TINY, steps=10**6))
    assert time.monotonic() - started < 60.0


def test_an_engine_that_failed_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fake(spec: CellSpec) -> CellResult:
        calls.append(spec.engine)
        if spec.engine == "fsdp2":
            raise CellFailed("fsdp2: rank 0 ended with code 1")
        return cell(spec.engine, [1.0])

    monkeypatch.setattr(compare_engines, "run_cell", fake)
    specs = [replace(TINY, engine=engine) for engine in ("ddp", "fsdp2", "zerokit-2")]
    results, failures = run_rounds(specs, 2, lambda line: None)
    assert calls == ["ddp", "fsdp2", "zerokit-2", "zerokit-2", "ddp"]
    assert set(results) == {"ddp", "zerokit-2"}
    assert set(failures) == {"fsdp2"}


@pytest.mark.parametrize("options", [["--world", "0"], ["--engines", "horovod"], ["--seq-len", "129"]])
def test_bad_options_end_with_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compare_engines.main(options)
    assert caught.value.code == 2

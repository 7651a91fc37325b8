"""What the scripts of benchmarks/ share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.elsewhere import take_turns
from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, spread
from benchmarks.ranks import run_ranks
from tests.support.distributed import server_context
from tests.support.forked import ForkedRank
from zerokit.launch import ranks
from zerokit.launch.failures import WorkerFailed


def test_every_second_round_goes_backwards_and_all_is_kept() -> None:
    calls: list[str] = []
    kept: list[int] = []

    def once(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_rounds(["a", "b"], 3, once, lambda results: kept.append(sum(map(len, results.values()))))
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert kept == [1, 2, 3, 4, 5, 6]


def test_calls_take_turns_after_a_round_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, list[str]()

    def call(name: str, seconds: float) -> None:
        nonlocal now
        calls.append(name)
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    both = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 3.0)}
    assert take_turns(both, 1) == {"a": [1.0], "b": [3.0]}
    assert calls == ["a", "b"] * 2
    calls.clear()
    assert take_turns(both, 1, lambda name: call("-", 9.0), seconds=4.0) == {"a": [1.0] * 2, "b": [3.0] * 2}
    assert "".join(calls) == "-a-b" + "-a-b-b-a"


def test_figures() -> None:
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0–3.0)"
    assert ratio([2.0, 9.0, 3.0], [1.0, 3.0, 3.0]) == 2.0
    table = plain_table("title", ["name", "ms"], [["a", "1"], ["b", "20"]])
    assert table.splitlines()[2:] == ["name  ms", "--------", "a      1", "b     20"]


def test_a_bar_and_whether_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert bar_holds("a of b", 0.5, 0.5)
    assert not bar_holds("a of b", 0.51, 0.5)
    assert capsys.readouterr().out.splitlines() == [
        "a of b: 0.500, at most 0.500: holds",
        "a of b: 0.510, at most 0.500: MISSED",
    ]


def test_ranks_run_a_script_s_function_and_a_failure_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks here; test_compare_checkpoints starts processes."""
    monkeypatch.setattr(ranks, "start_rank", ForkedRank)
    server_context()  # its files lie elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(_divide, 1) == [1.0, 2.0]
    assert list(tmp_path.glob("zerokit-ranks-*")) == []
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        run_ranks(_divide, 0, world=1)


def _divide(by: int) -> float:
    return (dist.get_rank() + 1) / by

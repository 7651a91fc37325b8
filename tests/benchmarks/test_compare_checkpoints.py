"""The comparison of checkpoints runs from end to end, on real checkpoints, and says what failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import zerokit
from benchmarks import compare_checkpoints
from benchmarks.checkpoint_calls import LOADS, SAVES
from benchmarks.measuring import remove
from tests.support.distributed import run_alone


def test_commands_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--size-gb 0.004 --repeats 1 --skip-live --directory"
    words = [*options.split(), str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert compare_checkpoints.main(words) == 0
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["format"] == "zerokit.compare-checkpoints/1"
    assert {"zerokit reshard --to 8", "zerokit consolidate"} <= record["figures"].keys()
    for name, found in record["figures"].items():
        assert all(seconds > 0 for seconds in found["seconds"]), name
        assert all(2**20 < size < 2**27 for size in found["peak_bytes"]), name
    assert record["floors"]["zerokit consolidate"] in record["figures"]
    assert "÷ floor" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_calls_and_peers_run(tmp_path: Path) -> None:
    figures = compare_checkpoints.live(tmp_path, 0.004, 1)
    assert figures.keys() == {*SAVES, *LOADS}
    assert all(seconds > 0 for found in figures.values() for seconds in found["seconds"])
    assert zerokit.verify(tmp_path / "run").intact
    for task in compare_checkpoints.peer_tasks(tmp_path):
        python, option, *words = map(str, task.command)
        assert (python, option) == (sys.executable, "-c")
        run_alone(execute, words)
        output = Path(words[-1])
        assert output.exists()
        remove(output)


def execute(words: list[str]) -> None:
    """As `python -c` would."""
    sys.argv = ["-c", *words[1:]]
    exec(words[0], {"__name__": "__main__"})


def test_a_failing_command_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        compare_checkpoints.run([sys.executable, "-c", "raise SystemExit('no such thing')"])

"""scripts/gpu-check on a machine without a GPU: what it says there, and how it gets through its parts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.bench.records import make_cell, make_failure
from tests.support.distributed import run_alone
from zerokit.bench.record.record import write_record
from zerokit.cli.bench import command as bench

ROOT = Path(__file__).resolve().parents[2]
DEVICE: dict[str, object] = {"name": "a GPU", "count": 1, "torch": "2", "cuda": "12", "nccl": "2"}


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_does_not_pass() -> None:
    done = start()
    assert done.returncode == 4, done.stderr
    assert "finds no CUDA device here; nothing was checked" in done.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on a machine that seems to have a GPU."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    monkeypatch.setattr(module, "probe", lambda directory: DEVICE)
    return module


def write_tests(path: Path, **bodies: str) -> tuple[str, ...]:
    """A file of tests marked `gpu`, by name, for one part."""
    lines = ["import time, pytest", "pytestmark = pytest.mark.gpu"]
    lines += [f"def test_{name}(record_property):\n    {body}" for name, body in bodies.items()]
    path.write_text("\n".join(lines) + "\n")
    return (str(path), "-W", "ignore::pytest.PytestUnknownMarkWarning")


def test_torch_is_imported_by_parts_alone() -> None:
    code = "import sys; sys.path[:0] = ['scripts']; import gpu_check; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_unknown_part_is_a_usage_error(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(["speed"])
    assert end.value.code == 2
    assert "no part is called speed" in capsys.readouterr().err


def test_parts_stand_in_order_of_their_evidence(script: ModuleType) -> None:
    expected = "late sync ahead api save ranks stages kernels bench steps steps-clip compiled"
    assert list(script.PARTS) == expected.split()
    assert script.PART_LIMIT_S <= 150
    assert script.TOTAL_LIMIT_S + script._LAST_WORDS_S <= 540


class Names:
    """The names of the tests that pytest finds."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = [item.nodeid for item in session.items]


def collect(selections: list[tuple[str, ...]]) -> list[list[str]]:
    """The tests for GPUs of each selection."""
    os.chdir(ROOT)
    found = []
    for selection in selections:
        names = Names()
        options = ["--collect-only", "-qq", "-m", "gpu", "-p", "no:cacheprovider"]
        # Plugins may have been imported in the tests' server.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        with warnings.catch_warnings(action="ignore", category=pytest.PytestAssertRewriteWarning):
            pytest.main([*options, *selection], plugins=[names])
        found.append(names.found)
    return found


def test_every_test_for_gpus_belongs_to_one_part(script: ModuleType) -> None:
    parts = {name: part.selection for name, part in script.PARTS.items() if isinstance(part, script.Tests)}
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    files += [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/runtime").glob("test_device*.py"))
    ]
    everything, *selected = run_alone(collect, [tuple(sorted(set(files))), *parts.values()])
    assert len(everything) > 20
    assert sorted(everything) == sorted(name for names in selected for name in names)
    assert all(selected), dict(zip(parts, selected, strict=True))


def test_a_failed_part_is_no_end_and_rows_come_as_parts_end(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    seen: list[tuple[str, list[str], str]] = []

    class Noted:
        """Notes what was there when it began."""

        def __init__(self, part: Any) -> None:
            self.part = part

        def check(self, name: str, directory: Path, limit_s: float) -> Any:
            files = sorted(path.name for path in out.iterdir())
            seen.append((name, files, capsys.readouterr().out))
            self.outcome = self.part.check(name, directory, limit_s)
            return self.outcome

    good = write_tests(tmp_path / "test_good.py", fine="record_property('host ms', 3)", also="pass")
    bad = write_tests(tmp_path / "test_bad.py", fine="pass", wrong="assert 1 == 2, 'one is not two'")
    none = write_tests(tmp_path / "test_none.py", skips="pytest.skip('needs zlib-ng')")
    parts = {
        "bad": script.Tests(bad),
        "good": script.Tests(good),
        "lacking": script.Tests(none, may_skip=True),
        "missing": script.Tests(none),
    }
    noted = {name: Noted(part) for name, part in parts.items()}
    monkeypatch.setattr(script, "PARTS", noted)
    assert script.main(["--output", str(out)]) == 1
    table = capsys.readouterr().out

    assert [name for name, _, _ in seen] == list(parts)
    assert "bad: FAILED after" in seen[1][2]
    assert "one is not two" in seen[1][2]
    assert seen[1][1] == ["bad.json", "bad.xml", "summary.json"]
    assert "good: ok after" in seen[2][2]
    assert "2 passed" in seen[2][2]
    assert "lacking: skipped" in seen[3][2]
    assert "needs zlib-ng" in seen[3][2]
    assert "missing: FAILED" in table
    assert "gpu-check: 1 × a GPU" in table

    summary = json.loads((out / "summary.json").read_text())
    assert summary["device"] == DEVICE
    assert [part["result"] for part in summary["parts"]] == ["FAILED", "ok", "skipped", "FAILED"]
    tests = {test["name"]: test for test in json.loads((out / "good.json").read_text())["tests"]}
    assert tests["test_fine"]["noted"] == {"host ms": "3"}
    assert tests["test_also"]["result"] == "passed"
    (failed,) = (
        test for test in json.loads((out / "bad.json").read_text())["tests"] if test["result"] == "failed"
    )
    assert "one is not two" in failed["message"]

    well = [SimpleNamespace(check=lambda *_, name=name: noted[name].outcome) for name in ("good", "lacking")]
    monkeypatch.setattr(script, "PARTS", dict(zip(("good", "lacking"), well, strict=True)))
    assert script.main([]) == 0


def test_a_part_that_lasts_too_long_is_stopped_and_tells_how_far_it_came(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = tmp_path / "hangs"
    body = f"open({str(hangs)!r}, 'w').close(); time.sleep(300)"
    slow = write_tests(tmp_path / "test_slow.py", fine="pass", hangs=body)
    now = [0.0]

    class Limited(subprocess.Popen[bytes]):
        """Its time is over as soon as the test hangs."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != 50.0:
                return super().wait(timeout)
            while not hangs.exists():
                assert self.poll() is None
                time.sleep(0.05)
            now[0] += timeout
            raise subprocess.TimeoutExpired("pytest", timeout)

    monkeypatch.setattr(script, "PARTS", {"slow": script.Tests(slow), "never": script.Tests(slow)})
    monkeypatch.setattr(script, "PART_LIMIT_S", 50.0)
    monkeypatch.setattr(script, "_LAST_WORDS_S", 60.0)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Limited}))
    outcomes = script.run_parts(["slow", "never"], tmp_path, DEVICE, total_s=100.0)
    assert [outcome.result for outcome in outcomes] == ["timed out", "not run"]
    assert [test["name"] for test in outcomes[0].tests] == ["test_fine"]
    assert not any(outcome.passed for outcome in outcomes)
    assert "never: not run" in capsys.readouterr().out


def test_figures_come_from_the_records(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt: dict[str, Any] = {"device": "cuda", "precision": "bf16"}
    losses: list[float | None] = [5.0, 4.0]
    records = [
        replace(make_cell("ddp", 0, **gpt), loss=losses),
        replace(make_cell("zerokit", 2, **gpt), loss=[loss and 1.001 * loss for loss in losses]),
        make_failure("unsupported", "it has stage 0 only", "ddp", 2, **gpt),
    ]
    code = 0

    def run(command: list[str], timeout_s: float) -> int:
        assert command[:3] == ["-m", "zerokit.cli", "bench"]
        options = bench.make_context("bench", command[3:]).params
        assert options["clip"] == (1.0 if "steps-clip" in str(options["output"]) else 0.0)
        assert (options["device"], options["nproc_per_node"]) == ("cuda", (1,))
        assert {"ddp", "fsdp2", "zerokit"} <= set(options["engine"])
        for number, record in enumerate(records):
            write_record(record, options["output"] / "cells" / f"{number}.json")
        return code

    monkeypatch.setattr(script, "run", run)
    for name in ("steps", "steps-clip"):
        outcome = script.PARTS[name].check(name, tmp_path, 5.0)
        assert outcome.result == "ok", outcome.detail
        assert re.fullmatch(r"DDP \d+\.\d ms \d+ MB, zerokit 2 \d+\.\d ms \d+ MB", outcome.detail)
    code = 124
    assert script.PARTS["steps"].check("steps", tmp_path, 5.0).result == "timed out"
    code = 0
    records[1] = replace(records[1], loss=[loss and 1.1 * loss for loss in losses])
    outcome = script.PARTS["steps"].check("steps", tmp_path, 5.0)
    assert outcome.result == "FAILED"
    assert outcome.detail.startswith(
        "zerokit 2: the loss of step 2 differs from that of DDP by 0.1 of it; DDP "
    )
    records[1] = make_failure("failed", "rank 0: no such kernel\nand more", "zerokit", 2, **gpt)
    outcome = script.PARTS["steps"].check("steps", tmp_path, 5.0)
    assert outcome.result == "FAILED"
    assert outcome.detail.startswith("zerokit 2: failed: rank 0: no such kernel; DDP ")
    records.clear()
    assert "before it could report" in script.PARTS["steps"].check("steps", tmp_path, 5.0).detail

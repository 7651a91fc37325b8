"""scripts/gpu-check: each of its parts at small sizes on a host, and what becomes of parts that do not end well."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.gpu_check import frame
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.frame import TABLE_CHARACTERS, Check
from benchmarks.gpu_check.parts import PARTS, Entry
from benchmarks.gpu_check.place import SPARE_S, Place, attempt
from benchmarks.gpu_check.rest import FILES
from benchmarks.gpu_check.wheels import CARRIED, install
from tests.cli.commands import run_python
from tests.support.forked import ForkedProcess, share_server
from tests.support.processes import alive

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"
DEFAULT = ("env", "parity", "avg", "late", "gloo2", "checkpoint", "csan")
"""The others have tests of their own, or start pytest."""


def lines(out: Path) -> dict[str, dict[str, Any]]:
    found = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {line["part"]: line for line in found}


@pytest.mark.full(default=DEFAULT)
@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_each_part_runs_on_a_host(name: str, tmp_path: Path) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    assert Check(tmp_path, "cpu", inf).run([part]), (tmp_path / "log.txt").read_text()
    line = lines(tmp_path)[name]
    assert line["ok"]
    assert line["error"] == ""
    assert line["data"]["row"]
    assert line["seconds"] > 0


def test_nothing_is_tried_when_a_part_would_be_killed_for_it(tmp_path: Path) -> None:
    faults: list[str] = []
    for limit_s, expected in ((SPARE_S / 2, None), (inf, 7)):
        place = Place(torch.device("cpu"), True, tmp_path, limit_s)
        assert attempt("stage 3", lambda: 7, faults, place) == expected
    assert faults == ["stage 3: not tried, as the part's time was nearly over"]


# --- parts that do not end well ----------------------------------------------------------------------------


def well(place: Any) -> dict[str, Any]:
    print("all is well")
    (place.out / "step.json").write_text("{}")
    return {"row": "two\nlines", "small": place.small, "device": str(place.device)}


def raises(place: Any) -> dict[str, Any]:
    raise ValueError("seven")


def wrong(place: Any) -> dict[str, Any]:
    from benchmarks.gpu_check.place import found

    return found({"row": "3 of 4"}, ["the fourth is wrong"])


def hangs(place: Any) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "3600"])
    print("hanging", os.getpid(), child.pid, flush=True)
    while True:
        time.sleep(3600)


def leaves_a_child(place: Any) -> dict[str, Any]:
    return {"row": "child", "pid": subprocess.Popen(["sleep", "3600"]).pid}


def dies(place: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def exits(place: Any) -> dict[str, Any]:
    os._exit(3)


def no_json(place: Any) -> dict[str, Any]:
    return {"row": "", "value": {1, 2}}


def much(place: Any) -> dict[str, Any]:
    for _ in range(100):
        print("x" * 20_000)
    for number in range(3):
        (place.out / f"trace-{number}").write_bytes(random.randbytes(1 << 20))
    return {"row": "much", "text": "y" * (1 << 20)}


def wordy(place: Any) -> dict[str, Any]:
    return {"row": "word " * 10_000}


def entry(function: Callable[..., Any], limit_s: float = 1000.0, expected_s: float = 1.0) -> Entry:
    """A part that is a function here; on a host its limit is 20 times as long."""
    return Entry(function.__name__, f"{__name__}:{function.__name__}", limit_s, expected_s)


def gone(pids: list[int]) -> None:
    """Returns once none of the processes runs."""
    while any(map(alive, pids)):
        time.sleep(0.02)


def hanging(out: Path, process: ForkedProcess | None = None) -> list[int]:
    """The ids of `hangs` and its child, once both run."""
    while True:
        log = out / "log.txt"
        if log.exists() and (match := re.search(r"^hanging (\d+) (\d+)\n", log.read_text(), re.MULTILINE)):
            return [int(pid) for pid in match.groups()]
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_part_that_fails_is_no_end_of_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = [entry(one) for one in (raises, wrong, dies, exits, no_json, leaves_a_child, well)]
    assert not Check(tmp_path, "cpu", inf).run(parts)
    found = lines(tmp_path)
    assert {name: line["error"] for name, line in found.items()} == {
        "raises": "ValueError: seven",
        "wrong": "CheckFailed: the fourth is wrong",
        "dies": "was killed: SIGKILL",
        "exits": "ended with 3",
        "no_json": "TypeError: Object of type set is not JSON serializable",
        "leaves_a_child": "",
        "well": "",
    }
    assert [name for name, line in found.items() if line["ok"]] == ["leaves_a_child", "well"]
    assert found["wrong"]["data"] == {"row": "3 of 4"}
    assert found["well"]["data"] == {"row": "two\nlines", "small": True, "device": "cpu"}
    gone([found["leaves_a_child"]["data"]["pid"]])
    log = (tmp_path / "log.txt").read_text()
    assert "all is well" in log
    assert 'raise ValueError("seven")' in log
    with tarfile.open(tmp_path / "traces.tar.gz") as traces:
        assert traces.getnames() == ["well/step.json"]
    *_, first, second, _, _, _, _, last = capfd.readouterr().out.splitlines()
    assert first.split() == ["raises", "FAILED", first.split()[2], "s", "ValueError:", "seven"]
    assert second.endswith("CheckFailed: the fourth is wrong · 3 of 4")
    assert last.split()[:2] == ["well", "ok"]
    assert last.endswith("two lines")


def test_a_part_that_hangs_ends_at_its_deadline_with_its_stack(tmp_path: Path) -> None:
    assert not Check(tmp_path, "cpu", inf).run([entry(hangs, limit_s=0.1), entry(well)])
    assert lines(tmp_path)["hangs"]["error"] == "was not over after 2 s"
    assert lines(tmp_path)["well"]["ok"]
    gone(hanging(tmp_path))
    assert "in hangs" in (tmp_path / "log.txt").read_text()


def _hang(out: str) -> None:
    share_server()
    Check(Path(out), "cpu", inf).run([entry(well), entry(hangs)])


@pytest.mark.full(default="SIGKILL")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_killed_check_leaves_what_has_ended_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (printed := tmp_path / "printed").mkdir()
    process = ForkedProcess(printed, os.environ, _hang, str(tmp_path))
    pids = hanging(tmp_path, process)
    process.send_signal(number)
    process.wait()
    gone(pids)
    assert list(lines(tmp_path)) == ["well"]
    assert {path.name for path in tmp_path.glob("*.*")} == {"results.jsonl", "log.txt", "traces.tar.gz"}


def test_files_stay_small_enough_to_be_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frame.TRACES_BYTES < 16 << 20
    monkeypatch.setattr(frame, "TRACES_BYTES", 5 << 19)
    assert not Check(tmp_path, "cpu", inf).run([entry(much)])
    assert "more than 524288" in lines(tmp_path)["much"]["error"]
    with tarfile.open(tmp_path / "traces.tar.gz") as traces:
        assert traces.getnames() == ["much/trace-0", "much/trace-1"]
    assert "much/trace-2 is left out" in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "log.txt").stat().st_size < 1 << 20
    assert (tmp_path / "traces.tar.gz").stat().st_size < 5 << 19
    assert len(list(tmp_path.iterdir())) == 3
    # What another run into the same folder adds.
    assert Check(tmp_path, "cpu", inf).run([entry(well)])
    with tarfile.open(tmp_path / "traces.tar.gz") as traces:
        assert traces.getnames() == ["much/trace-0", "much/trace-1", "well/step.json"]
    assert list(lines(tmp_path)) == ["much", "well"]


def test_parts_start_while_they_fit_into_the_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [entry(raises, expected_s=2000.0), entry(well)]
    assert Check(tmp_path, "cpu", 1000.0).run(parts)
    assert list(lines(tmp_path)) == ["well"]
    first, second = capfd.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"raises +- +not started: 2000 s expected, \d+ left", first)
    assert second.split()[:2] == ["well", "ok"]


def test_the_table_fits_into_the_end_of_the_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = [entry(wordy)] + [replace(one, expected_s=2000.0) for one in PARTS]
    check = Check(tmp_path, "cpu", 1000.0)
    assert check.run(parts)
    row = capfd.readouterr().out.splitlines()[-len(parts)]
    assert row.startswith("wordy")
    assert row.endswith("…")
    assert len(check.table()) < 12_000
    assert len(row) * len(parts) <= TABLE_CHARACTERS


# --- the program -------------------------------------------------------------------------------------------


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *words], env=os.environ | variables, capture_output=True, text=True, timeout=800, check=False
    )


def test_without_a_gpu_it_says_so_and_does_not_pass() -> None:
    done = run(CUDA_VISIBLE_DEVICES="", PYTHON=sys.executable)
    assert done.returncode == 4, done.stderr
    assert "finds no CUDA device here; nothing was checked" in done.stderr


def test_the_program_runs_some_parts_in_a_folder(tmp_path: Path) -> None:
    """From another folder."""
    out = tmp_path / "out"
    words = ("--device", "cpu", "--only", "csan,rest", "--short", "--budget", "39", "--out", str(out))
    done = run(*words, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert list(lines(out)) == ["csan"]
    assert "not started: 40 s expected" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "csan,all"], "no part is called all: they are env, parity"),
        (["--budget", "0"], "--budget 0 is not positive"),
        (["--device", "cpu", "--wheels", "/does/not/exist"], "has no wheels: pip download --no-deps"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_every_file_with_tests_for_gpus_is_run() -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert files == set(FILES)


# --- packages that a bare machine lacks --------------------------------------------------------------------

BARE = ("torch", "numpy", "pytest", "psutil", "safetensors")

IMPORT = """
import importlib, sys
from importlib.machinery import PathFinder

class Some(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Some
for module in {modules}:
    importlib.import_module(module)
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def with_requirements(names: Sequence[str]) -> set[str]:
    """Distributions and all that they require, as far as they are installed."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        with suppress(PackageNotFoundError):
            wanted = [Requirement(line) for line in requires(name) or []]
            found.add(name)
            left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def imported(there: set[str], modules: Sequence[str]) -> set[str]:
    """The top-level modules that importing these brings, where only some distributions are there."""
    blocked = {
        module
        for module, names in packages_distributions().items()
        if not any(normal(name) in there for name in names)
        and module not in ("zerokit", "tests", "benchmarks")
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(blocked=blocked, modules=modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_bare_machine_imports_the_program() -> None:
    imported(with_requirements(BARE), ["benchmarks.gpu_check.__main__", "benchmarks.gpu_check.parity"])


def test_a_bare_machine_with_the_carried_packages_imports_all_that_runs() -> None:
    """And each of them is imported; pydantic comes when a schema is read, so it is asked for here."""
    modules = [part.function.partition(":")[0] for part in PARTS]
    modules += ["tests.conftest", *(file.removesuffix(".py").replace("/", ".") for file in FILES)]
    modules += ["zerokit.bench.worker.rank", "zerokit.checkpoint.checksum", "pydantic"]
    found = imported(with_requirements(BARE) | set(map(normal, CARRIED)), modules)
    needed = {normal(name).replace("-", "_") for name in (*BARE, *CARRIED)}
    assert needed <= found


def test_carried_packages_are_installed_for_all_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheels := tmp_path / "wheels").mkdir()
    info = "carried_example-1.0.dist-info"
    with zipfile.ZipFile(wheels / "carried_example-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_example.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-example\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    install(wheels, tmp_path / "site")
    code = "import carried_example, sys; print(carried_example.__file__)"
    done = run_python(tmp_path, "-c", code)
    assert done.stdout.strip() == str(tmp_path / "site" / "carried_example.py"), done.stderr

"""The work of scripts/gpu-check, without importing torch: each part is a process of its own.

    late           bits do not change where collectives' results come late; a missing wait is noticed
    sync           no step synchronises the host with the device
    ahead          a step returns while the device is still busy
    api            optimizers, states, gathered weights, misuse, another current stream
    save           checkpoints of CUDA tensors (needs zlib-ng)
    ranks          all of the above between several GPUs, a rank each (needs two)
    stages         stages are equal bits, memory and traffic their predictions: NCCL, gloo with 2 and 4 ranks
    steps          step time and peak memory beside DDP and FSDP2: one rank on NCCL, bf16
    steps-clip     the same, with clipped gradients
    compiled       compiled blocks (needs a compiler)

The most telling come first, and each has a time limit of its own, so that a machine that is lent for ten minutes
leaves what it could. A part's row is printed, and its files are written, as soon as it ends. Figures come from files
that the parts write, never from what they print.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import plain_table  # noqa: E402
from zerokit.bench.comparison.cells import Cell, make_cells  # noqa: E402
from zerokit.bench.comparison.differences import disagreements  # noqa: E402
from zerokit.bench.record.record import Run, in_folder  # noqa: E402
from zerokit.errors import ZerokitError  # noqa: E402

NO_GPU = 4

_PROBE = """
import json, sys, torch
found = torch.cuda.is_available()
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "count": torch.cuda.device_count()}
facts["name"] = torch.cuda.get_device_name(0) if found else None
facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if found else None
open(sys.argv[1], "w").write(json.dumps(facts))
"""


PART_LIMIT_S = 150.0
TOTAL_LIMIT_S = 530.0
"""Under nine minutes, with the time to start."""
_LAST_WORDS_S = 10.0
"""For a part that was interrupted to write down how far it came."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part; a row of the closing table.

    `result` is "ok", "FAILED", "timed out", "skipped" or "not run"; `tests` has each test's name, result, seconds,
    message and what it noted down.
    """

    part: str
    result: str
    detail: str
    seconds: float = 0.0
    tests: list[dict[str, object]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong: what a machine lacks the package for is not."""
        return self.result in ("ok", "skipped")


class Part(Protocol):
    """Something that is checked in a process of its own."""

    def check(self, name: str, directory: Path, limit_s: float) -> Outcome:
        """Do it within `limit_s` seconds, with files in `directory`."""


def run(command: Sequence[str], timeout_s: float) -> int:
    """Run a command of this Python in the checkout; 124 when it had to be stopped, its children with it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if command[0] != "-c":
        print("+ python", *command, flush=True)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_LAST_WORDS_S)
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests marked `gpu` among `selection`; all of them may be skipped where `may_skip`."""

    selection: tuple[str, ...]
    may_skip: bool = False

    def check(self, name: str, directory: Path, limit_s: float) -> Outcome:
        """Run them with pytest, and read its report."""
        report = directory / f"{name}.xml"
        report.unlink(missing_ok=True)
        command = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        # The newer form of the report has no place for what tests note down.
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        code = run([*command, *self.selection], limit_s)
        if not report.exists():
            return Outcome(name, _ended(code), f"pytest ended with code {code} before it could report")
        # One that was interrupted has no name.
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.get("name")]
        found = [_described(case) for case in cases]
        counts = Counter(str(test["result"]) for test in found)
        detail = ", ".join(f"{count} {result}" for result, count in counts.items()) or "no test ended"
        bad = next((f": {test['message']}" for test in found if test["result"] == "failed"), "")
        if code == 0 and counts["passed"]:
            return Outcome(name, "ok", detail, tests=found)
        if code == 0 and counts["skipped"] and self.may_skip:
            return Outcome(name, "skipped", f"{detail}: {found[0]['message']}", tests=found)
        return Outcome(name, _ended(code), detail + bad, tests=found)


def _ended(code: int) -> str:
    return "timed out" if code == 124 else "FAILED"


def _described(case: ElementTree.Element) -> dict[str, object]:
    """A test out of pytest's report."""
    result, message = "passed", ""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            result = "skipped" if child.tag == "skipped" else "failed"
            message = (child.get("message") or "").split("\n")[0]
    noted = {str(one.get("name")): one.get("value") for one in case.iter("property")}
    return {
        "name": case.get("name"),
        "result": result,
        "seconds": float(case.get("time", "0")),
        "message": message,
        "noted": noted,
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engines side by side: a sweep of `zerokit bench` with `options`."""

    options: tuple[str, ...]

    def check(self, name: str, directory: Path, limit_s: float) -> Outcome:
        """Run it; what it got through within the limit counts."""
        out = directory / f"{name}-sweep"
        shutil.rmtree(out, ignore_errors=True)
        command = ["-m", "zerokit.cli", "bench", "--device", "cuda", "--no-twin", "--no-mlflow"]
        code = run([*command, "--output", str(out), *self.options], limit_s)
        records = tuple(in_folder(out)) if out.exists() else ()
        cells = [cell for cell in make_cells([Run("", records)]) if cell.status != "unsupported"]
        well = [cell for cell in cells if cell.status == "ok"]
        if not well:
            return Outcome(name, _ended(code), f"zerokit bench ended with code {code} before it could report")
        wrong = [
            f"{cell.label}: {cell.status}: {(cell.first.reason or '').partition(chr(10))[0]}"
            for cell in cells
            if cell.status not in ("ok", "killed")
        ]
        try:
            wrong += disagreements(cells, _LOSSES_AGREE)
        except ZerokitError as error:  # too few to compare
            wrong.append(str(error))
        figures = ", ".join(_figures(cell) for cell in well)
        detail = f"{wrong[0]}; {figures}" if wrong else figures
        return Outcome(name, "ok" if code == 0 and not wrong else _ended(code), detail)


def _figures(cell: Cell) -> str:
    """The median step and the peak of torch's allocator, construction included."""
    names = ("memory/peak_allocated_mib", "memory/setup_allocated_mib")
    peak_mib = max(cell.value(name) or 0.0 for name in names)
    return f"{cell.label} {cell.value('step/p50_ms') or 0.0:.1f} ms {peak_mib * 1.048576:.0f} MB"


_LOSSES_AGREE = 2e-2
"""In bf16, where engines round at different points (autocast keeps fp32 parameters); in fp32 it would be 1e-5."""
_STEPS = (
    *["--nproc-per-node", "1", "--precision", "bf16", "--model", "gpt2-124m", "--data", "synthetic"],
    *["--batch-size", "8", "--seq-len", "512", "--lr", "3e-4"],
    *["--steps", "20", "--warmup", "5", "--repeats", "1"],
    *["--engine", "ddp,fsdp2,zerokit", "--stage", "2,3,0,1"],
)
_CUDA = "tests/runtime/test_cuda.py"
_BENCH = ("tests/bench/worker/test_worker.py", "tests/bench/machine/test_devices.py")
PARTS: dict[str, Part] = {
    "late": Tests(("tests/runtime/test_device_way.py",)),
    "sync": Tests((_CUDA, "-k", "synchronis")),
    "ahead": Tests((_CUDA, "-k", "busy")),
    "api": Tests((_CUDA, "-k", "not synchronis and not busy and not checkpoints and not compiled")),
    "save": Tests((_CUDA, "-k", "checkpoints"), may_skip=True),
    "ranks": Tests(("tests/runtime/test_cuda_ranks.py",), may_skip=True),
    "stages": Tests(("tests/runtime/test_cuda_parity.py",)),
    "kernels": Tests(("tests/runtime/test_cuda_norms.py", "tests/runtime/test_probe.py")),
    "bench": Tests(_BENCH),
    "steps": Comparison((*_STEPS, "--clip", "0")),
    "steps-clip": Comparison((*_STEPS, "--clip", "1")),
    "compiled": Tests((_CUDA, "-k", "compiled"), may_skip=True),
}


def probe(directory: Path) -> dict[str, object] | None:
    """What torch sees on this machine; None where it cannot be imported (its error is printed)."""
    facts = directory / "device.json"
    if run(["-c", _PROBE, str(facts)], timeout_s=300) != 0:
        return None
    found: dict[str, object] = json.loads(facts.read_text())
    return found


def run_parts(
    names: Sequence[str], directory: Path, facts: dict[str, object], *, total_s: float = TOTAL_LIMIT_S
) -> list[Outcome]:
    """Run parts one after the other, whatever becomes of them; each one's files are there when it ends."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for name in names:
        started = time.monotonic()
        left_s = began + total_s - started
        if left_s < _LAST_WORDS_S:
            outcome = Outcome(name, "not run", f"the {total_s:.0f} s for all parts were over")
        else:
            outcome = PARTS[name].check(name, directory, min(PART_LIMIT_S, left_s))
        outcome = replace(outcome, seconds=round(time.monotonic() - started, 1))
        outcomes.append(outcome)
        print(f"{name}: {outcome.result} after {outcome.seconds:.0f} s: {outcome.detail}", flush=True)
        (directory / f"{name}.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        summary = {"device": facts, "parts": [asdict(one) | {"tests": len(one.tests)} for one in outcomes]}
        (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Run everything that needs a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the reports (JSON, JUnit XML) here")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="zerokit-gpu-check-") as temporary:
        directory = (options.output or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        facts = probe(directory)
        if facts is None:
            print(
                f"gpu-check: torch cannot be used with {sys.executable}; nothing was checked", file=sys.stderr
            )
            return 1
        if not facts["count"] or facts["name"] is None:
            print(
                f"gpu-check: torch {facts['torch']} finds no CUDA device here; nothing was checked",
                file=sys.stderr,
            )
            return NO_GPU
        outcomes = run_parts(options.parts or list(PARTS), directory, facts)
    title = "gpu-check: {count} × {name}, torch {torch}, CUDA {cuda}, NCCL {nccl}".format_map(facts)
    rows = [[row.part, row.result, f"{row.seconds:.0f}", row.detail] for row in outcomes]
    print("\n" + plain_table(title, ["part", "result", "seconds", "detail"], rows))
    return 0 if all(row.passed for row in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The work of scripts/gpu-check, with the standard library alone: each check is a process of its own.

    tests        pytest -m gpu, over the files that hold such tests (others may need packages missing here)
    nccl         compare_engines.py, one rank on NCCL, bf16
    gloo         compare_engines.py, two ranks on one GPU through gloo with CUDA tensors, fp32

Figures come from files that the checks write, never from what they print.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.tables import plain_table  # noqa: E402

NO_GPU = 4

_PROBE = """
import json, sys, torch
found = torch.cuda.is_available()
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "count": torch.cuda.device_count()}
facts["name"] = torch.cuda.get_device_name(0) if found else None
facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if found else None
open(sys.argv[1], "w").write(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row of the closing table."""

    check: str
    passed: bool
    detail: str
    seconds: float


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
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def gpu_tests(directory: Path) -> tuple[bool, str]:
    """Run the tests marked `gpu`."""
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]
    if not files:
        return False, "no test is marked gpu"
    report = directory / "tests.xml"
    limit = ["--timeout=300"] if find_spec("pytest_timeout") else []
    code = run(["-m", "pytest", "-m", "gpu", f"--junitxml={report}", *limit, *files], timeout_s=900)
    if not report.exists():
        return False, f"pytest ended with code {code} before it could report"
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ElementTree.parse(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    bad = ", ".join(f"{counts[name]} {name}" for name in ("failures", "errors", "skipped") if counts[name])
    return code == 0 and passed > 0, f"{passed} passed" + (f", {bad}" if bad else "")


def comparison(name: str, *options: str) -> Callable[[Path], tuple[bool, str]]:
    """A check that runs compare_engines.py with `options`."""

    def check(directory: Path) -> tuple[bool, str]:
        out = directory / f"{name}.json"
        command = ["benchmarks/compare_engines.py", "--device", "cuda", "--json", str(out), *options]
        code = run(command, timeout_s=600)
        if not out.exists():
            return False, f"compare_engines.py ended with code {code} before it could report"
        record = json.loads(out.read_text())
        wrong = [*record["failures"].values(), *record["disagreements"]]
        if wrong:
            return False, wrong[0].splitlines()[0]
        steps = {engine: summary["step_ms"][0] for engine, summary in record["summaries"].items()}
        ratios = [f"{engine} {steps[engine] / steps['ddp']:.2f}" for engine in steps if engine != "ddp"]
        return code == 0, "losses agree; step time ÷ DDP: " + ", ".join(ratios)

    return check


_ZEROKIT = [f"zerokit-{stage}" for stage in range(4)]
CHECKS: dict[str, Callable[[Path], tuple[bool, str]]] = {
    "tests": gpu_tests,
    "nccl": comparison(
        "nccl",
        *["--world", "1", "--backend", "nccl", "--precision", "bf16", "--model", "gpt2-124m"],
        *["--batch-size", "8", "--seq-len", "512", "--repeats", "1", "--engines", "ddp", *_ZEROKIT, "fsdp2"],
    ),
    "gloo": comparison(
        "gloo",
        *["--world", "2", "--backend", "gloo", "--precision", "fp32", "--steps", "5", "--repeats", "1"],
        *["--engines", "ddp", *_ZEROKIT],
    ),
}


def probe(directory: Path) -> dict[str, object] | None:
    """What torch sees on this machine; None where it cannot be imported (its error is printed)."""
    facts = directory / "device.json"
    if run(["-c", _PROBE, str(facts)], timeout_s=300) != 0:
        return None
    found: dict[str, object] = json.loads(facts.read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Run everything that needs a GPU.")
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(CHECKS)} (default: all)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the reports (JSON, JUnit XML) here")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.checks) - set(CHECKS))
    if unknown:
        parser.error(f"no check is called {', '.join(unknown)}: choose from {', '.join(CHECKS)}")
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
        outcomes = []
        for name in options.checks or CHECKS:
            started = time.monotonic()
            passed, detail = CHECKS[name](directory)
            outcomes.append(Outcome(name, passed, detail, time.monotonic() - started))
    title = "gpu-check: {count} × {name}, torch {torch}, CUDA {cuda}, NCCL {nccl}".format_map(facts)
    rows = [
        [row.check, "ok" if row.passed else "FAILED", f"{row.seconds:.0f}", row.detail] for row in outcomes
    ]
    print("\n" + plain_table(title, ["check", "result", "seconds", "detail"], rows))
    return 0 if all(row.passed for row in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())

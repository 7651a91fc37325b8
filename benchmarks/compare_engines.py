"""Step time and memory of zerokit and its peers, side by side on this machine.

    python benchmarks/compare_engines.py
    python benchmarks/compare_engines.py --repeats 5 --engines ddp zerokit-2 --json results.json
    python benchmarks/compare_engines.py --device cuda --precision bf16

Every engine trains the same model from the same weights on the same batches, in fresh processes, with fused
AdamW and no allocator variables set. Rounds over all engines follow each other, every second one in reverse
order, so that a machine's moods fall on all alike: trust the ratios. Ends with 1 when an engine failed or
the losses disagree.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.cells import CellFailed, CellResult, CellSpec, run_cell  # noqa: E402
from benchmarks.tables import print_table  # noqa: E402
from zerokit.bench.catalogue.workloads import WORKLOADS  # noqa: E402
from zerokit.bench.machine.place import cores, processor_name  # noqa: E402
from zerokit.launch.interrupts import Interrupted  # noqa: E402

FLOOR = "compute-only"
DEFAULT_ENGINES = [
    FLOOR,
    "ddp",
    "zero-redundancy-optimizer",
    "zerokit-0",
    "zerokit-1",
    "zerokit-2",
    "fsdp2",
    "zerokit-3",
]
ENGINES = [*DEFAULT_ENGINES, "zerokit-3-meta"]

# Relative difference of a loss: in fp32 only the order of sums differs; in bf16 engines also round at
# different places (autocast keeps fp32 parameters).
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


Results = dict[str, list[CellResult]]
Failures = dict[str, str]


@dataclass(frozen=True, slots=True)
class Summary:
    """One engine over all rounds: median, minimum and maximum of the rounds' figures."""

    engine: str
    step_ms: tuple[float, float, float]
    rss_mb: tuple[float, float, float]
    cuda_mb: tuple[float, float, float]
    losses: list[float]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def summarise(engine: str, cells: Sequence[CellResult]) -> Summary:
    """Put the rounds of one engine together. Megabytes are 10^6 bytes."""
    return Summary(
        engine=engine,
        step_ms=_spread([cell.median_step_ms for cell in cells]),
        rss_mb=_spread([cell.peak_rss_bytes / 1e6 for cell in cells]),
        cuda_mb=_spread([cell.peak_cuda_bytes / 1e6 for cell in cells]),
        losses=cells[0].losses,
    )


def disagreement(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference between two runs' losses; infinite where one is not a number."""
    pairs = zip(losses, reference, strict=True)
    differences = [abs(mine - other) / abs(other) for mine, other in pairs]
    return float("inf") if any(value != value for value in differences) else max(differences)


def run_rounds(
    specs: Sequence[CellSpec],
    repeats: int,
    report: Callable[[str], None],
    keep: Callable[[Results, Failures], None] = lambda results, failures: None,
) -> tuple[Results, Failures]:
    """All engines `repeats` times; returns the results by engine, and what failed.

    An engine that failed once is not run again. `keep` is given what there is after every cell.
    """
    results: Results = {spec.engine: [] for spec in specs}
    failures: Failures = {}

    def finished() -> Results:
        return {name: cells for name, cells in results.items() if cells and name not in failures}

    for number in range(repeats):
        for spec in specs if number % 2 == 0 else reversed(specs):
            if spec.engine in failures:
                continue
            report(f"round {number + 1}/{repeats}: {spec.engine}")
            try:
                results[spec.engine].append(run_cell(spec))
            except CellFailed as error:
                failures[spec.engine] = str(error)
                report(f"failed: {error}")
            keep(finished(), failures)
    return finished(), failures


def check_losses(summaries: dict[str, Summary], tolerance: float) -> list[str]:
    """What is wrong with the losses, in words; nothing when the engines agree."""
    trained = [summary for name, summary in summaries.items() if name != FLOOR]
    wrong = []
    for summary in trained[1:]:
        found = disagreement(summary.losses, trained[0].losses)
        if not found <= tolerance:
            wrong.append(
                f"losses of {summary.engine} differ from {trained[0].engine}'s by {found:.1e} "
                f"(allowed: {tolerance:.0e})"
            )
    return wrong


def ratio(summaries: dict[str, Summary], engine: str, to: str, figure: Callable[[Summary], float]) -> str:
    """A ratio of medians for the table; empty where the other engine was not run, or is this one."""
    if to not in summaries or engine == to or not figure(summaries[to]):
        return ""
    return f"{figure(summaries[engine]) / figure(summaries[to]):.3f}"


def show(summaries: dict[str, Summary], *, title: str, cuda: bool) -> None:
    """Print the table; peak memory is the GPU's on CUDA and the process's elsewhere."""

    def memory(summary: Summary) -> tuple[float, float, float]:
        return summary.cuda_mb if cuda else summary.rss_mb

    rows = []
    for name, summary in summaries.items():
        peer = "fsdp2" if name.startswith("zerokit-3") else ""
        rows.append(
            [
                name,
                "{:.1f} ({:.1f}–{:.1f})".format(*summary.step_ms),
                ratio(summaries, name, "ddp", lambda of: of.step_ms[0]),
                ratio(summaries, name, peer, lambda of: of.step_ms[0]),
                "{:.0f} ({:.0f}–{:.0f})".format(*memory(summary)),
                ratio(summaries, name, "ddp", lambda of: memory(of)[0]),
                ratio(summaries, name, peer, lambda of: memory(of)[0]),
                f"{summary.losses[-1]:.6f}",
            ]
        )
    peak = "peak GPU MB" if cuda else "peak RSS MB"
    print_table(
        title,
        [
            "engine",
            "step ms (min–max)",
            "÷ DDP",
            "÷ FSDP2",
            f"{peak} (min–max)",
            "÷ DDP",
            "÷ FSDP2",
            "last loss",
        ],
        rows,
    )


def machine() -> dict[str, object]:
    """What the figures depend on, for the record."""
    return {
        "processor": processor_name(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="compare_engines.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=DEFAULT_ENGINES, metavar="ENGINE")
    parser.add_argument(
        "--model", choices=sorted(name for name, one in WORKLOADS.items() if one.text), default="gpt-34m"
    )
    parser.add_argument("--world", type=_positive, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=3, help="rounds over all engines")
    parser.add_argument("--steps", type=_positive, default=10, help="timed steps a cell")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--batch-size", type=_positive, default=2, help="sequences a rank")
    parser.add_argument("--seq-len", type=_positive, default=128, help="tokens a sequence")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl on CUDA, else gloo")
    parser.add_argument("--precision", choices=sorted(LOSS_TOLERANCE), default="fp32")
    parser.add_argument("--bucket-mb", type=float, help="zerokit's bucket_mb (default: its default)")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients (default: do not)")
    parser.add_argument("--threads", type=_positive, default=1, help="CPU threads a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="write settings, machine and every figure here"
    )
    options = parser.parse_args(arguments)
    text = WORKLOADS[options.model].text
    if text is not None and options.seq_len > text.positions:
        parser.error(f"--seq-len {options.seq_len} exceeds {options.model}'s {text.positions} positions")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    options = parse(arguments)
    specs = [
        CellSpec(
            engine=engine,
            model=options.model,
            world=options.world,
            backend=options.backend or ("nccl" if options.device == "cuda" else "gloo"),
            device=options.device,
            precision=options.precision,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
            steps=options.steps,
            warmup=options.warmup,
            seed=options.seed,
            threads=options.threads,
            bucket_mb=options.bucket_mb,
            clip=options.clip,
        )
        for engine in dict.fromkeys(options.engines)
    ]
    tolerance = LOSS_TOLERANCE[options.precision]

    def write_record(results: Results, failures: Failures) -> None:
        if options.json is None:
            return
        summaries = {name: summarise(name, cells) for name, cells in results.items()}
        record = {
            "format": "zerokit.compare-engines/1",
            "machine": machine(),
            "settings": asdict(specs[0]) | {"engine": None, "repeats": options.repeats},
            "summaries": {name: asdict(summary) for name, summary in summaries.items()},
            "cells": {name: [asdict(cell) for cell in cells] for name, cells in results.items()},
            "failures": failures,
            "disagreements": check_losses(summaries, tolerance),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")

    results, failures = run_rounds(
        specs, options.repeats, lambda line: print(line, file=sys.stderr, flush=True), write_record
    )
    summaries = {name: summarise(name, cells) for name, cells in results.items()}
    wrong = check_losses(summaries, tolerance)
    title = (
        f"{options.model}, {options.precision}, {options.world} × {specs[0].backend} on {options.device}, "
        f"batch {options.batch_size}×{options.seq_len}, {'no clipping' if options.clip is None else 'clipping'}, "
        f"median of {options.repeats}"
    )
    show(summaries, title=title, cuda=options.device == "cuda")
    stages = [summary.losses for name, summary in summaries.items() if name.startswith("zerokit")]
    if any(losses != stages[0] for losses in stages[1:]):
        print("note: the losses of zerokit's stages are not identical bits", file=sys.stderr)
    for line in [*wrong, *failures.values()]:
        print(line, file=sys.stderr)
    return 1 if wrong or failures else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Interrupted as interrupted:
        print(f"compare_engines.py: {interrupted}", file=sys.stderr)
        raise SystemExit(128 + interrupted.signal_number) from None

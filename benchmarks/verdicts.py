"""Whether verdicts survive a drifting machine: real comparisons under a load that comes and goes.

Each comparison is of two cells in three rounds, every second one backwards, each cell in fresh processes, while other
processes take the cores for some seconds and leave them again. In every second comparison one cell is slowed: each
step takes longer by a known share.

PYTHONPATH=. python benchmarks/verdicts.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.comparison.differences import Difference, difference
from zerokit.bench.record.metrics import PACED
from zerokit.bench.record.runs import Run
from zerokit.bench.record.settings import Settings
from zerokit.bench.run.session import Host, run_cell
from zerokit.cli.display import Display
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.local import launch

SHARE = "ZEROKIT_VERDICTS_SHARE"
SECONDS = 20.0  # that a load comes or goes for, on average


def come_and_go(seed: int) -> None:
    """Take a core for some seconds, leave it for some, again and again."""
    draw = random.Random(seed)
    while True:
        until = time.monotonic() + draw.expovariate(1 / SECONDS)
        while time.monotonic() < until:
            sum(range(10_000))
        time.sleep(draw.expovariate(1 / SECONDS))


def slow_rank(job: Path, share: float) -> int:
    """A rank of the slowed cell: after each half of a step it works on for a share of the time that this took."""
    from zerokit.bench.engines.zerokit import ZerokitTrainer
    from zerokit.bench.worker import rank as worker

    def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result, until = function(*arguments), (1 + share) * time.perf_counter() - share * started
            while time.perf_counter() < until:
                pass
            return result

        return call

    for name in ("differentiate", "update"):
        setattr(ZerokitTrainer, name, slowed(getattr(ZerokitTrainer, name)))
    worker.main(job)
    return 0


def compare(settings: Settings, rounds: int, share: float, interrupts: Interrupts) -> Difference | None:
    """Two cells over rounds, the second one slowed by `share`; None where runs failed."""

    def start(module: str, arguments: Sequence[str], **options: Any) -> None:
        launch(module, arguments, interrupts=interrupts, **options)

    def start_slowed(module: str, arguments: Sequence[str], **options: Any) -> None:
        start("benchmarks.verdicts", arguments, environment={SHARE: str(share)}, **options)

    hosts = [Host(one, interrupts.check, (Interrupted,), Display()) for one in (start, start_slowed)]
    runs = []
    with tempfile.TemporaryDirectory(prefix="zerokit-verdicts-") as folder:
        for number in range(rounds):
            for place in (0, 1) if number % 2 == 0 else (1, 0):
                asked, path = replace(settings, repeat=number), Path(folder, f"{number}-{place}.json")
                runs.append((place, run_cell(asked, path, hosts[place if share else 0])))
    records = [tuple(record for place, record in runs if place == which) for which in (0, 1)]
    first, second = make_cells([Run("first", records[0]), Run("second", records[1])])
    return difference(second, first, PACED)


def main() -> int:
    """Run all; 1 where equal code was told apart too often, or slower code found too seldom."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured ones of a round")
    parser.add_argument("--share", type=float, default=0.1, help="by which slowed steps take longer")
    parser.add_argument("--loads", type=int, default=2)
    options = parser.parse_args()
    settings = Settings(nodes=2, batch_size=1, seq_len=64, steps=options.steps, warmup=3)
    spawn = multiprocessing.get_context("spawn").Process
    loads = [spawn(target=come_and_go, args=(n,), daemon=True) for n in range(options.loads)]
    found: Counter[tuple[bool, str]] = Counter()
    with Interrupts() as interrupts:
        for load in loads:
            load.start()
        for number in range(options.comparisons):
            share = options.share * (number % 2)
            change = compare(settings, options.rounds, share, interrupts)
            verdict = "failed" if change is None else change.verdict
            found[share > 0, verdict] += 1
            told = "" if change is None else f"measured {change.relative:+6.1%} ± {change.noise or 0:5.1%}  "
            print(f"{number + 1:3d}  slowed by {share:4.0%}  {told}{verdict}", flush=True)
    for (slow, told), count in sorted(found.items()):
        print(f"{'slower' if slow else 'equal'} code: {told} {count}")
    equal, slower = (sum(n for (slow, _), n in found.items() if slow == which) for which in (False, True))
    return int(found[False, "within noise"] < 0.95 * equal or found[True, "worse"] < 0.9 * slower)


if __name__ == "__main__":
    sys.exit(slow_rank(Path(sys.argv[-1]), float(os.environ[SHARE])) if SHARE in os.environ else main())

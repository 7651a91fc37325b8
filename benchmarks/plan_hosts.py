"""Planned beside measured steps on hosts: two ranks of one node, and of two nodes joined by slow links.

In each round the doctor's JSON is made; each stage's micro-batches are measured between two records of one rank
alone, and `zerokit plan` is asked with each of these and the JSON: their mean is what was planned. Each planned step
of the records' own micro-batch must be within 10 % of the measured one in the median of the rounds, and the cell that
is planned to be the best must reach 97 % of the throughput of the best that was measured. Nodes are network
namespaces of this machine, a rank takes one thread. Needs root and iproute2 for the links.

python benchmarks/plan_hosts.py
python benchmarks/plan_hosts.py --places node --steps 10 --repeats 1 --batch-sizes 2,4
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, plain_table, ratio, read_options, write_json
from benchmarks.slow_link import limit, on_hosts
from tests.support.namespaces import Hosts, refusal, wired_hosts
from zerokit.bench.record.record import in_folder
from zerokit.bench.record.statistics import slowest

PLACES = {"node": 0.0, "1gbit": 1.0, "100mbit": 0.1}
"""Gbit/s between two nodes; 0 for one node."""
BAR, BEST_BAR = 0.10, 0.03


@dataclass(frozen=True)
class Cell:
    """One cell: milliseconds of a step, and planned to measured in the same round; medians of rounds.

    `compared_ms` is planned from the same records for all cells, so that they can be compared.
    """

    stage: int
    batch_size: int
    planned_ms: float
    measured_ms: float
    ratio: float
    compared_ms: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.batch_size / self.measured_ms * 1e3


def measure(hosts: Hosts | None, folder: Path, options: Any) -> list[Cell]:
    """Every cell of one place, planned and measured."""
    rounds = [measure_round(hosts, folder, options, number) for number in range(options.repeats)]
    cells = []
    for key in sorted(rounds[0]):
        planned, measured, alike = zip(*(one[key] for one in rounds), strict=True)
        cells.append(Cell(*key, median(planned), median(measured), ratio(planned, measured), median(alike)))
    return cells


def measure_round(
    hosts: Hosts | None, folder: Path, options: Any, number: int
) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Planned and measured milliseconds of every cell, by stage and micro-batch, and those planned from all records.

    A machine's speed drifts within minutes, so each round begins with a doctor's report of its own, and each stage's
    record is taken both before and after it.
    """

    def alone(*words: str) -> str:
        return on_hosts(None, "zerokit.cli", *words, folder=folder)

    def together(*words: str, codes: Sequence[int] = (0,)) -> str:
        more = () if hosts is not None else ("--nproc-per-node", "2")
        return on_hosts(hosts, "zerokit.cli", *words, *more, codes=codes, folder=folder)

    doctor = folder / f"doctor{number}.json"
    doctor.write_text(together("doctor", str(folder), "--json", codes=(0, 5)))
    model = ["--model", options.model, "--seq-len", str(options.seq_len), "--precision", "fp32"]
    timed = [
        *["--data", "synthetic", "--no-mlflow", "--no-twin", "--warmup", "4", "--steps"],
        str(options.steps),
    ]

    def plan_with(record: Path) -> dict[tuple[int, int], float]:
        asked = f"--gpus 2 --device cpu --stage 0,1,2,3 --batch-size {options.batch_sizes} --seq-len {options.seq_len}"
        files = ["--from", str(record), "--cluster", str(doctor)]
        answer = alone("plan", options.model, *asked.split(), *files, "--no-recompute", "--json")
        return {(one["stage"], one["batch_size"]): one["step_ms"] for one in json.loads(answer)["fitting"]}

    def record_alone(turn: int) -> Path:
        record = folder / f"alone{number}-{turn}.json"
        own = ["--batch-size", str(options.batch_size), "--nproc-per-node", "1", "--output", str(record)]
        alone("bench", *model, *timed, *own)
        return record

    found, plans = {}, [plan_with(record_alone(0))]
    for stage in range(4):
        sweep = folder / f"sweep{number}-{stage}"
        cells = ["--stage", str(stage), "--batch-size", options.batch_sizes]
        together("bench", *model, *timed, *cells, "--output", str(sweep))
        plans.append(plan_with(record_alone(stage + 1)))
        for one in in_folder(sweep):
            key = stage, one.settings.batch_size
            times = slowest([rank.step_ms for rank in one.ranks])
            found[key] = mean(each[key] for each in plans[-2:]), median(times)
            print(f"round {number}, stage {stage}, batch {key[1]}: {found[key]} ms", file=sys.stderr)
    return {key: (*times, mean(each[key] for each in plans)) for key, times in found.items()}


def judge(place: str, cells: Sequence[Cell], own: int) -> bool:
    """Print the cells of one place. Whether its bars hold."""
    rows = []
    for one in cells:
        times = f"{one.planned_ms:.1f} {one.measured_ms:.1f} {one.ratio:.3f} {one.rate:.2f}".split()
        rows.append([str(one.stage), str(one.batch_size), *times])
    print(plain_table(place, ["stage", "batch", "planned ms", "measured ms", "ratio", "samples/s"], rows))
    # Among equally fast cells, the plan puts the one that needs less memory first.
    best = max(cells, key=lambda one: (one.batch_size / one.compared_ms, one.stage))
    worst = max(abs(one.ratio - 1) for one in cells if one.batch_size == own)
    holds = bar_holds(f"{place}: planned step of stages 0 to 3, worst error", worst, BAR)
    behind = max(one.rate for one in cells) / best.rate - 1
    name = (
        f"{place}: best planned cell (stage {best.stage}, batch {best.batch_size}), behind the best measured"
    )
    return bar_holds(name, behind, BEST_BAR) and holds


def main(words: Sequence[str] | None = None) -> int:
    options = read_options(
        __doc__,
        words,
        places=",".join(PLACES),
        model="gpt-5m",
        seq_len=128,
        batch_size=(4, "of the record of one rank alone"),
        batch_sizes="2,4,8",
        steps=20,
        repeats=3,
        json=Path,
    )
    holds, found = True, {}
    for place in options.places.split(","):
        gbits = PLACES[place]
        if gbits and (reason := refusal()):
            raise SystemExit(f"no two hosts here: {reason}")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerokit-plan-")))
            hosts = stack.enter_context(wired_hosts(servers=False)) if gbits else None
            if hosts is not None:
                limit(hosts, gbits)
            cells = measure(hosts, folder, options)
        found[place] = [astuple(one) for one in cells]
        write_json(options.json, {"options": vars(options), "cells": found})
        holds = judge(place, cells, options.batch_size) and holds
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""Planned beside measured steps on hosts: two ranks of one node, and of two nodes joined by slow links.

In each round the doctor's JSON is made, and for each stage a record of one rank alone; every micro-batch is measured,
and `zerokit plan` is asked with both. Each planned step of the record's own micro-batch must be within 10 % of the
measured one in the median of the rounds, and the cell that is planned to be the best must reach 97 % of the throughput
of the best that was measured. Nodes are network namespaces of this machine, a rank takes one thread. Needs root and
iproute2 for the links.

python benchmarks/plan_hosts.py
python benchmarks/plan_hosts.py --places node --steps 10 --repeats 1 --batch-sizes 2,4
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import ROOT, bar_holds, machine, make_parser, plain_table, write_json
from benchmarks.slow_link import limit
from tests.support.namespaces import Hosts, refusal, two_hosts
from zerokit.bench.record.record import in_folder

PLACES = {"node": 0.0, "1gbit": 1.0, "100mbit": 0.1}
"""Gbit/s between two nodes; 0 for one node."""
BAR, BEST_BAR = 0.10, 0.03
PORT = 29517


@dataclass(frozen=True)
class Bench:
    """Commands of zerokit on two ranks: of one node, or of one each on two hosts."""

    hosts: Hosts | None
    folder: Path

    def alone(self, *words: str, codes: Sequence[int] = (0,)) -> str:
        """What a command on this machine says on stdout."""
        return self._run([([], words, {})], codes)

    def together(self, *words: str, codes: Sequence[int] = (0,)) -> str:
        """What a command says whose two ranks are those of this place."""
        if self.hosts is None:
            return self.alone(*words, "--nproc-per-node", "2", codes=codes)
        shared = {"MASTER_ADDR": self.hosts.addresses["a"], "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
        shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = enumerate(self.hosts.addresses)
        return self._run(
            [
                (self.hosts.inside(host), words, shared | {"RANK": str(rank), "GROUP_RANK": str(rank)})
                for rank, host in ranks
            ],
            codes,
        )

    def _run(
        self, commands: Sequence[tuple[list[str], Sequence[str], dict[str, str]]], codes: Sequence[int]
    ) -> str:
        processes = [
            subprocess.Popen(
                [*inside, sys.executable, "-m", "zerokit.cli", *words],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=self.folder,
            )
            for inside, words, variables in commands
        ]
        said = [process.communicate(timeout=3600) for process in processes]
        for process, (_, words, _), (_, errors) in zip(processes, commands, said, strict=True):
            if process.returncode not in codes:
                raise SystemExit(f"zerokit {' '.join(words)} ended with {process.returncode}:\n{errors}")
        return said[0][0]


@dataclass(frozen=True)
class Cell:
    """One cell, with milliseconds of a step and samples a second: medians of rounds."""

    stage: int
    batch_size: int
    planned_ms: float
    measured_ms: float
    ratio: float
    """Planned to measured in the same round, median."""

    @property
    def rate(self) -> float:
        return self.batch_size / self.measured_ms * 1e3


def measure(bench: Bench, options: Any) -> list[Cell]:
    """Every cell of one place, planned and measured."""
    rounds = [measure_round(bench, options, number) for number in range(options.repeats)]
    cells = []
    for key in sorted(rounds[0]):
        planned, measured = zip(*(one[key] for one in rounds), strict=True)
        ratio = median(p / m for p, m in zip(planned, measured, strict=True))
        cells.append(Cell(*key, median(planned), median(measured), ratio))
    return cells


def measure_round(bench: Bench, options: Any, number: int) -> dict[tuple[int, int], tuple[float, float]]:
    """Planned and measured milliseconds of every cell, by stage and micro-batch.

    A machine's speed drifts within minutes, so each round begins with a doctor's report of its own, and each stage with
    a record.
    """
    doctor = bench.folder / f"doctor{number}.json"
    doctor.write_text(bench.together("doctor", str(bench.folder), "--json", codes=(0, 5)))
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for stage in range(4):
        found.update(_measure_stage(bench, options, doctor, stage))
    return found


def _measure_stage(
    bench: Bench, options: Any, doctor: Path, stage: int
) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    model = ["--model", options.model, "--seq-len", str(options.seq_len), "--precision", "fp32"]
    timed = [
        "--data",
        "synthetic",
        "--no-mlflow",
        "--no-twin",
        "--warmup",
        "4",
        "--steps",
        str(options.steps),
    ]
    record = doctor.with_name(f"alone-{doctor.stem}-{stage}.json")
    sweep = doctor.with_name(f"sweep-{doctor.stem}-{stage}")
    own = ["--batch-size", str(options.batch_size), "--nproc-per-node", "1", "--output", str(record)]
    bench.alone("bench", *model, *timed, *own)
    cells = ["--stage", str(stage), "--batch-size", options.batch_sizes]
    bench.together("bench", *model, *timed, *cells, "--output", str(sweep))
    asked = ["--gpus", "2", "--device", "cpu", "--from", str(record), "--cluster", str(doctor)]
    asked += ["--batch-size", options.batch_sizes, "--seq-len", str(options.seq_len), "--no-recompute"]
    answer = json.loads(bench.alone("plan", options.model, *asked, "--stage", str(stage), "--json"))
    planned = {one["batch_size"]: one["step_ms"] for one in answer["fitting"]}
    for one in in_folder(sweep):
        slowest = [max(step) for step in zip(*(rank.step_ms for rank in one.ranks), strict=True)]
        yield (stage, one.settings.batch_size), (planned[one.settings.batch_size], median(slowest))


def judge(place: str, cells: Sequence[Cell], own: int) -> bool:
    """Print the cells of one place. Whether its bars hold."""
    rows = [
        [
            str(one.stage),
            str(one.batch_size),
            f"{one.planned_ms:.1f}",
            f"{one.measured_ms:.1f}",
            f"{one.ratio:.3f}",
            f"{one.rate:.2f}",
        ]
        for one in cells
    ]
    print(plain_table(place, ["stage", "batch", "planned ms", "measured ms", "ratio", "samples/s"], rows))
    best = max(cells, key=lambda one: one.batch_size / one.planned_ms)
    worst = max(abs(one.ratio - 1) for one in cells if one.batch_size == own)
    holds = bar_holds(f"{place}: planned step of stages 0 to 3, worst error", worst, BAR)
    behind = max(one.rate for one in cells) / best.rate - 1
    name = (
        f"{place}: best planned cell (stage {best.stage}, batch {best.batch_size}), behind the best measured"
    )
    return bar_holds(name, behind, BEST_BAR) and holds


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--model", default="gpt-5m")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="of the record of one rank alone")
    parser.add_argument("--batch-sizes", default="2,4,8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    holds, found = True, {}
    for place in options.places.split(","):
        gbits = PLACES[place]
        if gbits and (reason := refusal()):
            raise SystemExit(f"no two hosts here: {reason}")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerokit-plan-")))
            hosts = stack.enter_context(two_hosts(servers=False)) if gbits else None
            if hosts is not None:
                limit(hosts, gbits)
            cells = measure(Bench(hosts, folder), options)
        found[place] = [
            [one.stage, one.batch_size, one.planned_ms, one.measured_ms, one.ratio] for one in cells
        ]
        write_json(
            options.json, {"options": vars(options) | {"json": None}, "machine": machine(), "cells": found}
        )
        holds = judge(place, cells, options.batch_size) and holds
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

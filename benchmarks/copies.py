"""Steps with copies in the nodes' memory beside steps without, bytes that copies move, and a restart from memory.

Ranks of one machine are nodes here, each with a directory of its own below DIRECTORY/node-N; use one in memory. In each
round the same training runs with and without `zerokit.Copies`, in alternating order. A step with copies every ten
steps should take at most 1.03 of one without, and copies=k move k − 1 times the bytes of each rank's file. A restart is
the load of fresh ranks: from the nodes' memory, and from a checkpoint on the disk at --disk.

python benchmarks/copies.py DIRECTORY --disk DISK
python benchmarks/copies.py DIRECTORY --disk DISK --size-mb 500 --rounds 5 --json copies.json
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import zerokit
from benchmarks.measuring import bar_holds, in_rounds, read_options, spread, write_json
from benchmarks.ranks import run_ranks
from zerokit.checkpoint.together import Together

WORLD, WIDTH, EVERY, COPIES = 2, 1024, 10, 2
ROWS = 1024
"""Rows of a rank's batch. Copies take time of the processor, so their cost depends on what a step computes."""
STATE_BYTES = 12
"""Each parameter's: master and two moments of AdamW, in fp32."""
BAR = 1.03
WITH, WITHOUT = "with copies", "without"


def _optimizer(size_mb: float) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    torch.manual_seed(0)
    count = max(1, round(size_mb * 1e6 * WORLD / STATE_BYTES / (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-4)


def train(directory: str, disk: str, size_mb: float, steps: int, name: str) -> dict[str, Any]:
    """This rank's step times in ms; with copies also the bytes that it sent of each, and those of its file."""
    model, optimizer = _optimizer(size_mb)
    run, batch, sent = Path(directory, f"node-{dist.get_rank()}", "run"), torch.randn(ROWS, WIDTH), [0]
    swap = Together.swap

    def counted(self: Together, outgoing: Any, *rest: Any) -> None:
        sent[0] += 0 if outgoing is None else outgoing.numel() * outgoing.element_size()
        swap(self, outgoing, *rest)

    copies = zerokit.Copies(optimizer, run, copies=COPIES, every=EVERY) if name == WITH else None
    times = []
    with mock.patch.object(Together, "swap", counted):
        for _ in range(steps):
            started = time.perf_counter()
            optimizer.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            times.append((time.perf_counter() - started) * 1000.0)
        path = None if copies is None else copies.wait()
    files = 0
    if path is not None:
        own = f"rank-{dist.get_rank():05d}-of-{WORLD:05d}.safetensors"
        files = (path / own).stat().st_size
        zerokit.save(disk, optimizer, step=steps, overwrite=True)
    made = len(range(EVERY, steps + 1, EVERY))
    return {"ms": times, "sent": sent[0], "file": files, "made": made}


def restart(directory: str, disk: str, size_mb: float, name: str) -> float:
    """Seconds until fresh ranks have loaded, from memory or from the disk, and made a step."""
    started = time.perf_counter()
    model, optimizer = _optimizer(size_mb)
    place = str(Path(directory, f"node-{dist.get_rank()}", "run")) if name == "memory" else disk
    zerokit.load([place], optimizer)
    optimizer.backward(model(torch.randn(ROWS, WIDTH)).square().mean())
    optimizer.step()
    return time.perf_counter() - started


def main() -> int:
    """Measure all; returns 1 when a bar is missed or bytes differ from the formula."""
    options = read_options(
        __doc__,
        None,
        _directory=(Path, "in memory, such as one below /dev/shm"),
        disk=(Path, "a directory on a disk"),
        size_mb=(50.0, "state of a rank, in 10^6 bytes"),
        steps=(40, "of each training"),
        rounds=3,
        json=Path,
    )
    if options.disk is None:
        raise SystemExit("give --disk DIRECTORY")
    nodes = options.directory.resolve() / "zerokit-copies-benchmark"
    disk = options.disk.resolve() / "zerokit-copies-benchmark-disk"
    runs: dict[str, list[list[dict[str, Any]]]] = {}

    def measure(name: str) -> float:
        for folder in (nodes, disk) if name == WITH else ():
            shutil.rmtree(folder, ignore_errors=True)
        found = run_ranks(train, str(nodes), str(disk), options.size_mb, options.steps, name, world=WORLD)
        runs.setdefault(name, []).append(found)
        # The mean of whole intervals: a copy holds one step in ten.
        slowest: list[float] = [
            max(step) for step in zip(*(rank["ms"][EVERY:] for rank in found), strict=True)
        ]
        return sum(slowest) / len(slowest)

    try:
        step_ms = in_rounds((WITH, WITHOUT), options.rounds, measure)
        restarts = in_rounds(
            ("memory", "disk"),
            options.rounds,
            lambda name: max(run_ranks(restart, str(nodes), str(disk), options.size_mb, name, world=WORLD)),
        )
    finally:
        for folder in (nodes, disk):
            shutil.rmtree(folder, ignore_errors=True)
    for name, values in step_ms.items():
        print(f"a step {name}: {spread(values, 2)} ms")
    for name, values in restarts.items():
        print(f"from fresh ranks to a step, from {name}: {spread(values, 2)} s")
    wrong = [
        rank
        for found in runs[WITH]
        for rank in found
        # A copy that was still due when the last one was under way was left out.
        if rank["sent"] % ((COPIES - 1) * rank["file"])
        or not 0 < rank["sent"] <= rank["made"] * (COPIES - 1) * rank["file"]
    ]
    print(f"bytes that copies moved: {'NOT ' if wrong else ''}(k − 1) × each rank's file for every copy")
    pairs = zip(step_ms[WITH], step_ms[WITHOUT], strict=True)
    held = bar_holds("a step with copies ÷ without", median(one / other for one, other in pairs), BAR)
    write_json(options.json, {"step_ms": step_ms, "restart_s": restarts, "runs": runs})
    return int(bool(wrong) or not held)


if __name__ == "__main__":
    sys.exit(main())

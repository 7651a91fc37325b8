"""What a background save costs the training: how long a step's loop is held, and how much slower steps are meanwhile.

Two ranks of one thread each train square layers on gloo. In each round they copy their state once into a warm buffer
with torch alone (the floor), train some steps, save beside training, and go on training until the save has ended.

    held          the call of zerokit.save(blocking=False), beside the floor; bar: 1.3 times
    slower        what the steps during the write took longer than steps before and after it, beside the processor
                  time that the machine spends on a save when nobody trains, its kernel's included, for each rank;
                  bar: no more than that (ranks share the cores with it)

python benchmarks/background_saves.py DIRECTORY
python benchmarks/background_saves.py DIRECTORY --size-mb 500 --rounds 25 --json background.json
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import zerokit
from benchmarks.measuring import read_options, write_json
from benchmarks.ranks import run_ranks

WORLD, WIDTH = 2, 1024
STATE_BYTES = 12
"""State of one parameter: master and two moments of AdamW, in fp32."""
HELD_BAR = 1.3


def busy_seconds() -> float:
    """Busy time of all processors since boot: this process alone leaves out what the kernel writes back for it."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def train(directory: str, size_mb: float, rounds: int) -> list[dict[str, float]]:
    """The rounds of this rank, in seconds; `steps` were made during the write."""
    torch.manual_seed(0)
    count = max(1, round(size_mb * 1e6 * WORLD / STATE_BYTES / (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-4)
    batch = torch.randn(64, WIDTH)

    def step() -> None:
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def timed_steps(number: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(number):
            step()
        return (time.perf_counter() - started) / number

    timed_steps(3)
    state = [
        tensor
        for flat in optimizer.runtime.inner.param_groups[0]["params"]
        for tensor in (flat.detach(), *optimizer.runtime.inner.state[flat].values())
        if tensor.dim()
    ]
    buffer = torch.zeros(sum(tensor.numel() for tensor in state))
    run, found = Path(directory, "run"), []
    before = timed_steps(3)
    for number in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        start = 0
        for tensor in state:
            buffer[start : start + tensor.numel()].copy_(tensor)
            start += tensor.numel()
        copy = time.perf_counter() - started

        dist.barrier()
        started = time.perf_counter()
        saving = zerokit.save(run, optimizer, step=2 * number, blocking=False, keep_last=1)
        held = time.perf_counter() - started
        steps, going = 0, True
        started = time.perf_counter()
        while going:
            step()
            steps += 1
            busy = torch.tensor(0.0 if saving.done() else 1.0)
            dist.all_reduce(busy)
            going = bool(busy.item())
        during = (time.perf_counter() - started) / steps
        saving.wait()
        after = timed_steps(3)

        os.sync()  # what earlier writes left
        dist.barrier()
        wall, cpu = time.perf_counter(), busy_seconds()
        zerokit.save(run, optimizer, step=2 * number + 1, blocking=False, keep_last=1).wait()
        dist.barrier()
        wall, cpu = time.perf_counter() - wall, (busy_seconds() - cpu) / WORLD
        if number:  # the first has made the buffer
            one = {"copy": copy, "held": held, "step": (before + after) / 2, "steps": steps, "during": during}
            found.append(one | {"alone_wall": wall, "alone_cpu": cpu - copy})
        before = timed_steps(3)
    return found


def main() -> int:
    """Run both ranks; returns 1 when a save held the training for longer than the bar."""
    options = read_options(
        __doc__,
        None,
        _directory=(Path, "where to save: what its disk can do is part of the figures"),
        size_mb=(200.0, "state of a rank, in 10^6 bytes"),
        rounds=15,
        json=(Path, "write the rounds there"),
    )
    work = options.directory.resolve() / "background-saves"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    by_rank = run_ranks(train, str(work), options.size_mb, options.rounds, world=WORLD)
    shutil.rmtree(work)
    found = [one for rounds in by_rank for one in rounds]
    held = median(one["held"] / one["copy"] for one in found)
    slower = median((one["during"] - one["step"]) * one["steps"] / one["alone_cpu"] for one in found)
    middle = {name: median(one[name] for one in found) for name in found[0]}
    ms = {name: f"{1e3 * value:8.1f} ms" for name, value in middle.items()}
    print(f"one copy of {options.size_mb:<15g}{ms['copy']}")
    print(f"held by a background save  {ms['held']}   {held:.2f} of the copy (bar {HELD_BAR})")
    print(f"a step                     {ms['step']}")
    print(f"a step during the write    {ms['during']}   {middle['steps']:g} steps")
    print(f"a save while nobody trains {ms['alone_wall']}  {ms['alone_cpu']} of processor")
    print(f"steps took longer by {slower:.2f} of that processor time (bar 1)")
    write_json(options.json, {"held": held, "slower": slower, "rounds": found})
    return int(held > HELD_BAR)


if __name__ == "__main__":
    sys.exit(main())

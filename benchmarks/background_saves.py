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

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

WORLD, WIDTH = 2, 1024
STATE_BYTES = 12
"""Of a parameter: master and two moments of AdamW, in fp32."""
HELD_BAR = 1.3


@dataclass
class Round:
    """Seconds on one rank. `steps` were made during the write."""

    copy: float
    held: float
    step: float
    steps: int
    during: float
    alone_wall: float
    alone_cpu: float


def train(directory: Path, size_mb: float, rounds: int, rank: int) -> None:
    """One rank: writes its rounds as `rank-RANK.json`."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import zerokit

    def busy_seconds() -> float:
        """Of all processors since the boot: this process alone leaves out what the kernel writes back for it."""
        user, nice, system, _idle, _waiting, interrupts, soft = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
        )
        return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
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
        for flat in optimizer.parts.inner.param_groups[0]["params"]
        for tensor in (flat.detach(), *optimizer.parts.inner.state[flat].values())
        if tensor.dim()
    ]
    buffer = torch.zeros(sum(tensor.numel() for tensor in state))
    run, found = directory / "run", []
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
            found.append(Round(copy, held, (before + after) / 2, steps, during, wall, cpu - copy))
        before = timed_steps(3)
    (directory / f"rank-{rank}.json").write_text(json.dumps([asdict(one) for one in found]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", type=Path, help="where to save: what its disk can do is part of the figures"
    )
    parser.add_argument("--size-mb", type=float, default=200.0, help="state of a rank, in 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rounds there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.directory, options.size_mb, options.rounds, options.rank)
        return
    work = options.directory / "background-saves"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    sizes = ["--size-mb", str(options.size_mb), "--rounds", str(options.rounds)]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(work), "--rank", str(rank), *sizes],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD)
    ]
    if any(rank.wait() for rank in ranks):
        sys.exit("a rank failed")
    found = [
        Round(**one) for rank in range(WORLD) for one in json.loads((work / f"rank-{rank}.json").read_text())
    ]
    shutil.rmtree(work)
    held = statistics.median(one.held / one.copy for one in found)
    slower = statistics.median((one.during - one.step) * one.steps / one.alone_cpu for one in found)
    ms = {
        name: f"{1e3 * statistics.median(getattr(one, name) for one in found):8.1f} ms"
        for name in asdict(found[0])
    }
    steps = statistics.median(one.steps for one in found)
    print(f"one copy of {options.size_mb:<15g}{ms['copy']}")
    print(f"held by a background save  {ms['held']}   {held:.2f} of the copy (bar {HELD_BAR})")
    print(f"a step                     {ms['step']}")
    print(f"a step during the write    {ms['during']}   {steps:g} steps")
    print(f"a save while nobody trains {ms['alone_wall']}  {ms['alone_cpu']} of processor")
    print(f"steps took longer by {slower:.2f} of that processor time (bar 1)")
    if options.json:
        rounds = [asdict(one) for one in found]
        options.json.write_text(json.dumps({"held": held, "slower": slower, "rounds": rounds}, indent=1))
    sys.exit(held > HELD_BAR)


if __name__ == "__main__":
    main()

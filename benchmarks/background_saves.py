"""How long a background save holds the training, beside one copy of the state with torch alone (the floor).

Two ranks of one thread each train square layers on gloo. In each round they copy their state into a warm buffer, call
zerokit.save(blocking=False), and train until the save has ended.

python benchmarks/background_saves.py DIRECTORY
python benchmarks/background_saves.py DIRECTORY --size-mb 500 --rounds 25 --json background.json
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import zerokit
from benchmarks.measuring import bar_holds, read_options, write_json
from benchmarks.ranks import run_ranks

WORLD, WIDTH = 2, 1024
STATE_BYTES = 12
"""State of one parameter: master and two moments of AdamW, in fp32."""
BAR = 1.3


def train(directory: str, size_mb: float, rounds: int) -> list[dict[str, float]]:
    """The rounds of this rank, in seconds."""
    torch.manual_seed(0)
    count = max(1, round(size_mb * 1e6 * WORLD / STATE_BYTES / (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-4)
    batch = torch.randn(64, WIDTH)

    def step() -> None:
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [
        tensor
        for flat in optimizer.runtime.inner.param_groups[0]["params"]
        for tensor in (flat.detach(), *optimizer.runtime.inner.state[flat].values())
        if tensor.dim()
    ]
    buffer, found = torch.zeros(sum(tensor.numel() for tensor in state)), []
    for number in range(rounds + 1):
        dist.barrier()
        started, start = time.perf_counter(), 0
        for tensor in state:
            buffer[start : start + tensor.numel()].copy_(tensor)
            start += tensor.numel()
        copy = time.perf_counter() - started

        dist.barrier()
        started = time.perf_counter()
        saving = zerokit.save(Path(directory), optimizer, step=number, blocking=False, keep_last=1)
        held, going = time.perf_counter() - started, True
        while going:
            step()
            busy = torch.tensor(0.0 if saving.done() else 1.0)
            dist.all_reduce(busy)
            going = bool(busy.item())
        saving.wait()
        if number:  # the first has made the buffer
            found.append({"copy": copy, "held": held})
    return found


def main() -> int:
    """Run both ranks; returns 1 when a save held the training for longer than the bar."""
    options = read_options(
        __doc__,
        None,
        _directory=(Path, "where to save"),
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
    for name in ("copy", "held"):
        print(f"{name}  {1e3 * median(one[name] for one in found):.1f} ms")
    held = median(one["held"] / one["copy"] for one in found)
    write_json(options.json, {"held": held, "rounds": found})
    return int(not bar_holds("held by a background save, of the copy", held, BAR))


if __name__ == "__main__":
    sys.exit(main())

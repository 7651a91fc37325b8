"""Elastic benches of tests: a model that tells which samples it saw, and holds its ranks where a test wants them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import zerokit
from zerokit.bench.record.journal import Part
from zerokit.bench.workloads.build import draw_seed

MINE = '''
import os, time
from pathlib import Path
import torch
from torch import nn
from zerokit.bench.workloads.own import Own

SEEN = Path(__file__).parent / "seen"
FREE = (SEEN / "free").exists()  # asked once: ranks that have started before stay held
(SEEN / f"pid-{os.environ.get('RANK')}").write_text(str(os.getpid()))
steps = 0

def held():
    """In the forward pass after as many as the file says, until it says more or is gone."""
    try:
        return not FREE and steps > int((SEEN / "hold").read_text() or 0)
    except FileNotFoundError:
        return False

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x, seed):
        global steps
        if not x.is_meta:
            steps += 1
            rank, world, part = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            with (SEEN / f"{part}-{rank}-of-{world}").open("a") as file:
                print(int(seed), file=file)
            print("forward of", len(x), flush=True)
            while held():
                time.sleep(0.05)
        return self.inner(x).square().mean()

def draw(generator, size):
    return torch.randn(size, 8, generator=generator), torch.tensor([generator.initial_seed()])

def tiny():
    return Own(build=Net, batch=draw)
'''
BATCH = 2
MODEL = ("--model", "mine:tiny", "--batch-size", str(BATCH), "--device", "cpu", "--no-twin", "--warmup", "1")


def prepare(folder: Path, hold: int | None) -> Path:
    """Put the model there; its ranks stop in the forward pass after `hold` steps. The folder of its traces."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE)
    seen = folder / "seen"
    seen.mkdir()
    if hold is not None:
        hold_at(seen, hold)
    return seen


def hold_at(seen: Path, steps: int) -> None:
    """Let the ranks that are held go on until they have made so many steps."""
    temporary = seen / "hold.tmp"
    temporary.write_text(str(steps))
    temporary.replace(seen / "hold")


def let_go(seen: Path) -> None:
    """Ranks that start from now on are not held."""
    (seen / "free").touch()


def trained(folder: Path, part: int, step: int) -> Callable[[], bool]:
    """Whether rank 0 of a part has come to this step."""

    def look() -> bool:
        try:
            text = (folder / "run" / "elastic" / f"part-{part:04d}.jsonl").read_text()
        except FileNotFoundError:
            return False
        return json.dumps({"trained": step}) in text

    return look


def kill_rank(seen: Path, rank: int) -> None:
    """By SIGKILL, the newest one; the others go on, and meet their dead peer."""
    os.kill(int((seen / f"pid-{rank}").read_text()), signal.SIGKILL)
    hold_at(seen, 1000)


def samples_of(folder: Path, part: Part, steps: int) -> list[list[int]]:
    """The numbers of the samples that a part trained on in each of its first steps, as its ranks' models saw them.

    Parts of one world size are told from each other by their ports, in the order in which they began.
    """
    numbers = {draw_seed(seed=0, sample=sample) % 2**63: sample for sample in range(2000)}
    found: list[list[int]] = [[] for _ in range(steps)]
    files = list((folder / "seen").glob(f"*-of-{part.world}"))
    by_port: dict[str, list[list[int]]] = {}
    for path in files:
        firsts = [numbers[int(line)] for line in path.read_text().split()]
        by_port.setdefault(path.name.partition("-")[0], []).append(firsts)
    for ranks in by_port.values():
        if min(firsts[0] for firsts in ranks) == part.first_sample:
            assert len(ranks) == part.world
            for firsts in ranks:
                for step, first in enumerate(firsts[:steps]):
                    found[step] += range(first, first + BATCH)
            return [sorted(step) for step in found]
    raise AssertionError(f"no ranks began with sample {part.first_sample}")


def require_plain_order(folder: Path, parts: list[Part]) -> None:
    """After cutting what was repeated, the samples of all parts are 0, 1, 2, … to the end."""
    order: list[int] = []
    for number, part in enumerate(parts):
        end = parts[number + 1].first_step if number + 1 < len(parts) else part.last_step + 1
        for step in samples_of(folder, part, end - part.first_step):
            order += step
    assert order == list(range(len(order)))
    last = parts[-1]
    assert len(order) == last.first_sample + (last.last_step - last.first_step + 1) * last.samples_per_step


def copy_run(run: Path, target: Path, step: int) -> None:
    """A run that ends with this step."""
    target.mkdir(parents=True)
    name = f"step-{step:08d}"
    shutil.copytree(run / name, target / name)
    (target / "latest").write_text(f"{name} {zerokit.Checkpoint(run / name).manifest_crc:08x}\n")

"""A training with a data loader that saves on a stop signal; started by tests/training/test_workers.py.

    torchrun --nproc-per-node 2 stopped.py RUN
    python stopped.py RUN                       two ranks of torch.multiprocessing.spawn

It makes the file RUN.ready after some steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.utils.data import DataLoader, Dataset

import zerokit


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.02)
        return torch.full((4,), float(index))


def rank(number: int, run: str) -> None:
    store = FileStore(f"{run}.store", 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    model = nn.Linear(4, 4)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=2, precision="fp32", lr=1e-6)
    with zerokit.StopSignal(optimizer) as stop:
        for step, batch in enumerate(DataLoader(Slow(), 2, num_workers=2), 1):
            optimizer.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                Path(f"{run}.ready").touch()
            if stop.requested():
                zerokit.save(run, optimizer, step=step)
                break
    dist.barrier()
    dist.destroy_process_group()
    print(f"ended after {stop.reason}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(int(os.environ["RANK"]), sys.argv[1])
    else:
        launcher: Any = torch.multiprocessing
        launcher.spawn(rank, (sys.argv[1],), 2)

"""A rank alone: the process group of most parts, NCCL's on a GPU and gloo's on a host."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.gpu_check.place import Place
from tests.support.devices import alone_on_gpu


def join_gloo(folder: str, rank: int, world: int) -> None:
    """Starts the default group of ranks that meet in a folder, with gloo's collectives."""
    store = FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


@contextlib.contextmanager
def alone(place: Place) -> Iterator[None]:
    """Inside, this process is the only rank, and kernels give the same bits in every run."""
    with tempfile.TemporaryDirectory(prefix="zerokit-store-") as folder:
        join_gloo(folder, 0, 1)
        with alone_on_gpu(place.device.type):
            yield
        if dist.is_initialized():
            dist.destroy_process_group()

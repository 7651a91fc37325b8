"""Two ranks that share this GPU, over gloo: bits of stages, and which way hosts' memory lets pinned memory go."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

import torch

from benchmarks.gpu_check.alone import join_gloo
from benchmarks.gpu_check.place import Place, found
from tests.support.devices import SCENES, Training, at, require_deterministic_kernels
from tests.support.training import may_read_the_other
from zerokit.placement import Axis

_STAGES = (1, 3)
_WORLD = 2


def gloo2(place: Place) -> dict[str, Any]:
    """The same training in bf16 at stages 1 and 3."""
    # Forks of this process, which has touched no device. They end with its process group, in whatever state.
    pool = ProcessPoolExecutor(_WORLD, multiprocessing.get_context("fork"))
    with tempfile.TemporaryDirectory(prefix="zerokit-store-") as folder:
        ranks = list(pool.map(_rank, range(_WORLD), repeat(folder), repeat(place.device.type)))
    pool.shutdown(wait=False)
    faults = [
        f"rank {rank}: stages {_STAGES} differ: {one['bits']}"
        for rank, one in enumerate(ranks)
        if len(set(map(tuple, one["bits"]))) > 1
    ]
    first = ranks[0]
    row = (
        f"bits equal {not faults}; road {first['road']}; pinned memory readable by the other rank "
        f"{[one['pinned_readable'] for one in ranks]}, pageable {[one['readable'] for one in ranks]}; "
        f"{first['seconds']:.1f} s"
    )
    return found({"row": row, "ranks": ranks}, faults)


def _rank(rank: int, folder: str, kind: str) -> dict[str, Any]:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        require_deterministic_kernels()
        torch.cuda.set_device(device)
    join_gloo(folder, rank, _WORLD)
    readable = may_read_the_other()
    pinned = may_read_the_other(pinned=True) if kind == "cuda" else None
    started, bits, roads = time.perf_counter(), [], set()
    for stage in _STAGES:
        training = Training(at(SCENES["plain"], stage=stage, precision="bf16"), device)
        for step in range(training.run.steps):
            training.step(step)
        roads.add(training.optimizer.runtime.collectives.routes[Axis.INNER].name)
        bits.append(training.bits())
    return {
        "bits": bits,
        "road": sorted(roads),
        "readable": readable,
        "pinned_readable": pinned,
        "seconds": time.perf_counter() - started,
    }

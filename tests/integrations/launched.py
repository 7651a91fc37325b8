"""The environment that a launcher gives its ranks, for libraries that look there and not at the process group."""

from __future__ import annotations

import os

import torch.distributed as dist


def as_launched() -> None:
    """Set what torchrun sets; the group that this rank has joined already is used as it is."""
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost",
        "OMP_NUM_THREADS": "1",
    }

"""The shares of ranks: how much of what is sharded each of them holds, as asked for or by the memory that is free."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from zerokit.available import memory_pools, part_of, sharers
from zerokit.cuts import MAX_SHARE, reduced
from zerokit.errors import UsageError
from zerokit.layout import Layout
from zerokit.runtime.collectives import Collectives

BY_MEMORY = "memory"
_PLACE = "ZeroOptimizer(shares='memory')"
_GRAIN = 64 << 20
"""Bytes of memory for a share of one: finer differences move with every allocation."""


def cut_by_shares(layout: Layout, asked: object, collectives: Collectives) -> Layout:
    """The layout cut by the shares that are asked for. Collective. Raises `UsageError` for shares that do not fit."""
    if asked is None:
        return layout
    by_rank = _by_memory(collectives) if asked == BY_MEMORY else _as_asked(asked, collectives)
    mesh = collectives.mesh
    try:
        return layout.for_world(mesh.world, [by_rank[mesh.rank(position)] for position in range(mesh.world)])
    except ValueError as error:
        raise UsageError(f"shares={asked!r}: {error}") from None


def _as_asked(asked: object, collectives: Collectives) -> list[int]:
    """The shares by rank; those of the inner axis are repeated for each group of the outer one."""
    mesh = collectives.mesh
    if not isinstance(asked, list | tuple):
        raise UsageError(
            f"shares={asked!r}: expected one integer for each of {mesh.world} ranks, such as (3, 3, 1, 1), or "
            f"{BY_MEMORY!r}"
        )
    if len(asked) == mesh.inner:
        return list(asked) * mesh.outer
    if len(asked) != mesh.world:
        inner = f", or of the {mesh.inner} of the inner axis" if mesh.outer > 1 else ""
        raise UsageError(
            f"shares={asked!r}: {len(asked)} shares, expected one for each of {mesh.world} ranks{inner}"
        )
    return list(asked)


def _by_memory(collectives: Collectives) -> list[int]:
    """Shares in proportion to the free memory of each rank's device, printed on rank 0."""
    mine = free_bytes(collectives.device, sharing_memory(collectives))
    free = collectives.all_gather_objects(mine, _PLACE)
    shares = in_proportion(free)
    if collectives.rank == 0:
        said = (f"{share} (rank {rank}, {free[rank] / 1e9:.1f} GB)" for rank, share in enumerate(shares))
        print(f"zerokit: shares by free memory: {', '.join(said)}", file=sys.stderr)
    return shares


def in_proportion(sizes: Sequence[int]) -> list[int]:
    """Shares in proportion to bytes of memory."""
    shares = [min(size // _GRAIN, MAX_SHARE) for size in sizes]
    equal = [1] * len(sizes)
    return list(reduced(len(sizes), shares if any(shares) else equal)) or equal


def sharing_memory(collectives: Collectives) -> Mapping[str, int]:
    """How many ranks take from each pool of main memory: a machine, or a control group with a limit. Collective."""
    return sharers(collectives.all_gather_objects(list(memory_pools()), _PLACE))


def free_bytes(device: torch.device, sharing: Mapping[str, int]) -> int:
    """The memory that a rank could still take: of its GPU, or its part of the main memory that ranks share.

    `sharing` is how many ranks take from each pool of main memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + reserved
    return int(min(part_of(memory_pools(), sharing), sys.maxsize))

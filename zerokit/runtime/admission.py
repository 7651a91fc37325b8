"""Agreement at construction: all ranks have the same model, layout and settings."""

from __future__ import annotations

import hashlib
import json

from zerokit.errors import LayoutMismatch
from zerokit.layout import Layout
from zerokit.runtime.collectives import Collectives

BUILDING = "construction of ZeroOptimizer"
"""The place at which ranks exchange what they build."""


def require_agreement(layout: Layout, settings: dict[str, str], collectives: Collectives) -> None:
    """Raise `LayoutMismatch` on every rank, naming ranks and differences, unless all describe the same thing."""
    digest = hashlib.sha256(layout.digest() + json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if len(set(collectives.all_gather_objects(digest, BUILDING))) == 1:
        return
    units = [unit.name for unit in layout.units]
    mine = {
        **settings,
        "bucket_mb": f"{layout.bucket_bytes} bytes",
        "the number of parameters": str(len(layout.parameters)),
        **{
            p.name: f"{p.dtype}{list(p.shape)} in group {p.group}{'' if p.trainable else ' (frozen)'}"
            for p in layout.parameters
        },
        "the division by units=": f"{len(units)} units ({', '.join(units[:2])}, …)",
    }
    described = collectives.all_gather_objects(mine, BUILDING)
    lines = []
    for rank, other in enumerate(described):
        differing = [key for key in {**described[0], **other} if described[0].get(key) != other.get(key)]
        lines += [
            f"rank {rank}: {key} is {other.get(key, 'absent')}, not {described[0].get(key, 'absent')}"
            for key in differing[:4]
        ]
    raise LayoutMismatch(
        "ranks disagree, compared with rank 0:\n  "
        + "\n  ".join(lines)
        + "\nBuild the same model with the same arguments on every rank"
    )

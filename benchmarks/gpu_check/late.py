"""Collectives whose results come late: no bit may change, and a wait that is taken away must be noticed."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, found
from tests.runtime.test_device_way import late_and_prompt, mutated
from tests.support.devices import SCENES, STAGES

_MUTATIONS = {"gathers are not waited for": (3,), "sums are added to too early": (0, 1)}
"""A rank alone gathers nothing from others, so that fewer waits matter."""
_SMALL = ("plain", "accumulation")


def late(place: Place) -> dict[str, Any]:
    """Every scene in bf16 at every stage, and two mutations."""
    names = _SMALL if place.small else tuple(SCENES)
    with alone(place):
        cases = [(name, "bf16", STAGES) for name in names]
        faults = [f"late results change bits: {case}" for case in late_and_prompt(place.device.type, cases)]
        seen = {name: mutated(place.device.type, name, stages) for name, stages in _MUTATIONS.items()}
    for name, stages in seen.items():
        for stage, (right, outcome) in stages.items():
            if not right:
                faults.append(f"{name}, stage {stage}: differs though nothing was changed")
            if outcome == "the same":
                faults.append(f"{name}, stage {stage}: not noticed")
    trainings = len(names) * len(STAGES)
    noticed = sum(outcome != "the same" for stages in seen.values() for _, outcome in stages.values())
    row = f"{trainings} late trainings, {len(faults)} faults; mutations noticed {noticed}/{sum(map(len, seen.values()))}"
    return found({"row": row, "scenes": list(names), "mutations": seen}, faults)

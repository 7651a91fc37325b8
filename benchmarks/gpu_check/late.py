"""Collectives whose results come late: no bit may change, and a wait that is taken away must be noticed."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, found
from tests.runtime.test_device_way import late_and_prompt, mutated
from tests.support.devices import SCENES, STAGES
from tests.support.missing_waits import ALONE

_SMALL = ("plain", "accumulation")


def late(place: Place) -> dict[str, Any]:
    """Every scene in bf16 at every stage, and two mutations."""
    names = _SMALL if place.small else tuple(SCENES)
    with alone(place):
        cases = [(name, "bf16", STAGES) for name in names]
        faults = [f"late results change bits: {case}" for case in late_and_prompt(place.device.type, cases)]
        seen = {name: mutated(place.device.type, name, stages) for name, stages in ALONE.items()}
    for name, stages in seen.items():
        for stage, (right, outcome) in stages.items():
            if not right:
                faults.append(f"{name}, stage {stage}: differs though nothing was changed")
            if outcome == "the same":
                faults.append(f"{name}, stage {stage}: not noticed")
    outcomes = [outcome for stages in seen.values() for _, outcome in stages.values()]
    noticed = sum(outcome != "the same" for outcome in outcomes)
    trainings = len(names) * len(STAGES)
    row = f"{trainings} late trainings, {len(faults)} faults; mutations noticed {noticed}/{len(outcomes)}"
    return found({"row": row, "scenes": list(names), "mutations": seen}, faults)

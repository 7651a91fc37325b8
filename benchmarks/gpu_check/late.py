"""Collectives whose results come late: no bit may change, and a wait that is taken away must be noticed."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, attempt, found
from tests.runtime.test_device_way import late_and_prompt, mutated
from tests.support.devices import SCENES, STAGES
from tests.support.missing_waits import ALONE

_SMALL = ("plain", "accumulation")


def late(place: Place) -> dict[str, Any]:
    """Every scene in bf16 at every stage, and two mutations."""
    names = _SMALL if place.small else tuple(SCENES)
    kind, faults = place.device.type, list[str]()
    outcomes: dict[str, dict[int, tuple[bool, str]]] = {}
    with alone(place):
        for name in names:
            wrong = attempt(name, partial(late_and_prompt, kind, [(name, "bf16", STAGES)]), faults, place)
            faults += [f"late results change bits: {case}" for case in wrong or ()]
        for name, stages in ALONE.items():
            outcomes[name] = attempt(name, partial(mutated, kind, name, stages), faults, place) or {}
    seen = [(name, stage, *one) for name, by_stage in outcomes.items() for stage, one in by_stage.items()]
    for name, stage, right, outcome in seen:
        if not right:
            faults.append(f"{name}, stage {stage}: differs though nothing was changed")
        if outcome == "the same":
            faults.append(f"{name}, stage {stage}: not noticed")
    noticed = sum(outcome != "the same" for *_, outcome in seen)
    row = (
        f"{len(names) * len(STAGES)} late trainings, {len(faults)} faults; "
        f"mutations noticed {noticed}/{sum(map(len, ALONE.values()))}"
    )
    return found({"row": row, "scenes": list(names), "mutations": outcomes}, faults)

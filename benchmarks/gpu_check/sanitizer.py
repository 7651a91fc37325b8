"""torch's CUDA sanitizer over two steps at stages 1 to 3: memory that two streams use without an order between them."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, attempt, found
from tests.support.devices import SCENES, Training, at

_STAGES, _STEPS = (1, 2, 3), 2
_CHARACTERS = 4000
"""The most that is kept of a race, whose text has the stacks of both sides."""


def sanitizer(place: Place) -> dict[str, Any]:
    """The races by stage, of which a stage's first one ends its training; on a host only the steps."""
    applicable = place.device.type == "cuda"
    raised: tuple[type[Exception], ...] = ()
    if applicable:
        # As TORCH_CUDA_SANITIZER=1 does at the import of torch: no device has been touched yet.
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()
        raised = (_sanitizer.CUDASanitizerErrors,)
    races: dict[int, list[str]] = {}
    faults: list[str] = []
    with alone(place):
        for stage in _STAGES:
            races[stage] = (
                attempt(f"stage {stage}", partial(_races, place, stage, raised), faults, place) or []
            )
    faults += [f"stage {stage}: {race}" for stage, several in races.items() for race in several]
    row = f"races by stage {[len(several) for several in races.values()]}" if applicable else "not applicable"
    return found({"row": row, "applicable": applicable, "steps": _STEPS, "races": races}, faults)


def _races(place: Place, stage: int, raised: tuple[type[Exception], ...]) -> list[str]:
    training = Training(at(SCENES["plain"], stage=stage, precision="bf16", steps=_STEPS), place.device)
    try:
        for step in range(_STEPS):
            training.step(step)
        training.losses()
    except raised as errors:
        return [str(error)[:_CHARACTERS] for error in vars(errors)["errors"]]
    return []

"""torch's CUDA sanitizer over two steps at stages 1 to 3: memory that two streams use without an order between them."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, found
from tests.support.devices import SCENES, Training, at

_STAGES = (1, 2, 3)


def sanitizer(place: Place) -> dict[str, Any]:
    """The races by stage, of which a stage's first one ends its training; on a host only the steps."""
    applicable = place.device.type == "cuda"
    races: dict[int, list[str]] = {}
    if applicable:
        # As TORCH_CUDA_SANITIZER=1 does at the import of torch: no device has been touched yet.
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()
    with alone(place):
        for stage in _STAGES:
            races[stage] = _races(place, stage, applicable)
    faults = [f"stage {stage}: {race}" for stage, several in races.items() for race in several]
    row = f"races by stage {[len(several) for several in races.values()]}" if applicable else "not applicable"
    return found({"row": row, "applicable": applicable, "steps": 2, "races": races}, faults)


def _races(place: Place, stage: int, applicable: bool) -> list[str]:
    scene = at(SCENES["plain"], stage=stage, precision="bf16", steps=2)
    if not applicable:
        _train(scene, place)
        return []
    from torch.cuda._sanitizer import CUDASanitizerErrors

    try:
        _train(scene, place)
    except CUDASanitizerErrors as errors:
        return [str(error) for error in errors.errors]
    return []


def _train(scene: Any, place: Place) -> None:
    training = Training(scene, place.device)
    for step in range(scene.run.steps):
        training.step(step)
    training.losses()

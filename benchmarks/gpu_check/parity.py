"""Stages beside each other and beside plain torch, to the bit; memory beside its prediction; no synchronisation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, attempt, found
from tests.support.devices import PRECISIONS, STAGES, Scene, Training, at, no_synchronisation
from tests.support.models import CASES, Batch, Case
from tests.support.models.base import labels
from tests.support.oracle import PaddedOptimizer, clip
from tests.support.training import Run, Trajectory, build_seeded
from zerokit.bench.catalogue.workloads import GPTConfig
from zerokit.bench.workloads.models import Decoder, materialise, name_modules

_CASE = "gpt of the check"
_RUNS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "not clipped": {"clip": None},
    "accumulation": {"micro": 2, "accumulate": True},
}
_ROUNDED = {"fp32": 1e-5, "bf16": 2e-3}
"""How far a loss may be from that of plain torch: in bf16 a norm that differs in its last bit moves roundings."""


def make_decoder(config: GPTConfig, device: torch.device) -> Decoder:
    """The bench's GPT with the bench's weights; without what reads records, which may be missing on a bare machine."""
    with torch.device("meta"):
        model = Decoder(config)
    name_modules(model, 0)
    materialise(model, device)
    return model


def _scenes(place: Place) -> dict[str, Scene]:
    """The runs; registers their model."""
    config = GPTConfig(59, 16, 32, 2, 2) if place.small else GPTConfig(4096, 256, 512, 6, 8)
    samples, length = (2, 12) if place.small else (4, 256)

    def make(generator: torch.Generator, rank: int) -> Batch:
        text = labels(generator, config.vocabulary, samples, length + 1)
        return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model(batch["x"], batch["y"])
        return value

    CASES[_CASE] = Case(_CASE, lambda: make_decoder(config, torch.device("cpu")), make, loss)
    run = Run(steps=4 if place.small else 6, clip=0.5, bucket_mb=0.02 if place.small else 1.0)
    return {name: Scene(_CASE, replace(run, **changes)) for name, changes in _RUNS.items()}


@dataclass(frozen=True)
class _Trained:
    """A training: its bits and losses, and bytes held at the end of its last backward, predicted, and at the peak."""

    bits: list[str]
    losses: list[float]
    held: bool
    predicted_bytes: int
    peak_bytes: int | None


def parity(place: Place) -> dict[str, Any]:
    """Each precision, clipped and not, with and without micro-batches, at stages 0 to 3."""
    cells: list[dict[str, Any]] = []
    faults: list[str] = []
    with alone(place):
        for name, scene in _scenes(place).items():
            for precision in PRECISIONS:
                label = f"{name}, {precision}"
                compare = partial(_compare, place, at(scene, precision=precision))
                if (compared := attempt(label, compare, faults, place)) is not None:
                    cell, wrong = compared
                    cells.append({"run": name, "precision": precision, **cell})
                    faults += [f"{label}: {fault}" for fault in wrong]
    far = {
        precision: max((cell["distance"] for cell in cells if cell["precision"] == precision), default=inf)
        for precision in _ROUNDED
    }
    peaks = [
        "unknown" if peak is None else f"{peak / 1e6:.0f}"
        for cell in cells
        if (cell["run"], cell["precision"]) == ("clipped", "bf16")
        for peak in cell["peak_bytes"]
    ]
    count = len(_RUNS) * len(PRECISIONS)
    row = (
        f"bits equal over stages {sum(cell['stages_equal'] for cell in cells)}/{count}; memory as predicted "
        f"{sum(cell['memory_as_predicted'] for cell in cells)}/{count}; distance to plain torch "
        + ", ".join(f"{name} {value:.1e}" for name, value in far.items())
        + f"; bf16 peaks by stage in MB {', '.join(peaks)}"
    )
    return found({"row": row, "cells": cells}, faults)


def _compare(place: Place, scene: Scene) -> tuple[dict[str, Any], list[str]]:
    stages = [_train(place, at(scene, stage=stage)) for stage in STAGES]
    first, faults = stages[0], []
    differing = [stage for stage, one in zip(STAGES, stages, strict=True) if one.bits != first.bits]
    if differing:
        faults.append(f"stages {differing} have other bits than stage 0: losses {[s.losses for s in stages]}")
    wrong = [stage for stage, one in zip(STAGES, stages, strict=True) if not one.held]
    if wrong:
        faults.append(f"memory() is not predicted_memory() at stages {wrong}")
    distance = None
    if scene.run.precision in _ROUNDED:
        plain = _train_plain(place, scene)
        pairs = zip(first.losses, plain, strict=True)
        distance = max(abs(one - other) / abs(other) for one, other in pairs)
        if not distance <= _ROUNDED[scene.run.precision]:
            faults.append(f"losses {first.losses}, of plain torch {plain}")
    return {
        "stages_equal": not differing,
        "memory_as_predicted": not wrong,
        "distance": distance,
        "losses": first.losses,
        "predicted_bytes": [one.predicted_bytes for one in stages],
        "peak_bytes": [one.peak_bytes for one in stages],
    }, faults


def _train(place: Place, scene: Scene) -> _Trained:
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(place.device)  # which starts CUDA, too
        torch.cuda.reset_peak_memory_stats(place.device)
    training = Training(scene, place.device)
    last = scene.run.steps - 1
    for step in range(last):
        with no_synchronisation() if on_gpu and step >= 2 else contextlib.nullcontext():
            training.step(step)
    training.differentiate(last)
    held, predicted = training.optimizer.memory(), training.optimizer.predicted_memory()
    training.update()
    peak = torch.cuda.max_memory_allocated(place.device) if on_gpu else None
    return _Trained(training.bits(), training.losses(), held == predicted, predicted.total, peak)


def _train_plain(place: Place, scene: Scene) -> list[float]:
    """The same losses from a loop over torch's own optimizer; in bf16 with fp32 masters."""
    case, run = CASES[scene.case], scene.run
    model = build_seeded(case, 0).to(place.device)
    with place.device:
        optimizer = PaddedOptimizer(model, case, run)
    scheduler = CosineAnnealingLR(optimizer.inner[0], T_max=7)
    losses = []
    for step in range(run.steps):
        gradients: list[Tensor | None] = [None] * len(optimizer.parameters)
        for micro in range(run.micro):
            batch = case.batch(run.seed, step * run.micro + micro, 0)
            loss = (
                case.loss(model, {name: value.to(place.device) for name, value in batch.items()}) / run.micro
            )
            loss.backward()
            losses.append(float(loss.detach()))
            for index, parameter in enumerate(optimizer.parameters):
                assert parameter.grad is not None
                before, own = gradients[index], parameter.grad.float()
                gradients[index], parameter.grad = own if before is None else before + own, None
        clip(gradients, run, Trajectory())
        optimizer.step(gradients)
        scheduler.step()
    return losses

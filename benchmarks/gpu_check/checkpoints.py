"""A checkpoint of a model on a device: how long saves and loads hold the training, and bits of what goes on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerokit
from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.parity import make_decoder
from benchmarks.gpu_check.place import Place, found
from tests.support.training import whole_weights
from zerokit.bench.catalogue.workloads import GPTConfig, describe


class _Training:
    """A GPT that is trained on batches that depend on the step's number alone."""

    def __init__(self, place: Place) -> None:
        config = describe("gpt-tiny" if place.small else "gpt3-350m").config
        assert isinstance(config, GPTConfig)
        self._config, self._device = config, place.device
        self._shape = (2, 16) if place.small else (2, 512)
        self.model = make_decoder(config, place.device)
        self.optimizer = zerokit.ZeroOptimizer(
            self.model, torch.optim.AdamW, stage=2, precision="bf16", lr=1e-4
        )

    def step(self, number: int) -> Tensor:
        """The step's loss."""
        generator = torch.Generator().manual_seed(number)
        samples, length = self._shape
        text = torch.randint(self._config.vocabulary, (samples, length + 1), generator=generator).to(
            self._device
        )
        loss: Tensor = self.model(text[:, :-1], text[:, 1:])
        self.optimizer.backward(loss)
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def go_on(self, *numbers: int) -> list[Tensor]:
        """The losses of some steps, and all weights after them."""
        losses = [self.step(number) for number in numbers]
        return losses + [weight.clone() for weight in whole_weights(self.model).values()]


def _seconds(place: Place, call: Callable[[], object]) -> float:
    """How long a call holds the training, from an idle device on."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def checkpoints(place: Place) -> dict[str, Any]:
    """Saves, background saves and loads, each followed by steps that are compared with those of the first time."""
    faults: list[str] = []
    seconds: dict[str, float] = {}
    with alone(place), tempfile.TemporaryDirectory(prefix="zerokit-checkpoint-") as folder:
        run, training = Path(folder, "run"), _Training(place)
        optimizer, saving = training.optimizer, None
        training.go_on(0, 1)
        seconds["save"] = _seconds(place, lambda: zerokit.save(run, optimizer, step=2))
        expected = training.go_on(2, 3)
        stalls = []
        for step in (4, 5):
            started = time.perf_counter()
            saving = zerokit.save(run, optimizer, step=step, blocking=False)
            stalls.append(time.perf_counter() - started)
            training.step(step)
            seconds[f"until background save {step - 3} is on the disk"] = _seconds(place, saving.wait)
        seconds["stall of background save 1"], seconds["stall of background save 2"] = stalls
        later = training.go_on(6)
        steps = {step: run / f"step-{step:08d}" for step in (2, 5)}
        seconds["load"] = _seconds(place, lambda: zerokit.load(steps[2], optimizer))
        if not _same(training.go_on(2, 3), expected):
            faults.append("training goes on with other bits from the blocking save")
        zerokit.load(steps[5], optimizer)
        if not _same(training.go_on(5, 6)[1:], later):
            faults.append("training goes on with other bits from the background save")
        for path in steps.values():
            seconds["verify"] = _seconds(place, partial(_verify, path, faults))
        size = sum(file.stat().st_size for file in steps[2].iterdir())
    rates = {name: size / seconds[name] / 1e9 for name in ("save", "load", "verify")}
    row = (
        f"{size / 1e9:.2f} GB: "
        + ", ".join(f"{name} {seconds[name]:.2f} s ({rate:.2f} GB/s)" for name, rate in rates.items())
        + f"; stalls {stalls[0]:.2f}, {stalls[1]:.2f} s; {len(faults)} faults"
    )
    return found({"row": row, "bytes": size, "seconds": seconds, "gb_per_s": rates}, faults)


def _same(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def _verify(path: Path, faults: list[str]) -> None:
    report = zerokit.verify(path)
    if not report.intact:
        faults.append(f"{path.name} is damaged: {'; '.join(map(str, report.findings))}")

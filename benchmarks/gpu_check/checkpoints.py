"""A checkpoint of a model on a device: how long saves and loads hold the training, and bits of what goes on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import zerokit
from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.parity import make_decoder
from benchmarks.gpu_check.place import Place, found
from tests.support.training import whole_weights
from zerokit.bench.catalogue.workloads import GPTConfig, describe
from zerokit.checkpoint.together import Saving

T = TypeVar("T")


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

    def save_beside(self, run: Path, step: int) -> Saving:
        """Starts a save in the background."""
        return zerokit.save(run, self.optimizer, step=step, blocking=False)

    def go_on(self, *numbers: int) -> list[Tensor]:
        """The losses of some steps, and all weights after them."""
        losses = [self.step(number) for number in numbers]
        return losses + [weight.clone() for weight in whole_weights(self.model).values()]


@dataclass(frozen=True)
class _Stopwatch:
    """Seconds by name; they are printed, too, so that the log has them where the part is killed."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, call: Callable[[], T], *, idle: bool = True) -> T:
        """How long the call holds the training: from an idle device on, or from where the training is."""
        if idle and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        result = call()
        self.seconds[name] = time.perf_counter() - started
        print(f"{name}: {self.seconds[name]:.3f} s")
        return result


def checkpoints(place: Place) -> dict[str, Any]:
    """Saves, background saves and loads, each followed by steps that are compared with those of the first time."""
    faults: list[str] = []
    watch = _Stopwatch(place.device)
    seconds = watch.seconds
    with alone(place), tempfile.TemporaryDirectory(prefix="zerokit-checkpoint-") as folder:
        # Filling what is not initialised, for kernels that give the same bits, would be part of each copy.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        run, training = Path(folder, "run"), _Training(place)
        optimizer = training.optimizer
        training.go_on(0, 1)
        watch.time("save", partial(zerokit.save, run, optimizer, step=2))
        expected = training.go_on(2, 3)
        for step, name in ((4, "first background save"), (5, "second background save")):
            saving = watch.time(f"{name}: stall", partial(training.save_beside, run, step), idle=False)
            training.step(step)
            watch.time(f"{name}: until it is on the disk", saving.wait)
        later = training.go_on(6)
        steps = {step: run / f"step-{step:08d}" for step in (2, 5)}
        watch.time("load", partial(zerokit.load, steps[2], optimizer))
        if not _same(training.go_on(2, 3), expected):
            faults.append("training goes on with other bits from the blocking save")
        zerokit.load(steps[5], optimizer)
        if not _same(training.go_on(5, 6)[1:], later):
            faults.append("training goes on with other bits from the background save")
        watch.time("verify", partial(_verify, steps[5], faults))
        size = sum(file.stat().st_size for file in steps[2].iterdir())
    rates = {name: size / seconds[name] / 1e9 for name in ("save", "load", "verify")}
    row = (
        f"{size / 1e9:.2f} GB: "
        + ", ".join(f"{name} {seconds[name]:.2f} s ({rate:.2f} GB/s)" for name, rate in rates.items())
        + "; stalls "
        + ", ".join(f"{taken:.2f} s" for name, taken in seconds.items() if name.endswith("stall"))
        + f"; {len(faults)} faults"
    )
    return found({"row": row, "bytes": size, "seconds": seconds, "gb_per_s": rates}, faults)


def _same(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def _verify(path: Path, faults: list[str]) -> None:
    report = zerokit.verify(path)
    if not report.intact:
        faults.append(f"{path.name} is damaged: {'; '.join(map(str, report.findings))}")

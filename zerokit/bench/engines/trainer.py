"""What an engine is to the worker: forward, backward and update on one rank, which together are a step."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.catalogue.check import unsupported
from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from zerokit.bench.workloads.build import Loaded
    from zerokit.runtime import ZeroOptimizer

Batch = tuple[Tensor, ...]
Autocast = Callable[[], AbstractContextManager[object]]


class Trainer(ABC):
    """One engine on one rank. The parts are public so that each can be timed; `step` is what is measured."""

    zero: ZeroOptimizer | None = None
    """zerokit's optimizer, which can be asked for its memory, traffic and checkpoints; None for other engines."""

    @property
    def skipped_steps(self) -> int:
        """Steps left out because fp16 gradients overflowed."""
        return 0

    @property
    def waited_s(self) -> float | None:
        """Seconds that this rank has waited inside collectives so far; None where the engine cannot be asked."""
        return None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Surrounds forward and backward of one micro-batch; gradients are reduced in the last one of a step."""
        return nullcontext()

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """This rank's loss of a micro-batch on the device: a scalar that can be differentiated."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Differentiate a loss that has been divided by the number of micro-batches."""

    @abstractmethod
    def update(self) -> Tensor | None:
        """Clip, step the optimizer, drop the gradients; returns the norm before, if it was asked for and is known."""

    def differentiate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward and backward over the micro-batches of a step: their losses, detached."""
        losses = []
        for place, batch in enumerate(batches):
            with self.micro_batch(last=place == len(batches) - 1):
                loss = self.forward(batch)
                self.backward(loss / len(batches))
            losses.append(loss.detach())
        return losses

    def step(self, batches: Sequence[Batch]) -> tuple[list[Tensor], Tensor | None]:
        """One optimizer step over micro-batches: their losses, detached, and what `update` returned.

        These tensors are read when later steps may be over already: no step writes to those of another.
        """
        return self.differentiate(batches), self.update()


class TorchTrainer(Trainer):
    """The loop that torch's own engines share.

    Args:
        model: wrapped as the engine wants it; `forward(*batch)` is the loss.
        optimizer: over its parameters.
        clip: largest gradient norm; None leaves gradients alone.
        autocast: surrounds the forward pass.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, clip: float | None, autocast: Autocast = nullcontext
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._clip = clip
        self._autocast = autocast

    def forward(self, batch: Batch) -> Tensor:
        with self._autocast():
            loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def update(self) -> Tensor | None:
        norm = None if self._clip is None else self.clip(self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def clip(self, largest: float) -> Tensor:
        """Scale the gradients down to a norm of `largest`; returns their norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)


def adamw(parameters: Iterable[Tensor], settings: Settings) -> torch.optim.AdamW:
    """Torch's fused AdamW: the optimizer of every engine."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=settings.lr, fused=True)


def autocast(settings: Settings, accelerator: Accelerator) -> Autocast:
    """Mixed precision for engines that keep fp32 parameters: products in the lower type, as autocast chooses."""
    if settings.precision == "fp32":
        return nullcontext
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[str(settings.precision)]
    return lambda: torch.autocast(accelerator.device.type, dtype=dtype)


def build_in_memory(loaded: Loaded, accelerator: Accelerator) -> nn.Module:
    """The whole model on this rank's device."""
    with accelerator.device:
        return loaded.build()


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> Trainer:
    """The trainer of `settings.engine`, inside the process group of all ranks.

    Raises `UsageError` for what the engine cannot do, and for an engine that is not installed, with how to get it.
    """
    reason = unsupported(settings) or ENGINES[settings.engine].missing
    if reason is not None:
        raise UsageError(reason)
    module = importlib.import_module(f"zerokit.bench.engines.{settings.engine.replace('-', '_')}")
    trainer: Trainer = module.make(loaded, settings, accelerator)
    return trainer

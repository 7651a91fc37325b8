"""The interface of engines: forward, backward and update on one rank make a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.catalogue.engines import ENGINES, unsupported
from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from zerokit.bench.workloads.build import Loaded
    from zerokit.runtime import ZeroOptimizer
    from zerokit.training.computing import ComputeClock

Batch = tuple[Tensor, ...]
Mark = Callable[[str], None]
"""Called with the part of a step that begins: "forward", "backward", "optimizer"."""


class Trainer:
    """One engine on one rank; the default is PyTorch's loop over a whole model, without communication.

    The parts are public so that each can be timed; `step` is what is measured.
    """

    zero: ZeroOptimizer | None = None
    """zerokit's optimizer, which can be asked for its memory, traffic and checkpoints; None for other engines."""

    autocasts: ClassVar[bool] = True
    """Whether parameters stay in fp32 and products are made in the lower precision, as autocast chooses."""

    def __init__(self, loaded: Loaded, settings: Settings, accelerator: Accelerator) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.model = self.make_model(loaded)
        self.optimizers = self.make_optimizers()

    def make_model(self, loaded: Loaded) -> nn.Module:
        """The model as the engine uses it, on the device; `forward(*batch)` returns the loss."""
        return self.build(loaded)

    def make_optimizers(self) -> Sequence[Optimizer]:
        """The optimizers over the model's parameters, each for some of them; all are stepped."""
        return [share.build() for share in shares_of(self.model, self.settings)]

    def build(self, loaded: Loaded, *, on_meta: bool = False) -> nn.Module:
        """The whole model on this rank's device, or on meta."""
        with torch.device("meta") if on_meta else self.accelerator.device:
            return loaded.build()

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients were inf or nan."""
        return 0

    @property
    def waited_s(self) -> float | None:
        """Seconds that this rank has waited in collectives so far; None if the engine does not count them."""
        return None

    def compute_clock(self) -> ComputeClock | None:
        """A clock of the time that this rank computes in a step; None if the engine cannot tell it from waiting."""
        return None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Context for forward and backward of one micro-batch; gradients are reduced in a step's last one."""
        return nullcontext()

    def forward(self, batch: Batch) -> Tensor:
        """This rank's loss of a micro-batch: a differentiable scalar on the device."""
        with self._autocast():
            loss: Tensor = self.model(*batch)
        return loss

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.autocasts or self.settings.precision == "fp32":
            return nullcontext()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[str(self.settings.precision)]
        return torch.autocast(self.accelerator.device.type, dtype=dtype)

    def backward(self, loss: Tensor) -> None:
        """Differentiate a loss that has been divided by the number of micro-batches."""
        torch.autograd.backward(loss)

    def backward_of(self, loss: Tensor, batch: Batch, passes: int) -> None:
        """Differentiate the loss of a micro-batch, one of so many of the step."""
        self.backward(loss / passes)

    def update(self) -> Tensor | None:
        """Clip, step the optimizers and drop the gradients; returns the norm before, if requested and known."""
        norm = self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def clip(self) -> Tensor | None:
        """Clip the gradients to the requested norm, if any; returns their norm before."""
        largest = self.settings.clip
        return None if largest is None else self.clip_to(largest)

    def clip_to(self, largest: float) -> Tensor:
        """Scale the gradients down to a norm of `largest`; returns their norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)

    def differentiate(self, batches: Sequence[Batch], mark: Mark = lambda part: None) -> list[Tensor]:
        """Forward and backward over the micro-batches of a step: their losses, detached. `mark` is called with each."""
        losses = []
        for number, batch in enumerate(batches):
            with self.micro_batch(last=number == len(batches) - 1):
                mark("forward")
                loss = self.forward(batch)
                self._require_loss(loss)
                mark("backward")
                self.backward_of(loss, batch, len(batches))
            losses.append(loss.detach())
        return losses

    def _require_loss(self, found: object) -> None:
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = (
                f"tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            )
            raise UsageError(
                f"{self.settings.model}: forward returned a {what}: expected the loss, one number in a tensor"
            )

    def step(
        self, batches: Sequence[Batch], mark: Mark = lambda part: None
    ) -> tuple[list[Tensor], Tensor | None]:
        """One optimizer step over micro-batches: their losses, detached, and what `update` returned.

        These tensors are read when later steps may be over already: no step writes to those of another.
        """
        losses = self.differentiate(batches, mark)
        mark("optimizer")
        return losses, self.update()


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> Trainer:
    """The trainer of `settings.engine`, inside the process group of all ranks.

    Raises `UsageError` for what the engine cannot do, and for an engine that is not installed, with how to get it.
    """
    reason = unsupported(settings) or ENGINES[settings.engine].missing
    if reason is not None:
        raise UsageError(reason)
    words = settings.engine.split("-")
    name = ENGINES[settings.engine].module or "_".join(words)
    module = importlib.import_module(f"zerokit.bench.engines.{name}")
    trainer: Trainer = getattr(module, "".join(map(str.title, words)) + "Trainer")(
        loaded, settings, accelerator
    )
    return trainer

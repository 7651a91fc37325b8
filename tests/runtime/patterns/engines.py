"""The one interface that a training pattern is written against, and what stands behind it: plain torch or zerokit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.runtime.patterns.models import square

Options = dict[str, Any]

STEPS = 3
"""The first records the order of units, the second one is the first to know it."""

VARIED_STEPS = 4
"""Where one step differs from another."""

Way = Literal["host", "device", "threads"]
"""As on a host; the device's way, with results that arrive late; the same with backward in a thread of its own."""

SMALL = 0.0005
"""MiB: 16 KB matrices are larger, so that every unit stands alone."""

OPTIMIZERS: dict[str, tuple[Any, Options]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-2}),
    # A larger eps than usual: gradients that are rounding errors must not decide the sign of an update.
    "adamw": (partial(torch.optim.AdamW, eps=1e-5), {"lr": 1e-3, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-3, "weight_decay": 0.1}),
}


def by_name(name: str) -> tuple[Any, Options]:
    """The class and its options; that of a package, which few patterns are tried with, is imported when it is used."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    import pytorch_optimizer

    return partial(pytorch_optimizer.Lamb, eps=1e-5), {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Setting:
    """How zerokit runs a pattern. `bucket_mb=None` leaves the default."""

    stage: int
    bucket_mb: float | None = SMALL
    optimizer: str = "sgd"
    outer: int | None = None
    """The stage of the outer axis, on a mesh of two by two ranks; None on one axis."""
    way: Way = "host"

    def __str__(self) -> str:
        stage = self.stage if self.outer is None else (self.outer, self.stage)
        way = {"host": "", "device": ", the device's way", "threads": ", the device's way in threads"}[
            self.way
        ]
        return f"stage {stage}, {'default' if self.bucket_mb is None else 'small'} buckets, {self.optimizer}{way}"


@dataclass
class Journal:
    """What a run leaves behind on one rank, to be compared: numbers, and models with their weights."""

    numbers: list[float] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)


class Engine:
    """zerokit: a model and its optimizer on this rank, and data that differs by rank.

    What a loss, a norm or an evaluation is, is recorded, to be compared.
    """

    plain = False
    optimizer: Any
    every: int | None = None
    """Ranks are islands, which average their weights once in so many steps; None for gradients averaged in each."""
    number = 0
    """The current step, in patterns that are written step by step."""

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        *,
        params: Any = None,
        options: Options | None = None,
        journal: Journal | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`options` are the ZeroOptimizer's (`precision`, `units`), the inner optimizer's (`lr`), `every` and `stages`.

        `stages` are those of modules, by path, beside that of the setting.
        """
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model: Any = model
        self.setting = setting
        self.journal = Journal() if journal is None else journal
        self.journal.engines.append(self)
        self.generator = generator or torch.Generator().manual_seed(1000 + self.rank)
        cls, defaults = by_name(setting.optimizer)
        options = {**defaults, **(options or {})}
        self.every = options.pop("every", None)
        self._make(cls, params, options)

    def _make(self, cls: Any, params: Any, options: Options) -> None:
        if self.setting.bucket_mb is not None:
            options.setdefault("bucket_mb", self.setting.bucket_mb)
        options = {"precision": "fp32", **options}
        if self.setting.way != "host" and self.setting.optimizer not in ("sgd", "adamw"):
            options.setdefault(
                "on_nonfinite", "ignore"
            )  # else the host would have to wait for a device, and warns
        stage: Any = self.setting.stage
        own: dict[str, int] = options.pop("stages", {})
        if self.every is not None:
            stage, options["mesh"] = ("local", stage), (self.world, 1)
        elif self.setting.outer is not None:
            stage, options["mesh"] = (self.setting.outer, stage), (2, 2)
            own = {path: (min(self.setting.outer, inner), inner) for path, inner in own.items()}  # type: ignore[misc]
        stage = {**own, "*": stage} if own else stage
        self.optimizer = zerokit.ZeroOptimizer(self.model, cls, stage=stage, params=params, **options)
        if self.every is not None:
            zerokit.LocalSteps(self.optimizer, every=self.every, outer=None)

    def another(self, model: nn.Module, **options: Any) -> Any:
        """A second model with an optimizer of its own, as in a GAN; compared as well."""
        shared = {"journal": self.journal, "generator": self.generator}
        return type(self)(model, self.setting, options=options, **shared)  # type: ignore[arg-type]

    # ---- data and results

    def data(self, *shape: int) -> Tensor:
        return torch.randn(shape or (4, 8), generator=self.generator)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def loss(self, *shape: int) -> Tensor:
        """The mean square of what the model makes of data."""
        return square(self.model(self.data(*shape)))

    def record(self, value: Any) -> None:
        """Compare this number, too."""
        self.journal.numbers.append(value.item() if isinstance(value, Tensor) else float(value))

    def evaluate(self, x: Tensor | None = None) -> None:
        with torch.no_grad():
            self.record(square(self.model(torch.ones(2, 8) if x is None else x)))

    def weights(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}

    # ---- the training loop

    def update(self, loss: Tensor, max_norm: float | None = None) -> None:
        """Everything that follows the forward in the usual loop."""
        self.backward(loss)
        if max_norm is not None:
            self.clip(max_norm)
        self.finish()

    def train(self) -> None:
        self.update(self.loss())

    def backward(self, loss: Tensor) -> None:
        self.record(loss)
        self.optimizer.backward(loss)

    def clip(self, max_norm: float) -> None:
        self.record(self.optimizer.clip_grad_norm_(max_norm))

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def finish(self) -> None:
        self.step()
        self.zero_grad()

    def closure_step(self, closure: Callable[[], Tensor]) -> Tensor:
        """`optimizer.step(closure)`."""
        return self.optimizer.step(closure)  # type: ignore[no-any-return]

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer.accumulate()  # type: ignore[no-any-return]

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer.gathered()  # type: ignore[no-any-return]

    def gathered_gradients(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer.gathered_gradients()  # type: ignore[no-any-return]


class Plain(Engine):
    """Plain torch: one all-reduce averages the gradients, and a missing one counts as zeros.

    That holds for one that no rank has, too, as zerokit documents it. What does not require a gradient, or did not in
    the step's last `loss()`, is left alone.
    """

    plain = True

    def _make(self, cls: Any, params: Any, options: Options) -> None:
        for name in ("precision", "units", "stages"):
            options.pop(name, None)
        self.parameters = list(dict.fromkeys(self.model.parameters()))
        for parameter in self.parameters:
            dist.broadcast(parameter.detach(), 0)  # as every engine for data parallelism does
        self.steps = 0
        self.frozen: set[nn.Parameter] = set()
        if self.setting.optimizer in ("sgd", "adamw"):
            options["fused"] = True
        self.optimizer = cls(self.parameters if params is None else params, **options)

    def loss(self, *shape: int) -> Tensor:
        self.frozen = {parameter for parameter in self.parameters if not parameter.requires_grad}
        return super().loss(*shape)

    def backward(self, loss: Tensor) -> None:
        self.record(loss)
        loss.backward()

    @torch.no_grad()
    def average(self) -> None:
        """Let every rank's gradients be their mean. A mean is its own mean: calling this again changes nothing."""
        gradients = []
        for parameter in self.parameters:
            # What is frozen now but has a gradient from before is averaged, as torch's optimizer would still use it.
            if parameter.requires_grad and parameter.grad is None and parameter not in self.frozen:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        if not gradients or self.every is not None:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.world)
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def clip(self, max_norm: float) -> None:
        self.average()
        self.record(nn.utils.clip_grad_norm_(self.parameters, max_norm))

    def step(self) -> None:
        self.average()
        self.optimizer.step()
        self.steps += 1
        if self.every is not None and self.steps % self.every == 0:
            for parameter in self.parameters:
                dist.all_reduce(parameter.detach())
                parameter.detach().div_(self.world)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def closure_step(self, closure: Callable[[], Tensor]) -> Tensor:
        def averaged() -> Tensor:
            loss = closure()
            self.average()
            return loss

        return self.optimizer.step(averaged)  # type: ignore[no-any-return]

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def gathered_gradients(self) -> Iterator[None]:
        self.average()
        yield

"""In which dtypes a step computes, sums gradients over ranks and keeps its master weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from zerokit.errors import LossScaleError, UsageError

FLOATING = (torch.float32, torch.bfloat16, torch.float16)

DtypeName = Literal["fp32", "bf16", "fp16"]
"""What these dtypes are called."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training step.

    Args:
        compute: of the parameters that the model sees, and so of activations and raw gradients.
        reduce: of the buckets in which gradients are accumulated and summed over ranks.
        master: of the weights that the optimizer updates, and of its states.
        wire: of gradients on their way between ranks: as `reduce` by default, or bfloat16 beside `reduce` in fp32. See
            below.
        cast_inputs: whether floating-point inputs take the compute dtype where they meet weights: at modules that
            hold parameters and have no modules with parameters inside, and at PyTorch's own. What a model does not feed
            to weights (timesteps, masks) keeps its dtype; a module with parameters beside such modules casts by itself.

    The ZeRO paper's mixed-precision table (arXiv:1910.02054, §3.1) counts 2 bytes an element for gradients:
    `Precision(compute=torch.float16, reduce=torch.float16)`. Summing in fp32 is the default because it costs
    little and loses nothing.

    `wire=torch.bfloat16` halves the bytes of that sum: each rank rounds its bucket, times 1/N, to bf16, its own piece
    too, and the rounded pieces are added in fp32 in rank order. So each term is rounded to bf16 once (by at most 2⁻⁹ of
    it), no sum is, and bits are the same at every stage. What stays in fp32: the buckets, sums of several backward
    passes, and stage 0's gather of the sums. A bucket on its way takes half its memory once more, for its rounded
    copy. With one rank nothing crosses, so nothing is rounded.

    Raises `UsageError` for a dtype other than float32, bfloat16 or float16, and for a wire that is neither `reduce` nor
    bfloat16 beside float32.
    """

    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    cast_inputs: bool = True
    wire: torch.dtype | None = None
    """None where gradients travel in `reduce`, given so or by default."""

    if TYPE_CHECKING:  # names are taken as well, and are dtypes from then on

        def __init__(
            self,
            compute: torch.dtype | DtypeName = torch.float32,
            reduce: torch.dtype | DtypeName = torch.float32,
            master: torch.dtype | DtypeName = torch.float32,
            cast_inputs: bool = True,
            wire: torch.dtype | DtypeName | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        roles = _ROLES if self.wire is None else (*_ROLES, "wire")
        for role in roles:
            dtype = getattr(self, role)
            if isinstance(dtype, str):
                dtype = _NAMES.get(dtype, dtype)
                object.__setattr__(self, role, dtype)
            if dtype not in FLOATING:
                raise UsageError(
                    f"precision: {role}={getattr(self, role)!r} is not one of "
                    "torch.float32, torch.bfloat16, torch.float16"
                )
        if self.wire == self.reduce:
            object.__setattr__(self, "wire", None)
        elif self.wire is not None and (self.wire, self.reduce) != (torch.bfloat16, torch.float32):
            raise UsageError(
                f"precision: gradients cannot cross in {self.wire} (wire) and be summed in {self.reduce} (reduce): "
                "choose wire=torch.bfloat16 with reduce=torch.float32, or leave wire out"
            )

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """`precision` itself, or the one of its name: "fp32", "bf16" or "fp16"."""
        if isinstance(precision, Precision):
            return precision
        if precision not in _NAMES:
            raise UsageError(
                f"precision {precision!r} is unknown: choose 'fp32', 'bf16' or 'fp16', or pass a zerokit.Precision"
            )
        return cls(compute=_NAMES[precision])

    @property
    def scaled(self) -> bool:
        """Whether gradients can underflow so that the loss must be scaled: fp16 anywhere on their way."""
        return torch.float16 in (self.compute, self.reduce)

    def as_dict(self) -> dict[str, str]:
        roles = _ROLES if self.wire is None else (*_ROLES, "wire")
        return {role: str(getattr(self, role)).removeprefix("torch.") for role in roles}


_ROLES = ("compute", "reduce", "master")
_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling, as in Micikevicius et al. (arXiv:1710.03740, §3.2).

    Args:
        value: the current scale.
        growth: factor after `interval` steps without an overflow.
        backoff: factor after a step whose gradients overflowed; that step is skipped.
        interval: steps.
        floor: an overflow at this scale is not a matter of scale any more and raises `LossScaleError`.
    """

    value: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    good_steps: int = 0
    current: ClassVar[float | None] = None
    """The factor of the loss that some optimizer's `backward` differentiates now; None for plain `loss.backward()`."""

    def __post_init__(self) -> None:
        if not (self.growth > 1 > self.backoff > 0 and self.interval > 0 and 0 < self.floor <= self.value):
            raise UsageError(
                f"{self}: growth must exceed 1, backoff lie between 0 and 1, interval be "
                "positive, and the value at least the floor"
            )

    def update(self, overflow: bool) -> None:
        """Adapt after a step. Raises `LossScaleError` for an overflow at the floor."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.value *= self.growth
                self.good_steps = 0
            return
        if self.value <= self.floor:
            raise LossScaleError(
                f"gradients are inf or nan at the loss scale's floor of {self.floor:g}: the loss itself is not finite. "
                "Lower the learning rate, clip gradients, check the data, or train with precision='bf16'"
            )
        self.value = max(self.floor, self.value * self.backoff)
        self.good_steps = 0

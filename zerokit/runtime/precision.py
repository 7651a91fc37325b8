"""Precision: the dtypes of computation, gradient sums and master weights, and the scale of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from zerokit.by_module import REST
from zerokit.errors import LossScaleError, UsageError
from zerokit.sizes import BLOCK_FORMATS, BlockFormat

FLOATING = (torch.float32, torch.bfloat16, torch.float16)

DtypeName = Literal["fp32", "bf16", "fp16"]  # what these dtypes are called
BlockName = Literal["int8", "int4"]  # wires of small integers in blocks
ModuleDtype: TypeAlias = torch.dtype | DtypeName | tuple[torch.dtype | DtypeName, torch.dtype | DtypeName]
"""What a module computes in, or a pair: what it computes in, and what it returns."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training step.

    Args:
        compute: of the parameters that the model sees, and so of activations and raw gradients.
        reduce: of the buckets in which gradients are accumulated and summed over ranks.
        master: of the weights that the optimizer updates, and of its states.
        wire: of gradients on their way between ranks: as `reduce` by default, or bfloat16, "int8" or "int4" beside
            `reduce` in fp32.
        cast_inputs: whether floating-point inputs take the compute dtype where they meet weights, at modules that hold
            parameters and have none inside, and at PyTorch's own; otherwise a model casts by itself.
        modules: what modules compute in where it is not `compute`, by path, as {"router": "fp32"}. A pair says what
            they return, too: {"head": ("fp32", "fp32")}.

    Sums in fp32 cost little and lose nothing; the ZeRO paper's table (arXiv:1910.02054, §3.1) counts those of
    `Precision(compute=torch.float16, reduce=torch.float16)`. docs/precision.md says how each wire rounds: bits are the
    same at every stage and route.

    Raises `UsageError` for a dtype other than float32, bfloat16 or float16, and for a wire that is neither `reduce` nor
    one of these beside float32.
    """

    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    cast_inputs: bool = True
    wire: torch.dtype | BlockName | None = None
    """None where gradients travel in `reduce`, given so or by default."""
    modules: tuple[tuple[str, tuple[torch.dtype, torch.dtype | None]], ...] = ()
    """By path what a module computes in, and what it returns, None for the dtype of the module around it."""
    feedback: InitVar[object] = None
    wire_updates: InitVar[object] = None

    if TYPE_CHECKING:  # names are taken as well, and are dtypes from then on

        def __init__(
            self,
            compute: torch.dtype | DtypeName = torch.float32,
            reduce: torch.dtype | DtypeName = torch.float32,
            master: torch.dtype | DtypeName = torch.float32,
            cast_inputs: bool = True,
            wire: torch.dtype | DtypeName | BlockName | None = None,
            modules: Mapping[str, ModuleDtype]
            | tuple[tuple[str, tuple[torch.dtype, torch.dtype | None]], ...] = (),
        ) -> None: ...

    def __post_init__(self, feedback: object, wire_updates: object) -> None:
        if feedback is not None or wire_updates is not None:
            raise UsageError(
                "precision: feedback= and wire_updates= are gone, because an int8 or int4 wire rounds gradients at "
                "random and keeps nothing, and updated parameters travel in the compute dtype: leave both out"
            )
        roles = _ROLES if self.wire is None or self.blocks else (*_ROLES, "wire")
        for role in roles:
            dtype = getattr(self, role)
            if isinstance(dtype, str):
                dtype = _NAMES.get(dtype, dtype)
                object.__setattr__(self, role, dtype)
            if dtype not in FLOATING:
                raise UsageError(
                    f"precision: {role}={getattr(self, role)!r} is not one of "
                    "torch.float32, torch.bfloat16, torch.float16"
                    + (", 'int8', 'int4'" if role == "wire" else "")
                )
        object.__setattr__(self, "modules", tuple(_of_module(*one) for one in dict(self.modules).items()))
        if self.wire == self.reduce:
            object.__setattr__(self, "wire", None)
        elif self.wire is not None and not (
            self.reduce == torch.float32 and (self.blocks or self.wire == torch.bfloat16)
        ):
            raise UsageError(
                f"precision: gradients cannot travel in {self.wire} (wire) and be summed in {self.reduce} (reduce): "
                "choose wire=torch.bfloat16 with reduce=torch.float32, or leave wire out"
            )

    @classmethod
    def of(cls, precision: str | Precision | Mapping[str, Any]) -> Precision:
        """`precision` itself, or the precision of this name: "fp32", "bf16" or "fp16"; or of these by module.

        Raises `UsageError` for other names, and for a mapping without "*", the rest.
        """
        if isinstance(precision, Precision):
            return precision
        if isinstance(precision, Mapping):
            if REST not in precision:
                raise UsageError(f"precision={dict(precision)!r}: add {REST!r} for the rest of the model")
            own = {path: dtype for path, dtype in precision.items() if path != REST}
            return dataclasses.replace(cls.of(precision[REST]), modules=tuple(own.items()))
        if precision not in _NAMES:
            raise UsageError(
                f"precision {precision!r} is unknown: choose 'fp32', 'bf16' or 'fp16', pass a zerokit.Precision, or "
                "these by module, {'router': 'fp32', '*': 'bf16'}"
            )
        return cls(compute=_NAMES[precision])

    @property
    def scaled(self) -> bool:
        """Whether gradients can underflow, so that the loss must be scaled: fp16 at any point of their way."""
        return torch.float16 in (self.compute, self.reduce, *self.by_module.values())

    @property
    def blocks(self) -> BlockFormat | None:
        """The block format of an int8 or int4 wire."""
        return BLOCK_FORMATS.get(self.wire) if isinstance(self.wire, str) else None

    def as_dict(self) -> dict[str, str]:
        roles = _ROLES if self.wire is None else (*_ROLES, "wire")
        own = {f"compute of {path}": compute for path, (compute, _) in self.modules}
        own |= {f"output of {path}": output for path, (_, output) in self.modules if output is not None}
        dtypes = {role: getattr(self, role) for role in roles} | own
        return {role: str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()}

    @property
    def by_module(self) -> dict[str, torch.dtype]:
        """The compute dtype by module, the rest included."""
        return {**{path: compute for path, (compute, _) in self.modules}, REST: self.compute}


def _of_module(path: str, given: object) -> tuple[str, tuple[torch.dtype, torch.dtype | None]]:
    """What is given for a module, as dtypes. Raises `UsageError` for anything else."""
    pair = given if isinstance(given, tuple) else (given, None)
    dtypes = [_NAMES.get(one, one) if isinstance(one, str) else one for one in pair]
    if len(dtypes) != 2 or dtypes[0] not in FLOATING or dtypes[1] not in (*FLOATING, None):
        raise UsageError(
            f"precision: {path!r} has {given!r}: expected what the module computes in, 'fp32', 'bf16' or 'fp16', or a "
            f"pair with what it returns; reduce, master and wire are one for all, those of {REST!r}"
        )
    return path, (dtypes[0], dtypes[1])


PrecisionArgument: TypeAlias = DtypeName | Precision | Mapping[str, ModuleDtype | Precision]
"""What arguments called `precision` take: a name, a `Precision`, or one for "*" and names by module."""

_ROLES: tuple[str, ...] = ("compute", "reduce", "master")
_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


_STAYS = "a scale that stays is LossScale(value=1024.0, interval=10**9): only an overflow then lowers it"


@dataclass(frozen=True, slots=True)
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

    def __post_init__(self) -> None:
        if not (self.growth > 1 > self.backoff > 0 and self.interval > 0 and 0 < self.floor <= self.value):
            raise UsageError(
                f"{self}: growth must exceed 1, backoff lie between 0 and 1, interval be "
                f"positive, and the value at least the floor; {_STAYS}"
            )

    @classmethod
    def of(cls, given: LossScale | None) -> LossScale:
        """The scale that was given, or the default. Raises `UsageError` for a number."""
        if not isinstance(given, LossScale | None):
            raise UsageError(
                f"loss_scale={given!r}: expected a zerokit.LossScale, which is dynamic; {_STAYS}"
            )
        return given or cls()

    def restored(self, value: float, good_steps: int) -> LossScale:
        """This one with a scale, the floor at least, and a number of steps without overflow that were saved."""
        return dataclasses.replace(self, value=max(value, self.floor), good_steps=good_steps)

    def after_step(self, *, overflow: bool) -> LossScale:
        """The loss scale of the next step. Raises `LossScaleError` for an overflow at the floor."""
        if overflow and self.value <= self.floor:
            raise LossScaleError(
                f"gradients are inf or nan at the loss scale's floor of {self.floor:g}: the loss itself is not finite. "
                "Lower the learning rate, clip gradients, check the data, or train with precision='bf16'"
            )
        if overflow:
            return dataclasses.replace(self, value=max(self.floor, self.value * self.backoff), good_steps=0)
        if self.good_steps + 1 >= self.interval:
            return dataclasses.replace(self, value=self.value * self.growth, good_steps=0)
        return dataclasses.replace(self, good_steps=self.good_steps + 1)

"""Precision: the dtypes of computation, gradient sums and master weights, and casts of inputs.

Floating-point inputs take the compute dtype where they meet weights. That is at modules that hold parameters
themselves, in a ParameterList too, and leave none to modules inside (Linear, LayerNorm, a layer of one's own), and at
PyTorch's own that do both (MultiheadAttention). What passes through the model untouched, a timestep or a mask, keeps
its dtype until then: 1001 would become 1000 in bfloat16. A module that computes with parameters beside modules that
have some, or with another module's, must cast by itself, as in any half-precision model.

[Note: modules of another dtype] A module that computes in another dtype than the one around it casts its inputs to its
own, as FSDP2's `cast_forward_inputs` does, and gives its outputs back in that of the one around: tensors of its own
dtype, apart from scalars, such as losses, which change no other's dtype. So code outside sees the dtypes that it would
see without the exception.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from zerokit.by_module import REST, settle
from zerokit.errors import LossScaleError, UsageError
from zerokit.formulas import BLOCK_FORMATS, BlockFormat
from zerokit.runtime.model import CONTAINERS, module_paths
from zerokit.runtime.torch_internals import BATCH_NORMS, SPECTRAL_NORM, map_leaves

FLOATING = (torch.float32, torch.bfloat16, torch.float16)

DtypeName = Literal["fp32", "bf16", "fp16"]  # what these dtypes are called
BlockName = Literal["int8", "int4"]  # wires of small integers in blocks


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
        modules: the compute dtype of modules for which it is not `compute`, by path, such as {"router": "fp32"}.

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
    modules: tuple[tuple[str, torch.dtype], ...] = ()
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
            modules: Mapping[str, torch.dtype | DtypeName] | tuple[tuple[str, torch.dtype], ...] = (),
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
        modules = {path: _NAMES.get(str(dtype), dtype) for path, dtype in dict(self.modules).items()}
        object.__setattr__(self, "modules", tuple(modules.items()))
        for path, dtype in self.modules:
            if dtype not in FLOATING:
                raise UsageError(
                    f"precision: {path!r} has {dtype!r}: modules differ in what they compute in, 'fp32', 'bf16' or "
                    f"'fp16'; reduce, master and wire are one for all, those of {REST!r}"
                )
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
        return torch.float16 in (self.compute, self.reduce, *dict(self.modules).values())

    @property
    def blocks(self) -> BlockFormat | None:
        """The block format of an int8 or int4 wire."""
        return BLOCK_FORMATS.get(self.wire) if isinstance(self.wire, str) else None

    def as_dict(self) -> dict[str, str]:
        roles = _ROLES if self.wire is None else (*_ROLES, "wire")
        own = {f"compute of {path}": dtype for path, dtype in self.modules}
        dtypes = {role: getattr(self, role) for role in roles} | own
        return {role: str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()}

    @property
    def by_module(self) -> dict[str, torch.dtype]:
        """The compute dtype by module, the rest included."""
        return {**dict(self.modules), REST: self.compute}


PrecisionArgument: TypeAlias = DtypeName | Precision | Mapping[str, DtypeName | Precision]
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
    current: ClassVar[float | None] = None
    """The factor of the loss that some optimizer's `backward` differentiates now; None for plain `loss.backward()`."""
    count: ClassVar[float | Tensor | None] = None
    """How many samples or tokens that loss is a sum over; None for a mean."""

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

    @classmethod
    @contextmanager
    def applied(cls, scale: float | None, count: float | Tensor | None = None) -> Iterator[None]:
        """A context in which losses, maybe sums over `count`, are differentiated times `scale`, or plainly."""
        before = cls.current, cls.count
        cls.current, cls.count = scale, count
        try:
            yield
        finally:
            cls.current, cls.count = before

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


_LISTS = (nn.ParameterList, nn.ParameterDict)

_CASTABLE = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def modules_that_cast(model: nn.Module) -> set[nn.Module]:
    """The modules whose inputs are the first to meet weights."""
    casting = set()
    for module in model.modules():
        if isinstance(module, _LISTS):
            continue  # never called: its parameters meet what enters the module around it
        lists = [child for child in module.children() if isinstance(child, _LISTS)]
        own = any(
            next(part.parameters(recurse=part is not module), None) is not None for part in (module, *lists)
        )
        inside = any(
            next(child.parameters(), None) is not None for child in module.children() if child not in lists
        )
        of_torch = type(module).__module__.startswith("torch.nn.")
        if (own and (of_torch or not inside)) or (is_parametrized(module) and of_torch):
            casting.add(module)
    return casting


def compute_dtypes(model: nn.Module, precision: Precision) -> dict[nn.Module, torch.dtype]:
    """What each module of `model` computes in. Raises `UsageError` for a path that is no module's."""
    paths = module_paths(model)
    settled = settle("precision", precision.by_module, paths)
    return {module: settled[path] for path, module in reversed(paths.items())}


def casting(model: nn.Module, precision: Precision) -> dict[nn.Module, torch.dtype]:
    """The modules that cast their inputs, and to what. In fp32 alone none do: PyTorch refuses other dtypes as ever."""
    dtypes = compute_dtypes(model, precision)
    if not precision.cast_inputs or set(dtypes.values()) == {torch.float32}:
        return {}
    return {module: dtypes[module] for module in {*modules_that_cast(model), *_borders(model, dtypes)}}


def _borders(model: nn.Module, dtypes: Mapping[nn.Module, torch.dtype]) -> dict[nn.Module, torch.dtype]:
    """The modules that compute in another dtype than the one around them, which computes in that."""
    paths, found = module_paths(model), dict[nn.Module, torch.dtype]()
    for path, module in paths.items():
        around = path.rpartition(".")[0]
        while isinstance(paths[around], CONTAINERS) and around:  # which are never called
            around = around.rpartition(".")[0]
        if dtypes[module] != dtypes[paths[around]] and not isinstance(module, CONTAINERS):
            found.setdefault(module, dtypes[paths[around]])
    return found


def cast_outputs(model: nn.Module, precision: Precision, device: str) -> list[RemovableHandle]:
    """Let modules of another dtype give their outputs in that of the one around; returns the hooks.

    See [Note: modules of another dtype].
    """
    dtypes = compute_dtypes(model, precision)
    borders = _borders(model, dtypes) if precision.cast_inputs else {}
    return [
        module.register_forward_hook(partial(_give_back, dtypes[module], around, device))
        for module, around in borders.items()
    ]


def _give_back(
    own: torch.dtype, around: torch.dtype, device: str, module: nn.Module, args: Any, output: Any
) -> Any:
    if torch.is_autocast_enabled(device):
        return output  # the user's autocast decides
    return _mapped(
        output, lambda tensor: tensor.to(around) if tensor.dtype == own and tensor.dim() else tensor
    )


def cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype, device: str) -> tuple[Any, Any] | None:
    """`args` and `kwargs` with floating-point tensors cast to `dtype`; None if nothing changes."""
    if not kwargs and all(
        _fits(value, dtype) if isinstance(value, Tensor) else isinstance(value, int | float | None)
        for value in args
    ):
        return None
    if torch.is_autocast_enabled(device):
        return None  # the user's autocast decides
    return _mapped(args, partial(_cast, dtype)), _mapped(kwargs, partial(_cast, dtype))


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype or tensor.dtype not in _CASTABLE


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor if _fits(tensor, dtype) else tensor.to(dtype)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _mapped(getattr(value, field.name), change))
        return changed
    if isinstance(value, list | tuple | dict):
        # Containers that pytree does not know are not entered.
        return map_leaves(
            lambda leaf: leaf if isinstance(leaf, list | tuple | dict) else _mapped(leaf, change), value
        )
    return value


def keep_statistics(dtypes: Mapping[nn.Module, torch.dtype]) -> list[RemovableHandle]:
    """Make normalisation layers with running statistics work in half precision as under autocast; returns the hooks.

    `dtypes` are what modules compute in.

    Their statistics stay in fp32, and meet weights in fp32: those of this pass are copies in the module's `__dict__`,
    which hides its parameters. Spectral norm's vectors take the dtype of the weight that they are multiplied by, as
    with `model.bfloat16()`.
    """
    hooks: list[RemovableHandle] = []
    for module, compute in dtypes.items():
        if compute == torch.float32:
            continue
        if isinstance(module, BATCH_NORMS) and module.running_mean is not None:
            hooks.append(module.register_forward_pre_hook(_show_exact))
            hooks.append(module.register_forward_hook(_hide_exact, always_call=True))
        spectral = isinstance(module, SPECTRAL_NORM)
        older = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        names = {f"{hook.name}{end}" for hook in older for end in ("_u", "_v")}
        for name, buffer in module.named_buffers(recurse=False):
            if (spectral or name in names) and buffer.is_floating_point():
                module._buffers[name] = buffer.to(compute)
    return hooks


def _show_exact(module: nn.Module, args: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module.__dict__[name] = parameter.float()


def _hide_exact(module: nn.Module, args: Any, output: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)

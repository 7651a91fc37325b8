"""What is checked at construction: ranks hold the same model, cut the same way, and the optimizer is elementwise."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zerokit.errors import LayoutMismatch, UnsupportedOptimizer
from zerokit.layout import Layout
from zerokit.runtime.collectives import Collectives

_NAMED = 3
"""How many differing parameters an error lists."""


def require_agreement(layout: Layout, settings: dict[str, str], collectives: Collectives) -> None:
    """Raise `LayoutMismatch` on every rank, naming ranks and differences, unless all describe the same thing.

    Costs one all-reduce of eight integers where they agree.
    """
    digest = hashlib.sha256(layout.digest() + json.dumps(settings, sort_keys=True).encode()).digest()
    halves = torch.tensor(
        [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)], dtype=torch.int64
    )
    extremes = torch.cat([halves, -halves]).to(collectives.device)
    collectives.all_reduce(extremes, dist.ReduceOp.MAX)
    numbers = collectives.read(extremes)
    if all(highest == -lowest for highest, lowest in zip(numbers[:4], numbers[4:], strict=True)):
        return
    parameters = {p.name: (list(p.shape), p.dtype, p.group, p.trainable) for p in layout.parameters}
    units = [unit.name for unit in layout.units]
    described = collectives.all_gather_objects((settings, parameters, layout.bucket_bytes, units))
    lines = [
        f"rank {rank}: {difference}"
        for rank, other in enumerate(described)
        for difference in _differences(described[0], other)
    ]
    raise LayoutMismatch(
        "ranks disagree, compared with rank 0:\n  "
        + "\n  ".join(lines)
        + "\nBuild the same model with the same arguments on every rank"
    )


def _differences(first: object, other: object) -> list[str]:
    assert isinstance(first, tuple)
    assert isinstance(other, tuple)
    (settings, parameters, bucket, units), (other_settings, other_parameters, other_bucket, other_units) = (
        first,
        other,
    )
    lines = [
        f"{key} is {other_settings.get(key)}, not {value}"
        for key, value in settings.items()
        if other_settings.get(key) != value
    ]
    if bucket != other_bucket:
        lines.append(f"bucket_mb counts {other_bucket} bytes, not {bucket}")
    if len(parameters) != len(other_parameters):
        lines.append(f"{len(other_parameters)} parameters, not {len(parameters)}")
    names = [
        name
        for name in {**parameters, **other_parameters}
        if parameters.get(name) != other_parameters.get(name)
    ]
    for name in names[:_NAMED]:
        lines.append(f"{name} is {_text(other_parameters.get(name))}, not {_text(parameters.get(name))}")
    if len(names) > _NAMED:
        lines.append(f"and {len(names) - _NAMED} more parameters differ")
    if not lines and units != other_units:
        lines.append(
            f"{len(other_units)} units ({other_units[0]}, …), not {len(units)} ({units[0]}, …): compare units="
        )
    return lines


def _text(parameter: tuple[list[int], str, int, bool] | None) -> str:
    if parameter is None:
        return "absent"
    shape, dtype, group, trainable = parameter
    return f"{dtype}{shape} in group {group}{'' if trainable else ' (frozen)'}"


_SHAPE = (16, 24)
_STEPS = 30
"""As many as show what begins late: preconditioners that are refreshed every tenth step, rectified variances."""
_LEARNING_RATE = 1.0
"""At least: with a small one, what is estimated from how far weights have come (Prodigy) stays at its tiny start."""
_ADVICE = (
    "zerokit shards elementwise optimizers: AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, "
    "or your own that treats every element alike"
)


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What the optimizer keeps for one flat parameter: bytes an element, and bytes beside.

    `kinds` names the states that have the parameter's shape, with their `dtypes`; `others` those that are numbers.
    """

    element_bytes: int
    scalar_bytes: int
    kinds: frozenset[str]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def choose_kernel(
    optimizer_class: type[Optimizer], options: dict[str, Any], device: torch.device, master: torch.dtype
) -> dict[str, Any]:
    """Ask for the fused kernel where the user expressed no wish and one step with it succeeds on `device`.

    One fused call over flat tensors takes a third of the time of PyTorch's default on a CPU.
    """
    accepted = inspect.signature(optimizer_class).parameters
    unsuited = any(options.get(name) for name in ("foreach", "differentiable", "capturable"))
    if "fused" not in accepted or "fused" in options or unsuited:
        return options
    fused = {**options, "fused": True}
    tried = nn.Parameter(torch.ones(64, dtype=master, device=device))
    try:
        _run(optimizer_class([tried], **fused), tried, [torch.ones_like(tried)])
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        # Which kernels exist differs with the device and PyTorch's version: Adagrad's came to CUDA in 2026.
        return options
    return fused


def probe(optimizer_class: type[Optimizer], options: dict[str, Any], master: torch.dtype) -> OptimizerStates:
    """Step `optimizer_class` on a matrix, and on each half of the same elements by itself; they must agree.

    Raises `UnsupportedOptimizer` where they do not, or where the optimizer refuses the plain call.
    """
    name = optimizer_class.__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    half = start.numel() // 2
    # Of one direction: what estimates a distance from all gradients (D-Adaptation) stays at its tiny start otherwise.
    # The halves' sizes rise and fall apart: a norm of both, or whether it rises or falls, is not that of one.
    sizes = 2.0 ** torch.stack([torch.arange(_STEPS) % 5 - 2, -(torch.arange(_STEPS) // 5 % 3)], dim=1)
    gradients = [
        (0.3 * torch.randn(_SHAPE, generator=generator) + start.sign())
        * size.repeat_interleave(half).view(_SHAPE)
        for size in sizes
    ]
    whole = nn.Parameter(start.clone())
    if isinstance(options.get("lr"), float | int):
        options = options | {"lr": max(options["lr"], _LEARNING_RATE)}
    optimizer = optimizer_class([whole], **options)  # a wrong option raises its own error
    try:
        _run(optimizer, whole, gradients)
        cut = [nn.Parameter(piece.clone()) for piece in start.flatten().split(half)]
        for number, piece in enumerate(cut):
            # In an optimizer of its own, as on a rank of its own: norms over all parameters show as well.
            _run(
                optimizer_class([piece], **options),
                piece,
                [g.flatten().split(half)[number] for g in gradients],
            )
        typed = nn.Parameter(start.flatten().to(master))
        optimizer = optimizer_class([typed], **options)
        _run(optimizer, typed, [gradient.flatten().to(master) for gradient in gradients[:3]])
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, AssertionError) as error:
        raise UnsupportedOptimizer(
            f"{name} cannot be stepped on flat parameters ({type(error).__name__}: {error}). {_ADVICE}"
        ) from error
    together = torch.cat([piece.detach() for piece in cut]).view(_SHAPE)
    if not torch.allclose(whole.detach(), together, rtol=1e-4, atol=1e-6):
        raise UnsupportedOptimizer(
            f"{name} updates an element by looking at others (the shape of its matrix, or a norm over it or over all "
            f"parameters, matters), so cutting the line would change the training. {_ADVICE}"
        )
    tensors = {k: value for k, value in optimizer.state[typed].items() if isinstance(value, torch.Tensor)}
    elementwise = {kind: value for kind, value in tensors.items() if value.shape == typed.shape}
    others = [value for kind, value in tensors.items() if kind not in elementwise]
    return OptimizerStates(
        sum(value.element_size() for value in elementwise.values()),
        sum(value.untyped_storage().nbytes() for value in others),
        frozenset(elementwise),
        {kind: value.dtype for kind, value in elementwise.items()},
        tuple(kind for kind, value in optimizer.state[typed].items() if _is_number(value)),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim())


def _run(optimizer: Optimizer, parameter: nn.Parameter, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()

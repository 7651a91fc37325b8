"""Checks at construction: ranks have the same model and layout, and the optimizer is elementwise."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerokit.errors import LayoutMismatch, UnsupportedOptimizer
from zerokit.layout import Layout
from zerokit.runtime.collectives import Collectives

BUILDING = "construction of ZeroOptimizer"
"""The place at which ranks exchange what they build."""


def require_agreement(layout: Layout, settings: dict[str, str], collectives: Collectives) -> None:
    """Raise `LayoutMismatch` on every rank, naming ranks and differences, unless all describe the same thing."""
    digest = hashlib.sha256(layout.digest() + json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if len(set(collectives.all_gather_objects(digest, BUILDING))) == 1:
        return
    units = [unit.name for unit in layout.units]
    mine = {
        **settings,
        "bucket_mb": f"{layout.bucket_bytes} bytes",
        "the number of parameters": str(len(layout.parameters)),
        **{
            p.name: f"{p.dtype}{list(p.shape)} in group {p.group}{'' if p.trainable else ' (frozen)'}"
            for p in layout.parameters
        },
        "the division by units=": f"{len(units)} units ({', '.join(units[:2])}, …)",
    }
    described = collectives.all_gather_objects(mine, BUILDING)
    lines = []
    for rank, other in enumerate(described):
        differing = [key for key in {**described[0], **other} if described[0].get(key) != other.get(key)]
        lines += [
            f"rank {rank}: {key} is {other.get(key, 'absent')}, not {described[0].get(key, 'absent')}"
            for key in differing[:4]
        ]
    raise LayoutMismatch(
        "ranks disagree, compared with rank 0:\n  "
        + "\n  ".join(lines)
        + "\nBuild the same model with the same arguments on every rank"
    )


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
    """The optimizer's tensors for one flat parameter: bytes per element and fixed; `kinds` have its shape."""

    element_bytes: int
    scalar_bytes: int
    kinds: frozenset[str]
    scalars: frozenset[str]


def choose_kernel(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    device: torch.device,
    master: torch.dtype,
) -> dict[str, Any]:
    """Choose the fused kernel, three times as fast on a CPU, if the user did not choose and it works on `device`."""
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


def probe(
    optimizer_class: Callable[..., Optimizer], options: dict[str, Any], master: torch.dtype
) -> OptimizerStates:
    """Step `optimizer_class` on a matrix, and on each half of it separately. The results must agree.

    Raises `UnsupportedOptimizer` otherwise.
    """
    name = optimizer_class.__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    half = start.numel() // 2
    # In one direction: an estimate of distance from all gradients (D-Adaptation) otherwise stays at its tiny start.
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
            f"{name} updates an element depending on others (through the shape of its matrix, or a norm over it "
            f"or over all parameters), so sharding would change the training. {_ADVICE}"
        )
    tensors = {k: value for k, value in optimizer.state[typed].items() if isinstance(value, torch.Tensor)}
    elementwise = {kind: value for kind, value in tensors.items() if value.shape == typed.shape}
    others = tensors.keys() - elementwise.keys()
    return OptimizerStates(
        sum(value.element_size() for value in elementwise.values()),
        sum(tensors[kind].untyped_storage().nbytes() for kind in others),
        frozenset(elementwise),
        frozenset(others),
    )


def _run(optimizer: Optimizer, parameter: nn.Parameter, gradients: list[torch.Tensor]) -> None:
    train: Any = getattr(optimizer, "train", None)
    if callable(train):  # schedule-free optimizers step in this mode alone
        train()
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()

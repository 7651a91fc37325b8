"""accelerate's `kwargs_handlers`: what `ZeroOptimizer` has a place for is used, the rest refused with what to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)

from zerokit.errors import UsageError
from zerokit.runtime import LossScale, Precision

_BUCKET_CAP_MB = 25
"""DistributedDataParallel's own default, which says nothing."""


def require_known(handlers: Iterable[object]) -> None:
    """Raise `UsageError` for handlers of other kinds of training, such as fp8."""
    known = (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    for handler in handlers:
        if not isinstance(handler, known):
            raise UsageError(
                f"kwargs_handlers: {type(handler).__name__} has no meaning for ZeroAccelerator: leave it out; it takes "
                f"{', '.join(kind.__name__ for kind in known)}"
            )


def with_handlers(
    given: Mapping[str, Any],
    *,
    scaler: GradScalerKwargs | None,
    ddp: DistributedDataParallelKwargs | None,
    group: InitProcessGroupKwargs | None,
    autocast: AutocastKwargs | None,
) -> dict[str, Any]:
    """The arguments `given` for `ZeroOptimizer`, and what the handlers say.

    Of DistributedDataParallel's options, those that choose among equal results (find_unused_parameters,
    gradient_as_bucket_view, static_graph) need nothing here. Raises `UsageError` for what cannot be done, or is said
    twice.
    """
    arguments = dict(given)
    precision: Precision = arguments["precision"]
    if group is not None:
        arguments.setdefault("timeout", group.timeout)
    if scaler is not None and precision.scaled:
        _require_once("GradScalerKwargs", "loss_scale", arguments)
        arguments["loss_scale"] = _loss_scale(scaler)
    if autocast is not None and not autocast.enabled and precision.compute != torch.float32:
        raise UsageError(
            f"AutocastKwargs(enabled=False) beside a model that computes in {precision.compute}, whose weights have "
            "this dtype: write mixed_precision='no', or leave the handler out"
        )
    if ddp is not None:
        if ddp.bucket_cap_mb != _BUCKET_CAP_MB:
            _require_once("bucket_cap_mb", "bucket_mb", arguments)
            arguments["bucket_mb"] = ddp.bucket_cap_mb
        arguments["precision"] = _with_hook(precision, ddp)
    return arguments


def _loss_scale(scaler: GradScalerKwargs) -> LossScale:
    if not scaler.enabled:
        raise UsageError(
            "GradScalerKwargs(enabled=False): fp16 gradients underflow without a loss scale: leave it out, or write "
            "mixed_precision='bf16'"
        )
    return LossScale(
        value=scaler.init_scale,
        growth=scaler.growth_factor,
        backoff=scaler.backoff_factor,
        interval=scaler.growth_interval,
        floor=min(1.0, scaler.init_scale),
    )


def _with_hook(precision: Precision, ddp: DistributedDataParallelKwargs) -> Precision:
    """`precision` with the wire of DistributedDataParallel's communication hook."""
    for name in ("comm_hook", "comm_wrapper"):
        chosen = DDPCommunicationHookType(getattr(ddp, name))
        if chosen is DDPCommunicationHookType.NO:
            continue
        if name == "comm_wrapper" or chosen is not DDPCommunicationHookType.BF16 or ddp.comm_state_option:
            raise UsageError(
                f"DistributedDataParallelKwargs({name}={chosen.value!r}) cannot be done: gradients travel in fp32, "
                "bfloat16, int8 or int4: write comm_hook=DDPCommunicationHookType.BF16 without further options, or "
                "precision=zerokit.Precision(..., wire='int8')"
            )
        if precision.wire not in (None, torch.bfloat16):
            raise UsageError(f"comm_hook='bf16' beside wire={precision.wire!r}: leave one of them out")
        return dataclasses.replace(precision, wire=torch.bfloat16)
    return precision


def _require_once(handler: str, argument: str, arguments: Mapping[str, Any]) -> None:
    if argument in arguments:
        raise UsageError(f"{handler} beside zero_options={{{argument!r}: ...}}: leave one of them out")

"""The options of a `ZeroOptimizer`, and what is required of the model and the ranks that it is built over."""

from __future__ import annotations

import datetime
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerokit.errors import UsageError, ZerokitWarning
from zerokit.owners import Cost
from zerokit.placement import Mesh
from zerokit.runtime.casts import compute_dtypes
from zerokit.runtime.guard import TICKET
from zerokit.runtime.model import InitRule, UnitRule, require_own_memory, require_unwrapped
from zerokit.runtime.nonfinite import require_choice
from zerokit.runtime.ordinary import require_ordinary_tensors
from zerokit.runtime.precision import FLOATING, Precision
from zerokit.runtime.torch_internals import default_group


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `ZeroOptimizer` that are not the inner optimizer's; its docstring tells of each.

    Raises `UsageError` for numbers that are out of range. What depends on the ranks is checked where they meet.
    """

    stage: object
    mesh: object
    process_group: dist.ProcessGroup | None
    timeout: datetime.timedelta | None
    precision: Precision
    params: Iterable[Any] | None
    units: UnitRule | None
    bucket_mb: float | None
    prefetch: int
    init_fn: InitRule
    on_nonfinite: object
    row_blocks: Mapping[str, int | Sequence[int]] | None
    update_cost: Cost | None
    states: str | os.PathLike[str]
    shares: object

    def __post_init__(self) -> None:
        require_choice(self.on_nonfinite)
        size: object = self.bucket_mb
        if size is not None and not (isinstance(size, int | float) and 0 < size < math.inf):
            raise UsageError(f"bucket_mb={size!r}: expected a positive number of MiB")
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise UsageError(
                f"prefetch={self.prefetch!r}: expected the number of units to gather ahead, 0 or more"
            )


def group_of_this_rank(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks to shard over. Raises `UsageError` where there are none, or this one is not among them."""
    if not dist.is_initialized():
        raise UsageError(
            "no process group: call torch.distributed.init_process_group() first (torchrun sets its environment)"
        )
    # torch.distributed.new_group gives ranks that are not in the group a number instead of one.
    group: Any = given if given is not None else default_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER or group.rank() < 0:
        raise UsageError(
            f"rank {dist.get_rank()} is not in process_group: build ZeroOptimizer on the ranks of that group only"
        )
    own: dist.ProcessGroup = group
    return own


def mesh_of(mesh: object, group: dist.ProcessGroup) -> Mesh | None:
    """The ranks as (outer, inner), from a pair or a `DeviceMesh` over `group`; `UsageError` if it does not fit."""
    if mesh is None:
        return None
    shape = getattr(mesh, "shape", mesh)
    sizes = tuple(shape) if isinstance(shape, tuple | list) else ()
    if not 1 <= len(sizes) <= 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise UsageError(
            f"mesh={mesh!r}: expected (outer, inner), two numbers of ranks, or a DeviceMesh of 1 or 2 axes"
        )
    outer, inner = sizes if len(sizes) == 2 else (1, sizes[0])
    world = group.size()
    if outer * inner != world:
        raise UsageError(f"mesh={sizes}: {outer * inner} ranks, but the process group has {world}")
    ranks = getattr(mesh, "mesh", None)
    if isinstance(ranks, torch.Tensor) and ranks.flatten().tolist() != dist.get_process_group_ranks(group):
        raise UsageError(
            f"mesh={mesh!r}: its ranks in order are not those of the process group, "
            f"{dist.get_process_group_ranks(group)}: build it with init_device_mesh(), or pass process_group= too"
        )
    return Mesh(outer, inner)


def require_plain(model: nn.Module) -> None:
    """Raise `UsageError` for a model that cannot be taken over."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the first argument is a {type(model).__name__}: pass the model itself, ZeroOptimizer(model, "
            "torch.optim.AdamW, ...), and groups of its parameters, if any, as params="
        )
    if torch.get_default_device().type != "cpu":
        raise UsageError(
            f"the default device is {torch.get_default_device()}, but zerokit also makes tensors that belong on the "
            "host: use model.to(device) instead of torch.set_default_device() and `with torch.device(...):`"
        )
    for path, module in model.named_modules():
        wrapper = type(module).__name__
        if wrapper in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise UsageError(f"{path or 'the model'} is already wrapped in {wrapper}: pass the plain model")
    require_unwrapped(model)
    for name, parameter in model.named_parameters():
        if TICKET in parameter.__dict__:
            raise UsageError(
                f"{name} is already managed by a ZeroOptimizer: build one for a module that holds all that it trains; "
                "to train it with another one, call zerokit.release(model) on all ranks first"
            )
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "device_mesh"):
            raise UsageError(f"{name} is a DTensor (tensor parallelism): pass the plain model")
    require_ordinary_tensors(model)
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise UsageError(
                f"buffer {name} is {buffer.layout}, but only dense ones are broadcast and saved: keep it as a plain "
                "attribute of its module, made alike on all ranks"
            )
    require_trainable_dtypes(model)
    require_own_memory(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient")


def require_trainable_dtypes(model: nn.Module) -> None:
    """Raise `UsageError` for a trainable parameter whose dtype is none that a step computes in."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in FLOATING:
            remedy = (
                "keep it as torch.view_as_real(weight) and call torch.view_as_complex() in forward"
                if parameter.is_complex()
                else "call model.float() before ZeroOptimizer is built, or freeze it with requires_grad_(False)"
            )
            raise UsageError(
                f"{name} is {parameter.dtype}: trainable parameters must be float32, bfloat16 or float16; {remedy}"
            )


def warn_of_widening(model: nn.Module, precision: Precision) -> None:
    """Warn of half-precision parameters that computation in fp32 makes twice as large, modules named for it apart."""
    own = compute_dtypes(model, precision)
    rest = {
        p for module, dtype in own.items() if dtype == precision.compute for p in module._parameters.values()
    }
    widened = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dtype in FLOATING
        and parameter.dtype.itemsize < precision.compute.itemsize
        and parameter in rest
    }
    if widened:
        name, first = next(iter(widened.items()))
        size = sum(parameter.nbytes for parameter in widened.values())
        warnings.warn(
            f"{len(widened)} parameters in half precision ({size / 1e6:,.1f} MB; {name} is {first.dtype}) become "
            f"{precision.compute}, twice the memory: choose precision='bf16' (bf16=True in TrainingArguments, "
            "mixed_precision='bf16' in accelerate, precision='bf16-mixed' in Lightning) to compute in half precision, "
            "or call model.float() before ZeroOptimizer is built to say that you want this",
            ZerokitWarning,
            stacklevel=4,
        )


def device_of(model: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """The one device that the model lies on. Raises `UsageError` where there are several."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if not tensor.is_meta}
    if len(devices) > 1:
        raise UsageError(f"the model lies on {', '.join(sorted(map(str, devices)))}: move it to one device")
    if devices:
        return devices.pop()
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

"""Builds the runtime's parts from a model and an optimizer class.

The model never exists twice: units take its values one by one, and give its old memory back.
"""

from __future__ import annotations

import datetime
import functools
import math
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zerokit.errors import UsageError, ZerokitWarning
from zerokit.layout import build_layout, default_bucket_bytes
from zerokit.placement import Mesh, Placement, without_lone_axis
from zerokit.runtime.admission import choose_kernel, probe, require_agreement
from zerokit.runtime.collectives import Collectives, make_collectives
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.guard import TICKET
from zerokit.runtime.masters import MasterSlice
from zerokit.runtime.memory import Heap
from zerokit.runtime.model import (
    InitRule,
    Materializer,
    UnitRule,
    named_tensors,
    require_own_memory,
    take_apart,
)
from zerokit.runtime.plain import require_plain
from zerokit.runtime.precision import FLOATING, Precision, keep_statistics
from zerokit.runtime.readers import guard_readers
from zerokit.runtime.step import StepControl
from zerokit.runtime.unit import UnitState, write_back
from zerokit.runtime.walk import WALK, ModelWalk
from zerokit.runtime.weights import WholeWeights


class Runtime:
    """The parts of a `ZeroOptimizer`, and its interface for checkpoints and averages.

    They read and write `masters()`, between `settle` and `publish`, and frozen parameters by `UnitState.kept_part`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        options: dict[str, Any],
        *,
        stage: object,
        mesh: object,
        precision: Precision,
        params: Iterable[Any] | None,
        rule: UnitRule | None,
        bucket_mb: float | None,
        prefetch: int,
        process_group: dist.ProcessGroup | None,
        timeout: datetime.timedelta | None,
        init: InitRule,
    ) -> None:
        """Take over `model`; arguments and errors as for `ZeroOptimizer`."""
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod  # what it compiles, whose names are the model's own
        if isinstance(optimizer_class, functools.partial):
            options = optimizer_class.keywords | options
            optimizer_class = optimizer_class.func
        self.model, self.precision = model, precision
        _check_arguments(model, optimizer_class, bucket_mb, prefetch)
        _tell_of_widening(model, precision)
        group = group_of_this_rank(process_group)
        groups = _as_groups(model, params)
        device = _device_of(model, group)
        options = choose_kernel(optimizer_class, options, device, precision.master)
        self.states = probe(optimizer_class, options, precision.master)
        parts = take_apart(model, rule, {p: number for number, g in enumerate(groups) for p in g["params"]})
        bucket_bytes = default_bucket_bytes(parts.segments) if bucket_mb is None else int(bucket_mb * 2**20)
        self.layout = layout = build_layout(parts.segments, world=group.size(), bucket_bytes=bucket_bytes)
        shape = mesh_of(mesh, group)
        if shape is not None:
            stage, shape = without_lone_axis(stage, shape)
            Placement.of(stage, shape)  # raises before anything is made
        self.collectives = collectives = make_collectives(
            group, device, timeout, units=len(layout.units), mesh=shape
        )
        self.placement = placement = Placement.of(stage, collectives.mesh)
        settings = {
            "stage": str(placement),
            "mesh": f"{collectives.mesh.outer}x{collectives.mesh.inner}",
            "precision": str(precision.as_dict()),
            "prefetch": str(prefetch),
            "optimizer": optimizer_class.__name__,
            **_describe_options(groups, options),
        }
        require_agreement(layout, settings, collectives)
        collectives.reporter.distinguish(collectives.all_gather_objects(secrets.randbits(40))[0])

        seed, absent = _start_of_rank_0(model, collectives)
        materializer = Materializer(model, parts, init, device, seed, absent)
        heap = Heap(device, settles=True)
        self.units = units = list[UnitState]()
        for unit in layout.units:
            parameters = [parts.named[parameter.name] for parameter in unit.parameters]
            dtype = precision.compute if parameters[0].dtype in FLOATING else parameters[0].dtype
            renormed = [
                position
                for position, parameter in enumerate(unit.parameters)
                if all(getattr(owner, "max_norm", None) is not None for owner in parts.owners[parameter.name])
            ]
            units.append(UnitState(unit, parameters, collectives, dtype, placement, renormed))
            units[-1].take_over(materializer.values_of(parameters), precision.master)
            del parameters
            # Small objects that stay are carved out of each large block that goes: unless its pages are returned, a
            # model built unit by unit still grows to its full size.
            heap.return_freed_memory()
        materializer.fill_buffers()
        for buffer in model.buffers():
            collectives.broadcast(buffer)

        if device.type == "cuda":
            torch.cuda.empty_cache()  # the model's old memory, block by block, fits nothing that follows

        self.gradients = gradients = Gradients(units, collectives, precision, layout)
        self.gathering = gathering = Gathering(units, gradients, collectives, prefetch)
        self.weights = WholeWeights(model, gathering, collectives, precision.master)
        statistics = keep_statistics(model, precision.compute)
        self.walk = walk = ModelWalk(model, parts, gathering, precision)
        self.hooks = [*statistics, *walk.hooks]
        """What was registered in the model, for its release."""
        for number, entry in enumerate(groups):
            entry["params"] = [m.tensor for unit in units for m in unit.masters if m.group == number]
        # A model outlives its optimizer where a function trains it and returns it.
        if placement.cuts_parameters:
            guard_readers()
            model.__dict__[WALK] = walk
        else:
            weakref.finalize(walk, gathering.finish_updates).atexit = False
        self.inner = optimizer_class(groups, **options)
        self.control = StepControl(collectives, gradients, self.inner)

    def masters(self) -> Iterator[tuple[UnitState, MasterSlice, dict[str, Any]]]:
        """The masters that this rank updates, in line order, each with its optimizer state ({} before a step)."""
        for unit in self.units:
            for master in unit.masters:
                yield unit, master, self.inner.state.get(master.tensor, {})

    def settle(self) -> None:
        """Wait until all masters are current and nothing is in flight, so that they may be changed. Collective."""
        self.gathering.take_changes()
        self.gathering.free_all()

    def publish(self, *, frozen: bool = False) -> None:
        """Update the parameters after the masters, or `frozen` units' shards, were changed. Collective."""
        write_back(self.units)
        if frozen:
            for unit in self.units:
                if not unit.unit.trainable:
                    unit.gather_from_owners()
                    unit.complete()
        self.gathering.gather_updated()


def _start_of_rank_0(model: nn.Module, collectives: Collectives) -> tuple[int, frozenset[str]]:
    """Rank 0's seed, and the names of its parameters and buffers on `meta`: of all others every rank gets its values.

    Raises `UsageError`, on every rank, where another one has values that rank 0 has not.
    """
    absent = frozenset(name for name, tensor in named_tensors(model) if tensor.is_meta)
    everyone = collectives.all_gather_objects((torch.initial_seed() % 2**62, absent))
    seed, first = everyone[0]
    for rank, (_, theirs) in enumerate(everyone):
        if not first <= theirs:
            raise UsageError(
                f"rank {rank} has values of {min(first - theirs)}, which rank 0 has on meta, and every rank takes rank "
                "0's: load them on rank 0, or build the model on meta on all ranks"
            )
    return seed, first


def group_of_this_rank(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks to shard over. Raises `UsageError` where there are none, or this one is not among them."""
    if not dist.is_initialized():
        raise UsageError(
            "no process group: call torch.distributed.init_process_group() first (torchrun sets its environment)"
        )
    # torch.distributed.new_group gives ranks that are not in the group a number instead of one.
    group: Any = given if given is not None else dist.distributed_c10d._get_default_group()
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


def _describe_options(groups: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, str]:
    """Options by name, as text that is equal on ranks that were given the same."""
    return {
        name + (f" of group {number}" if len(groups) > 1 else ""): str(value)
        if value is None or isinstance(value, bool | int | float | str | list | tuple | torch.Tensor)
        else type(value).__qualname__
        for number, group in enumerate(groups)
        for name, value in sorted((options | group).items())
        if name != "params"
    }


def _check_arguments(model: nn.Module, optimizer_class: object, bucket_mb: object, prefetch: object) -> None:
    if not callable(optimizer_class):
        raise UsageError(
            f"{optimizer_class!r} is not an optimizer class: pass the class itself, such as torch.optim.AdamW, and its "
            "options as keywords; zerokit builds it over flat parameters"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the first argument is a {type(model).__name__}: pass the model itself, ZeroOptimizer(model, "
            "torch.optim.AdamW, ...), and groups of its parameters, if any, as params="
        )
    if bucket_mb is not None and not (isinstance(bucket_mb, int | float) and 0 < bucket_mb < math.inf):
        raise UsageError(f"bucket_mb={bucket_mb!r}: expected a positive number of MiB")
    if type(prefetch) is not int or prefetch < 0:
        raise UsageError(f"prefetch={prefetch!r}: expected the number of units to gather ahead, 0 or more")
    if torch.get_default_device().type != "cpu":
        raise UsageError(
            f"the default device is {torch.get_default_device()}, but zerokit also makes tensors that belong on the "
            "host: use model.to(device) instead of torch.set_default_device() and `with torch.device(...):`"
        )
    for path, module in model.named_modules():
        wrapper = type(module).__name__
        if wrapper in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise UsageError(f"{path or 'the model'} is already wrapped in {wrapper}: pass the plain model")
    for name, parameter in model.named_parameters():
        if TICKET in parameter.__dict__:
            raise UsageError(
                f"{name} is already managed by a ZeroOptimizer: build one for a module that holds all that it trains; "
                "to train it with another one, call zerokit.release(model) on all ranks first"
            )
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "device_mesh"):
            raise UsageError(f"{name} is a DTensor (fully_shard or tensor parallelism): pass the plain model")
    require_plain(model)
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


def _tell_of_widening(model: nn.Module, precision: Precision) -> None:
    """Warn of half-precision parameters that computation in fp32 makes twice as large."""
    widened = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dtype in FLOATING and parameter.dtype.itemsize < precision.compute.itemsize
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


def _as_groups(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """torch's ways to pass parameters, as a list of groups of parameters; each parameter in exactly one."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if params is None:
        return [{"params": list(names)}]
    given = list(params)
    groups = [dict(one) for one in given] if given and isinstance(given[0], dict) else [{"params": given}]
    seen: dict[nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        group["params"] = [member[1] if isinstance(member, tuple) else member for member in members]
        for parameter in group["params"]:
            if parameter not in names:
                shape = list(parameter.shape) if isinstance(parameter, torch.Tensor) else parameter
                raise UsageError(f"params: group {number} holds {shape}, which is no parameter of the model")
            if parameter in seen:
                raise UsageError(
                    f"params: {names[parameter]} is in group {seen[parameter]} and in group {number}: keep one"
                )
            seen[parameter] = number
    left = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in seen]
    if left:
        raise UsageError(
            f"params: {', '.join(left[:5])}{' …' if len(left) > 5 else ''} require gradients but are in no group: "
            "add them, or freeze them with requires_grad_(False)"
        )
    return groups


def _device_of(model: nn.Module, group: dist.ProcessGroup) -> torch.device:
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if not tensor.is_meta}
    if len(devices) > 1:
        raise UsageError(f"the model lies on {', '.join(sorted(map(str, devices)))}: move it to one device")
    if devices:
        return devices.pop()
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

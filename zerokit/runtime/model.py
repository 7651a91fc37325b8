"""The structure of a model: segments of its parameters, and initial values for one built on `meta`.

Values on `meta` are made a few modules at a time, each from a seed of its own (the run's seed and the module's name),
so that they depend neither on the world size nor on the stage or units.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.by_module import is_by_module, of_parameters, settle
from zerokit.errors import UsageError
from zerokit.layout import Interval, Parameter, Segment, Unit
from zerokit.runtime.torch_internals import applied_to, called_by_ddp

InitRule = Callable[[nn.Module], None] | None
UnitRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called."""


@dataclass(slots=True)
class Anatomy:
    """The structure of a model.

    `named` holds every parameter once under its first name, `aliases` its other names. `segments` lists them in
    the order of the line. `owners` maps a parameter's name to the modules that hold it directly.
    """

    named: dict[str, nn.Parameter]
    segments: list[Segment]
    owners: dict[str, list[nn.Module]]


def take_apart(model: nn.Module, rule: UnitRule | None, groups: Mapping[nn.Parameter, int]) -> Anatomy:
    """Divide `model`'s parameters among its unit modules and the rest.

    Unit modules are the outermost ones that match `rule`; without a rule, the children of every `ModuleList` and
    `Sequential` (looking through containers that cannot be called). What two unit modules share, or one and anything
    outside, belongs to the rest, which is split by its position between them. Raises `UsageError` where `rule` matches
    no module.
    """
    scopes = _unit_modules(model, rule)
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    first_name = {parameter: name for name, parameter in named.items()}
    aliases: dict[str, list[str]] = {}
    users: dict[str, dict[str | None, None]] = {}
    owners: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        scope = next((name for name in scopes if path == name or path.startswith(f"{name}.")), None)
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = first_name[parameter]
            alias = plain_name(f"{path}.{local}" if path else local)
            if alias != name:
                aliases.setdefault(name, []).append(alias)
            users.setdefault(name, {})[scope] = None
            owners.setdefault(name, []).append(module)

    segments: list[Segment] = []
    for name, parameter in named.items():
        scope = next(iter(users[name])) if len(users[name]) == 1 else None
        member = Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            group=groups.get(parameter, 0),
            trainable=parameter.requires_grad,
            aliases=tuple(aliases.get(name, ())),
        )
        # Parameters of the rest stand alone, to join within a bucket: a large embedding then is a unit by itself.
        joins = scope is not None and segments and segments[-1].scope == scope
        before = segments.pop().parameters if joins else ()
        segments.append(Segment(scope, (*before, member)))
    return Anatomy(named, segments, owners)


def settings_of(option: str, given: Any, model: nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    """What `given` says of each parameter, by name, for all or by module. Raises `UsageError`, see `by_module`."""
    parameters = [parameter for segment in anatomy.segments for parameter in segment.parameters]
    if not is_by_module(given):
        return {parameter.name: given for parameter in parameters}
    return of_parameters(option, settle(option, given, module_paths(model)), parameters)


def module_paths(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by each of its paths, without torch.compile's wrappers."""
    return {plain_name(path): module for path, module in model.named_modules(remove_duplicate=False)}


def require_unwrapped(model: nn.Module) -> None:
    """Raise `UsageError` where PyTorch's own data parallelism reduces this model's gradients, too."""
    for path, module in model.named_modules():
        for name in applied_to(module):
            if name in ("fully_shard", "replicate"):
                raise UsageError(
                    f"{path or 'the model'} is under {name}(), but ZeroOptimizer shards the model itself: pass the "
                    f"plain model, and omit {name}()"
                )
    if called_by_ddp(model):
        raise UsageError(
            "this model is under ZeroOptimizer, which reduces its gradients itself: call the model without "
            "DistributedDataParallel (with accelerate, zerokit.integrations.accelerate.ZeroAccelerator does so)"
        )


def require_own_memory(model: nn.Module) -> None:
    """Raise `UsageError` where two tensors of the model share elements, which each of them would get for itself.

    Strided views that lie between each other are taken to share some.
    """
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors_of(model):
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in by_memory.values():
        for (name, tensor), (other, second) in itertools.combinations(sharing, 2):
            involved = isinstance(tensor, nn.Parameter) or isinstance(second, nn.Parameter)
            if tensor is not second and involved and _span(tensor).intersection(_span(second)).numel:
                raise UsageError(
                    f"{name} and {other} share memory, or interleave in it, but are not the same parameter: "
                    "ZeroOptimizer gives each its own. Use one parameter in both places (b.weight = a.weight, with "
                    ".t() or a slice taken in forward), or copy: .detach().clone()"
                )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain attributes, each object once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        # The older spectral norm leaves an attribute that it computes anew in each forward.
        derived = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and name not in derived:
                yield f"{path}.{name}" if path else name, value


def _span(tensor: Tensor) -> Interval:
    """The bytes from the first element of a tensor to its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Interval(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def plain_name(name: str) -> str:
    """The name without the wrappers that torch.compile puts around modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _unit_modules(model: nn.Module, rule: UnitRule | None) -> dict[str, nn.Module]:
    """The outermost modules inside `model` that match `rule`, by path."""
    listed = {
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children()
    }

    def matches(module: nn.Module) -> bool:
        if rule is None:
            return module in listed and not isinstance(module, CONTAINERS)
        return isinstance(module, rule) if isinstance(rule, type | tuple) else rule(module)

    if not (rule is None or isinstance(rule, type | tuple) or callable(rule)):
        raise UsageError(
            f"units={rule!r}: expected a module class, a tuple of classes, or a function of a module"
        )
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():  # what is inside a module follows it
        if path and not (found and path.startswith(f"{next(reversed(found))}.")) and matches(module):
            found[path] = module
    if rule is not None and not found:
        raise UsageError(
            f"units={rule!r} matches no module inside {type(model).__name__}: pass the class of its repeated block, "
            "or leave units out to take the children of every ModuleList and Sequential"
        )
    return found


def announcers(model: nn.Module, anatomy: Anatomy, units: Iterable[Unit]) -> dict[int, set[nn.Module]]:
    """For each unit, the modules whose calls announce uses of its weights: its own, or those that hold its parameters.

    Where the root is one of these, not every use is announced.
    """
    modules = dict(model.named_modules())
    return {
        unit.index: {modules[scope] for scope in unit.scopes}
        or {module for p in unit.parameters for module in anatomy.owners[p.name]}
        for unit in units
    }


def parameter_ids(model: nn.Module) -> dict[str, int]:
    """The identity of each parameter, by all its names; torch.func.functional_call puts tensors in their place."""
    named: Iterable[tuple[str, object]] = model.named_parameters(remove_duplicate=False)
    return {name: id(parameter) for name, parameter in named if isinstance(parameter, nn.Parameter)}


def require_known(model: nn.Module, known: Mapping[str, int]) -> None:
    """Raise `UsageError` if parameters were added, replaced or renamed since `parameter_ids` gave what is `known`."""
    foreign = dict(parameter_ids(model).items() - known.items())
    if foreign:
        raise UsageError(
            f"{', '.join(sorted(foreign))}: not in the model when ZeroOptimizer was built (a module or parameter was "
            "added, replaced, renamed or tied), so it would not be updated and saved correctly: change the model "
            "before, or build a new model and optimizer"
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, by each of their names, without torch.compile's wrappers."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield plain_name(name), buffer


class Materializer:
    """Makes the initial values of parameters and buffers that are on `meta`.

    Those of `absent` only, which rank 0 has there, too: all others take what rank 0 broadcasts.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        init: InitRule,
        device: torch.device,
        seed: int,
        absent: Collection[str],
    ) -> None:
        self._init, self._device, self._seed = init, device, seed
        self._absent = {tensor for name, tensor in named_tensors(model) if name in absent}
        self._paths = {module: path for path, module in model.named_modules()}
        self._owners = {parameter: anatomy.owners[name][0] for name, parameter in anatomy.named.items()}
        # A parameter that lies in an earlier unit has lost its form by the time its module is initialised again.
        self._forms = {p: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in self._owners}

    def values_of(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Values for those of `parameters` that are on `meta`; a tied one takes what its first owner gives it."""
        wanted = [parameter for parameter in parameters if parameter in self._absent]
        values: dict[nn.Parameter, Tensor] = {
            parameter: torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
            for parameter in parameters
            if parameter.is_meta and parameter not in self._absent
        }
        for owner in dict.fromkeys(self._owners[parameter] for parameter in wanted):
            scratch = self._initialise(owner)
            values.update({p: scratch[p].detach() for p in wanted if self._owners[p] is owner})
        return values

    def fill_buffers(self) -> None:
        """Give buffers that are on `meta` memory and values."""
        for module in self._paths:
            meta = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
            for name, buffer in meta.items():
                module._buffers[name] = torch.empty_like(buffer, device=self._device)
            if not self._absent.isdisjoint(meta.values()):
                self._initialise(module)

    def _initialise(self, module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        """Let `module` initialise scratch parameters, which are returned: its own may be on `meta`, or freed."""
        path, init = self._paths[module], self._init
        reset: Any = getattr(module, "reset_parameters", None)
        if init is None and not callable(reset):
            raise UsageError(
                f"{path or 'the model'} ({type(module).__name__}) has parameters or buffers on meta but no "
                "reset_parameters(): pass init_fn=, a function that initialises one module in place"
            )
        held = dict(module._parameters)
        scratch = {
            p: nn.Parameter(torch.empty_like(self._forms[p], device=self._device), p.requires_grad)
            for p in held.values()
            if p is not None
        }
        digest = hashlib.sha256(f"{self._seed}:{path}".encode()).digest()
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            module._parameters.update({name: p if p is None else scratch[p] for name, p in held.items()})
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:7], "little"))
                reset() if init is None else init(module)
        finally:
            module._parameters.update(held)
        return scratch

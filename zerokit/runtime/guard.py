"""Guarded parameters, whose every access is intercepted while the model does not run.

Between passes a parameter's memory may be gone (stage 3), on its way (stages 1 and 2) or a rounded copy of its master,
and its gradient lies in zerokit's buckets. Code that reads or changes it then must get what PyTorch would give it, or
an error that names the right call. So a parameter's class, not its identity, changes to a *guarded* subclass while the
model does not use it: PyTorch calls its `__torch_function__` before every operation on it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError
from zerokit.runtime.hooks import Hook
from zerokit.runtime.torch_internals import compiling, uncompiled, without_torch_function

TICKET = "_zerokit"  # the attribute of a managed parameter that leads to its unit

SCALES_ITSELF = (
    "zerokit scales the loss itself: use precision='fp16' and optimizer.backward(loss), without GradScaler"
)

_GRADIENT_ADVICE = (
    "zerokit holds the gradient in flat buckets, summed and divided over ranks: call optimizer.clip_grad_norm_() "
    "to clip and optimizer.zero_grad() to clear, or read and change whole gradients inside "
    "`with optimizer.gathered_gradients():`, which all ranks enter"
)

_METADATA = frozenset(
    """
    shape size dim ndim ndimension numel nelement dtype device layout stride storage_offset is_contiguous
    element_size itemsize nbytes is_floating_point is_complex is_signed is_leaf requires_grad
    requires_grad_ is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_sparse_csr is_quantized is_nested
    is_inference is_conj is_neg is_pinned get_device grad_fn output_nr retains_grad retain_grad
    register_hook register_post_accumulate_grad_hook _post_accumulate_grad_hooks _backward_hooks _version
    _base _is_view names has_names __len__ __hash__ data_ptr untyped_storage is_shared is_set_to
    is_same_size grad_dtype grad backward get_gradient_edge is_tensor empty_like zeros_like ones_like
    full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full new_tensor
    """.split()  # noqa: SIM905 - a list of strings, one a line, fills the page
)
"""What describes a tensor and reads no element of it: functions, and properties by their name."""


class Owner(Protocol):
    """The interface of whoever holds values and gradients of guarded parameters, each named by unit and position."""

    def read(self, unit: int, name: str) -> None:
        """Prepare a parameter for a use; `UsageError` where it cannot be used now."""

    def has_gradient(self, unit: int, positions: Iterable[int]) -> bool: ...

    def clear_gradient(self, unit: int, positions: Iterable[int]) -> None: ...

    def note_alias(self, unit: int, position: int, alias: Tensor) -> None:
        """Note that a tensor over a parameter's memory was handed out, which version counters do not show."""

    def take_exact(self, unit: int, position: int, values: Tensor) -> None:
        """Note that `values`, maybe wider, were copied to a parameter."""

    def note_requires_grad(self, unit: int) -> None:
        """Note that a parameter was frozen or unfrozen."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a managed parameter knows of zerokit."""

    reference: weakref.ref[Owner]
    index: int  # of its unit
    positions: tuple[int, ...]  # of the unit's parameters: one, or several for a master
    name: str

    @property
    def owner(self) -> Owner:
        """What decides what may be done with it while the model does not run; there as long as the optimizer is."""
        owner = self.reference()
        assert owner is not None
        return owner

    def clear_gradient(self) -> None:
        if self.reference() is not None:
            self.owner.clear_gradient(self.index, self.positions)


def ticket_of(parameter: Tensor) -> Ticket | None:
    """The ticket of a parameter that a living `ZeroOptimizer` manages."""
    ticket = parameter.__dict__.get(TICKET)
    return ticket if isinstance(ticket, Ticket) and ticket.reference() is not None else None


class WithoutGradient(nn.Parameter):
    """A parameter whose gradient zerokit holds: `grad` is a `HeldGradient` while there is one, and None clears it.

    Masters are such outside the update: functions over `optimizer.param_groups` would find no gradients, and clip none.
    """

    @property
    @uncompiled
    def grad(self) -> Tensor | None:
        real, ticket = shown_gradient(self), ticket_of(self)
        if (
            real is not None
            or ticket is None
            or not ticket.owner.has_gradient(ticket.index, ticket.positions)
        ):
            return real
        return HeldGradient(self, ticket)

    @grad.setter
    @uncompiled
    def grad(self, value: Tensor | None) -> None:
        ticket = ticket_of(self)
        if ticket is None or shown_gradient(self) is not None:
            show_gradient(self, value)
        elif value is None:
            ticket.clear_gradient()
        elif not isinstance(value, HeldGradient):
            raise UsageError(f"assigning {ticket.name}.grad has no effect: {_GRADIENT_ADVICE}")

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class Guarded(WithoutGradient):
    """The behaviour of a guarded parameter; `guarded_class` joins it to the parameter's own class."""

    plain: type[nn.Parameter] = nn.Parameter
    """The class that the parameter has while the model computes with it."""

    @classmethod
    @uncompiled
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(function)
        described = name in _METADATA or (name == "data" and function.__name__ == "__set__")
        used = [] if described else [each for each in _flat((args, kwargs)) if isinstance(each, Guarded)]
        touched = [(each, ticket) for each in used if (ticket := ticket_of(each)) is not None]
        for _, ticket in touched:  # reading one may unguard the others of its unit
            ticket.owner.read(ticket.index, ticket.name)
        _require_one_kind(name, args)
        with without_torch_function():
            if name == "data" and described:
                _require_same_memory(args[0], args[1])
            result = function(*args, **kwargs)
            if name == "requires_grad_" or (name == "requires_grad" and function.__name__ == "__set__"):
                _note_requires_grad(args[0])
            elif name == "register_post_accumulate_grad_hook":
                _run_last(args[0])
        for parameter, ticket in touched:
            if name == "data":
                ticket.owner.note_alias(ticket.index, ticket.positions[0], result)
            elif name == "copy_" and len(args) > 1 and args[0] is parameter and isinstance(args[1], Tensor):
                ticket.owner.take_exact(ticket.index, ticket.positions[0], args[1])
        return result

    def set_(self, source: Tensor) -> Tensor:  # type: ignore[override]
        """Take the values, and keep the memory: parametrizations call it when `layer.weight = value` is assigned."""
        return self.copy_(source)  # unlike `set_`, it is shown to __torch_function__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ticket = ticket_of(self)
        named = "" if ticket is None else f"{ticket.name}, "
        return f"Parameter({named}shape={tuple(self.shape)}, dtype={self.dtype}, managed by ZeroOptimizer)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).plain(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach().clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


class HeldGradient(Tensor):
    """`parameter.grad` while zerokit holds the gradient: it can be cleared; other uses raise errors with advice."""

    ticket: Ticket

    def __new__(cls, parameter: Tensor, ticket: Ticket) -> HeldGradient:
        with without_torch_function():
            nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
            held = nothing.expand(parameter.shape).as_subclass(cls)
        held.ticket = ticket
        return held

    @classmethod
    @uncompiled
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(function)
        held = next((value for value in _flat((args, kwargs or {})) if isinstance(value, cls)), None)
        assert held is not None
        if name in _METADATA or name == "detach_":
            with without_torch_function():
                result = function(*args, **(kwargs or {}))
            return held if name in ("detach_", "requires_grad_") else result
        if name == "zero_":
            held.ticket.clear_gradient()
            return held
        if name.startswith("_amp_"):
            raise UsageError(SCALES_ITSELF)
        raise UsageError(f"{name}() of {held.ticket.name}.grad: {_GRADIENT_ADVICE}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldGradient({self.ticket.name}, shape={tuple(self.shape)})"


@functools.cache
def guarded_class(plain: type[nn.Parameter]) -> type[Guarded]:
    """The guarded form of a class of parameters."""
    return type(plain.__name__, (Guarded, plain), {"plain": plain, "__module__": plain.__module__})


_GRAD: Any = Tensor.grad  # the slot that autograd writes, below the guarded property


def show_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set `parameter.grad` to a real tensor or to None, whatever class the parameter has."""
    with without_torch_function():
        _GRAD.__set__(parameter, gradient)


def drop_gradients(parameters: Sequence[Tensor]) -> None:
    """Set the real `grad` of all of them to None, whatever class they have."""
    with without_torch_function():
        for parameter in parameters:
            _GRAD.__set__(parameter, None)


def shown_gradient(parameter: Tensor) -> Tensor | None:
    """The real tensor that `show_gradient` set, or its replacement."""
    with without_torch_function():
        gradient: Tensor | None = _GRAD.__get__(parameter)
    return gradient


def _name(function: Callable[..., Any]) -> str:
    """The name of an operation; a property's for its getter and setter."""
    owner = getattr(function, "__self__", None)
    if function.__name__ in ("__get__", "__set__", "__delete__") and owner is not None:
        return str(owner.__name__)
    return str(function.__name__)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _flat(inner)
    else:
        yield value


def _require_one_kind(name: str, args: Sequence[Any]) -> None:
    """Raise `UsageError` where a parameter of the model is looked for among those of the optimizer's groups."""
    if name not in ("eq", "__eq__", "ne", "__ne__"):
        return
    held = [each for each in args if isinstance(each, WithoutGradient)]
    guarded = [each for each in held if isinstance(each, Guarded)]
    if guarded and len(guarded) < len(held):
        raise UsageError(
            f"{guarded[0].__dict__[TICKET].name} is compared with a tensor of optimizer.param_groups, which hold flat "
            "ones and no parameter of the model: the number of its group is that of its entry in "
            "optimizer.layout.parameters, by name"
        )


def hooked(parameter: Tensor) -> bool:
    """Whether the user has registered a hook that sees the accumulated gradient."""
    return any(not isinstance(hook, Hook) for hook in (parameter._post_accumulate_grad_hooks or {}).values())


def _run_last(parameter: Tensor) -> None:
    """Let zerokit take the gradient after all hooks of the user have seen it."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, Hook):
            # `move_to_end` would not do: autograd goes through the dictionary itself.
            hooks[key] = hooks.pop(key)


def _note_requires_grad(parameter: Tensor) -> None:
    if (ticket := ticket_of(parameter)) is not None:
        try:
            ticket.owner.note_requires_grad(ticket.index)
        except UsageError:
            parameter.requires_grad = False
            raise


def _require_same_memory(parameter: Tensor, value: Tensor) -> None:
    """Allow `model.to()` that changes nothing: it assigns what it has read."""
    same = value.dtype == parameter.dtype and value.device == parameter.device
    if same and value.shape == parameter.shape and value.data_ptr() == parameter.data_ptr():
        return
    raise refuse_moving(parameter.__dict__[TICKET].name, value, parameter)


def refuse_moving(name: str, found: Tensor, expected: Tensor) -> UsageError:
    """The error for parameters that are given other memory."""
    return UsageError(
        f"moving {name} out of zerokit's storage (found {found.dtype} on {found.device}, expected {expected.dtype} on "
        f"{expected.device}) cuts it off from its updates, as .to(), .float(), .half() and assigning .data do: change "
        "the model before ZeroOptimizer is built, choose precision=, or copy values inside `with optimizer.gathered():`"
    )


def refuse_reading(name: str) -> UsageError:
    """The error for the use of a freed parameter whose unit cannot be gathered."""
    if compiling():
        return UsageError(
            f"a graph of torch.compile reads {name}, which stage 3 has divided over ranks, outside its unit's module: "
            "compile the units instead, `for block in model.blocks: block.compile()`"
        )
    return UsageError(
        f"{name} is divided over ranks between its uses (stage 3), so it cannot be read or changed here: do it inside "
        "`with optimizer.gathered():`, which all ranks enter, or in the model's forward, where reading gathers it"
    )

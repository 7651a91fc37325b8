"""The model's own methods, adapted to sharded weights or made to raise errors with advice."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.utils.hooks import RemovableHandle

from zerokit.errors import UsageError
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.guard import refuse_moving
from zerokit.runtime.unit import UnitState
from zerokit.runtime.walk import WALK
from zerokit.runtime.weights import WholeWeights, standing_in


class Managing(Protocol):
    """An optimizer whose model is given back."""

    def zero_grad(self) -> None: ...

    def note_release(self) -> None:
        """Refuse to go on: the model is a plain one now. Raises `UsageError` where that cannot be now."""


_METHODS = "_zerokit_methods"  # the attribute of a managed model


class ModelMethods:
    """A model's methods under a `ZeroOptimizer`: they behave as without zerokit, or raise errors with advice.

    `state_dict()` gives whole, current tensors, which are the masters where these are wider than the parameters, and
    `load_state_dict()` reaches the masters; all ranks must call them.
    """

    def __init__(
        self,
        gathering: Gathering,
        weights: WholeWeights,
        hooks: Sequence[RemovableHandle],
        managing: Managing,
    ) -> None:
        self._gathering, self._weights = gathering, weights
        self._hooks, self._managing = list(hooks), weakref.ref(managing)

    def manage(self, model: nn.Module) -> None:
        """Install them in the optimizer's model, and mark its modules."""
        self.install(model)
        self._hooks += [
            model.register_load_state_dict_pre_hook(self._before_load),
            model.register_load_state_dict_post_hook(self._after_load),
        ]
        model.__dict__[_METHODS] = self
        # DistributedDataParallel reads it first of all; fully_shard and replicate look into the registry.
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoDistributedDataParallel()
        for module in model.modules():
            module.__dict__[REGISTRY_KEY] = _NoFullyShard(module.__dict__.get(REGISTRY_KEY, ()))

    def install(self, model: nn.Module) -> None:
        """Install them in `model`: the optimizer's, or another module over the same parameters."""
        plain, gathering, weights, reference = _Plain(model), self._gathering, self._weights, self._managing

        def zero_grad(set_to_none: bool = True) -> None:
            plain("zero_grad", set_to_none)
            managing = reference()
            if managing is not None:
                managing.zero_grad()

        def apply(function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
            if _only_copies(function, gathering.units):
                function = _of_others(function, gathering.units)
            guarded = [unit for unit in gathering.units if unit.guarded]
            for unit in guarded:
                unit.unguard()
            try:
                return plain("_apply", function, *args, **kwargs)
            finally:
                for unit in guarded:
                    unit.guard()

        def state_dict(*args: Any, **kwargs: Any) -> Any:
            # `keep_vars=True` asks for the parameters themselves.
            themselves = kwargs.get("keep_vars", len(args) > 2 and args[2])
            # Every hook and override of the model's modules finds whole weights, whatever it makes of them.
            with gathering.opened() if themselves else weights.shown():
                state = plain("state_dict", *args, **kwargs)
            return state if themselves else _tied(state, plain.model)

        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            before = gathering.is_open
            try:
                return plain("load_state_dict", *args, **kwargs)
            finally:
                if gathering.is_open > before:  # an exception in a module's own loading
                    gathering.close()

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            """The method of transformers, PEFT and diffusers also asks parts of the model for their states."""
            # One rank saves what all have gathered, as trainers do.
            whole = kwargs.get("state_dict")
            with weights.shown(as_built=True) if whole is None else _parts_taken_from(whole, plain.model):
                return plain("save_pretrained", *args, **kwargs)

        installed = (state_dict, load_state_dict, zero_grad, save_pretrained)
        model.__dict__.update({m.__name__: m for m in installed if hasattr(model, m.__name__)})
        model.__dict__.update({"_apply": apply, "__deepcopy__": _refuse_deepcopy})

    def remove(self, model: nn.Module) -> None:
        """Take back what `install` and `manage` have set in `model`."""
        for name in (*_INSTALLED, _METHODS, WALK):
            model.__dict__.pop(name, None)

    def release(self, model: nn.Module) -> None:
        """What `release` does; `model` is the optimizer's."""
        managing = self._managing()
        if managing is not None:
            managing.note_release()
        self._weights.give_back()
        for hook in self._hooks:
            hook.remove()
        self.remove(model)
        for module in model.modules():
            if registered := OrderedDict(module.__dict__.pop(REGISTRY_KEY)):
                module.__dict__[REGISTRY_KEY] = registered

    def _before_load(
        self,
        module: nn.Module,
        state: Mapping[str, Tensor],
        prefix: str,
        metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters into the model, which nothing updates: "
                "omit assign=True, so that values are copied"
            )
        self._gathering.open()

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self._gathering.close(agree=True)


_INSTALLED = (
    *("state_dict", "load_state_dict", "zero_grad", "save_pretrained", "_apply", "__deepcopy__"),
    "_ddp_params_and_buffers_to_ignore",
)


def release(model: nn.Module) -> None:
    """Make `model`, which a `ZeroOptimizer` manages, a plain one again. All ranks must call it.

    Its parameters are whole, in the dtype that they had when the optimizer was built, with the values of the masters,
    and another optimizer may be built for it. The earlier one refuses `step`, and its states are dropped. A rank needs
    memory for the whole model.

    Raises `UsageError` for a model that no `ZeroOptimizer` manages, and while it shows averages.
    """
    methods = model.__dict__.get(_METHODS)
    if not isinstance(methods, ModelMethods):
        raise UsageError(
            f"release() of a {type(model).__name__} that no ZeroOptimizer manages: pass the model that it was built for"
        )
    methods.release(model)


def is_managed(model: nn.Module) -> bool:
    """Whether a `ZeroOptimizer` was built for `model` and has not released it."""
    return _METHODS in model.__dict__


class _Plain:
    """Calls methods of a model's class, for what hides them in the model and must not keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._reference = weakref.ref(model)

    @property
    def model(self) -> nn.Module:
        model = self._reference()
        assert model is not None
        return model

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.model), name)(self.model, *args, **kwargs)


@contextlib.contextmanager
def _parts_taken_from(whole: Mapping[str, Any], model: nn.Module) -> Iterator[None]:
    """A context in which `state_dict()` of the model's parts, which one rank alone may call, is of the `whole`.

    Its tensors stand in the model, whose dtype goes into the configuration that is saved beside them.
    """
    named = model.named_parameters(remove_duplicate=False)
    given = {parameter: whole[name] for name, parameter in named if isinstance(whole.get(name), Tensor)}
    parts = [
        (f"{path}.", vars(part))
        for path, part in model.named_modules()
        if path and "state_dict" not in vars(part)
    ]

    def state_dict(path: str, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        state = {} if destination is None else destination
        state.update({prefix + name[len(path) :]: whole[name] for name in whole if name.startswith(path)})
        return state

    for path, members in parts:
        members["state_dict"] = functools.partial(state_dict, path)
    try:
        with standing_in(model, given):
            yield
    finally:
        for _, members in parts:
            del members["state_dict"]


def _tied(state: Any, model: nn.Module) -> Any:
    """The state, in which names of one parameter have one tensor, as writers of files expect it."""
    first: dict[nn.Parameter, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(state.get(name), Tensor) and state[name].shape == parameter.shape:
            state[name] = first.setdefault(parameter, state[name])
    return state


def _only_copies(function: Callable[[Tensor], Tensor], units: Sequence[UnitState]) -> bool:
    """Whether the function copies a tensor as it is, as `model.to("cpu:0")` does for one on "cpu".

    Raises `UsageError` where `model.to()` and its like would change the parameters.
    """
    copies = False
    for unit in units:
        probe = torch.tensor([1, 0, 1], dtype=unit.dtype, device=unit.device)
        made = function(probe)
        if made.dtype != probe.dtype or made.device != probe.device:
            raise refuse_moving(unit.unit.name, made, probe)
        copies |= made is not probe and made.equal(probe)
    return copies


def _of_others(
    function: Callable[[Tensor], Tensor], units: Sequence[UnitState]
) -> Callable[[Tensor], Tensor]:
    """The function for other tensors than the units' parameters, which stay in their memory."""
    managed = {id(parameter) for unit in units for parameter in unit.parameters}
    return lambda tensor: tensor if id(tensor) in managed else function(tensor)


def _refuse_deepcopy(memo: object) -> NoReturn:
    raise UsageError(
        "deepcopy of a model under ZeroOptimizer would copy empty or shared units: copy it before, or take its "
        "state_dict()"
    )


class _NoDistributedDataParallel:
    """Raises an error when it is iterated over."""

    def __iter__(self) -> Iterator[str]:
        raise UsageError(
            "this model is under ZeroOptimizer, which reduces its gradients itself: call the model without "
            "DistributedDataParallel (with accelerate, zerokit.integrations.accelerate.ZeroAccelerator does so)"
        )


class _NoFullyShard(dict[str, Any]):
    """torch's note of what has been applied to a module; refuses what would divide it again."""

    def setdefault(self, name: str, default: Any = None) -> Any:  # what torch notes; anybody may ask for it
        if name in ("fully_shard", "replicate"):
            raise UsageError(
                f"this model is under ZeroOptimizer, which already shards it: omit {name}(), or omit "
                "ZeroOptimizer and pass its parameters to a torch optimizer"
            )
        return super().setdefault(name, default)

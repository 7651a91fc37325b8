"""The model's own methods, adapted to sharded weights or made to raise errors with advice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerokit.errors import UsageError
from zerokit.runtime.engine import Engine
from zerokit.runtime.guard import refuse_moving
from zerokit.runtime.saving import writers_of
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
        model: nn.Module,
        engine: Engine,
        weights: WholeWeights,
        hooks: Sequence[RemovableHandle],
        managing: Managing,
    ) -> None:
        """Install them in the optimizer's `model`, in which `hooks` have been registered for it before."""
        self._engine, self._weights, self._managing = engine, weights, weakref.ref(managing)
        self.install(model)
        self._hooks = [
            *hooks,
            model.register_load_state_dict_pre_hook(self._before_load),
            model.register_load_state_dict_post_hook(self._after_load),
        ]
        model.__dict__[_METHODS] = self

    def install(self, model: nn.Module) -> None:
        """Install them in `model`: the optimizer's, or another module over the same parameters."""
        engine, weights, reference = self._engine, self._weights, self._managing
        model_reference = weakref.ref(model)  # what stands in the model must not keep it alive

        def own() -> nn.Module:
            model = model_reference()
            assert model is not None
            return model

        def plain(name: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(type(own()), name)(own(), *args, **kwargs)

        def zero_grad(set_to_none: bool = True) -> None:
            plain("zero_grad", set_to_none)
            managing = reference()
            if managing is not None:
                managing.zero_grad()

        def apply(function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
            if _only_copies(function, engine.units):
                function = _of_others(function, engine.units)
            guarded = [unit for unit in engine.units if unit.guarded]
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
            with engine.opened() if themselves else weights.shown():
                state = plain("state_dict", *args, **kwargs)
            return state if themselves else _tied(state, own())

        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            before = engine.is_open
            try:
                return plain("load_state_dict", *args, **kwargs)
            finally:
                if engine.is_open > before:  # an exception in a module's own loading
                    engine.close()

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            """The method of transformers, PEFT and diffusers also asks parts of the model for their states."""
            whole = kwargs.get("state_dict")
            if whole is None and writers_of(own()):
                return weights.in_turn(
                    lambda: plain("save_pretrained", *args, **kwargs),
                    trained_at_once=hasattr(own(), "peft_config"),
                )
            # Trainers give one rank alone what all have gathered. It stands in the model then: the dtype of its tensors
            # goes into the configuration that is saved beside them.
            with weights.shown(as_built=True) if whole is None else standing_in(own(), _named(own(), whole)):
                return plain("save_pretrained", *args, **kwargs)

        installed = (state_dict, load_state_dict, zero_grad, save_pretrained)
        model.__dict__.update({m.__name__: m for m in installed if hasattr(model, m.__name__)})
        model.__dict__.update({"_apply": apply, "__deepcopy__": _refuse_deepcopy})

    def remove(self, model: nn.Module) -> None:
        """Take back what was set in `model`."""
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
        self._engine.open()

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self._engine.close(agree=True)


_INSTALLED = ("state_dict", "load_state_dict", "zero_grad", "save_pretrained", "_apply", "__deepcopy__")


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


def _named(model: nn.Module, whole: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
    """The tensors that `whole` has under the names of the model's parameters."""
    named = model.named_parameters(remove_duplicate=False)
    return {parameter: whole[name] for name, parameter in named if isinstance(whole.get(name), Tensor)}


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

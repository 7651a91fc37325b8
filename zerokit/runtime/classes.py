"""The optimizer classes that a `ZeroOptimizer` is given, and which parameters each of them updates."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from zerokit.by_module import keys_by_path
from zerokit.errors import UnsupportedOptimizer, UsageError, ZerokitWarning
from zerokit.layout import Layout
from zerokit.owners import Owners, Whole, rows_of
from zerokit.runtime.trials import TRIAL_ERRORS, OptimizerStates, choose_kernel

OptimizerClass: TypeAlias = Callable[..., Optimizer]
OptimizerClasses: TypeAlias = OptimizerClass | Mapping[OptimizerClass, Any]
"""One class, or each class with what it takes as `params`: tensors, names or groups."""


@dataclass(frozen=True, slots=True)
class Inner:
    """One class of torch optimizers, with the options that all its groups have, and its groups of parameters."""

    optimizer_class: Callable[..., Optimizer]
    options: dict[str, Any]
    groups: list[dict[str, Any]]

    def tuned(self, device: torch.device, master: torch.dtype) -> Inner:
        """With the kernel that is fastest on this device, if the user has chosen none."""
        return replace(self, options=choose_kernel(self.optimizer_class, self.options, device, master))


def classes_of(
    model: nn.Module, given: object, params: Iterable[Any] | None, options: dict[str, Any]
) -> list[Inner]:
    """The classes that `given` names: one, or a mapping from classes to their parameters.

    Raises `UsageError` for anything else.
    """
    if not isinstance(given, Mapping):
        parts = [
            _inner(given, options, _groups(model, list(model.parameters()) if params is None else params))
        ]
    else:
        if params is not None or options:
            extra = "params=" if params is not None else f"{next(iter(options))}="
            raise UsageError(
                f"{extra} beside several optimizer classes: give each class its groups, with their options, as in "
                '{torch.optim.Muon: [{"params": matrices, "lr": 0.02}], torch.optim.AdamW: rest}'
            )
        if not given:
            raise UsageError("no optimizer class is given: the mapping from classes to parameters is empty")
        parts = [_inner(one, {}, _groups(model, members)) for one, members in given.items()]
    _require_each_once(model, [group for part in parts for group in part.groups])
    return parts


def _inner(given: object, options: dict[str, Any], groups: list[dict[str, Any]]) -> Inner:
    if isinstance(given, functools.partial):
        return _inner(given.func, given.keywords | options, groups)
    if not callable(given):
        raise UsageError(
            f"{given!r} is not an optimizer class: pass the class itself, such as torch.optim.AdamW, and its "
            "options as keywords; zerokit builds it over flat parameters"
        )
    return Inner(given, options, groups)


def _groups(model: nn.Module, params: Any) -> list[dict[str, Any]]:
    """torch's ways to pass parameters, or their names, as a list of groups of parameters."""
    by_name = dict(model.named_parameters(remove_duplicate=False))
    given: list[Any] = [params] if isinstance(params, dict | torch.Tensor | str) else list(params)
    groups: list[dict[str, Any]] = [{"params": given}]
    if given and isinstance(given[0], dict):
        groups = [dict(one) for one in given]
    for group in groups:
        lone = isinstance(group["params"], torch.Tensor | str)
        members = [group["params"]] if lone else list(group["params"])
        members = [member[1] if isinstance(member, tuple) else member for member in members]
        group["params"] = [
            by_name.get(member, member) if isinstance(member, str) else member for member in members
        ]
    return groups


def _require_each_once(model: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
    """Raise `UsageError` unless every parameter that requires a gradient is in one group, and no other tensor."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    seen: dict[torch.Tensor, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if not isinstance(parameter, torch.Tensor) or parameter not in names:
                shown = list(parameter.shape) if isinstance(parameter, torch.Tensor) else repr(parameter)
                raise UsageError(f"params: group {number} holds {shown}, which is no parameter of the model")
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


def row_blocks_of(
    given: Mapping[str, int | Sequence[int]] | None, layout: Layout, groups: Collection[int]
) -> dict[str, tuple[int, ...]]:
    """The rows of the blocks of parameters, by name, from keys that are names or the ends of some.

    Raises `UsageError` for a key that is neither, for parameters whose optimizer is elementwise, and for blocks that do
    not fit.
    """
    shapes = {p.name: p.shape for p in layout.parameters if p.trainable and p.group in groups}
    given = given or {}
    rule = "a key is a parameter's name, as in model.named_parameters(), or the end of some names"
    keys = keys_by_path("row_blocks", given, shapes, "parameter that is updated whole", rule)
    return {name: rows_of(name, shapes[name], given[key]) for name, key in keys.items()}


def require_shapes(classes: Sequence[Inner], layout: Layout, owners: Owners) -> None:
    """Let each class see tensors of the very shapes that it will update, on every rank.

    Raises `UnsupportedOptimizer` for one that it refuses.
    """
    kinds: dict[tuple[int, tuple[int, ...]], Whole] = {}
    for index in owners.units:
        for tensor in owners.of_unit(index):
            kinds.setdefault((tensor.group, tensor.shape), tensor)
    groups = [(inner, group) for inner in classes for group in inner.groups]
    for (number, shape), tensor in kinds.items():
        inner, group = groups[number]
        tried = nn.Parameter(torch.zeros(()).expand(shape))
        try:
            inner.optimizer_class([{**group, "params": [tried]}], **inner.options)
        except TRIAL_ERRORS as error:
            name = layout.units[tensor.unit].slices[tensor.position].parameter.name
            raise UnsupportedOptimizer(
                f"{inner.optimizer_class.__name__} does not take {name} {list(shape)} ({error}): give it to another "
                "class, such as AdamW"
            ) from error


def warn_of_unsuited(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], states: Sequence[OptimizerStates]
) -> None:
    """Warn of embeddings and one-row matrices among the parameters of a class that takes matrices only."""
    embeddings = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group, own in zip(groups, states, strict=True):
        if own.whole is None or own.whole.takes_vectors:
            continue
        found = [names[p] for p in group["params"] if p in embeddings or 1 in p.shape]
        if found:
            warnings.warn(
                f"{', '.join(found[:4])}{' …' if len(found) > 4 else ''}: an optimizer for matrices updates an "
                "embedding, or a matrix of one row or column; such optimizers are meant for the matrices of hidden "
                "layers: give embeddings, heads and vectors to AdamW",
                ZerokitWarning,
                stacklevel=4,
            )

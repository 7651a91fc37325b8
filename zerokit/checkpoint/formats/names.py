"""Renaming of a foreign checkpoint's tensors to a model's names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from zerokit.checkpoint.formats.description import PARAM, Description, StoredParameter, as_buffer, as_frozen
from zerokit.checkpoint.source import StoredBuffer
from zerokit.errors import CheckpointError

Rename = Mapping[str, str] | Callable[[str], str]
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class ModelNames:
    """The parameters of a model, each with its other names, and its persistent buffers."""

    parameters: Mapping[str, Sequence[str]]
    buffers: Collection[str]


def under_names(
    described: Description,
    model: ModelNames,
    rename: Rename | None,
    require_equal: Callable[[StoredParameter, StoredParameter], None],
) -> Description:
    """The description with the model's names.

    Args:
        described: what a reader found.
        model: the parameters and buffers that it is to be loaded into.
        rename: how a name here is called in the model: a function, or prefixes and what replaces them.
        require_equal: raises unless two parameters, which the model ties, are stored with the same bytes.
    """
    names = {name: first for first, names in model.parameters.items() for name in (first, *names)}
    known = names.keys() | model.buffers
    parameters: dict[str, StoredParameter] = {}
    buffers: dict[str, StoredBuffer] = {}
    for stored in described.parameters:
        name = _renamed(stored.parameter.name, rename, known)
        aliases = tuple(_renamed(alias, rename, known) for alias in stored.parameter.aliases)
        stream = stored.streams.get(PARAM)
        if name in model.buffers and stream is not None and len(stream.stretches) <= 1:
            buffers[name] = as_buffer(stream, stored.parameter.shape, described.files)
            continue
        first = names.get(name, name)
        twin = parameters.get(first)
        if twin is not None and name != twin.parameter.name and not stored.parameter.trainable:
            require_equal(twin, stored)  # tied in the model, stored twice
            continue
        if twin is not None:
            raise CheckpointError(
                f"{described.path}: {stored.parameter.name} and another parameter are both {name} in the model"
            )
        parameters[first] = replace(stored, parameter=replace(stored.parameter, name=name, aliases=aliases))
    for old, buffer in described.buffers.items():
        name = _renamed(old, rename, known)
        if name in names and name not in model.buffers:
            parameters[name] = as_frozen(name, buffer, described.files)
        else:
            buffers[name] = buffer
    return replace(described, parameters=list(parameters.values()), buffers=buffers)


def _renamed(name: str, rename: Rename | None, known: Collection[str]) -> str:
    """What the model calls a parameter or buffer.

    Wrappers' prefixes are dropped where the model does not have the name with them.
    """
    if callable(rename):
        return rename(name)
    for prefix, other in (rename or {}).items():
        if name.startswith(prefix):
            name = other + name.removeprefix(prefix)
            break
    if name in known:
        return name
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return bare if bare in known else name

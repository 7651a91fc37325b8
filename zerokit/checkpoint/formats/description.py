"""`Description`: the contents of another framework's checkpoint, helpers of all readers, and renaming for a model.

A reader lists parameters and buffers with the stretches of files that their elements lie in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokit.checkpoint.by_rank import ByRank
from zerokit.checkpoint.disk import entries_of
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor
from zerokit.checkpoint.source import Stretch, to_array
from zerokit.errors import CheckpointError
from zerokit.layout import Interval, Parameter

if TYPE_CHECKING:
    from numpy.typing import NDArray

MASTER, PARAM = "master", "param"

LARGEST_BUFFER = 1 << 26
"""Bytes. A buffer is held in memory whole, so what is larger is taken as a frozen parameter: quantised weights."""

WEIGHTS = ("float", "bfloat", "complex")
"""How the names of dtypes begin that buffers seldom have."""

_DROPPED = object()
_BESIDE = re.compile(
    r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth|(optimizer|scheduler)(_\d+)?\.(bin|pt)|(sampler|dl_state_dict)(_\d+)?\.bin"
    r"|scaler\.pt|training_args\.bin|trainer_state\.json|custom_checkpoint_\d+\.pkl"
)
"""What accelerate and transformers' Trainer keep beside a model's checkpoint."""

_MOST_PLAIN, _DEEPEST_PLAIN = 1 << 24, 100


@dataclass(frozen=True, slots=True)
class StoredStream:
    """A parameter's state of one kind: its elements, in order, in stretches that tile the parameter."""

    dtype: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class StoredScalar:
    """State of a parameter that has another shape, such as its step count."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @property
    def array(self) -> NDArray[Any]:
        return to_array(self.content, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter with its streams: `streams` has "master" where it is trained, and else "param"."""

    parameter: Parameter
    streams: Mapping[str, StoredStream]
    scalars: Mapping[str, StoredScalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """The contents of a checkpoint, as a reader found them.

    `groups` are the options of the optimizer's groups, None where there is no optimizer's state. `user` is what the
    program itself saved. `blobs` has the bytes of each file that have a checksum. `dropped` names what is not carried,
    `doubts` are sentences on what looks wrong and may be right.
    """

    format: str
    path: Path
    step: int
    world: int
    files: Sequence[Path]
    parameters: Sequence[StoredParameter]
    buffers: Sequence[StoredParameter]
    groups: Sequence[Mapping[str, Any]] | None
    identity: int
    user: Any = None
    scaler: Mapping[str, Any] | None = None
    blobs: Mapping[int, Sequence[Blob]] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    doubts: Sequence[str] = ()
    details: Any = None
    """What the format's own writer needs beside it."""


def beside(folder: Path) -> list[str]:
    """Files of a training program in a checkpoint's folder that are not carried over, by name."""
    return [entry.name for entry in entries_of(folder) if _BESIDE.fullmatch(entry.name)]


def stretches_of(tensor: StoredTensor, file: int, what: str) -> StoredStream:
    """A whole tensor of a torch file. Raises `CheckpointError`, naming `what`, if it is not contiguous."""
    if not tensor.contiguous:
        raise CheckpointError(
            f"{what}: stored with strides {list(tensor.stride)} for shape {list(tensor.shape)}: save "
            "it contiguous, with tensor.contiguous()"
        )
    whole = Stretch(file, Interval(0, tensor.numel), tensor.offset)
    return StoredStream(tensor.dtype, (whole,) if tensor.numel else ())


def as_frozen(name: str, shape: tuple[int, ...], stream: StoredStream) -> StoredParameter:
    """A frozen parameter, or a buffer."""
    return StoredParameter(Parameter(name, shape, stream.dtype, trainable=False), {PARAM: stream})


def plain_value(root: Any, name: str, dropped: list[str], where: Path | None = None) -> Any:
    """A program's own data as plain containers; paths of unsupported values are added to `dropped`.

    Raises `CheckpointError`, naming the file `where` if given, for data that grows without end where shared parts are
    written out.
    """
    count = 0

    def visit(value: Any, path: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > _MOST_PLAIN or depth > _DEEPEST_PLAIN:
            file = "" if where is None else f"{where}: "
            raise CheckpointError(
                f"{file}{name}: over {_MOST_PLAIN} values, or nested over {_DEEPEST_PLAIN} deep"
            )
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, dict):
            carried = {}
            for key, part in value.items():
                inner = f"{path}.{key}" if isinstance(key, str) else f"{path}[{str(key)[:60]}]"
                within = key if isinstance(key, tuple) else (key,)
                if not all(one is None or isinstance(one, (str, int, float, bytes)) for one in within):
                    dropped.append(inner)
                elif (plain := visit(part, inner, depth + 1)) is not _DROPPED:
                    carried[key] = plain
            return carried
        if isinstance(value, (list, tuple)) and not isinstance(value, ByRank):
            parts = [visit(part, f"{path}[{number}]", depth + 1) for number, part in enumerate(value)]
            if any(part is _DROPPED for part in parts):
                return _DROPPED
            return parts if isinstance(value, list) else tuple(parts)
        dropped.append(path)
        return _DROPPED

    return visit(root, name, 0)


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
    buffers: list[StoredParameter] = []
    for number, stored in enumerate((*described.parameters, *described.buffers)):
        old, stream = stored.parameter, stored.streams.get(PARAM)
        name = _renamed(old.name, rename, known)
        aliases = tuple(_renamed(alias, rename, known) for alias in old.aliases)
        renamed = replace(stored, parameter=replace(old, name=name, aliases=aliases))
        likely = number >= len(described.parameters) and name not in names
        if stream is not None and len(stream.stretches) <= 1 and (likely or name in model.buffers):
            buffers.append(renamed)
            continue
        twin = parameters.setdefault(names.get(name, name), renamed)
        if twin is not renamed and name != twin.parameter.name and not old.trainable:
            require_equal(twin, stored)  # tied in the model, stored twice
        elif twin is not renamed:
            raise CheckpointError(
                f"{described.path}: {old.name} and another parameter are both {name} in the model"
            )
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

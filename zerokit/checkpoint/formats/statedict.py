"""Weights in a file of `torch.save`, as programs with DDP write them: a state dict, or a dictionary that has one.

    torch.save(model.state_dict(), "model.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "last.pt")

Only weights are read. An optimizer's state in such a file numbers the parameters and does not name them, so it belongs
to a model that the file does not have: `torch.distributed.checkpoint` saves it by names. The pickle is parsed, never
executed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import is_file, opened
from zerokit.checkpoint.formats import description
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.pickles import Record
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, read_torch_file
from zerokit.layout import Parameter

FORMAT = "torch"
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_PARTS = ("_model_states.pt", "_optim_states.pt")
"""Files of a DeepSpeed checkpoint, none of which is whole."""

_MEMBERS = ("model", "state_dict", "model_state_dict", "module", "weights")
"""What programs call the state dict in a dictionary, the most usual first."""

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of every name where the wrapped model was saved: by DDP, and by `torch.compile`."""


def recognises(path: Path) -> bool:
    """Whether `path` is a file that is called as files of `torch.save` are."""
    return path.suffix in _ENDINGS and is_file(path)


def read(path: Path) -> ForeignCheckpoint:
    """Read the weights in the file `path`. Raises `CheckpointError` for damaged, missing or unsupported data."""
    part = path.name.endswith(_PARTS)
    require(not part, path, "a part of a DeepSpeed checkpoint: give the directory that it is in")
    blobs: set[Blob] = set()
    with opened(path) as fd:
        value = read_torch_file(path, fd, blobs=blobs)
    tensors, dropped = _state_dict(path, value)
    parameters: dict[object, description.StoredParameter] = {}
    buffers = []
    for name, tensor in tensors.items():
        stored = description.as_frozen(
            name, tensor.shape, description.stretches_of(tensor, 0, f"{path}: {name}")
        )
        size = math.prod(tensor.shape) * tensor.element_bytes
        if not tensor.dtype.startswith(description.WEIGHTS) and size <= description.LARGEST_BUFFER:
            buffers.append(stored)
            continue
        first = parameters.setdefault(tensor if tensor.numel else name, stored)
        if first is not stored:  # tied: both are the same bytes
            aliases = (*first.parameter.aliases, name)
            own = first.parameter
            parameters[tensor] = description.StoredParameter(
                Parameter(own.name, own.shape, own.dtype, trainable=False, aliases=aliases), first.streams
            )
    return ForeignCheckpoint(
        description.Description(
            format=FORMAT,
            path=path,
            step=0,
            world=1,
            files=[path],
            parameters=list(parameters.values()),
            buffers=buffers,
            groups=None,
            identity=crc32(repr(list(tensors.items())).encode()),
            blobs={0: sorted(blobs)},
            dropped=dropped,
        )
    )


def _state_dict(path: Path, value: Any) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of the state dict in the file's value, by name, and the names of what else there is."""
    whole = "save model.state_dict() instead of the model: its classes are not imported from a pickle"
    require(not isinstance(value, Record), path, f"holds an object, not a state dict: {whole}")
    require(isinstance(value, dict), path, f"holds a {type(value).__name__}, expected a state dict")
    found = [key for key, inner in value.items() if _has_tensors(inner)]
    named = [key for key in _MEMBERS if key in found]
    dropped: list[str] = []
    if named or not _has_tensors(value):
        some = f"has state dicts {', '.join(map(repr, found))}" if found else "has no tensors by name"
        expected = "expected model.state_dict(), or a dictionary that has it as 'model'"
        require(named or len(found) == 1, path, f"{some}, {expected}")
        chosen = named[0] if named else found[0]
        dropped = [str(key)[:60] for key in value if key != chosen]
        value = value[chosen]
    tensors: dict[str, StoredTensor] = {}
    for name, one in value.items():
        if isinstance(one, StoredTensor):
            tensors[name] = one
            continue
        kind = one.name if isinstance(one, Record) else type(one).__name__
        sharded = isinstance(one, Record) and not name.endswith("_extra_state")
        plain = "save a plain tensor: a DTensor by full_tensor()"
        require(not sharded, path, f"{name[:200]} is a {kind}, {plain}")
        dropped.append(name[:200])
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): one for name, one in tensors.items()}
    return tensors, dropped


def _has_tensors(value: Any) -> bool:
    """Whether it is a dictionary with tensors by names."""
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(one, StoredTensor) for one in value.values())
    )

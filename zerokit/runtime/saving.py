"""Files of a model's weights, written while the weights are not there: what stands for them is on `meta`.

Libraries sort, rename and split a state dict, and hand its tensors to safetensors' `save_file`. None of that needs a
value. Inside `intercepted` such a file is written in place: its header first, then each weight where it belongs, in the
order in which they come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerokit import files
from zerokit.runtime.torch_internals import leaves_of

_STOCK: Callable[..., None] = safetensors.torch.save_file
_STOCK_TORCH: Callable[..., None] = torch.save

Values: TypeAlias = Generator[tuple[nn.Parameter, Tensor], None, None]
"""Parameters and their whole values, each until the next one comes."""


class NeedsValues(RuntimeError):
    """What was to be saved is made of weights, and not these themselves."""


def writers_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The names by which a model's `save_pretrained` and those that it overrides call safetensors' `save_file`."""
    functions = [vars(kind).get("save_pretrained") for kind in type(model).__mro__]
    spaces = {id(space): space for f in functions if (space := getattr(f, "__globals__", None)) is not None}
    return [(space, name) for space in spaces.values() for name in space if space[name] is _STOCK]


class StandIns:
    """Parameters on `meta` in place of those of `dtypes`, in their shapes; files of them get what `values_of` gives.

    `values_of` is called with the parameters of a file, and yields each with its whole value.
    """

    def __init__(
        self, dtypes: Mapping[nn.Parameter, torch.dtype], values_of: Callable[[list[nn.Parameter]], Values]
    ) -> None:
        self.tensors = {p: torch.empty(p.shape, dtype=dtypes[p], device="meta") for p in dtypes}
        self._parameters = {StorageWeakRef(own.untyped_storage()): p for p, own in self.tensors.items()}
        self._values_of = values_of

    @contextmanager
    def intercepted(self, model: nn.Module) -> Iterator[None]:
        """A context in which files that hold stand-ins are written with values. Raises `NeedsValues`."""
        places = [*writers_of(model), (vars(safetensors.torch), "save_file")]
        before = [(space, name, space[name]) for space, name in [*places, (vars(torch), "save")]]
        try:
            for space, name in places:
                space[name] = self._save_file
            vars(torch)["save"] = _refuse_stand_ins
            yield
        finally:
            for space, name, function in before:
                space[name] = function

    def _save_file(
        self, tensors: dict[str, Tensor], filename: str | os.PathLike[str], metadata: Any = None
    ) -> None:
        wanted = {self._parameter(name, tensor): name for name, tensor in tensors.items() if tensor.is_meta}
        if not wanted:
            _STOCK(tensors, filename, metadata=metadata)
            return
        if len(wanted) < sum(tensor.is_meta for tensor in tensors.values()):
            raise NeedsValues("one weight under two names")
        path = Path(os.fsdecode(filename))
        aside = files.temporary(path)
        header, offsets = _lay_out(tensors, metadata)
        with os.fdopen(files.system().create(aside), "wb", buffering=0) as file:
            try:
                file.write(header)
                for name in tensors.keys() - wanted.values():
                    _write(file, offsets[name], tensors[name])
                with closing(self._values_of([*wanted])) as values:
                    for parameter, value in values:
                        own = value.to(self.tensors[parameter].dtype)
                        _write(file, offsets[wanted[parameter]], own)
                files.system().sync(file.fileno())
                files.system().rename(aside, path)
            except BaseException:
                with suppress(OSError):
                    files.system().unlink(aside)
                raise

    def _parameter(self, name: str, tensor: Tensor) -> nn.Parameter:
        """The parameter for which a tensor stands whole."""
        parameter = self._parameters.get(StorageWeakRef(tensor.untyped_storage()))
        if parameter is not None and _same_view(tensor, self.tensors[parameter]):
            return parameter
        raise NeedsValues(f"{name} is made of weights")


def _same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a storage are all of it alike; packed elements have another shape in a file."""
    alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return alike and one.storage_offset() == 0 and "float4" not in str(one.dtype)


def _refuse_stand_ins(obj: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save`, which would write tensors on meta without their values."""
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves_of(obj)):
        raise NeedsValues("torch.save of weights")
    _STOCK_TORCH(obj, *args, **kwargs)


def _lay_out(tensors: Mapping[str, Tensor], metadata: Any) -> tuple[bytes, dict[str, int]]:
    """The header that safetensors writes for these tensors, in its own order, and where each one's bytes begin."""
    empty = safetensors.torch.save(
        {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata
    )
    entries = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    ends, at = {}, 0
    for name, entry in entries.items():
        if name != "__metadata__":
            ends[name] = at
            entry |= {"shape": list(tensors[name].shape), "data_offsets": [at, at + tensors[name].nbytes]}
            at += tensors[name].nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + end for name, end in ends.items()}


def _write(file: Any, offset: int, value: Tensor) -> None:
    numbers: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    left = memoryview(numbers)
    file.seek(offset)
    while left:
        left = left[file.write(left) :]

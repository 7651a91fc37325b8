"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2, accelerate and torchtitan write them.

`dcp_items` reads what the files hold; this module finds out what it is. accelerate keeps two of them in one folder,
`pytorch_model_fsdp_0` and `optimizer_0`. A model and an optimizer's state are found by their shape, whatever the
program called them: `X.state.NAME.KIND` beside `X.param_groups` is an optimizer's, and what its names end is the
model's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerokit.checkpoint.disk import entries_of, is_directory, is_file, opened
from zerokit.checkpoint.formats import description
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.dcp_items import METADATA, Items, StoredItem
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.torchfile import Blob, content_of
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.source import to_array
from zerokit.layout import Parameter

_FOLDERS = re.compile(r"pytorch_model_fsdp_\d+"), re.compile(r"optimizer_\d+")
_PARAM_GROUPS = re.compile(r"^(?:(.+?)\.)?param_groups\.")
_STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,18})$")
_State = tuple[dict[str, description.StoredStream], dict[str, description.StoredScalar]]
"""A parameter's states, of its shape and of others, by kind."""

_MEGATRON = re.compile(r"(^|\.)optimizer\.(state|distributed)\.")
"""Among names of weights: it keeps states beside them, and the optimizer's groups in a file of its own."""

_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def recognises(path: Path) -> bool:
    """Whether `path` is a DCP checkpoint, or a folder of accelerate's with two of them."""
    return bool(_folders(path))


def _folders(path: Path) -> list[Path]:
    if not is_directory(path) or is_file(path / METADATA):
        return [path] if is_directory(path) else []
    entries = [path / entry.name for entry in entries_of(path) if is_directory(entry)]
    found = [entry for pattern in _FOLDERS for entry in entries if pattern.fullmatch(entry.name)]
    # One of the two may be what a killed save has left: it is refused, not passed over.
    return found if any(is_file(entry / METADATA) for entry in found) else []


def read(path: Path) -> ForeignCheckpoint:
    """Read the checkpoint at `path`. Raises `CheckpointError` for damaged, missing or unsupported data."""
    return ForeignCheckpoint(_Reader(path).describe())


class _Reader(Items):
    def __init__(self, path: Path) -> None:
        super().__init__(path, _folders(path))
        self.dropped = description.beside(path)
        self.optimizer = self._optimizer_prefix()

    def describe(self) -> description.Description:
        options = [] if self.optimizer is None else self._options()
        trained = {name: number for number, (_, names) in enumerate(options) for name in names}
        model = self._model_prefix(trained)
        parameters, buffers = [], []
        weights = {
            key.removeprefix(model): item
            for key, item in self.tensors.items()
            if key.startswith(model) and not self._of_optimizer(key) and (model or len(item.path) == 1)
        }
        for name in trained:
            require(name in weights, self.path, f"the optimizer has {name}, which has no weights")
        sharded = next(filter(_MEGATRON.search, weights), None)
        require(
            not sharded, self.path, f"{sharded} is of Megatron-Core's own format, which zerokit does not read"
        )
        states = {} if self.optimizer is None else self._states(weights, trained)
        aliases = _tied(weights, trained)
        tied = {alias for names in aliases.values() for alias in names}
        divided = any(item.chunks > 1 for item in weights.values())
        for name, item in weights.items():
            if name in tied:
                continue
            if name not in trained and len(item.stretches) == 1 and _is_buffer(name, item, divided=divided):
                buffers.append(description.as_frozen(name, item.shape, item.stream))
                continue
            streams, scalars = states.get(name, ({}, {}))
            streams = {description.MASTER if name in trained else description.PARAM: item.stream, **streams}
            others, group = tuple(aliases.get(name, ())), trained.get(name, 0)
            parameter = Parameter(name, item.shape, item.dtype, group, name in trained, others)
            parameters.append(description.StoredParameter(parameter, streams, scalars))
        user, step = self._user(model, states)
        return description.Description(
            format="dcp",
            path=self.path,
            step=step,
            world=self._world(),
            files=self.files,
            parameters=parameters,
            buffers=buffers,
            groups=[group for group, _ in options] if options else None,
            identity=self.identity,
            user=user,
            blobs=self.blobs,
            dropped=self.dropped,
        )

    def _world(self) -> int:
        ranks = [int(match[1]) for file in self.files if (match := _RANK.fullmatch(file.name))]
        return max(ranks, default=0) + 1

    def _optimizer_prefix(self) -> str | None:
        """What every key of the optimizer's state begins with; None where there is none."""
        for key, (path, value) in self.values.items():
            whole = path[-1] == "param_groups" and isinstance(value, (list, tuple))
            older = f"{key} is one value, as torch before 2.4 wrote it: load and save it with a newer torch"
            require(not whole, self.path, older)
        prefixes = {
            f"{match[1]}." if match[1] else "" for key in self.values if (match := _PARAM_GROUPS.match(key))
        }
        several = f"several optimizers ({', '.join(sorted(prefixes))}): zerokit reads one"
        require(len(prefixes) < 2, self.path, several)
        return prefixes.pop() if prefixes else None

    def _of_optimizer(self, key: str) -> bool:
        start = self.optimizer
        return start is not None and key.startswith((f"{start}state.", f"{start}param_groups."))

    def _options(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Each group's options and the names of its parameters."""
        by_number: dict[int, dict[str, Any]] = {}
        by_name: dict[str, dict[str, Any]] = {}
        start = f"{self.optimizer}param_groups."
        tensors = {
            key: (item.path, to_array(self._content(item), item.dtype, item.shape).tolist())
            for key, item in self.tensors.items()
            if key.startswith(start)  # such as a learning rate of a compiled optimizer
        }
        for key, (path, value) in (self.values | tensors).items():
            if not key.startswith(start):
                continue
            if len(path) > 1 and isinstance(path[-2], int):
                by_number.setdefault(path[-2], {})[str(path[-1])] = value
            else:
                name, _, option = key.removeprefix(start).rpartition(".")
                by_name.setdefault(name, {})[option] = value
        groups = [(options, list(options.pop("params"))) for _, options in sorted(by_number.items())]
        for name, options in by_name.items():  # flattened: options stand at each parameter
            for known, names in groups:
                if known == options:
                    names.append(name)
                    break
            else:
                groups.append((options, [name]))
        require(
            all(isinstance(name, str) for _, names in groups for name in names),
            self.path,
            "the optimizer's parameters have numbers instead of names: save what get_state_dict(model, optimizer) "
            "gives, not optimizer.state_dict()",
        )
        for options, _ in groups:
            options.pop("param_names", None)
        return [
            (description.plain_value(options, "param_groups", self.dropped, self.path), names)
            for options, names in groups
        ]

    def _states(self, weights: Mapping[str, StoredItem], trained: Mapping[str, int]) -> dict[str, _State]:
        states: dict[str, _State] = {}
        start = f"{self.optimizer}state."
        for key, item in self.tensors.items():
            if not key.startswith(start):
                continue
            name, _, kind = key.removeprefix(start).rpartition(".")
            if len(item.path) > 2 and item.path[-2] in trained:  # a kind may have a point in it
                name, kind = item.path[-2:]
            require(name in trained, self.path, f"{key} is of a parameter that is in no group")
            streams, scalars = states.setdefault(name, ({}, {}))
            if item.shape == weights[name].shape and kind != "step":
                streams[kind] = item.stream
            else:
                scalars[kind] = description.StoredScalar(item.dtype, item.shape, self._content(item))
        for key, (_, value) in self.values.items():
            if key.startswith(start) and not isinstance(value, dict):
                self.dropped.append(key)
        return states

    def _content(self, item: StoredItem) -> bytes:
        name, shape = ".".join(map(str, item.path)), list(item.shape)
        known = "zerokit reads states of their parameter's shape, and small ones in one piece"
        right = len(item.stretches) == 1 and item.numel <= 1 << 16
        require(right, self.path, f"{name} has the shape {shape}: {known}")
        (place,) = item.stretches
        path, size = self.files[place.file], item.numel * ELEMENT_BYTES[item.dtype]
        with opened(path) as fd:
            return content_of(path, fd, Blob(place.offset, size, item.crcs[0]))

    def _model_prefix(self, trained: Mapping[str, int]) -> str:
        """What the model's keys begin with, such as "model."."""
        outside = [key for key in self.tensors if not self._of_optimizer(key)]
        if trained:
            name = max(trained, key=len)
            found = [key.removesuffix(name) for key in outside if key == name or key.endswith(f".{name}")]
            found = [start for start in found if all(start + one in self.tensors for one in trained)] or found
        else:
            paths = [self.tensors[key].path for key in outside]
            found = [f"{path[0]}." if len(path) > 1 else "" for path in paths]
        expected = f"expected names such as 'model.{next(iter(trained), '')}'"
        require(found, self.path, f"no weights of a model: {expected}")
        counts = Counter(found)
        usual = [start for start in counts if f".{start}".endswith(".model.")]
        if len(usual) == 1:
            return usual[0]
        best = sorted(start for start in counts if counts[start] == max(counts.values()))
        several = f"weights of several models ({', '.join(best)}): zerokit reads one: save it as 'model'"
        require(len(best) == 1 or not best[0], self.path, several)  # a model and an average of it, say
        return best[0]

    def _user(self, model: str, states: Mapping[str, _State]) -> tuple[dict[str, Any], int]:
        """What the program saved beside model and optimizer, and the step that it was.

        The step is what the program called so, or in the folder's name, or what the optimizer has counted.
        """
        own: dict[str, Any] = {}
        for key, (path, value) in self.values.items():
            if self._of_optimizer(key) or (model and key.startswith(model)):
                continue
            place = own
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = value
        carried = description.plain_value(_with_lists(own), "", self.dropped, self.path)
        step = next(
            (int(value) for value in _named(carried, ("step", "global_step")) if type(value) is int), None
        )
        for key, item in self.tensors.items():
            if key in ("step", "train_state.step", "global_step") and item.numel == 1:
                content = self._content(item)
                step = int.from_bytes(content, "little") if item.dtype.startswith("int") else step
            elif not key.startswith(model) and not self._of_optimizer(key):
                self.dropped.append(key)
        if step is None and (match := _STEP.search(self.path.name)):
            step = int(match[1])
        if step is None:
            counts = [scalars["step"] for _, scalars in states.values() if "step" in scalars]
            step = max((int(scalar.array.item()) for scalar in counts), default=0)
        if carried.keys() == {"extra", "step"}:  # zerokit wrote it, for what a run calls its extra
            carried = carried["extra"]
        return carried, step


def _tied(weights: Mapping[str, StoredItem], trained: Mapping[str, int]) -> dict[str, list[str]]:
    """Other names of matrices that are stored twice, by the trained name: equal bytes, and no state of their own."""
    known = {
        (weights[name].shape, weights[name].crcs): name for name in trained if len(weights[name].shape) > 1
    }
    aliases: dict[str, list[str]] = {}
    for name, item in weights.items():
        owner = known.get((item.shape, item.crcs))
        if owner is not None and name not in trained:
            aliases.setdefault(owner, []).append(name)
    return aliases


def _is_buffer(name: str, item: StoredItem, *, divided: bool) -> bool:
    """Whether a tensor that is not trained looks like a buffer: of integers, batch statistics, or the only whole one
    among `divided` ones. DCP does not say; `ForeignCheckpoint.fitted` corrects this where the model is known.
    """
    if item.numel * ELEMENT_BYTES[item.dtype] > description.LARGEST_BUFFER:
        return False
    if not item.dtype.startswith(("float", "bfloat", "complex")):
        return True
    return (divided and item.chunks == 1) or name.endswith(("running_mean", "running_var", "inv_freq"))


def _with_lists(value: Any) -> Any:
    """The value with lists again where torch has made paths of their elements' numbers."""
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    return (
        [parts[n] for n in range(len(parts))] if parts and parts.keys() == set(range(len(parts))) else parts
    )


def _named(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """The values of these names, outer ones first."""
    if isinstance(value, dict):
        yield from (value[name] for name in names if name in value)
        for part in value.values():
            yield from _named(part, names)

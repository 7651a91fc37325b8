"""Checkpoints of DeepSpeed's ZeRO, stages 1, 2 and 3: which bytes of which file are which elements.

    ROOT/latest                                          the name of a tag
    ROOT/TAG/mp_rank_00_model_states.pt                  stages 1 and 2
    ROOT/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3, one a rank
    ROOT/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   one a rank

At stages 1 and 2 a group is its parameters flattened in the order of `param_shapes`, padded to a multiple of 2N
elements, and rank r holds the r-th N-th of it. At stage 3 each parameter of n elements is cut by itself: rank r holds
elements [r·p, (r+1)·p) with p = ceil(n/N), padded with zeros, and a sub-group is the concatenation of those pieces.
See deepspeed/runtime/zero (0.19) and deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import opened, read_exactly, read_whole
from zerokit.checkpoint.extents import ELEMENT_BYTES
from zerokit.checkpoint.formats.foreign import (
    MASTER,
    PARAM,
    Description,
    ForeignCheckpoint,
    StoredParameter,
    StoredScalar,
    StoredStream,
    plain_value,
    reading,
    stretches_of,
)
from zerokit.checkpoint.formats.pickles import Record
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, read_torch_file
from zerokit.checkpoint.source import StoredBuffer, Stretch
from zerokit.errors import CheckpointError
from zerokit.layout import Interval, Parameter

ALIGNMENT = 2
"""A group of stages 1 and 2 is padded to a multiple of this many elements for each rank."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERTS = re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|layer_\d+-model_.*\.pt")
_STAGES = {1: "optimizer states", 2: "gradients", 3: "parameters"}

_KNOWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "universal_checkpoint_info",
}
"""Members of the model's states that DeepSpeed writes itself; others are the program's own."""


@dataclass(frozen=True, slots=True)
class Group:
    """An optimizer group of stages 1 and 2: `offsets` of its parameters, `numel` with padding, in elements."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    payload: int
    numel: int

    def partition(self, world: int) -> int:
        """Elements of each rank's piece, padding included."""
        return self.numel // world

    def lean(self, rank: int, world: int) -> int:
        """Elements of a rank's piece without padding."""
        size = self.partition(world)
        return min(size, max(0, self.payload - rank * size))


@dataclass(frozen=True)
class Files:
    """A tag's directory and its files, by rank."""

    folder: Path
    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]


def lay_out(shapes: Mapping[str, Sequence[int]], world: int, paddings: Sequence[int] | None = None) -> Group:
    """Place a group's parameters for `world` ranks; `paddings` are elements that follow each of them."""
    offsets, end = [], 0
    for number, shape in enumerate(shapes.values()):
        offsets.append(end)
        end += math.prod(shape) + (paddings[number] if paddings else 0)
    multiple = ALIGNMENT * world
    return Group(tuple(shapes), tuple(offsets), end, -(-end // multiple) * multiple)


def recognises(path: Path) -> bool:
    """Whether `path` is a directory of DeepSpeed's: a tag's, or one with `latest` and tags."""
    return _tag(path) is not None


def _tag(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    if any(_MODEL.fullmatch(entry.name) for entry in path.iterdir()):
        return path
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 4096:
        name = read_whole(latest, limit=4096).decode("utf-8", "replace").strip()
        folder = path / name
        if name and "/" not in name and folder.is_dir():
            return folder if any(_MODEL.fullmatch(entry.name) for entry in folder.iterdir()) else None
    return None


def find_files(path: Path) -> Files:
    """The files of the checkpoint at `path`. Raises `CheckpointError` where one is missing or of another kind."""
    folder = _tag(path)
    assert folder is not None
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    for entry in sorted(folder.iterdir()):
        if _EXPERTS.fullmatch(entry.name):
            raise CheckpointError(
                f"{entry}: of a mixture of experts or a pipeline, which zerokit does not read: save without it"
            )
        for pattern, found in ((_MODEL, models), (_OPTIMIZER, optimizers)):
            match = pattern.fullmatch(entry.name)
            if match is None:
                continue
            if int(match[2]):
                raise CheckpointError(
                    f"{entry}: of tensor or pipeline parallelism, which zerokit does not read: convert it with "
                    "DeepSpeed's own tools first"
                )
            rank = int(match[1] or 0)
            if rank in found:
                raise CheckpointError(f"{folder}: {entry.name} and {found[rank].name} are of the same rank")
            found[rank] = entry
    for what, found in (("model_states", models), ("optim_states", optimizers)):
        if missing := set(range(max(found, default=-1) + 1)) - set(found):
            raise CheckpointError(f"{folder}: rank {min(missing)}'s file of {what} is missing")
    if not optimizers:
        raise CheckpointError(
            f"{folder}: no optim_states of ZeRO beside the model's: zerokit reads checkpoints of stages 1 to 3"
        )
    return Files(
        folder,
        tuple(models[rank] for rank in sorted(models)),
        tuple(optimizers[rank] for rank in sorted(optimizers)),
    )


def read(path: Path) -> ForeignCheckpoint:
    """The checkpoint at `path`. Raises `CheckpointError` for what is damaged, missing or not supported."""
    files = find_files(path)
    with reading(files.folder):
        run = path if files.folder != path else None
        return ForeignCheckpoint(Reader(files).describe(), run)


class Reader:
    """A checkpoint's files, read; `deepspeed_writer` takes them as its template."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.paths = (*files.models, *files.optimizers)
        self.world = len(files.optimizers)
        self.identity = 0
        self.blobs: dict[int, list[Blob]] = {}
        models = [self._load(number) for number in range(len(files.models))]
        self.model = models[0]
        self.optimizer_files = [self._load(len(models) + rank) for rank in range(self.world)]
        self.optimizers = [file["optimizer_state_dict"] for file in self.optimizer_files]
        self.stage = _stage(self.optimizers[0])
        self.dropped: list[str] = []
        self._check(models)
        self.models = models

    def _load(self, number: int) -> dict[str, Any]:
        path = self.paths[number]
        with opened(path) as fd:
            value = read_torch_file(path, fd)
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: a {type(value).__name__}, expected DeepSpeed's dict of states")
        self.blobs[number] = sorted(set(_blobs(value)), key=lambda blob: blob.offset)
        self.identity = crc32(repr(self.blobs[number]).encode(), self.identity)
        return value

    def _check(self, models: Sequence[dict[str, Any]]) -> None:
        folder = self.files.folder
        stated = self.model.get("dp_world_size", self.world)
        if stated != self.world:
            raise CheckpointError(
                f"{folder}: {self.world} ranks' optimizer states are there, expected {stated}: a file is missing"
            )
        if self.model.get("mp_world_size", 1) != 1:
            raise CheckpointError(f"{folder}: of tensor parallelism, which zerokit does not read")
        if self.stage == 3 and len(models) != self.world:
            raise CheckpointError(f"{folder}: {len(models)} files of model states, expected {self.world}")
        for what in ("global_steps", "param_shapes"):
            for rank, model in enumerate(models):
                if model.get(what) != self.model.get(what):
                    raise CheckpointError(
                        f"{self.paths[rank]}: its {what} differ from rank 0's: files of several saves are mixed"
                    )
        for rank, optimizer in enumerate(self.optimizers):
            if _stage(optimizer) != self.stage:
                raise CheckpointError(
                    f"{self.files.optimizers[rank]}: of stage {_stage(optimizer)}, rank 0's is of {self.stage}"
                )
            if "ds_zero_partition_groups" in optimizer:
                raise CheckpointError(f"{folder}: of a mixture of experts, which zerokit does not read")

    def describe(self) -> Description:
        model = self.model
        shapes = self.group_shapes()
        group_of = {name: number for number, group in enumerate(shapes) for name in group}
        frozen = {**(model.get("frozen_param_shapes") or {})}
        aliases: dict[str, list[str]] = {}
        for alias, owner in (model.get("shared_params") or {}).items():
            aliases.setdefault(owner, []).append(alias)
        tied = {alias for names in aliases.values() for alias in names}
        streams = self._trained(shapes)
        scalars = self._scalars(shapes)
        buffer_names = model.get("buffer_names") or []
        parameters, buffers = [], {}
        whole_frozen = set()
        for name, tensor in model["module"].items():
            if name in tied:
                continue
            if name in buffer_names:
                buffers[name] = self._buffer(name, tensor)
                continue
            if name in group_of:
                shape, held = tuple(shapes[group_of[name]][name]), streams[name]
            elif name in frozen or (self.stage == 1 and isinstance(tensor, StoredTensor)):
                shape = tuple(frozen.get(name, tensor.shape))
                held = {PARAM: self._frozen(name, shape, tensor)}
                whole_frozen.add(name)
            else:
                self.dropped.append(f"module.{name}")
                continue
            parameter = Parameter(
                name,
                shape,
                tensor.dtype,
                group_of.get(name, 0),
                name in group_of,
                tuple(aliases.get(name, ())),
            )
            parameters.append(StoredParameter(parameter, held, scalars.get(name, {})))
        if missing := [name for name in (*group_of, *frozen) if name not in model["module"]]:
            raise CheckpointError(
                f"{self.files.models[0]}: no {missing[0]} among the module's parameters: saved with "
                "exclude_frozen_parameters, or changed since"
            )
        return Description(
            format="deepspeed",
            path=self.files.folder,
            step=int(model["global_steps"]),
            world=self.world,
            files=self.paths,
            parameters=parameters,
            buffers=buffers,
            groups=self._groups(),
            identity=self.identity,
            user=self._user(),
            scaler=self._scaler(),
            blobs=self.blobs,
            dropped=self.dropped,
            details=self,
        )

    def group_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of every optimizer group's parameters. At stage 3 `param_shapes` has them by sub-group."""
        listed: list[dict[str, tuple[int, ...]]] = [dict(shapes) for shapes in self.model["param_shapes"]]
        if self.stage < 3:
            return listed
        whole = {name: shape for shapes in listed for name, shape in shapes.items()}
        group_of = {number: g for g, options in enumerate(self.options()) for number in options["params"]}
        groups: list[dict[str, tuple[int, ...]]] = [{} for _ in self.options()]
        for number, members in self.sub_groups():
            groups[group_of[number]].update({name: whole[name] for name, _ in members})
        return groups

    def _number(self, rank: int) -> int:
        """The number of a rank's optimizer file."""
        return len(self.files.models) + rank

    def state(self, rank: int) -> dict[int, dict[str, Any]]:
        """The optimizer's states of a rank, by group (stages 1 and 2) or sub-group."""
        optimizer = self.optimizers[rank]
        if self.stage == 3:
            return dict(optimizer["optimizer_state_dict"]["state"])
        base = optimizer["base_optimizer_state"]
        if isinstance(base, dict):
            return dict(base["state"])
        return {number: dict(state) for number, state in enumerate(base)}

    def options(self) -> list[dict[str, Any]]:
        """The optimizer's groups with all their options, as rank 0 has them; the elastic format keeps none."""
        optimizer = self.optimizers[0]
        base = optimizer["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        return list(base["param_groups"]) if isinstance(base, dict) else [{} for _ in base]

    def masters(self, rank: int) -> list[StoredTensor]:
        """A rank's fp32 pieces, by group or sub-group."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(self.optimizers[rank][key])

    def kinds(self, rank: int, number: int) -> dict[str, StoredTensor]:
        """The states that have an element for each of the master's, by kind; the master itself among them."""
        master = self.masters(rank)[number]
        size = max(master.numel, self._padded(number) if self.stage < 3 else 0)
        found = {MASTER: master}
        for kind, value in self.state(rank).get(number, {}).items():
            if isinstance(value, StoredTensor) and value.shape and value.numel in (master.numel, size):
                found[kind] = value
        return found

    def _padded(self, number: int) -> int:
        return self.groups[number].partition(self.world)

    @property
    def groups(self) -> list[Group]:
        """The groups of stages 1 and 2."""
        paddings = self.optimizers[0].get("param_alignment_paddings")
        return [
            lay_out(shapes, self.world, paddings[number] if paddings else None)
            for number, shapes in enumerate(self.model["param_shapes"])
        ]

    def sub_groups(self) -> Iterator[tuple[int, list[tuple[str, int]]]]:
        """Stage 3: each sub-group's number and its parameters with their elements a rank."""
        sizes = [tensor.numel for tensor in self.masters(0)]
        number, filled, members = 0, 0, []
        for shapes in self.model["param_shapes"]:
            for name, shape in shapes.items():
                piece = -(-math.prod(shape) // self.world)
                members.append((name, piece))
                filled += piece
                if number >= len(sizes) or filled > sizes[number]:
                    raise CheckpointError(
                        f"{self.files.optimizers[0]}: its sub-groups of {sizes} elements do not end between "
                        f"parameters: {name} has {piece}; states that were offloaded to NVMe are not read"
                    )
                if filled == sizes[number]:
                    yield number, members
                    number, filled, members = number + 1, 0, []
        if number != len(sizes) or members:
            raise CheckpointError(
                f"{self.files.optimizers[0]}: {len(sizes)} sub-groups, but parameters fill {number}"
            )

    def _trained(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, StoredStream]]:
        """Every trained parameter's streams."""
        found: dict[str, dict[str, list[tuple[str, Stretch]]]] = {}
        if self.stage < 3:
            pieces = self._pieces_of_groups()
        else:
            pieces = self._pieces_of_parameters({n: s for group in shapes for n, s in group.items()})
        for name, interval, rank, number, start in pieces:
            for kind, tensor in self.kinds(rank, number).items():
                if start + interval.numel > tensor.numel or not tensor.contiguous:
                    raise CheckpointError(
                        f"{self.files.optimizers[rank]}: {kind} of group {number} has {tensor.numel} elements, "
                        f"{name} is expected up to {start + interval.numel}: truncated, or offloaded to NVMe"
                    )
                offset = tensor.offset + start * tensor.element_bytes
                stretch = Stretch(self._number(rank), interval, offset)
                found.setdefault(name, {}).setdefault(kind, []).append((tensor.dtype, stretch))
        streams: dict[str, dict[str, StoredStream]] = {}
        for group in shapes:
            for name in group:
                streams[name] = {}
                for kind, parts in found.get(name, {MASTER: []}).items():
                    dtypes = {dtype for dtype, _ in parts} or {"float32"}
                    if len(dtypes) > 1:
                        raise CheckpointError(
                            f"{self.files.folder}: {kind} of {name} has dtypes {sorted(dtypes)}"
                        )
                    streams[name][kind] = StoredStream(dtypes.pop(), tuple(stretch for _, stretch in parts))
        return streams

    def _pieces_of_groups(self) -> Iterator[tuple[str, Interval, int, int, int]]:
        """Stages 1 and 2: name, elements, rank, group and where in the rank's piece they begin."""
        for number, group in enumerate(self.groups):
            size = group.partition(self.world)
            for rank in range(self.world):
                master = self.masters(rank)[number]
                if master.numel not in (group.lean(rank, self.world), size):
                    raise CheckpointError(
                        f"{self.files.optimizers[rank]}: group {number} has {master.numel} elements, expected "
                        f"{group.lean(rank, self.world)}: a file of another save, or offloaded to NVMe"
                    )
            for name, offset in zip(group.names, group.offsets, strict=True):
                numel = math.prod(self.model["param_shapes"][number][name])
                whole = Interval(offset, offset + numel)
                for rank in range(offset // max(size, 1), self.world):
                    part = whole.intersection(Interval(rank * size, (rank + 1) * size))
                    if not part.numel:
                        break
                    yield name, part.shifted(-offset), rank, number, part.start - rank * size

    def _pieces_of_parameters(
        self, shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, Interval, int, int, int]]:
        """Stage 3: the same, by sub-group."""
        for number, members in self.sub_groups():
            start = 0
            for name, piece in members:
                numel = math.prod(shapes[name])
                for rank in range(self.world):
                    part = Interval(0, numel).intersection(Interval(rank * piece, (rank + 1) * piece))
                    if part.numel:
                        yield name, part, rank, number, start
                start += piece

    def _scalars(self, shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, StoredScalar]]:
        """States of another shape, such as step counts: equal on all ranks, and for all parameters of a group."""
        members = (
            {number: list(group) for number, group in enumerate(shapes)}
            if self.stage < 3
            else {number: [name for name, _ in held] for number, held in self.sub_groups()}
        )
        scalars: dict[str, dict[str, StoredScalar]] = {}
        for number, names in members.items():
            first = self._scalars_of(0, number)
            for rank in range(1, self.world):
                if self._scalars_of(rank, number) != first:
                    raise CheckpointError(
                        f"{self.files.optimizers[rank]}: the step count of group {number} differs from rank 0's: files "
                        "of several saves are mixed"
                    )
            for name in names:
                scalars[name] = first
        return scalars

    def _scalars_of(self, rank: int, number: int) -> dict[str, StoredScalar]:
        wide = self.kinds(rank, number)
        scalars = {}
        state = dict(self.state(rank).get(number, {}))
        if state and "step" not in state:  # FusedAdam counts for the group
            options = self.options()
            step = self.optimizers[rank].get("base_optimizer_state_step")
            if step is None and number < len(options):
                step = options[number].get("step")
            if step is not None:
                state["step"] = step
        for kind, value in state.items():
            if kind in wide:
                continue
            if isinstance(value, StoredTensor):
                scalars[kind] = StoredScalar(value.dtype, value.shape, self.content(rank, value))
            elif type(value) in (int, float) and kind == "step":
                scalars[kind] = StoredScalar("float32", (), struct.pack("<f", value))
            elif rank == 0:
                self.dropped.append(f"state {kind} of group {number}")
        return scalars

    def content(self, rank: int, tensor: StoredTensor) -> bytes:
        """The bytes of a small tensor of a rank's optimizer file, verified."""
        path = self.files.optimizers[rank]
        if not tensor.contiguous or tensor.numel > 1 << 16:
            raise CheckpointError(
                f"{path}: a state of shape {list(tensor.shape)}, which is no state of ZeRO's"
            )
        content = bytearray(tensor.numel * tensor.element_bytes)
        with opened(path) as fd:
            read_exactly(fd, [content], tensor.offset, path)
        if tensor.blob.size == len(content) and crc32(content) != tensor.blob.crc:
            raise CheckpointError(
                f"{path}: damaged (CRC-32 {crc32(content):08x}, expected {tensor.blob.crc:08x})"
            )
        return bytes(content)

    def _frozen(self, name: str, shape: tuple[int, ...], tensor: StoredTensor) -> StoredStream:
        if self.stage < 3:
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{self.files.models[0]}: {name} is {list(tensor.shape)}, expected {list(shape)}"
                )
            return stretches_of(tensor, 0, f"{self.files.models[0]}: {name}")
        numel = math.prod(shape)
        piece = -(-numel // self.world)
        stretches = []
        for rank, model in enumerate(self.models):
            fragment = model["frozen_param_fragments"][name]
            part = Interval(0, numel).intersection(Interval(rank * piece, (rank + 1) * piece))
            if part.numel > fragment.numel or not fragment.contiguous:
                raise CheckpointError(
                    f"{self.files.models[rank]}: {name} has {fragment.numel} elements, expected {piece}"
                )
            if part.numel:
                stretches.append(Stretch(rank, part, fragment.offset))
        return StoredStream(tensor.dtype, tuple(stretches))

    def _buffer(self, name: str, tensor: StoredTensor) -> StoredBuffer:
        if not tensor.contiguous:
            raise CheckpointError(f"{self.files.models[0]}: buffer {name} is not contiguous: save it so")
        size = tensor.numel * ELEMENT_BYTES[tensor.dtype]
        return StoredBuffer(tensor.dtype, tensor.shape, self.files.models[0], tensor.offset, size)

    def _groups(self) -> list[dict[str, Any]]:
        groups = []
        for number, options in enumerate(self.options()):
            kept = {
                key: value for key, value in options.items() if key not in ("params", "param_names", "step")
            }
            groups.append(plain_value(kept, f"param_groups[{number}]", self.dropped))
        return groups

    def _user(self) -> dict[str, Any]:
        own = {key: value for key, value in self.model.items() if key not in _KNOWN}
        return dict(plain_value(own, "client_state", self.dropped))

    def _scaler(self) -> dict[str, Any] | None:
        scaler = self.optimizers[0].get("loss_scaler")
        if not isinstance(scaler, Record) or not scaler.name.endswith("DynamicLossScaler"):
            return None
        fields = scaler.fields
        good = int(fields["cur_iter"]) - int(fields["last_overflow_iter"]) - 1
        window = int(fields["scale_window"])
        return {"value": float(fields["cur_scale"]).hex(), "good_steps": max(0, good) % max(1, window)}


def _stage(optimizer: Mapping[str, Any]) -> int:
    stage = optimizer["zero_stage"]
    number = stage.args[0] if isinstance(stage, Record) else stage
    if number not in _STAGES:
        raise CheckpointError(f"ZeRO stage {number!r} is unknown: expected 1, 2 or 3")
    return int(number)


def _blobs(value: Any) -> Iterator[Blob]:
    """Every storage that a value refers to."""
    pending, seen = [value], set()
    while pending:
        part = pending.pop()
        if isinstance(part, StoredTensor):
            yield part.blob
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)

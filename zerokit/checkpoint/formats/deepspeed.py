"""Reads checkpoints of DeepSpeed's ZeRO, stages 1, 2 and 3: the places of their elements.

`deepspeed_files` finds the files, and says how parameters are cut for the ranks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import opened
from zerokit.checkpoint.formats import deepspeed_files
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.deepspeed_files import KNOWN, LATEST, Files, GroupCut, Shapes
from zerokit.checkpoint.formats.description import (
    MASTER,
    PARAM,
    Description,
    StoredParameter,
    StoredScalar,
    StoredStream,
    as_frozen,
    beside,
    plain_value,
    stretches_of,
)
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.pickles import Record
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, content_of
from zerokit.checkpoint.source import Stretch
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter

_MOMENTUM = "momentum_buffer"
_DYNAMIC_SCALER = "DynamicLossScaler"


def recognises(path: Path) -> bool:
    """Whether `path` is a directory of DeepSpeed's: a tag's, or one with tags."""
    return deepspeed_files.find_tag(path) is not None or bool(deepspeed_files.find_tags(path))


def read(path: Path) -> ForeignCheckpoint:
    """Read the checkpoint at `path`. Raises `CheckpointError` for damaged, missing or unsupported data."""
    folder = deepspeed_files.find_tag(path)
    if folder is None:
        tags = ", ".join(deepspeed_files.find_tags(path)[:5])
        raise CheckpointError(
            f"{path}: has checkpoints of DeepSpeed ({tags}), and no {LATEST} that names one: give the directory of one"
        )
    reader = Reader(deepspeed_files.find_files(folder))
    reader.dropped += beside(path)
    return ForeignCheckpoint(reader.describe(), path if folder != path else None)


class Reader:
    """The parsed files of a checkpoint; `deepspeed_writer` uses them as a template."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.paths = (*files.models, *files.optimizers)
        self.world = len(files.optimizers)
        self.identity = 0
        self.blobs: dict[int, list[Blob]] = {}
        self.dropped: list[str] = []
        self.models = [self._load(number) for number in range(len(files.models))]
        self.model = self.models[0]
        self.optimizer_files = [self._load(self._number(rank)) for rank in range(self.world)]
        self.optimizers = [file["optimizer_state_dict"] for file in self.optimizer_files]
        self.stage = deepspeed_files.stage_of(self.optimizers[0], files.optimizers[0])
        self._check()

    def _load(self, number: int) -> dict[str, Any]:
        value, self.blobs[number] = deepspeed_files.read_states(self.paths[number])
        self.identity = crc32(repr(self.blobs[number]).encode(), self.identity)
        return value

    def _number(self, rank: int) -> int:
        return len(self.files.models) + rank

    def _check(self) -> None:
        """Raises `CheckpointError` unless the files belong to one save, of a kind that is read."""
        folder, mixed = self.files.folder, "files of several saves are mixed"
        stated, parallel = self.model.get("dp_world_size", self.world), self.model.get("mp_world_size", 1)
        found = f"{self.world} ranks' optimizer states are there, expected {stated}"
        require(stated == self.world, folder, f"{found}: a file is missing")
        require(parallel == 1, folder, "saved with tensor parallelism, which zerokit does not read")
        files = len(self.models) if self.stage == 3 else self.world
        require(files == self.world, folder, f"{files} files of model states, expected {self.world}")
        for path, model in zip(self.files.models, self.models, strict=True):
            steps = model["global_steps"], self.model["global_steps"]
            require(steps[0] == steps[1], path, f"its global_steps differ from rank 0's: {mixed}")
            same = deepspeed_files.shapes_of(model) == self.shapes
            require(same, path, f"its param_shapes differ from rank 0's: {mixed}")
        for rank, path in enumerate(self.files.optimizers):
            optimizer, stage = self.optimizers[rank], deepspeed_files.stage_of(self.optimizers[rank], path)
            differ = f"saved at stage {stage}, rank 0's file at stage {self.stage}"
            require(stage == self.stage, path, f"{differ}: {mixed}")
            experts = "ds_zero_partition_groups" in optimizer
            require(not experts, folder, "holds a mixture of experts, which zerokit does not read")
            self._require_groups(len(self.masters(rank)), "masters", rank)
            if self.stage < 3:
                self._require_groups(len(self.options(rank)), "options", rank)
            same = self._groups(rank, []) == self._groups(0, [])
            require(same, path, f"its groups' options differ from rank 0's: {mixed}")

    def describe(self) -> Description:
        model, path = self.model, self.files.models[0]
        group_of = {name: number for number, group in enumerate(self.groups) for name in group}
        frozen = {name: tuple(shape) for name, shape in (model.get("frozen_param_shapes") or {}).items()}
        tied: dict[str, str] = model.get("shared_params") or {}
        buffer_names = frozenset(model.get("buffer_names") or ())
        streams, scalars = self._trained(), self._scalars()
        parameters, buffers = [], []
        needed = {*buffer_names, *group_of, *frozen}
        for name, tensor in model["module"].items():
            if name in tied:
                continue
            if name in needed:
                deepspeed_files.expect(path, f"module[{name!r}]", tensor, StoredTensor)
            if name in buffer_names:
                stream = stretches_of(tensor, 0, f"{path}: buffer {name}")
                buffers.append(as_frozen(name, tensor.shape, stream))
                continue
            if name in group_of:
                shape, held = self.shapes_by_name[name], streams[name]
            elif name in frozen or (self.stage == 1 and isinstance(tensor, StoredTensor)):
                shape = frozen.get(name, tensor.shape)
                held = {PARAM: self._frozen(name, shape, tensor)}
            else:
                self.dropped.append(f"module.{name}")
                continue
            names = tuple(alias for alias, owner in tied.items() if owner == name)
            parameter = Parameter(name, shape, tensor.dtype, group_of.get(name, 0), name in group_of, names)
            parameters.append(StoredParameter(parameter, held, scalars.get(name, {})))
        missing = next((name for name in (*group_of, *frozen) if name not in model["module"]), None)
        excluded = "saved with exclude_frozen_parameters, or changed since"
        require(missing is None, path, f"no {missing} among the module's parameters: {excluded}")
        own = {key: value for key, value in model.items() if key not in KNOWN}
        return Description(
            format="deepspeed",
            path=self.files.folder,
            step=int(model["global_steps"]),
            world=self.world,
            files=self.paths,
            parameters=parameters,
            buffers=buffers,
            groups=self._groups(0, self.dropped),
            identity=self.identity,
            user=plain_value(own, "client_state", self.dropped, path),
            scaler=self._scaler(),
            blobs=self.blobs,
            dropped=self.dropped,
            doubts=self._doubts(scalars),
            details=self,
        )

    def _doubts(self, scalars: Mapping[str, Mapping[str, StoredScalar]]) -> list[str]:
        """That the model's file counts other steps than the optimizer's, as it may where a run loaded weights alone."""
        taken = int(self.model["global_steps"]) - int(self.model.get("skipped_steps", 0))
        most = max(
            (int(states["step"].array.item()) for states in scalars.values() if "step" in states),
            default=taken,
        )
        if most == taken:
            return []
        return [
            f"{self.files.models[0]}: counts {taken} steps, the optimizer's files {most}: if the run did not "
            "begin from weights alone, files of several saves are mixed"
        ]

    @cached_property
    def shapes(self) -> list[Shapes]:
        """`param_shapes`: by optimizer group, at stage 3 by sub-group."""
        return deepspeed_files.shapes_of(self.model)

    @cached_property
    def shapes_by_name(self) -> Shapes:
        return {name: shape for shapes in self.shapes for name, shape in shapes.items()}

    def numels(self, names: Iterable[str]) -> dict[str, int]:
        return {name: math.prod(self.shapes_by_name[name]) for name in names}

    @cached_property
    def groups(self) -> list[list[str]]:
        """The names in each group of the optimizer."""
        groups: list[list[str]] = [[] for _ in self.options(0)]
        for cut in self.cuts:
            groups[cut.group] += cut.members
        return groups

    @cached_property
    def cuts(self) -> Sequence[GroupCut]:
        """The groups of stages 1 and 2, the sub-groups of stage 3."""
        if self.stage < 3:
            return self.groups_for(self.world)
        group_of = {n: group for group, options in enumerate(self.options(0)) for n in options["params"]}
        missing = next((number for number in range(len(self.shapes)) if number not in group_of), None)
        require(missing is None, self.files.optimizers[0], f"no group of its options has sub-group {missing}")
        return [
            deepspeed_files.cut_sub_group(group_of[number], self.numels(shapes), self.world)
            for number, shapes in enumerate(self.shapes)
        ]

    def groups_for(self, world: int, *, before: bool = False) -> list[GroupCut]:
        """The groups of stages 1 and 2, cut for so many ranks.

        `round_robin_gradients` gives parameters another order at each world; `before`: in the order before that.
        """
        paddings = self.optimizers[0].get("param_alignment_paddings") or [None] * len(self.shapes)
        self._require_groups(len(paddings), "param_alignment_paddings")
        cuts = []
        for number, (shapes, after) in enumerate(zip(self.shapes, paddings, strict=True)):
            names, count = list(shapes), len(shapes)
            if self._round_robin:
                own = dict(zip(deepspeed_files.round_robin(count, self.world), names, strict=True))
                order = range(count) if before else deepspeed_files.round_robin(count, world)
                names = [own[index] for index in order]
            cuts.append(deepspeed_files.cut_group(number, self.numels(names), world, after))
        return cuts

    def _require_groups(self, count: int, what: str, rank: int = 0) -> None:
        """Raise `CheckpointError` unless `count`, of `what` in a rank's file, is the number of groups of shapes."""
        expected = f"{count} groups of {what}, expected {len(self.shapes)}, as in {self.files.models[0].name}"
        require(count == len(self.shapes), self.files.optimizers[rank], expected)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`zero_optimization` of DeepSpeed's configuration; empty if that was a file: only its path is saved."""
        config = self.model.get("ds_config")
        settings = config.get("zero_optimization") if isinstance(config, dict) else None
        return settings if isinstance(settings, dict) else {}

    @cached_property
    def _round_robin(self) -> bool:
        if self.settings:
            return bool(self.settings.get("round_robin_gradients"))
        # DeepSpeed's mappings are made before parameters are ordered so.
        mappings = [optimizer.get("param_slice_mappings") or [] for optimizer in self.optimizers]
        before = [list(dict.fromkeys(chain(*parts))) for parts in zip(*mappings, strict=True)]
        return any(
            names != [name for name in shapes if name in names]
            for names, shapes in zip(before, self.shapes, strict=False)
        )

    def state(self, rank: int) -> dict[int, dict[str, Any]]:
        """The optimizer's states of a rank, by group (stages 1 and 2) or sub-group."""
        base = self.base(rank)
        states = base["state"].items() if isinstance(base, dict) else enumerate(base)
        return {
            number: {k: v for k, v in state.items() if k != _MOMENTUM or number not in self._untold}
            for number, state in states
        }

    @cached_property
    def _untold(self) -> frozenset[int]:
        """Groups whose momentum of Muon is left out: stages 1 and 2 keep that of each tensor that a rank has a part of.

        Where ranks share a tensor, its elements do not lie as those of the masters.
        """
        untold = {
            number
            for number, cut in enumerate(self.cuts if self.stage < 3 else ())
            if self.options(0)[cut.group].get("use_muon")
            and deepspeed_files.cuts_tensors(cut, self.numels(cut.members))
        }
        self.dropped += [
            f"{_MOMENTUM} of group {number}, whose tensors ranks share" for number in sorted(untold)
        ]
        return frozenset(untold)

    def base(self, rank: int) -> Any:
        """The state dict of a rank's own optimizer; of the elastic format a list of states."""
        return self.optimizers[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    def options(self, rank: int) -> list[dict[str, Any]]:
        """The optimizer's groups with all their options; the elastic format keeps none."""
        base = self.base(rank)
        return list(base["param_groups"]) if isinstance(base, dict) else [{} for _ in base]

    def _groups(self, rank: int, dropped: list[str]) -> list[dict[str, Any]]:
        """The options that are no bookkeeping, as plain data; paths of others are added to `dropped`."""
        left_out = ("params", "param_names", "step")
        groups = [{k: v for k, v in group.items() if k not in left_out} for group in self.options(rank)]
        plain: list[dict[str, Any]] = plain_value(
            groups, "param_groups", dropped, self.files.optimizers[rank]
        )
        return plain

    def masters(self, rank: int) -> list[StoredTensor]:
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(self.optimizers[rank][key])

    def kinds(self, rank: int, number: int) -> dict[str, StoredTensor]:
        """The states that have an element for each of the master's, by kind; the master itself among them."""
        master = self.masters(rank)[number]
        sizes = {master.numel, self.cuts[number].partition, self.cuts[number].unpadded[rank]}
        found = {MASTER: master}
        for kind, value in self.state(rank).get(number, {}).items():
            if isinstance(value, StoredTensor) and value.shape and value.numel in sizes:
                found[kind] = value
        return found

    def _trained(self) -> dict[str, dict[str, StoredStream]]:
        found: dict[str, dict[str, list[Stretch]]] = {name: {MASTER: []} for name in self.shapes_by_name}
        dtypes: dict[tuple[int, str], str] = {}
        for (number, cut), rank in product(enumerate(self.cuts), range(self.world)):
            path, held, size = self.files.optimizers[rank], self.kinds(rank, number), cut.unpadded[rank]
            require(
                held[MASTER].numel in (size, cut.partition),
                path,
                f"group {number} has {held[MASTER].numel} elements, expected {size}: a file of another save, or states "
                "that were offloaded to NVMe, which zerokit does not read",
            )
            for kind, tensor in held.items():
                dtype = dtypes.setdefault((number, kind), tensor.dtype)
                require(
                    tensor.dtype == dtype, path, f"{kind} of group {number} is not {dtype}, as in other files"
                )
                for piece in cut.pieces[rank]:
                    end = piece.start + piece.interval.numel
                    short = f"{kind} of group {number} has {tensor.numel} elements, {piece.name} ends with the {end}th"
                    require(end <= tensor.numel and tensor.contiguous, path, short)
                    offset = tensor.offset + piece.start * tensor.element_bytes
                    stretch = Stretch(self._number(rank), piece.interval, offset)
                    found[piece.name].setdefault(kind, []).append(stretch)
        return {
            name: {
                kind: StoredStream(dtypes[number, kind], tuple(held)) for kind, held in found[name].items()
            }
            for number, cut in enumerate(self.cuts)
            for name in cut.members
        }

    def _scalars(self) -> dict[str, dict[str, StoredScalar]]:
        """States of another shape, such as step counts: equal on all ranks, and for all parameters of a group."""
        scalars: dict[str, dict[str, StoredScalar]] = {}
        for number, cut in enumerate(self.cuts):
            first = self._scalars_of(0, number)
            for rank, path in enumerate(self.files.optimizers):
                differs = f"the step count of group {number} differs from rank 0's: files of several saves are mixed"
                require(not rank or self._scalars_of(rank, number) == first, path, differs)
            scalars |= dict.fromkeys(cut.members, first)
        return scalars

    def _scalars_of(self, rank: int, number: int) -> dict[str, StoredScalar]:
        wide = self.kinds(rank, number)
        scalars = {}
        state = dict(self.state(rank).get(number, {}))
        if state and "step" not in state:  # FusedAdam counts for the group
            options = self.options(rank)[self.cuts[number].group]
            step = self.optimizers[rank].get("base_optimizer_state_step", options.get("step"))
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
        path, small = self.files.optimizers[rank], tensor.contiguous and tensor.numel <= 1 << 16
        require(small, path, f"a state of shape {list(tensor.shape)}, which is not a state of ZeRO")
        with opened(path) as fd:
            content, start = content_of(path, fd, tensor.blob), tensor.start * tensor.element_bytes
        return content[start : start + tensor.numel * tensor.element_bytes]

    def _frozen(self, name: str, shape: tuple[int, ...], tensor: StoredTensor) -> StoredStream:
        if self.stage < 3:
            path = self.files.models[0]
            require(tensor.shape == shape, path, f"{name} is {list(tensor.shape)}, expected {list(shape)}")
            return stretches_of(tensor, 0, f"{path}: {name}")
        stretches = []
        for rank, part in deepspeed_files.parts(math.prod(shape), self.world):
            path, fragments = self.files.models[rank], self.models[rank]["frozen_param_fragments"]
            require(
                name in (fragments or ()),
                path,
                f"has no elements of {name}: files of several saves are mixed",
            )
            fragment, few = fragments[name], f"elements of {name}, expected {part.numel}"
            right = part.numel <= fragment.numel and fragment.contiguous
            require(right, path, f"{fragment.numel} {few}")
            stretches.append(Stretch(rank, part, fragment.offset))
        return StoredStream(tensor.dtype, tuple(stretches))

    def _scaler(self) -> dict[str, Any] | None:
        scaler = self.optimizers[0].get("loss_scaler")
        if not isinstance(scaler, Record) or not scaler.name.endswith(_DYNAMIC_SCALER):
            return None
        fields = scaler.fields
        good = int(fields["cur_iter"]) - int(fields["last_overflow_iter"]) - 1
        window = int(fields["scale_window"])
        return {"value": float(fields["cur_scale"]).hex(), "good_steps": max(0, good) % max(1, window)}

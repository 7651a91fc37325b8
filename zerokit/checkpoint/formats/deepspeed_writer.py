"""A DeepSpeed checkpoint cut for another number of ranks, with its own files as the template.

Everything but masters, moments and frozen pieces is written as it was read, client state and settings included: what
DeepSpeed put there is not for us to know. A checkpoint of stage 1 or 2 loads at either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerokit import files
from zerokit.checkpoint.conversion import Work
from zerokit.checkpoint.copying import Copier, Progress
from zerokit.checkpoint.disk import explained, sync_directory, write_file
from zerokit.checkpoint.extents import ELEMENT_BYTES
from zerokit.checkpoint.formats.deepspeed import Reader, lay_out
from zerokit.checkpoint.formats.foreign import MASTER, PARAM, ForeignCheckpoint
from zerokit.checkpoint.formats.pickles import Ordered, Record
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor
from zerokit.checkpoint.formats.torchwriter import (
    NewStorage,
    NewTensor,
    Part,
    TorchFile,
    copied,
    flat,
    plan_torch_file,
    row_major,
)
from zerokit.checkpoint.plan import Key
from zerokit.checkpoint.slices import check_copied
from zerokit.layout import Interval

_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_SUB_GROUP_NUMEL = 1_000_000_000
"""DeepSpeed's own default of `sub_group_size`, in elements a rank."""


def write_deepspeed(
    source: ForeignCheckpoint, world: int, work: Work, *, jobs: int | None, progress: Progress | None
) -> None:
    """Write `source` for `world` ranks into the directory of `work`. Raises `CheckpointError`."""
    reader: Reader = source.described.details
    folder = work.path / source.path.name if source.run is not None else work.path
    if not folder.is_dir():
        with explained(folder, "created"):
            files.system().mkdir(folder)
    writer = _Writer(source, reader, world)
    with Copier[Key](
        jobs=jobs, total=source.data_size, progress=progress, synced=work.journal.note
    ) as copier:
        copier.take_over(work.pieces)
        for name, file in writer.files():
            path = folder / name
            if work.has(path, file.size):
                continue
            target = copier.target(path, file.size)
            file.copy(source, copier, target)
            copier.drain()
            file.finish(source, copier.pieces, target)
            copier.release(target)
    check_copied(source, copier.pieces)
    if source.run is not None:
        sync_directory(folder)
        write_file(work.path / "latest", source.path.name.encode())


class _Writer:
    def __init__(self, source: ForeignCheckpoint, reader: Reader, world: int) -> None:
        self.source, self.reader, self.world = source, reader, world
        line = source.layout.line
        self.streams = {
            (stream.kind, line[position].name): number
            for number, stream in enumerate(source.streams)
            for position in stream.parameters
        }

        self._shapes = {
            name: shape for group in reader.model["param_shapes"] for name, shape in group.items()
        }

    def files(self) -> Iterator[tuple[str, TorchFile]]:
        """Every file's name and contents."""
        for rank in range(self.world if self.reader.stage == 3 else 1):
            name = self.reader.files.models[0].name
            if self.reader.stage == 3:
                name = name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            yield name, plan_torch_file(self._model(rank), Path(name).stem)
        for rank in range(self.world):
            name = self.reader.files.optimizers[0].name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            yield name, plan_torch_file(self._optimizer(rank), Path(name).stem)

    def _model(self, rank: int) -> dict[str, Any]:
        storages: dict[tuple[int, Blob], NewStorage] = {}
        template = dict(self.reader.model)
        fragments = template.pop("frozen_param_fragments", None)
        model = dict(_mapped(template, 0, storages))
        model["dp_world_size"] = self.world
        if self.reader.stage < 3:
            model["frozen_param_fragments"] = _mapped(fragments, 0, storages)
            return model
        model["param_shapes"] = [
            Ordered({name: self._shapes[name] for name, _ in members})
            for _, members in self._new_sub_groups()
        ]
        if rank:
            model["shared_params"] = {}  # DeepSpeed writes them into the first rank's file alone
        model["frozen_param_fragments"] = (
            None
            if fragments is None
            else Ordered({name: self._frozen(name, rank, fragments[name]) for name in fragments})
        )
        return model

    def _frozen(self, name: str, rank: int, template: StoredTensor) -> NewTensor:
        numel = math.prod(self.reader.model["frozen_param_shapes"][name])
        piece = -(-numel // self.world)
        part = Interval(0, numel).intersection(Interval(rank * piece, (rank + 1) * piece))
        parts = [Part(self.streams[PARAM, name], name, part, 0)] if part.numel else []
        return flat(template.dtype, piece, parts)

    def _optimizer(self, rank: int) -> dict[str, Any]:
        reader = self.reader
        whole = dict(reader.optimizer_files[0])
        template = dict(whole.pop("optimizer_state_dict"))
        cut = self._groups if reader.stage < 3 else self._sub_groups
        state = cut(rank, template)
        storages: dict[tuple[int, Blob], NewStorage] = {}
        first = len(reader.files.models)
        return {"optimizer_state_dict": _mapped(state, first, storages), **_mapped(whole, first, storages)}

    def _groups(self, rank: int, template: dict[str, Any]) -> dict[str, Any]:
        """Stages 1 and 2."""
        reader, world = self.reader, self.world
        alignments = template.get("param_alignment_paddings")
        base = template["base_optimizer_state"]
        elastic = not isinstance(base, dict)
        masters, states, paddings, mappings = [], {}, [], []
        for number, shapes in enumerate(reader.model["param_shapes"]):
            group = lay_out(shapes, world, alignments[number] if alignments else None)
            size, lean = group.partition(world), group.lean(rank, world)
            pieces = []
            for name, offset in zip(group.names, group.offsets, strict=True):
                part = Interval(offset, offset + math.prod(shapes[name])).intersection(
                    Interval(rank * size, (rank + 1) * size)
                )
                if part.numel:
                    pieces.append((name, part.shifted(-offset), part.start - rank * size))
            masters.append(self._flat(MASTER, number, pieces, lean))
            states[number] = self._state(number, pieces, lean if elastic else size)
            paddings.append(size - lean)
            mappings.append(Ordered({name: _fragment(part.numel, start) for name, part, start in pieces}))
        return {
            **template,
            "base_optimizer_state": list(states.values()) if elastic else {**base, "state": states},
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "partition_count": [world] * len(masters),
            "param_slice_mappings": mappings,
        }

    def _sub_groups(self, rank: int, template: dict[str, Any]) -> dict[str, Any]:
        """Stage 3."""
        reader, world = self.reader, self.world
        base = template["optimizer_state_dict"]
        # The state of a group's sub-groups differs in tensors alone, so the group's first one is the template.
        first_of: dict[int, int] = {}
        group_of = {name: g for g, shapes in enumerate(reader.group_shapes()) for name in shapes}
        for number, members in reader.sub_groups():
            first_of.setdefault(group_of[members[0][0]], number)
        masters: list[NewTensor] = []
        states: dict[int, dict[str, Any]] = {}
        numbers: dict[int, list[int]] = {}
        for group, members in self._new_sub_groups():
            pieces, start = [], 0
            for name, numel in members:
                piece = -(-numel // world)
                part = Interval(0, numel).intersection(Interval(rank * piece, (rank + 1) * piece))
                if part.numel:
                    pieces.append((name, part, start))
                start += piece
            number = len(masters)
            numbers.setdefault(group, []).append(number)
            masters.append(self._flat(MASTER, first_of[group], pieces, start))
            states[number] = self._state(first_of[group], pieces, start)
        options = [
            {**group, "params": numbers.get(number, [])} for number, group in enumerate(base["param_groups"])
        ]
        return {
            **template,
            "partition_count": world,
            "optimizer_state_dict": {**base, "state": states, "param_groups": options},
            "fp32_flat_groups": masters,
        }

    def _new_sub_groups(self) -> Iterator[tuple[int, list[tuple[str, int]]]]:
        """Each sub-group's group and parameters, cut as DeepSpeed will cut them for the new world."""
        config = self.reader.optimizer_files[0].get("ds_config") or {}
        limit = int(config.get("zero_optimization", {}).get("sub_group_size", _SUB_GROUP_NUMEL))
        for number, shapes in enumerate(self.reader.group_shapes()):
            members: list[tuple[str, int]] = []
            filled = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                members.append((name, numel))
                filled += -(-numel // self.world)
                if filled >= limit:
                    yield number, members
                    members, filled = [], 0
            if members:
                yield number, members

    def _state(
        self, template: int, pieces: Sequence[tuple[str, Interval, int]], numel: int
    ) -> dict[str, Any]:
        reader = self.reader
        wide = reader.kinds(0, template)
        state: dict[str, Any] = {}
        for kind, value in reader.state(0).get(template, {}).items():
            if kind in wide:
                state[kind] = self._flat(kind, template, pieces, numel)
            elif isinstance(value, StoredTensor):
                content = reader.content(0, value)
                storage = NewStorage(value.dtype, len(content), content=content)
                state[kind] = NewTensor(storage, value.shape, row_major(value.shape))
            else:
                state[kind] = value
        return state

    def _flat(
        self, kind: str, template: int, pieces: Sequence[tuple[str, Interval, int]], numel: int
    ) -> NewTensor:
        dtype = self.reader.kinds(0, template)[kind].dtype
        width = ELEMENT_BYTES[dtype]
        parts = [Part(self.streams[kind, name], name, part, start * width) for name, part, start in pieces]
        return flat(dtype, numel, parts)


def _fragment(numel: int, start: int) -> Record:
    return Record(_FRAGMENT, (), {"numel": numel, "start": start}, new=True)


def _mapped(value: Any, file: int, storages: dict[tuple[int, Blob], NewStorage]) -> Any:
    """The value with the tensors of the source's file as they are."""
    if isinstance(value, StoredTensor):
        return copied(value, file, storages)
    if isinstance(value, dict):
        return type(value)({key: _mapped(part, file, storages) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, file, storages) for part in value)
    if isinstance(value, Record):
        return Record(
            value.name,
            tuple(_mapped(part, file, storages) for part in value.args),
            _mapped(value.state, file, storages),
            [_mapped(part, file, storages) for part in value.items],
            {key: _mapped(part, file, storages) for key, part in value.pairs.items()},
            value.new,
        )
    return value

"""A DeepSpeed checkpoint cut for another number of ranks, with its own files as the template.

Everything but masters, moments and frozen pieces is written as it was read, client state and settings included: what
DeepSpeed put there is not for us to know. A checkpoint of stage 1 or 2 loads at either.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerokit.checkpoint.copying import Options, converting
from zerokit.checkpoint.disk import entries_of, is_kind, make_directory, sync_directory, write_file
from zerokit.checkpoint.formats import deepspeed_files, torchwriter
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.deepspeed import Reader
from zerokit.checkpoint.formats.deepspeed_files import LATEST, GroupCut, Piece
from zerokit.checkpoint.formats.description import MASTER, PARAM
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.pickles import Ordered, Record, Size
from zerokit.checkpoint.formats.torchfile import StoredTensor, is_marked
from zerokit.checkpoint.prune import foreign_to, named
from zerokit.checkpoint.safetensors import ELEMENT_BYTES

_FILE = re.compile(r"(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_SUB_GROUP_NUMEL = 1_000_000_000
"""DeepSpeed's own default of `sub_group_size`, in elements a rank."""


def write_deepspeed(source: ForeignCheckpoint, world: int, target: Path, options: Options) -> None:
    """Write `source` for `world` ranks as the directory `target`: a tag, or one with `latest` and a tag.

    Raises as `convert` does.
    """
    writer = _Writer(source, source.described.details, world)
    with converting(source, target, options, _foreign) as work:
        folder = work
        if source.run is not None:
            make_directory(folder := work / source.path.name)
        with options.copying(source) as copier:
            for name, file in writer.files():
                torchwriter.write_torch_files(source, copier, folder / name, [file])
        if source.run is not None:
            sync_directory(folder)
            write_file(work / LATEST, source.path.name.encode())


def _foreign(folder: Path) -> str:
    """What a directory holds beside one DeepSpeed checkpoint, or a run with one tag."""
    entries = entries_of(folder)
    if any(entry.name == LATEST for entry in entries):
        tags = [entry for entry in entries if is_kind(entry, stat.S_ISDIR)]
        others = [entry for entry in entries if entry.name != LATEST and entry not in tags]
        if others or len(tags) != 1:
            return named((others or tags)[-1]) if others or tags else "no checkpoint"
        folder = Path(tags[0].path)
    models = [entry.path for entry in entries_of(folder) if entry.name.endswith("_model_states.pt")]
    if models and not is_marked(Path(models[0])):
        return "a checkpoint of DeepSpeed's own"
    return foreign_to(folder, _FILE, "no file of DeepSpeed's")


class _Writer:
    def __init__(self, source: ForeignCheckpoint, reader: Reader, world: int) -> None:
        self.source, self.reader, self.world = source, reader, world
        self.cuts: Sequence[GroupCut]
        """The groups of stages 1 and 2, the sub-groups of stage 3, cut as DeepSpeed will cut them for the new world."""
        if reader.stage < 3:
            self.cuts = reader.groups_for(world)
        else:
            limit = int(reader.settings.get("sub_group_size", _SUB_GROUP_NUMEL))
            groups = [reader.numels(names) for names in reader.groups]
            own, self.cuts = (
                list(deepspeed_files.sub_groups(groups, n, limit)) for n in (reader.world, world)
            )
            require(
                own == reader.cuts,
                reader.files.models[0],
                "does not hold the sub_group_size by which DeepSpeed has cut it, and will cut it again: convert it to "
                "zerokit's format or DCP's",
            )

    def files(self) -> Iterator[tuple[str, torchwriter.TorchFile]]:
        for rank in range(self.world if self.reader.stage == 3 else 1):
            name = self.reader.files.models[0].name
            if self.reader.stage == 3:
                name = name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            yield name, torchwriter.plan_torch_file(self._model(rank), Path(name).stem, marked=True)
        for rank in range(self.world):
            name = self.reader.files.optimizers[0].name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            number = len(self.reader.files.models)
            yield (
                name,
                torchwriter.plan_torch_file(self._optimizer(rank), Path(name).stem, source_file=number),
            )

    def _model(self, rank: int) -> dict[str, Any]:
        template, shapes = dict(self.reader.model), self.reader.shapes_by_name
        template["dp_world_size"] = self.world
        template["param_shapes"] = [
            Ordered({name: Size(shapes[name]) for name in cut.members}) for cut in self.cuts
        ]
        if self.reader.stage == 3 and rank:
            template["shared_params"] = {}  # DeepSpeed writes them into the first rank's file alone
        if self.reader.stage == 3 and template.get("frozen_param_fragments") is not None:
            frozen = template.get("frozen_param_shapes") or {}
            template["frozen_param_fragments"] = Ordered({name: self._frozen(name, rank) for name in frozen})
        return template

    def _frozen(self, name: str, rank: int) -> torchwriter.NewTensor:
        stream, numel = self._stream(PARAM, name), math.prod(self.source.shapes[name])
        held = dict(deepspeed_files.parts(numel, self.world)).get(rank)
        parts = [torchwriter.Part(stream, name, held, 0)] if held else []
        dtype = self.source.streams[stream].dtype
        return torchwriter.flat(dtype, deepspeed_files.part_size(numel, self.world), parts)

    def _optimizer(self, rank: int) -> dict[str, Any]:
        template = dict(self.reader.optimizer_files[0])
        cut = self._groups if self.reader.stage < 3 else self._sub_groups
        template["optimizer_state_dict"] = cut(rank, template["optimizer_state_dict"])
        return template

    def _groups(self, rank: int, template: dict[str, Any]) -> dict[str, Any]:
        base = template["base_optimizer_state"]
        elastic = not isinstance(base, dict)
        masters, states, paddings, mappings = [], {}, [], []
        for number, cut in enumerate(self.cuts):
            held, unpadded = cut.pieces[rank], cut.unpadded[rank]
            masters.append(self._flat(MASTER, number, held, unpadded))
            states[number] = self._state(number, held, unpadded if elastic else cut.partition)
            paddings.append(cut.partition - unpadded)
            mapped_pieces = self.reader.groups_for(self.world, before=True)[number].pieces[rank]
            places = {p.name: {"numel": p.interval.numel, "start": p.start} for p in mapped_pieces}
            fragments = {name: Record(_FRAGMENT, (), place, new=True) for name, place in places.items()}
            mappings.append(Ordered(fragments))
        return {
            **template,
            "base_optimizer_state": list(states.values()) if elastic else {**base, "state": states},
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "partition_count": [self.world] * len(masters),
            "param_slice_mappings": mappings,
        }

    def _sub_groups(self, rank: int, template: dict[str, Any]) -> dict[str, Any]:
        base = template["optimizer_state_dict"]
        # The state of a group's sub-groups differs in tensors alone, so the group's first one is the template.
        first_of: dict[int, int] = {}
        for number, cut in enumerate(self.reader.cuts):
            first_of.setdefault(cut.group, number)
        masters, states = [], {}
        numbers: dict[int, list[int]] = {}
        for number, cut in enumerate(self.cuts):
            held, first = cut.pieces[rank], first_of[cut.group]
            numbers.setdefault(cut.group, []).append(number)
            masters.append(self._flat(MASTER, first, held, cut.partition))
            states[number] = self._state(first, held, cut.partition)
        options = [
            {**group, "params": numbers.get(number, [])} for number, group in enumerate(base["param_groups"])
        ]
        return {
            **template,
            "partition_count": self.world,
            "optimizer_state_dict": {**base, "state": states, "param_groups": options},
            "fp32_flat_groups": masters,
        }

    def _state(self, template: int, held: Sequence[Piece], numel: int) -> dict[str, Any]:
        reader = self.reader
        wide = reader.kinds(0, template)
        state: dict[str, Any] = {}
        for kind, value in reader.state(0).get(template, {}).items():
            if kind in wide:
                state[kind] = self._flat(kind, template, held, numel)
            elif isinstance(value, StoredTensor):
                state[kind] = torchwriter.whole(value.dtype, value.shape, reader.content(0, value))
            else:
                state[kind] = value
        return state

    def _stream(self, kind: str, name: str) -> int:
        return self.source.manifest.numbers[kind, self.source.layout.positions[name]]

    def _flat(self, kind: str, template: int, held: Sequence[Piece], numel: int) -> torchwriter.NewTensor:
        dtype = self.reader.kinds(0, template)[kind].dtype
        width = ELEMENT_BYTES[dtype]
        parts = [
            torchwriter.Part(self._stream(kind, piece.name), piece.name, piece.interval, piece.start * width)
            for piece in held
        ]
        return torchwriter.flat(dtype, numel, parts)

"""The files of a DeepSpeed checkpoint, by rank, the states in them, and how parameters are cut for the ranks.

ROOT/latest                                          the name of a tag
ROOT/TAG/mp_rank_00_model_states.pt                  stages 1 and 2
ROOT/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3, one a rank
ROOT/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   one a rank

At stages 1 and 2 a group is its parameters flattened one after the other, padded to a multiple of 2N elements, and
rank r holds the r-th N-th of it. At stage 3 each parameter of n elements is cut by itself: rank r holds elements
[r·p, (r+1)·p) with p = ceil(n/N), padded, and a sub-group is the concatenation of those pieces. See
deepspeed/runtime/zero (0.19) and deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from zerokit.checkpoint.disk import despite_damage, entries_of, is_directory, is_file, opened, read_whole
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.pickles import Name, Record
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, read_torch_file
from zerokit.errors import CheckpointError
from zerokit.layout import Cut, Interval

LATEST = "latest"
_FIRST = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"

_MAX_DIMENSIONS = 64
_STAGE = "ZeroStageEnum"
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}

Shapes = dict[str, tuple[int, ...]]

KNOWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "universal_checkpoint_info"),
}
"""Members of the model's states that DeepSpeed writes itself; others are the program's own."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d+)_optim_states\.pt")
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,9})_")
_EXPERTS = re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|layer_\d+-model_.*\.pt")


@dataclass(frozen=True)
class Files:
    """A tag's directory and its files, by rank."""

    folder: Path
    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]


def find_tag(path: Path) -> Path | None:
    """The directory of the checkpoint at `path`: itself, or the tag that `latest` names; None where there is none."""
    if not is_directory(path):
        return None
    if _has_model(path):
        return path
    latest = path / LATEST
    with despite_damage():  # a run of zerokit's has a `latest` as well, and does without it
        name = read_whole(latest, limit=4096).decode("utf-8", "replace").strip()
        folder = path / name
        if name and "/" not in name and name != ".." and is_directory(folder) and _has_model(folder):
            return folder
    return None


def find_tags(path: Path) -> list[str]:
    """Directories in `path` that hold a checkpoint each."""
    folders = [entry for entry in entries_of(path) if is_directory(entry)]
    return [entry.name for entry in folders if any(is_file(path / entry.name / name) for name in _FIRST)]


def _has_model(folder: Path) -> bool:
    return any(_MODEL.fullmatch(entry.name) for entry in entries_of(folder))


def find_files(folder: Path) -> Files:
    """The files of a tag's directory. Raises `CheckpointError` where one is missing or of another kind."""
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    advice = "which zerokit does not read: convert it with DeepSpeed's own tools first"
    for entry in (folder / found.name for found in entries_of(folder)):
        experts = _EXPERTS.fullmatch(entry.name)
        require(not experts, entry, f"belongs to a mixture of experts or a pipeline, {advice}")
        for pattern, found in ((_MODEL, models), (_OPTIMIZER, optimizers)):
            if match := pattern.fullmatch(entry.name):
                require(int(match[2]) == 0, entry, f"belongs to tensor or pipeline parallelism, {advice}")
                other = found.setdefault(int(match[1] or 0), entry)
                both = f"{entry.name} and {other.name}"
                require(
                    other is entry,
                    folder,
                    f"{both} belong to the same rank: files of several saves are mixed",
                )
    require(
        optimizers,
        folder,
        "no optim_states of ZeRO beside the model's, as in a universal checkpoint: zerokit reads stages 1 to 3",
    )
    for what, found in (("model_states", models), ("optim_states", optimizers)):
        for rank in range(len(found)):
            require(rank in found, folder, f"rank {rank}'s file of {what} is missing")
    return Files(folder, *(tuple(found[rank] for rank in sorted(found)) for found in (models, optimizers)))


def read_states(path: Path) -> tuple[dict[str, Any], list[Blob]]:
    """A file's states, and the storages in it by their offsets.

    Raises `CheckpointError`, naming the file and the value, for a member that is not as DeepSpeed writes it.
    """
    blobs: set[Blob] = set()
    names: set[str] = set()
    with opened(path) as fd:
        value = read_torch_file(path, fd, blobs=blobs, names=names)
    for name in names:
        own, saved = (_RANK.match(one) for one in (path.name, name))
        renamed = f"was saved as {name}.pt: files of two ranks are exchanged, so give them their names again"
        require(own is None or saved is None or own[1] == saved[1], path, renamed)
    require(isinstance(value, dict), path, f"a {type(value).__name__}, expected DeepSpeed's dict of states")
    (_check_model if _MODEL.fullmatch(path.name) else _check_optimizer)(path, value)
    return value, sorted(blobs)


_NONE = type(None)
_KINDS = {
    dict: "a mapping",
    list: "a list",
    int: "an integer",
    tuple: "a shape",
    StoredTensor: "a tensor",
    _NONE: "None",
}


def expect(path: Path, what: str, value: Any, *kinds: type) -> Any:
    """The value, which is of one of `kinds`. Raises `CheckpointError`, naming the file and the value, if it is not."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(_KINDS[kind] for kind in kinds)
        shown = "missing" if value is _MISSING else shown_value(value)
        raise CheckpointError(f"{path}: its {what} is {shown}, expected {expected}")
    return value


def shown_value(value: Any) -> str:
    """A value of a pickle for a message, short."""
    if isinstance(value, Name):
        return value.text[:200]
    return (str(value) if isinstance(value, Record) else reprlib.repr(value))[:200]


_MISSING = object()
_MODEL_MEMBERS: dict[str, tuple[type, ...]] = {
    "module": (dict,),
    "param_shapes": (list,),
    "global_steps": (int,),
    **dict.fromkeys(("frozen_param_shapes", "frozen_param_fragments", "shared_params"), (dict, _NONE)),
    "buffer_names": (list, _NONE),
    **dict.fromkeys(("skipped_steps", "dp_world_size", "mp_world_size"), (int,)),
}
_NEEDED = ("module", "param_shapes", "global_steps")


def _check_model(path: Path, states: Mapping[str, Any]) -> None:
    for key, kinds in _MODEL_MEMBERS.items():
        if key in states or key in _NEEDED:
            expect(path, key, states.get(key, _MISSING), *kinds)
    for number, shapes in enumerate(states["param_shapes"]):
        for name, shape in expect(path, f"param_shapes[{number}]", shapes, dict).items():
            right = isinstance(name, str) and isinstance(shape, tuple) and len(shape) <= _MAX_DIMENSIONS
            if not right or any(type(n) is not int or n < 0 for n in shape):
                raise CheckpointError(f"{path}: {shown_value(name)} has the shape {shown_value(shape)}")
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        for name, value in (states.get(key) or {}).items():
            kinds = (tuple,) if key.endswith("shapes") else (StoredTensor,)
            expect(path, f"{key}[{shown_value(name)}]", value, *kinds)


def _check_optimizer(path: Path, states: Mapping[str, Any]) -> None:
    own = expect(path, "optimizer_state_dict", states.get("optimizer_state_dict", _MISSING), dict)
    if "ds_zero_partition_groups" in own:
        return  # it is refused as what it is
    for key in ("param_alignment_paddings", "param_slice_mappings"):
        for number, part in enumerate(expect(path, key, own.get(key), list, _NONE) or ()):
            kinds = (dict, _NONE) if key.endswith("mappings") else (list, _NONE)
            expect(path, f"{key}[{number}]", part, *kinds)
            for element in part if isinstance(part, list) else ():
                expect(path, f"an element of {key}[{number}]", element, int)
    last = stage_of(own, path) == 3
    masters = "fp32_flat_groups" if last else "single_partition_of_fp32_groups"
    for number, master in enumerate(expect(path, masters, own.get(masters, _MISSING), list)):
        expect(path, f"{masters}[{number}]", master, StoredTensor)
    key = "optimizer_state_dict" if last else "base_optimizer_state"
    base = expect(path, key, own.get(key, _MISSING), dict, *(() if last else (list,)))
    groups: list[Any] = []
    if isinstance(base, dict):
        groups = expect(path, f"{key}.param_groups", base.get("param_groups", _MISSING), list)
        base = list(expect(path, f"{key}.state", base.get("state", _MISSING), dict).values())
    for number, part in enumerate([*groups, *base]):
        expect(path, f"{key}'s part {number}", part, dict)
    for number, group in enumerate(groups if last else ()):
        expect(path, f"{key}.param_groups[{number}].params", group.get("params", _MISSING), list)


def stage_of(optimizer: Mapping[str, Any], path: Path) -> int:
    """The stage that wrote a rank's states. DeepSpeed's optimizer for bf16, of stage 1, does not say.

    A member of its enum is pickled as the class with the value, or as the name of the member (Python 3.11.0 to 3.11.3).
    Raises `CheckpointError`, naming the file and the value, for anything else.
    """
    stage = optimizer.get("zero_stage", 1)
    number = stage
    if isinstance(stage, Record) and stage.name.endswith(f".{_STAGE}") and len(stage.args) == 1:
        number = stage.args[0]
    elif isinstance(stage, Name):
        owner, _, name = stage.text.rpartition(".")
        number = _STAGES.get(name) if owner.endswith(f".{_STAGE}") else None
    if type(number) is not int or not 1 <= number <= 3:
        raise CheckpointError(
            f"{path}: its zero_stage is {shown_value(stage)}, expected 1, 2 or 3, or a member of DeepSpeed's {_STAGE}"
        )
    return number


def shapes_of(model: Mapping[str, Any]) -> list[Shapes]:
    """`param_shapes`, as plain data."""
    return [{name: tuple(shape) for name, shape in shapes.items()} for shapes in model["param_shapes"]]


ALIGNMENT = 2
"""A group of stages 1 and 2 is padded to a multiple of this many elements for each rank."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `interval` of the flattened parameter `name`, from element `start` of a rank's piece of a group on."""

    name: str
    interval: Interval
    start: int


@dataclass(frozen=True, slots=True)
class GroupCut:
    """A group (stages 1 and 2) or a sub-group (stage 3) of optimizer group `group`, cut for ranks.

    Each rank has `partition` elements, of which `unpadded` (by rank) come before the padding at the end, and `pieces`
    (by rank) of parameters in them.
    """

    group: int
    members: tuple[str, ...]
    partition: int
    unpadded: tuple[int, ...]
    pieces: tuple[list[Piece], ...]


def cut_group(
    group: int, numels: Mapping[str, int], world: int, paddings: Sequence[int] | None = None
) -> GroupCut:
    """A group of stages 1 and 2; `paddings` are elements that follow each of its parameters."""
    places: dict[str, Interval] = {}
    end = 0
    for (name, numel), padding in zip(numels.items(), paddings or repeat(0), strict=False):
        places[name] = Interval(end, end + numel)
        end += numel + padding
    cut = Cut.equal(end, world, ALIGNMENT)
    pieces: tuple[list[Piece], ...] = tuple([] for _ in range(world))
    for name, place in places.items():
        for rank in cut.owners(place):
            held = cut.piece(rank)
            part = place.intersection(held)
            pieces[rank].append(Piece(name, part.shifted(-place.start), part.start - held.start))
    unpadded = tuple(cut.piece(rank).intersection(Interval(0, end)).numel for rank in range(world))
    return GroupCut(group, tuple(places), cut.piece_numel, unpadded, pieces)


def cuts_tensors(cut: GroupCut, numels: Mapping[str, int]) -> bool:
    """Whether some tensor lies on two ranks."""
    return any(part.interval.numel < numels[part.name] for pieces in cut.pieces for part in pieces)


def round_robin(count: int, world: int) -> list[int]:
    """The order of a group's parameters under `round_robin_gradients`: every N-th from the first, from the second, …"""
    return [index for first in range(world) for index in range(first, count, world)]


def cut_sub_group(group: int, numels: Mapping[str, int], world: int) -> GroupCut:
    """A sub-group of stage 3."""
    pieces: tuple[list[Piece], ...] = tuple([] for _ in range(world))
    size = 0
    for name, numel in numels.items():
        for rank, part in parts(numel, world):
            pieces[rank].append(Piece(name, part, size))
        size += part_size(numel, world)
    return GroupCut(group, tuple(numels), size, (size,) * world, pieces)


def part_size(numel: int, world: int) -> int:
    """Elements of a parameter that each rank holds at stage 3, padding included."""
    return Cut.equal(numel, world, alignment=1).piece_numel


def parts(numel: int, world: int) -> Iterator[tuple[int, Interval]]:
    """Each rank's elements of a parameter at stage 3; ranks that have none are left out."""
    cut, whole = Cut.equal(numel, world, alignment=1), Interval(0, numel)
    for rank in cut.owners(whole):
        yield rank, cut.piece(rank).intersection(whole)


def sub_groups(groups: Sequence[Mapping[str, int]], world: int, limit: int) -> Iterator[GroupCut]:
    """Sub-groups as DeepSpeed makes them: each ends with the parameter that fills `limit` elements a rank."""
    for number, numels in enumerate(groups):
        members: dict[str, int] = {}
        filled = 0
        for name, numel in numels.items():
            members[name] = numel
            filled += part_size(numel, world)
            if filled >= limit:
                yield cut_sub_group(number, members, world)
                members, filled = {}, 0
        if members:
            yield cut_sub_group(number, members, world)

"""Hugging Face folders: safetensors weights in one file or several with an index, whole or sharded by DCP.

    DIR/model.safetensors
    DIR/model-00001-of-00003.safetensors …  DIR/model.safetensors.index.json
    DIR/shard-00001-model-00001-of-00001.safetensors …    DCP's HuggingFaceStorageWriter: pieces of tensors a rank

The format has no checksums: what is read cannot be verified. A checkpoint knows parameters, not the class that they
belong to. The folder that the training began with does: its configuration and tokenizer are copied beside the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import entries_of, is_directory, is_file, read_whole, status_of
from zerokit.checkpoint.formats import description
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.dcp_items import rows
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.run import committed
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Header, Tensor, read_header
from zerokit.checkpoint.source import Stretch
from zerokit.checkpoint.strict import member, parse_json, typed
from zerokit.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES_INDEX = "pytorch_model.bin.index.json"

_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")
_UNREAD = {
    "adapter_model.safetensors": "an adapter of PEFT: merge it into its base first, with merge_and_unload()",
    "adapter_model.bin": "an adapter of PEFT: merge it into its base first, with merge_and_unload()",
    "pytorch_model.bin": "weights in a pickle: give that file itself, or save with save_pretrained, as safetensors",
    _PICKLES_INDEX: "weights in pickles: save them with save_pretrained, as safetensors",
}
_SHARDING = "DCP_SHARDING_INFO"


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder, or a single file of weights."""
    if is_file(path):
        return path.suffix == ".safetensors"
    if not is_directory(path) or status_of(path / NAME) is not None:
        return False
    known = (INDEX, SINGLE, *_UNREAD)
    # A run of zerokit's stays one, whatever lies beside its steps: adapters of PEFT, say.
    return (any(is_file(path / name) for name in known) or bool(_shards(path))) and not committed(path)


def _files(path: Path) -> list[Path]:
    if is_file(path):
        return [path]
    # First, as in transformers, whose save_pretrained leaves an older index beside it.
    if is_file(path / SINGLE):
        return [path / SINGLE]
    if not is_file(path / INDEX):
        return _shards(path)
    names = sorted(set(_weight_map(path / INDEX).values()))
    for name in names:
        beside = "/" not in name and name.endswith(".safetensors")
        require(beside, path / INDEX, f"names {name[:200]!r}, expected a safetensors file beside it")
    return [path / name for name in names]


def _shards(path: Path) -> list[Path]:
    return [path / entry.name for entry in entries_of(path) if _SHARD.fullmatch(entry.name)]


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises `CheckpointError`."""
    try:
        named = member(typed(parse_json(read_whole(index)), dict, "it"), "weight_map", dict)
        if not named or not all(isinstance(name, str) for name in named.values()):
            raise ValueError("its weight_map names no files")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of weights: {error}") from None
    return named


def _check_index(index: Path, files: list[Path], headers: list[Header]) -> None:
    """Raises `CheckpointError` unless every tensor is where the index says, and there is no other."""
    named = _weight_map(index)
    found = {name: file.name for file, header in zip(files, headers, strict=True) for name in header.tensors}
    for name in sorted(named.keys() | found.keys()):
        stated, actual = named.get(name, "no file"), found.get(name, "none of its files")
        both = f"says that {name[:200]!r} is in {stated}, but it is in {actual}"
        require(stated == actual, index, f"{both}: files of several saves may be mixed")


def read(path: Path) -> ForeignCheckpoint:
    """Read the weights at `path`. Raises `CheckpointError` for damaged or missing data."""
    files = _files(path)
    unread = next((name for name in _UNREAD if is_file(path / name)), "")
    require(files, path, f"only {unread}, {_UNREAD.get(unread)}")
    headers = [read_header(file) for file in files]
    if files[0] not in (path, path / SINGLE) and is_file(path / INDEX):
        _check_index(path / INDEX, files, headers)
    parameters: list[description.StoredParameter] = []
    buffers: list[description.StoredParameter] = []
    for name, (dtype, shape, stretches) in _stored(path, headers).items():
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        # A buffer lies in one place.
        floating = dtype.startswith(("float", "bfloat", "complex"))
        wide = floating or len(stretches) != 1 or size > description.LARGEST_BUFFER
        stream = description.StoredStream(dtype, stretches)
        (parameters if wide else buffers).append(description.as_frozen(name, shape, stream))
    identity = 0
    for file, header in zip(files, headers, strict=True):
        identity = crc32(repr((file.name, header)).encode(), identity)
    return ForeignCheckpoint(
        description.Description(
            format="huggingface",
            path=path,
            step=0,
            world=1,
            files=files,
            parameters=parameters,
            buffers=buffers,
            groups=None,
            identity=identity,
            dropped=description.beside(path) if is_directory(path) else [],
        )
    )


_Stored = tuple[str, tuple[int, ...], tuple[Stretch, ...]]


def _stored(path: Path, headers: list[Header]) -> dict[str, _Stored]:
    """Dtype, shape and places of each tensor: it is whole in one file, or DCP has cut it into several."""
    pieces: dict[str, list[tuple[tuple[int, ...], int, Tensor]]] = {}
    for number, header in enumerate(headers):
        placed = parse_json(header.metadata.get(_SHARDING, "{}").encode())
        for name, tensor in header.tensors.items():
            require(placed or name not in pieces, path, f"{name} is in two files")
            offsets = tuple(placed[name]["saved_offsets"]) if placed else (0,) * len(tensor.shape)
            inside = len(offsets) == len(tensor.shape) and all(type(n) is int and n >= 0 for n in offsets)
            require(inside, path, f"{name} is placed at {str(offsets)[:60]}")
            pieces.setdefault(name, []).append((offsets, number, tensor))
    stored: dict[str, _Stored] = {}
    for name, held in pieces.items():
        dtype = held[0][2].dtype
        ends = ([at + n for at, n in zip(offsets, tensor.shape, strict=True)] for offsets, _, tensor in held)
        shape = tuple(map(max, zip(*ends, strict=True)))
        stretches: dict[int, Stretch] = {}
        for offsets, number, tensor in held:
            both = f"{name} is {dtype} in one file, {tensor.dtype} in another"
            require(tensor.dtype == dtype, path, both)
            if not math.prod(tensor.shape):
                continue
            for interval, start in rows(shape, offsets, tensor.shape, f"{path}: {name}"):
                # A replicated tensor is written by several ranks: one of them is enough.
                place = tensor.offset + start * ELEMENT_BYTES[dtype]
                stretches.setdefault(interval.start, Stretch(number, interval, place))
        stored[name] = dtype, shape, tuple(stretches[start] for start in sorted(stretches))
    return stored


CONFIG = "config.json"
TEMPLATES = "additional_chat_templates"
"""A folder in which transformers keeps chat templates, if there are several."""

_COPIED = (
    CONFIG,
    "generation_config.json",
    "*processor_config.json",  # images, sound, video
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab*",
    "merges.txt",
    "bpe.codes",
    "*.model",  # SentencePiece
    "*.spm",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "*.py",  # the model's own code, for trust_remote_code
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.index.json")
"""Never copied, whatever they are called before that."""

_ADAPTER = re.compile(
    r"^base_model\.model\.|\.(lora_(A|B|embedding_A|embedding_B)|base_layer|modules_to_save)\."
)
"""Names that PEFT gives to parameters of the models that it wraps."""


def files_like(model: Path) -> dict[str, Path]:
    """The files of the folder `model` that belong beside weights, links followed, by their names in it.

    Raises `CheckpointError` unless there is a configuration among them.
    """
    require(
        is_file(model / CONFIG),
        model,
        f"has no {CONFIG}: give the folder that the model was loaded from, or make one with "
        "model.config.save_pretrained(DIR) and tokenizer.save_pretrained(DIR)",
    )
    names = [entry.name for entry in entries_of(model) if _copied(entry.name)]
    templates = (entry.name for entry in entries_of(model / TEMPLATES))
    names += [f"{TEMPLATES}/{name}" for name in templates if name.endswith(".jinja")]
    return {name: model / name for name in sorted(names) if is_file(model / name)}


def require_no_adapter(names: Iterable[str]) -> None:
    """Raise `CheckpointError` for names of a PEFT model, which `from_pretrained` does not know."""
    adapted = next(filter(_ADAPTER.search, names), None)
    if adapted is not None:
        raise CheckpointError(
            f"the checkpoint is that of a PEFT model ({adapted}), whose names from_pretrained() does not know: it "
            "would start with random weights. Load it into the model with zerokit.load(), then call, on all ranks, "
            "model.save_pretrained(DIR) for the adapter, or model.merge_and_unload() inside "
            "`with optimizer.gathered():`"
        )


def _copied(name: str) -> bool:
    def fits(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return fits(_COPIED) and not fits(_WEIGHTS)

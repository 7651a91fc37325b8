"""Hugging Face folders: safetensors weights in one file or several with an index, whole or sharded by DCP.

    DIR/model.safetensors
    DIR/model-00001-of-00003.safetensors …  DIR/model.safetensors.index.json
    DIR/shard-00001-model-00001-of-00001.safetensors …    DCP's HuggingFaceStorageWriter: pieces of tensors a rank

The format has no checksums: what is read cannot be verified. A checkpoint knows parameters, not the class that they
belong to. The folder that the training began with does: its configuration and tokenizer are copied beside the weights,
and its own weights' names and shapes, where it has any, must be those of the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import explained, make_directory, read_whole, sync_directory, write_file
from zerokit.checkpoint.formats import description
from zerokit.checkpoint.formats.dcp_items import rows
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Header, Tensor, read_header
from zerokit.checkpoint.source import Stretch
from zerokit.checkpoint.strict import member, parse_json, typed
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")
_UNREAD = {
    "adapter_model.safetensors": "an adapter of PEFT: merge it into its base first, with merge_and_unload()",
    "adapter_model.bin": "an adapter of PEFT: merge it into its base first, with merge_and_unload()",
    "pytorch_model.bin": "weights in a pickle: save them with save_pretrained, as safetensors",
    "pytorch_model.bin.index.json": "weights in pickles: save them with save_pretrained, as safetensors",
}
_SHARDING = "DCP_SHARDING_INFO"


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder, or a single file of weights."""
    if path.is_file():
        return path.suffix == ".safetensors"
    if not path.is_dir() or (path / NAME).exists():
        return False
    known = (INDEX, SINGLE, *_UNREAD)
    return any((path / name).is_file() for name in known) or bool(_shards(path))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # First, as in transformers, whose save_pretrained leaves an older index beside it.
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        names = sorted(set(weight_map(path / INDEX).values()))
        for name in names:
            if "/" in name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path / INDEX}: names {name[:200]!r}, expected a safetensors file beside it"
                )
        return [path / name for name in names]
    return _shards(path)


def _shards(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if _SHARD.fullmatch(entry.name))


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises `CheckpointError`."""
    try:
        named = member(typed(parse_json(read_whole(index)), dict, "it"), "weight_map", dict)
        if not named or not all(isinstance(name, str) for name in named.values()):
            raise ValueError("its weight_map names no files")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of weights: {error}") from None
    return named


def _check_index(path: Path, files: list[Path], headers: list[Header]) -> None:
    """Raises `CheckpointError` unless every tensor is where the index says, and there is no other."""
    named = weight_map(path / INDEX)
    found = {name: file.name for file, header in zip(files, headers, strict=True) for name in header.tensors}
    for name in sorted(named.keys() | found.keys()):
        if named.get(name) != found.get(name):
            raise CheckpointError(
                f"{path / INDEX}: says that {name[:200]!r} is in {named.get(name, 'no file')}, but it is in "
                f"{found.get(name, 'none of its files')}: files of several saves may be mixed"
            )


def read(path: Path) -> ForeignCheckpoint:
    """Read the weights at `path`. Raises `CheckpointError` for damaged or missing data."""
    with description.reading(path):
        files = _files(path)
        unread = [name for name in _UNREAD if (path / name).is_file()]
        if not files and unread:
            raise CheckpointError(f"{path}: only {unread[0]}, {_UNREAD[unread[0]]}")
        headers = [read_header(file) for file in files]
        if not (path.is_file() or (path / SINGLE).is_file()) and (path / INDEX).is_file():
            _check_index(path, files, headers)
        sharded = any(_SHARDING in header.metadata for header in headers)
        stored = _sharded(path, headers) if sharded else _whole(path, headers)
    parameters, buffers = [], {}
    for name, (dtype, shape, stretches) in stored.items():
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        stream = description.StoredStream(dtype, stretches)
        # A buffer lies in one place.
        if dtype.startswith(("float", "bfloat")) or len(stretches) != 1 or size > description.LARGEST_BUFFER:
            parameter = Parameter(name, shape, dtype, trainable=False)
            parameters.append(description.StoredParameter(parameter, {description.PARAM: stream}))
        else:
            buffers[name] = description.as_buffer(stream, shape, files)
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
            dropped=description.beside(path) if path.is_dir() else [],
        )
    )


_Stored = tuple[str, tuple[int, ...], tuple[Stretch, ...]]


def _whole(path: Path, headers: list[Header]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in stored:
                raise CheckpointError(f"{path}: {name} is in two files")
            stretches = description.whole(math.prod(tensor.shape), number, tensor.offset)
            stored[name] = tensor.dtype, tensor.shape, stretches
    return stored


def _sharded(path: Path, headers: list[Header]) -> dict[str, _Stored]:
    pieces: dict[str, list[tuple[tuple[int, ...], int, Tensor]]] = {}
    for number, header in enumerate(headers):
        placed = parse_json(header.metadata[_SHARDING].encode())
        for name, tensor in header.tensors.items():
            offsets = tuple(placed[name]["saved_offsets"])
            if len(offsets) != len(tensor.shape) or not all(type(n) is int and n >= 0 for n in offsets):
                raise CheckpointError(f"{path}: {name} is placed at {str(offsets)[:60]}")
            pieces.setdefault(name, []).append((offsets, number, tensor))
    stored: dict[str, _Stored] = {}
    for name, held in pieces.items():
        shape = tuple(
            max(offsets[i] + tensor.shape[i] for offsets, _, tensor in held) for i in range(len(held[0][0]))
        )
        stretches: dict[int, Stretch] = {}
        for offsets, number, tensor in held:
            if tensor.dtype != held[0][2].dtype:
                raise CheckpointError(
                    f"{path}: {name} is {held[0][2].dtype} in one file, {tensor.dtype} in another"
                )
            if not math.prod(tensor.shape):
                continue
            width = ELEMENT_BYTES[tensor.dtype]
            for interval, start in rows(shape, offsets, tensor.shape, f"{path}: {name}"):
                # A replicated tensor is written by several ranks: one of them is enough.
                stretches.setdefault(interval.start, Stretch(number, interval, tensor.offset + start * width))
        ordered = tuple(stretches[start] for start in sorted(stretches))
        stored[name] = held[0][2].dtype, shape, ordered
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

_DERIVED = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq|position_ids)$")
"""Buffers that older versions of transformers saved and newer ones compute: they may be missing."""

_ADAPTER = re.compile(
    r"^base_model\.model\.|\.(lora_(A|B|embedding_A|embedding_B)|base_layer|modules_to_save)\."
)
"""Names that PEFT gives to parameters of the models that it wraps."""

_SHOWN = 3

Shape = tuple[int, ...]


def copy_like(model: Path, work: Path) -> None:
    """Copy and sync everything but weights from the folder `model` into `work`. Links are followed.

    Raises `CheckpointError` where a file cannot be read or written.
    """
    for path in _listed(model):
        if path.is_file() and _copied(path.name):
            write_file(work / path.name, read_whole(path))
    if templates := _templates(model):
        make_directory(work / TEMPLATES)
        for path in templates:
            write_file(work / TEMPLATES / path.name, read_whole(path))
        sync_directory(work / TEMPLATES)


def copied_names(model: Path) -> set[str]:
    """The files that `copy_like` writes, as paths in its folder."""
    names = {path.name for path in _listed(model) if path.is_file() and _copied(path.name)}
    return names | {f"{TEMPLATES}/{path.name}" for path in _templates(model)}


def _templates(model: Path) -> list[Path]:
    return [path for path in _listed(model / TEMPLATES) if path.is_file() and path.suffix == ".jinja"]


def require_like(model: Path) -> None:
    """Raise `CheckpointError` unless the folder has a configuration."""
    with explained(model, "looked at"):
        present = (model / CONFIG).is_file()
    if not present:
        raise CheckpointError(
            f"{model}: has no {CONFIG}: give the folder that the model was loaded from, or make one with "
            "model.config.save_pretrained(DIR) and tokenizer.save_pretrained(DIR)"
        )


def check_like(model: Path, ours: Mapping[str, Shape], aliases: Mapping[str, str]) -> None:
    """Raise `CheckpointError` if weights in the folder `model` have other names or shapes than `ours`.

    Also for a PEFT model, which `from_pretrained` would not find under its names.

    Args:
        model: a folder with weights, with their index alone, or with neither: then nothing is compared.
        ours: every tensor's shape by its name.
        aliases: other names of tied tensors, and the name in `ours`.
    """
    adapted = next((name for name in ours if _ADAPTER.search(name)), None)
    if adapted is not None:
        raise CheckpointError(
            f"the checkpoint is that of a PEFT model ({adapted}), whose names from_pretrained() does not know: it "
            "would start with random weights. Load it into the model with zerokit.load(), then call, on all ranks, "
            "model.save_pretrained(DIR) for the adapter, or model.merge_and_unload() inside "
            "`with optimizer.gathered():`"
        )
    theirs = _weights(model)
    if theirs is None:
        return
    faults = min((_faults(prefix, ours, aliases, theirs) for prefix in _prefixes(ours, theirs)), key=len)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(
            f"{model}: its weights are not those of the checkpoint: {'; '.join(faults[:_SHOWN])}{more}. Give the "
            "folder of this very model, or one without weights: model.config.save_pretrained(DIR)"
        )


def _listed(folder: Path) -> list[Path]:
    with explained(folder, "listed"):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _copied(name: str) -> bool:
    def fits(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return fits(_COPIED) and not fits(_WEIGHTS)


def _weights(model: Path) -> dict[str, Shape | None] | None:
    """Names, and shapes as far as files of safetensors have them; None where there is neither weights nor an index."""
    for index in (INDEX, "pytorch_model.bin.index.json"):
        path = model / index
        if path.is_file():
            held = weight_map(path)
            shapes: dict[str, Shape | None] = dict.fromkeys(held)
            for file in sorted(set(held.values())):
                # A file of another folder is none of the model's.
                if Path(file).name == file and file.endswith(".safetensors") and (model / file).is_file():
                    shapes |= {name: shape for name, shape in _shapes(model / file).items() if name in held}
            return shapes
    path = model / SINGLE
    return dict(_shapes(path)) if path.is_file() else None


def _shapes(path: Path) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in read_header(path).tensors.items()}


def _prefixes(ours: Mapping[str, Shape], theirs: Mapping[str, Shape | None]) -> list[str]:
    """What the names of one side may begin with and those of the other not: "" and the model's inner module.

    `from_pretrained` takes weights of a GPT2Model, "wte.weight", for a GPT2LMHeadModel, "transformer.wte.weight".
    """
    prefixes = sorted({f"{name.split('.')[0]}." for name in (*ours, *theirs) if "." in name})
    return ["", *(prefix for prefix in prefixes if _distinct(prefix, ours) and _distinct(prefix, theirs))]


def _distinct(prefix: str, names: Collection[str]) -> bool:
    return len({name.removeprefix(prefix) for name in names}) == len(names)


def _faults(
    prefix: str, ours: Mapping[str, Shape], aliases: Mapping[str, str], theirs: Mapping[str, Shape | None]
) -> list[str]:
    """What is not the same, names taken without the prefix."""
    own = {name.removeprefix(prefix): shape for name, shape in ours.items()}
    tied = {alias.removeprefix(prefix): name.removeprefix(prefix) for alias, name in aliases.items()}
    faults, met = [], set()
    for full, shape in theirs.items():
        name = full.removeprefix(prefix)
        name = name if name in own else tied.get(name, name)
        if name not in own:
            if not _DERIVED.search(name):
                faults.append(f"{full} is not in the checkpoint")
            continue
        met.add(name)
        if shape is not None and shape != own[name]:
            faults.append(f"{full} is {list(shape)} there and {list(own[name])} in the checkpoint")
    faults += [f"{name} is missing" for name in own if name not in met and not _DERIVED.search(name)]
    return faults

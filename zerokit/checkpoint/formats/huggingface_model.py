"""Configuration and tokenizer of a Hugging Face folder, copied next to a checkpoint's weights.

A checkpoint knows parameters, not the class that they belong to. The folder that the training began with does; its
files are copied, and its weights' names and shapes, where it has any, must be those of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from zerokit.checkpoint.disk import explained, make_directory, read_whole, sync_directory, write_file
from zerokit.checkpoint.formats.huggingface import INDEX, SINGLE, weight_map
from zerokit.checkpoint.safetensors import read_header
from zerokit.errors import CheckpointError

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

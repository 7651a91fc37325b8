"""`consolidate --like`: a folder that `from_pretrained` takes as it is, or a refusal that names what differs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerokit
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import Content, write_run
from zerokit.checkpoint.formats.huggingface import check_like
from zerokit.checkpoint.safetensors import Stream
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter, Segment, build_layout

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def gpt2(**changes: int) -> Any:
    torch.manual_seed(8)
    options = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2} | changes
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(60)} | {"<unk>": 60}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    made.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    return made


def run_of(model: Any, path: Path) -> Path:
    """A run of two ranks with this model's weights, trained ones tied."""
    named = dict(model.named_parameters())
    aliases = {"transformer.wte.weight": ("lm_head.weight",)}
    parameters = tuple(
        Parameter(name, tuple(p.shape), aliases=aliases.get(name, ())) for name, p in named.items()
    )
    layout = build_layout([Segment(None, parameters)], world=2, bucket_bytes=0)
    streams = (Stream("master", "float32", tuple(range(len(parameters)))),)
    values = {("master", name): p.detach().numpy().tobytes() for name, p in named.items()}
    write_run(path, layout, Content(3, streams, values, (), (), {"step": 3}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run, and the model that it must give."""
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return run_of(model, tmp_path_factory.mktemp("trained") / "run"), model


LEFT_OUT = {"optimizer.pt", "training_args.bin", "trainer_state.json", "README.md", "tokenizer.bin"}


@pytest.fixture
def like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the hub, before training: weights, tokenizer, and what is nobody's business."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "like"
    gpt2().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name in LEFT_OUT:
        (folder / name).write_text("x")
    (folder / "onnx").mkdir()
    return folder


def test_from_pretrained_takes_the_folder(tmp_path: Path, trained: tuple[Path, Any], like: Path) -> None:
    run, wanted = trained
    done = command(
        tmp_path, "consolidate", str(run), "-o", "out", "--like", "like", "--max-shard-size", "20kB"
    )
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert re.fullmatch(r"\d+ files, \d+\.\d kB\n", done.stderr)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("w3 w59")["input_ids"] == [3, 59]
    assert loaded.chat_template == tokenizer().chat_template
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == load_file(like / "model.safetensors").keys()
    copied = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("model")}
    assert copied >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not copied & LEFT_OUT
    for name in copied - {"additional_chat_templates"}:
        assert (tmp_path / "out" / name).read_bytes() == (like / name).read_bytes()
    # What it has written itself, it replaces.
    zerokit.consolidate(run, tmp_path / "out", like=like, force=True, dtype="bf16")
    assert (tmp_path / "out" / "additional_chat_templates").is_dir()
    (tmp_path / "out" / "additional_chat_templates" / "mine").touch()
    with pytest.raises(CheckpointError, match="only an earlier output of this kind"):
        zerokit.consolidate(run, tmp_path / "out", like=like, force=True)


def inner_model(folder: Path) -> None:
    """As the hub's gpt2: names without "transformer.", and masks that newer versions compute."""
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}, folder / "model.safetensors")


def both_tied_names(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")


def linked(folder: Path) -> None:
    """As in the hub's cache: every file is a link to a blob."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            path.rename(blobs / path.name)
            path.symlink_to(os.path.join("..", "blobs", path.name))


def bin_index(folder: Path) -> None:
    """Names alone, of the older format."""
    (folder / "model.safetensors").unlink()
    names = [name for name, _ in gpt2().named_parameters()]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model-00001-of-00002.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def sharded(folder: Path, *, index_alone: bool = False, **changes: int) -> None:
    (folder / "model.safetensors").unlink()
    gpt2(**changes).save_pretrained(folder, max_shard_size="20kB")
    assert (folder / "model.safetensors.index.json").exists()
    for path in folder.glob("*.safetensors") if index_alone else ():
        path.unlink()


FORMS: dict[str, Callable[[Path], object]] = {
    "without weights": lambda folder: (folder / "model.safetensors").unlink(),
    "sharded": sharded,
    "index alone": partial(sharded, index_alone=True),
    "inner model": inner_model,
    "both tied names": both_tied_names,
    "linked": linked,
    "index of the older format": bin_index,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_same_model(tmp_path: Path, trained: tuple[Path, Any], like: Path, form: str) -> None:
    FORMS[form](like)
    out = zerokit.consolidate(trained[0], tmp_path / "out", like=like)
    assert (out / "config.json").is_file()
    assert not (out / "config.json").is_symlink()
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert not list(out.glob("*.bin*"))


def test_another_model_is_refused_and_leaves_nothing(
    tmp_path: Path, trained: tuple[Path, Any], like: Path
) -> None:
    shape = r"transformer.wte.weight is \[62, 24\] there and \[61, 24\] in the checkpoint"
    deeper = r"transformer.h.2.*is not in the checkpoint; .*; and 9 more. Give the folder of this very"
    changes: list[tuple[Callable[[Path], object], str]] = [
        (lambda folder: gpt2(vocab_size=62).save_pretrained(folder), shape),
        (lambda folder: gpt2(n_layer=3).save_pretrained(folder), deeper),
        (lambda folder: gpt2(n_layer=1).save_pretrained(folder), r"transformer.h.1.*is missing"),
        (partial(sharded, index_alone=True, n_layer=3), r"transformer.h.2.*is not in the checkpoint"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": []}'),
            r"model.safetensors.index.json: not an index of weights",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"like: has no config.json: .*save_pretrained"),
        (shutil.rmtree, r"like: has no config.json"),
    ]
    with pytest.raises(CheckpointError, match="the output is the source itself"):
        zerokit.consolidate(trained[0], like, like=like, force=True)
    for change, message in changes:
        change(like)
        with pytest.raises(CheckpointError, match=message):
            zerokit.consolidate(trained[0], tmp_path / "out", like=like)
        assert [path.name for path in tmp_path.iterdir() if path.name != "like"] == []


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    """Also beside a folder without weights: `from_pretrained` would know none of the names."""
    for name in (
        "base_model.model.lm_head.weight",
        "layers.0.q_proj.lora_A.default.weight",
        "h.base_layer.weight",
    ):
        with pytest.raises(CheckpointError, match=r"PEFT model .*save_pretrained\(DIR\).*merge_and_unload"):
            check_like(tmp_path, {name: (2, 2)}, {})

"""`consolidate --like`: a folder that `from_pretrained` takes as it is, or a refusal that names what differs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.cli.commands import zerokit as command
from tests.support.checkpoints import Content, write_run
from zerokit.checkpoint.extents import Stream
from zerokit.checkpoint.like import check_like
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


@pytest.fixture
def like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the hub, before training: weights, tokenizer, and what is nobody's business."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "like"
    gpt2().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", "README.md", "tokenizer.bin"):
        (folder / name).write_text("x")
    (folder / "onnx").mkdir()
    return folder


def test_from_pretrained_takes_the_folder(tmp_path: Path, trained: tuple[Path, Any], like: Path) -> None:
    run, wanted = trained
    done = command(tmp_path, "consolidate", str(run), "-o", "out", "--like", "like")
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert re.fullmatch(r"\d files, \d+\.\d kB\n", done.stderr)
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
    copied = {path.name for path in (tmp_path / "out").iterdir()} - {"model.safetensors"}
    assert copied >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not copied & {
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "README.md",
        "tokenizer.bin",
    }
    for name in copied - {"additional_chat_templates"}:
        assert (tmp_path / "out" / name).read_bytes() == (like / name).read_bytes()
    # What it has written itself, it replaces.
    zerokit.consolidate(run, tmp_path / "out", like=like, force=True, dtype="bf16")
    assert (tmp_path / "out" / "additional_chat_templates").is_dir()
    (tmp_path / "out" / "additional_chat_templates" / "mine").touch()
    with pytest.raises(CheckpointError, match="it is not replaced"):
        zerokit.consolidate(run, tmp_path / "out", like=like, force=True)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    gpt2().save_pretrained(folder, max_shard_size="20kB")
    assert (folder / "model.safetensors.index.json").exists()


def index_alone(folder: Path) -> None:
    sharded(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()


def inner_model(folder: Path) -> None:
    """As the hub's gpt2: names without "transformer.", and masks that newer versions compute."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}, folder / "model.safetensors")


def both_tied_names(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize(
    "change",
    [without_weights, sharded, index_alone, inner_model, both_tied_names, linked, bin_index],
    ids=lambda change: change.__name__,
)
def test_forms_of_the_same_model(
    tmp_path: Path, trained: tuple[Path, Any], like: Path, change: Callable[[Path], None]
) -> None:
    change(like)
    out = zerokit.consolidate(trained[0], tmp_path / "out", like=like)
    assert (out / "config.json").is_file()
    assert not (out / "config.json").is_symlink()
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert not list(out.glob("*.bin*"))


def other_vocabulary(folder: Path) -> None:
    gpt2(vocab_size=62).save_pretrained(folder)


def deeper(folder: Path) -> None:
    gpt2(n_layer=3).save_pretrained(folder)


def shallower(folder: Path) -> None:
    gpt2(n_layer=1).save_pretrained(folder)


def deeper_by_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    gpt2(n_layer=3).save_pretrained(folder, max_shard_size="20kB")
    for path in folder.glob("*.safetensors"):
        path.unlink()


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_vocabulary, r"transformer.wte.weight is \[62, 24\] there and \[61, 24\] in the checkpoint"),
        (deeper, r"transformer.h.2.*is not in the checkpoint; .*; and 9 more. Give the folder of this very"),
        (shallower, r"transformer.h.1.*is not there"),
        (deeper_by_index, r"transformer.h.2.*is not in the checkpoint"),
        (broken_index, r"model.safetensors.index.json: no index of weights"),
        (no_configuration, r"like: has no config.json: .*save_pretrained"),
        (nothing, r"like: has no config.json"),
    ],
)
def test_another_model_is_refused_and_leaves_nothing(
    tmp_path: Path, trained: tuple[Path, Any], like: Path, change: Callable[[Path], None], message: str
) -> None:
    change(like)
    with pytest.raises(CheckpointError, match=message):
        zerokit.consolidate(trained[0], tmp_path / "out", like=like)
    assert [path.name for path in tmp_path.iterdir() if path.name != "like"] == []


def test_the_folder_itself_is_never_the_output(tmp_path: Path, trained: tuple[Path, Any], like: Path) -> None:
    before = {path.name for path in like.iterdir()}
    with pytest.raises(CheckpointError, match="the output is the source itself"):
        zerokit.consolidate(trained[0], like, like=like, force=True)
    assert {path.name for path in like.iterdir()} == before


names = st.dictionaries(
    st.from_regex(r"(a|b)(\.(a|b)){0,2}", fullmatch=True),
    st.tuples(st.integers(1, 3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200)
@given(ours=names, theirs=names)
def test_generated_names_and_shapes(
    tmp_path_factory: pytest.TempPathFactory, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Accepted: the same names and shapes, but for one leading component that may be missing in some names."""
    from safetensors.numpy import save_file

    np = pytest.importorskip("numpy")
    folder = tmp_path_factory.getbasetemp() / "generated-like"
    folder.mkdir(exist_ok=True)
    save_file({name: np.zeros(shape) for name, shape in theirs.items()}, folder / "model.safetensors")

    def without(prefix: str, side: dict[str, Any]) -> list[tuple[str, Any]]:
        return sorted((name.removeprefix(prefix), shape) for name, shape in side.items())

    fits = any(
        without(prefix, ours) == without(prefix, theirs)
        for prefix in ("", "a.", "b.")
        if len(dict(without(prefix, ours))) == len(ours) and len(dict(without(prefix, theirs))) == len(theirs)
    )
    if fits:
        check_like(folder, ours, {})
        return
    with pytest.raises(CheckpointError, match="are not those of the checkpoint"):
        check_like(folder, ours, {})


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    """Also beside a folder without weights: `from_pretrained` would know none of the names."""
    for name in (
        "base_model.model.lm_head.weight",
        "layers.0.q_proj.lora_A.default.weight",
        "h.base_layer.weight",
    ):
        with pytest.raises(CheckpointError, match=r"PEFT model .*save_pretrained\(DIR\).*merge_and_unload"):
            check_like(tmp_path, {name: (2, 2)}, {})

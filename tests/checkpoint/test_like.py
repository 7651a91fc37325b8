"""`consolidate --like`: a folder that `from_pretrained` takes as it is."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zerokit
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import Content, write_run
from zerokit.checkpoint.formats.huggingface import require_no_adapter
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
    assert re.fullmatch(
        r"out: weights of step 3 in float32, \d+ files, \d+\.\d kB, verified and synced\n", done.stderr
    )
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


def test_links_are_followed_and_weights_passed_over(
    tmp_path: Path, trained: tuple[Path, Any], like: Path
) -> None:
    """As in the hub's cache, where every file is a link to a blob."""
    (tmp_path / "blobs").mkdir()
    for path in like.iterdir():
        if path.is_file():
            path.rename(tmp_path / "blobs" / path.name)
            path.symlink_to(os.path.join("..", "blobs", path.name))
    out = zerokit.consolidate(trained[0], tmp_path / "out", like=like)
    assert (out / "config.json").is_file()
    assert not (out / "config.json").is_symlink()
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert not list(out.glob("*.bin*"))


def test_a_folder_without_configuration_is_refused_and_leaves_nothing(
    tmp_path: Path, trained: tuple[Path, Any], like: Path
) -> None:
    with pytest.raises(CheckpointError, match="the output is the source itself"):
        zerokit.consolidate(trained[0], like, like=like, force=True)
    for change in (lambda folder: (folder / "config.json").unlink(), shutil.rmtree):
        change(like)
        with pytest.raises(CheckpointError, match=r"like: has no config.json: .*save_pretrained"):
            zerokit.consolidate(trained[0], tmp_path / "out", like=like)
        assert [path.name for path in tmp_path.iterdir() if path.name != "like"] == []


def test_a_model_with_adapters_is_refused() -> None:
    """`from_pretrained` would know none of the names."""
    for name in (
        "base_model.model.lm_head.weight",
        "layers.0.q_proj.lora_A.default.weight",
        "h.base_layer.weight",
    ):
        with pytest.raises(CheckpointError, match=r"PEFT model .*save_pretrained\(DIR\).*merge_and_unload"):
            require_no_adapter([name])

"""Inputs of every kind depend on the seed and the sample's number alone; bad text is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zerokit.bench.record.measured import Data
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import MASK, draw_seed, load, open_source, sample_text
from zerokit.bench.workloads.inputs import STANDARD_LIBRARY, SYNTHETIC, DataError, load_text

ROOT = Path(__file__).parents[3]
KINDS: list[tuple[Settings, tuple[int, ...]]] = [
    (Settings(model="gpt-tiny", seq_len=16, data="synthetic"), ()),
    (Settings(model="bert-base", seq_len=40, data="synthetic"), ()),
    (Settings(model="resnet50", image_size=32), (4, 3, 32, 32)),
    (Settings(model="mlp-mnist"), (4, 1, 28, 28)),
    (Settings(model="linear"), ()),
]


def batches(settings: Settings) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """What makes the micro-batch that begins at a sample."""
    take = open_source(settings)[1]
    return lambda first: take(range(first, first + settings.batch_size))


@pytest.mark.parametrize(("settings", "shape"), KINDS)
def test_a_batch_depends_on_its_number_and_the_seed_alone(settings: Settings, shape: tuple[int, ...]) -> None:
    batch_at = batches(settings)
    batch = batch_at(12)
    assert not shape or (tuple(batch[0].shape), batch[0].dtype) == (shape, torch.float32)
    assert all(len(tensor) == settings.batch_size and tensor.device.type == "cpu" for tensor in batch)
    again = batches(settings)(12)
    assert all(torch.equal(*pair) for pair in zip(batch, again, strict=True))
    for other in (batch_at(12 + settings.batch_size), batches(replace(settings, seed=7))(12)):
        assert not torch.equal(batch[0], other[0])
    # However many samples a batch has, and wherever it begins: each is its own.
    for size, first in ((2, 13), (3, 12)):
        other = batches(replace(settings, batch_size=size))(first)
        for mine, theirs in zip(batch, other, strict=True):
            assert torch.equal(mine[first - 12 : first - 12 + size], theirs)


def test_the_launcher_looks_at_data_and_memory_without_torch() -> None:
    code = """
import sys
from zerokit.bench.record.settings import Settings
from zerokit.bench.catalogue.engines import refuse_if_too_large, this_machine
from zerokit.bench.workloads.inputs import check_inputs
for model in ("gpt-tiny", "bert-base", "resnet50", "mlp-mnist", "linear"):
    settings = Settings(model=model, seq_len=16)
    check_inputs(settings)
    assert refuse_if_too_large(settings, this_machine()) is None
sys.exit(", ".join({"torch", "numpy", "transformers", "mlflow"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_masked_text_asks_for_as_many_bytes_of_each_sequence(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    batch_at = batches(Settings(model="bert-base", seq_len=100, batch_size=64, data=str(text)))
    tokens, targets = batch_at(0)
    asked = targets != -100
    assert asked.sum(1).tolist() == [15] * 64
    # The bytes count up, so that what stood anywhere follows from what was left alone.
    first = (tokens - torch.arange(100)) % 256
    original = (first.mode(1).values[:, None] + torch.arange(100)) % 256
    assert torch.equal(targets[asked], original[asked])
    assert torch.equal(tokens[~asked], original[~asked])
    masked = (tokens == MASK)[asked].float().mean().item()
    kept = (tokens == original)[asked].float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.05)
    assert kept == pytest.approx(0.1, abs=0.05)
    assert not (tokens == MASK)[~asked].any()


def test_what_the_record_says_of_a_model() -> None:
    text = load(Settings(model="gpt-tiny", seq_len=16, data="synthetic")).model
    assert (text.unit, text.units_per_sample, text.config["width"]) == ("tokens", 16, 32)
    images = load(Settings(model="mlp-mnist")).model
    assert (images.unit, images.units_per_sample, images.config["image_size"]) == ("images", 1, 28)
    # Forward and the weights' gradients of both layers, and the gradient of the second's input.
    assert images.flops_per_unit == 2 * (2 * 784 * 256 + 3 * 256 * 10)


def batch(text: bytes, *, seed: int, size: int = 4, length: int = 16) -> tuple[torch.Tensor, ...]:
    sample = sample_text(text, length)
    samples = [sample(draw_seed(seed=seed, sample=number)) for number in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))


@pytest.fixture(scope="module")
def library() -> tuple[bytes, Data]:
    return load_text(STANDARD_LIBRARY, limit=2**20)


def test_the_default_text_is_the_same_every_time(library: tuple[bytes, Data]) -> None:
    again = load_text(STANDARD_LIBRARY, limit=2**20)
    assert library == again
    assert (len(library[0]), library[1].truncated) == (2**20, True)
    assert b"import" in library[0]
    made, same, other = (load_text(SYNTHETIC, seed=seed)[0] for seed in (5, 5, 6))
    assert made == same != other


def test_targets_are_the_next_tokens_and_tokens_are_bytes_of_the_text(library: tuple[bytes, Data]) -> None:
    tokens, targets = batch(library[0], seed=1)
    assert tokens.dtype is targets.dtype is torch.int64
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for row, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True):
        assert bytes([*row, last]) in library[0]
    # Figures of different versions can only be compared while a batch stays what it was.
    tokens, _ = batch(bytes(range(256)), seed=0, size=3, length=4)
    assert tokens[:, 0].tolist() == [107, 11, 99]


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    files = {"c.txt": "3", "a.txt": "1", "b/z.md": "5", "b/a.md": "4", ".git/x": "no", ".y": "no"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    text, data = load_text(str(tmp_path))
    assert (text, data.files, data.truncated) == (b"1345", 4, False)
    for limit, whole in ((3, b"134"), (4, b"1345")):
        text, data = load_text(str(tmp_path), limit=limit)
        assert (text, data.truncated) == (whole, limit < 4)


def test_an_unreadable_file_and_an_empty_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission that is missing is feigned: root, as whom containers run tests, may read everything."""
    with pytest.raises(DataError, match="no text"):
        load_text(str(tmp_path))
    (tmp_path / "secret").write_text("text")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*secret: Permission denied"):
        load_text(str(tmp_path / "secret"))


def test_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345")
    settings = Settings(model="gpt-tiny", seq_len=4, batch_size=2, data=str(tmp_path / "short"))
    assert batches(settings)(0)[0].tolist() == [[49, 50, 51, 52]] * 2
    with pytest.raises(DataError, match=r"holds 5 bytes, but sequences of 5 tokens need at least 6"):
        batches(replace(settings, seq_len=5))

"""Every workload is known by name, with the size that its paper or its makers publish; what does not fit is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from zerokit.bench.catalogue.engines import ENGINES, require_known
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError

# Millions of parameters, as published: of the papers in the catalogue's comments, of the released weights
# (GPT-2, Llama, BERT with its masked-language head), of torchvision's tables (ResNet, Inception with both heads).
PUBLISHED = {
    "gpt2": 124.44,
    "gpt2-medium": 354.82,
    "gpt2-large": 774.03,
    "gpt2-xl": 1557.61,
    "llama-1b": 1235.81,
    "llama-7b": 6738.42,
    "llama-8b": 8030.26,
    "llama-13b": 13_015.86,
    "llama-30b": 32_528.94,
    "llama-65b": 65_285.66,
    "llama-70b": 68_976.65,
    "bert-base": 109.51,
    "resnet50": 25.557,
    "resnet152": 60.193,
    "inception-v3": 27.161,
    "mlp-mnist": 0.203530,
    # The paper names these by rounded sizes.
    "gpt3-125m": 125,
    "gpt3-350m": 356,
    "gpt3-760m": 760,
    "gpt3-1.3b": 1300,
    "gpt3-2.7b": 2650,
    "gpt3-6.7b": 6700,
    "gpt3-13b": 12_850,
    "gpt3-175b": 174_600,
}


@pytest.mark.parametrize(("name", "millions"), PUBLISHED.items())
def test_sizes_are_the_published_ones(name: str, millions: float) -> None:
    tolerance = 0.015 if name.startswith("gpt3-") else 1e-4
    assert describe(name).parameters == pytest.approx(millions * 1e6, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "unit", "data"),
    [
        ("gpt-tiny", "tokens", "standard-library"),
        ("bert-base", "tokens", "standard-library"),
        ("resnet50", "images", "synthetic"),
        ("linear", "samples", "synthetic"),
        ("mine.models:tiny", "samples", "synthetic"),
    ],
)
def test_unit_and_default_data_follow_from_the_kind(name: str, unit: str, data: str) -> None:
    assert (describe(name).unit, describe(name).default_data) == (unit, data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("resnet-50", "model 'resnet-50' is unknown: did you mean resnet50"),
        ("gpt3-175", "did you mean gpt3-175b"),
        ("zzz", "choose one of gpt-tiny, .*, inception-v3 \\(or package.module:factory"),
        ("", "is unknown"),
        ("mine.models:", "is not a factory: write package.module:function"),
        ("mine/models.py:tiny", "is not a factory"),
    ],
)
def test_unknown_names_are_refused_with_what_is_close(wrong: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        describe(wrong)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("gpt2", {"seq_len": 1025}, "seq_len 1025 exceeds the 1024 positions of gpt2"),
        ("gpt2", {"image_size": 224}, "gpt2 takes no images: leave image_size 224 out"),
        ("mine:tiny", {"image_size": 8}, "takes no images"),
        ("linear", {"data": "numbers.csv"}, "linear makes its own data: omit --data numbers.csv"),
        ("mine:tiny", {"data": "numbers.csv"}, "makes its own data"),
        ("mlp-mnist", {"image_size": 32}, "takes images of 28 pixels a side, not 32"),
        ("resnet50", {"image_size": 31}, "image_size 31 is too small for resnet50: at least 32"),
        ("resnet50", {"image_size": 32, "batch_size": 1}, "needs a batch of at least 2"),
        ("inception-v3", {"batch_size": 1}, "inception-v3 at 299 pixels needs a batch of at least 2"),
    ],
)
def test_sizes_and_data_that_do_not_fit_are_refused(name: str, asked: dict[str, Any], message: str) -> None:
    require_known(Settings(model=name))
    with pytest.raises(UsageError, match=message):
        require_known(Settings(model=name, **asked))


def test_sequences_do_not_matter_to_images_nor_synthetic_data_to_anyone() -> None:
    for name in ("resnet50", "linear", "mlp-mnist", "mine:tiny"):
        require_known(Settings(model=name, seq_len=10**6, data="synthetic"))


def test_a_missing_library_is_said_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert describe("gpt-tiny").missing is None
    assert "not installed here; pip install deepspeed" in (ENGINES["deepspeed"].missing or "")
    assert "pip install 'zerokit[hf]'" in (describe("bert-base").missing or "")
    assert "built by torchvision, which is not installed here" in (describe("inception-v3").missing or "")

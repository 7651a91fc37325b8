"""Models: their sizes, weights that depend on seed and name alone, losses that begin at chance and fall; FLOPs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zerokit.bench.catalogue.workloads import (
    WORKLOADS,
    BertConfig,
    Config,
    GPTConfig,
    InceptionConfig,
    LlamaConfig,
    ResNetConfig,
    describe,
    transformer_flops,
)
from zerokit.bench.record.record import utilisation
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import build, build_model, count_flops, load
from zerokit.bench.workloads.library import BatchNorm
from zerokit.bench.workloads.models import init_module, rotary_angles, rotate
from zerokit.errors import UsageError

transformers = pytest.importorskip("transformers")

TINY = ("gpt-tiny", "llama-tiny")
SMALL: dict[str, Config] = {
    "gpt": GPTConfig(vocabulary=300, positions=16, width=32, layers=2, heads=2),
    "llama": LlamaConfig(300, 16, 32, 2, 4, 2, 48, False, 10_000.0),
    "llama-tied": LlamaConfig(300, 16, 32, 2, 4, 4, 48, True, 10_000.0),
    "bert": BertConfig(300, 16, 32, 2, 2, 64),
    "resnet": ResNetConfig((1, 2, 1, 1), (16, 24, 32, 40), stem=8, classes=5),
}
LIBRARY = [name for name, workload in WORKLOADS.items() if workload.library == "transformers"]
# Ours, and those of the library as small as they go, by seed.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    **{
        name: partial(lambda name, seed: build(name, seed=seed), name)
        for name in (*TINY, "linear", "mlp-mnist")
    },
    **{name: partial(lambda name, seed: build_library(SMALL[name], seed), name) for name in SMALL},
}


def build_library(config: Config, seed: int = 0) -> nn.Module:
    library = "torchvision" if isinstance(config, InceptionConfig) else "transformers"
    return build_model(config, library, seed=seed)


def batch_of(config: Config) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if isinstance(config, ResNetConfig):
        return torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)
    tokens = torch.randint(0, 300, (4, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("name", [*LIBRARY, *SMALL])
def test_parameters_are_as_many_as_the_formula_says(name: str) -> None:
    config = SMALL.get(name) or describe(name).config
    assert config is not None
    with torch.device("meta"):
        model = build_library(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_gets_the_weights_and_buffers_of_one_in_memory(name: str) -> None:
    here = MODELS[name](3)
    torch.manual_seed(5)  # nothing may depend on it
    with torch.device("meta"):
        there = MODELS[name](3)
    there.to_empty(device="cpu")
    for module in reversed(list(there.modules())):  # in any order
        init_module(module)
    # `to_empty` unties weights, so that heads are compared as well.
    assert_equal(dict(here.state_dict()), dict(there.state_dict()))
    assert_equal(dict(here.named_buffers()), dict(there.named_buffers()))
    other = MODELS[name](4)
    assert not all(torch.equal(*pair) for pair in zip(here.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", TINY)
def test_a_decoder_guesses_evenly_in_fp32_and_sees_no_future(name: str) -> None:
    model = build(name)
    tokens = torch.arange(32).view(2, 16)
    targets = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert model(tokens, targets).item() == pytest.approx(math.log(256), abs=0.1)
    later = tokens.clone()
    later[:, 10:] += 100
    assert torch.equal(model(tokens)[:, :10], model(later)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(later)[:, 10:])
    half = model.bfloat16()
    assert (half(tokens).dtype, half(tokens, targets).dtype) == (torch.bfloat16, torch.float32)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 12, 8) for _ in range(2))
    cosines, sines = rotary_angles(12, 8, 10_000.0, torch.device("cpu"))
    products = rotate(query, cosines, sines) @ rotate(key, cosines, sines).transpose(-1, -2)
    for distance in range(12):
        diagonal = products[0, 0].diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM")])
def test_buffers_are_those_that_the_library_itself_computes(name: str, kind: str) -> None:
    inner = build_library(SMALL[name]).get_submodule("model")
    buffers = dict(inner.named_buffers())
    assert buffers
    assert_equal(buffers, dict(getattr(transformers, kind)(inner.config).named_buffers()))


@pytest.mark.parametrize("name", SMALL)
def test_an_untrained_model_guesses_evenly_and_learns(name: str) -> None:
    """Nothing is random in a forward pass: dropout would make engines and ranks differ."""
    model, batch = build_library(SMALL[name]), batch_of(SMALL[name])
    assert model.training
    assert model(*batch).item() == model(*batch).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert name == "resnet" or losses[0] == pytest.approx(math.log(300), abs=0.2)
    assert losses[-1] < losses[0] - 0.3
    assert loss.dtype is torch.float32


def test_half_precision_images_meet_statistics_in_fp32() -> None:
    model = build_library(SMALL["resnet"])
    images, labels = batch_of(SMALL["resnet"])
    exact = model(images, labels).item()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    before = next(module for module in model.modules() if isinstance(module, BatchNorm)).running_var
    assert before is not None
    assert before.dtype is torch.float32
    assert model(images.bfloat16(), labels).item() == pytest.approx(exact, rel=0.05)


def test_inception_is_built_where_torchvision_is_installed() -> None:
    pytest.importorskip("torchvision")
    config = InceptionConfig(classes=7)
    with torch.device("meta"):
        model = build_library(InceptionConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == InceptionConfig().parameters
    small = build_library(config)
    assert sum(parameter.numel() for parameter in small.parameters()) == config.parameters
    assert not [module for module in small.modules() if isinstance(module, nn.Dropout) and module.p]
    loss = small(torch.randn(2, 3, 299, 299), torch.tensor([1, 2]))
    loss.backward()
    assert math.isfinite(loss.item())
    assert replace(config, classes=1000) == InceptionConfig()


def test_a_torchvision_of_another_torch_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(
        UsageError, match=r"does not work with this torch \(operator torchvision::nms does not"
    ):
        build_library(InceptionConfig())


H100 = "NVIDIA H100 80GB HBM3"
# From llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0), some rows of the table "H100 80GB BF16":
# layers, width, length, GPUs, MFU in percent, tokens a second of all GPUs, parameters.
LLM_FOUNDRY = [
    (80, 8192, 2048, 64, 42.57, 66_523, 64_862_437_376),
    (32, 4096, 65536, 8, 28.59, 15_654, 6_918_905_856),
    (32, 2560, 512, 8, 46.32, 223_721, 2_647_905_280),
    (24, 1536, 2048, 16, 37.89, 1_096_819, 760_470_528),
]


def mfu_percent(tokens_per_s: float, flops: float) -> float:
    reached = utilisation(tokens_per_s, flops, H100, "bf16")
    assert reached is not None
    return reached.mfu * 100.0


def test_mfu_is_the_published_one() -> None:
    for layers, width, length, gpus, percent, tokens_per_s, parameters in LLM_FOUNDRY:
        flops = transformer_flops(int(parameters), layers=layers, width=width, length=length)
        assert mfu_percent(tokens_per_s / gpus, flops) == pytest.approx(percent, rel=1e-3)
    text = describe("llama-8b").text  # torchtitan's, which leaves the table out that is only looked up
    assert text is not None
    flops, convention = text.flops(8192)
    assert [mfu_percent(rate, flops) for rate in (5762, 6667)] == pytest.approx([33.7, 39.0], abs=0.1)
    assert "N = 7,504,924,672" in convention


@pytest.mark.parametrize("name", ["gpt-5m", "llama-1b"])
def test_the_formula_is_what_torch_counts(name: str) -> None:
    """Torch counts the products alone; what it leaves out (norms, biases) is under 1 % of them."""
    text = describe(name).text
    assert text is not None
    length = 128
    tokens = torch.zeros(2, length, dtype=torch.int64)
    counted = count_flops(lambda: build(name), (tokens, tokens))
    assert counted / (2 * length) == pytest.approx(text.flops(length)[0], rel=0.01)


def test_an_image_costs_what_is_published() -> None:
    """ResNet-50 at 224 pixels: 4.09 G multiplications forward, twice that backward but for the first layer's input."""
    first = 2 * 64 * 7 * 7 * 3 * 112 * 112
    for recompute in (False, True):  # what runs again is no work on the model
        model = load(Settings(model="resnet50", batch_size=2, recompute=recompute)).model
        assert model.flops_per_unit == pytest.approx(3 * 2 * 4.09e9 - first, rel=2e-3)
        assert "FlopCounterMode" in (model.flops_convention or "")

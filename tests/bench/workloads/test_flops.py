"""FLOPs, and with them MFU, are those that others publish."""

from __future__ import annotations

import pytest
import torch

from zerokit.bench.catalogue.workloads import describe, transformer_flops
from zerokit.bench.record.record import utilisation
from zerokit.bench.workloads.build import build, count_flops

H100 = "NVIDIA H100 80GB HBM3"
# Layers and width by the size that its table names.
MPT = {
    "70b": (80, 8192),
    "30b": (48, 7168),
    "13b": (40, 5120),
    "7b": (32, 4096),
    "3b": (32, 2560),
    "1b": (24, 2048),
    "760m": (24, 1536),
}
# From llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0), table "H100 80GB BF16": size, length, GPUs, MFU
# in percent, tokens a second of all GPUs, parameters. Some rows with five digits of throughput or more.
LLM_FOUNDRY = [
    ("70b", 2048, 64, 42.57, 66_523, 64_862_437_376),
    ("30b", 8192, 8, 29.92, 11_072, 30_019_254_272),
    ("13b", 32768, 8, 31.68, 15_812, 13_011_240_960),
    ("7b", 65536, 8, 28.59, 15_654, 6_918_905_856),
    ("3b", 512, 8, 46.32, 223_721, 2_647_905_280),
    ("1b", 65536, 8, 26.34, 44_050, 1_445_974_016),
    ("760m", 2048, 16, 37.89, 1_096_819, 760_470_528),
]


@pytest.mark.parametrize(("size", "length", "gpus", "percent", "tokens_per_s", "parameters"), LLM_FOUNDRY)
def test_mfu_is_the_published_one(
    size: str, length: int, gpus: int, percent: float, tokens_per_s: int, parameters: int
) -> None:
    layers, width = MPT[size]
    flops = transformer_flops(parameters, layers=layers, width=width, length=length)
    reached = utilisation(tokens_per_s / gpus, flops, H100, "bf16")
    assert reached is not None
    assert reached.mfu * 100.0 == pytest.approx(percent, rel=1e-3)


@pytest.mark.parametrize(("tokens_per_s", "percent"), [(5762, 33.7), (6667, 39.0)])
def test_mfu_of_torchtitans_llama_leaves_the_looked_up_table_out(tokens_per_s: int, percent: float) -> None:
    text = describe("llama-8b").text
    assert text is not None
    flops, convention = text.flops(8192)
    reached = utilisation(tokens_per_s, flops, H100, "bf16")
    assert reached is not None
    assert reached.mfu * 100.0 == pytest.approx(percent, abs=0.1)
    assert "N = 7,504,924,672" in convention


def test_no_device_no_mfu() -> None:
    assert utilisation(1000.0, 1e9, "cpu", "fp32") is None


@pytest.mark.parametrize("name", ["gpt-5m", "llama-1b"])
def test_the_formula_is_what_torch_counts(name: str) -> None:
    """Torch counts the products alone; what it leaves out (norms, biases) is under 1 % of them."""
    text = describe(name).text
    assert text is not None
    length = 128
    tokens = torch.zeros(2, length, dtype=torch.int64)
    counted, _ = count_flops(lambda: build(name), (tokens, tokens))
    assert counted / length == pytest.approx(text.flops(length)[0], rel=0.01)


def test_an_image_costs_what_is_published() -> None:
    """ResNet-50 at 224 pixels: 4.09 G multiplications forward, twice that backward but for the first layer's input."""
    pytest.importorskip("transformers")
    batch = (torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.int64))
    flops, convention = count_flops(lambda: build("resnet50"), batch)
    first = 2 * 64 * 7 * 7 * 3 * 112 * 112
    assert flops == pytest.approx(3 * 2 * 4.09e9 - first, rel=2e-3)
    assert "FlopCounterMode" in convention

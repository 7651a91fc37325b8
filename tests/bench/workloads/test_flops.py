"""FLOPs, and with them MFU, are those that others publish."""

from __future__ import annotations

import pytest
import torch

from zerokit.bench.catalogue.workloads import describe, transformer_flops
from zerokit.bench.record.record import utilisation
from zerokit.bench.workloads.build import build, count_flops

H100 = "NVIDIA H100 80GB HBM3"
# From llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0), table "H100 80GB BF16", some rows
# Layers, width, length, GPUs, MFU in percent, tokens a second of all GPUs, parameters.
LLM_FOUNDRY = [
    (80, 8192, 2048, 64, 42.57, 66_523, 64_862_437_376),
    (32, 4096, 65536, 8, 28.59, 15_654, 6_918_905_856),
    (32, 2560, 512, 8, 46.32, 223_721, 2_647_905_280),
    (24, 1536, 2048, 16, 37.89, 1_096_819, 760_470_528),
]


@pytest.mark.parametrize(
    ("layers", "width", "length", "gpus", "percent", "tokens_per_s", "parameters"), LLM_FOUNDRY
)
def test_mfu_is_the_published_one(
    layers: int, width: int, length: int, gpus: int, percent: float, tokens_per_s: int, parameters: int
) -> None:
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

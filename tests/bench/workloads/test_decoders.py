"""The built-in models have the sizes they claim, and weights that depend on seed and name alone."""

from __future__ import annotations

import math

import pytest
import torch

from zerokit.bench.workloads.build import build
from zerokit.bench.workloads.initialise import init_module
from zerokit.bench.workloads.models import Decoder, rotary_angles, rotate

TINY = ("gpt-tiny", "llama-tiny")


def decoder(name: str, seed: int = 0) -> Decoder:
    model = build(name, seed=seed)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name", TINY)
def test_a_model_built_on_meta_gets_the_weights_of_one_built_in_memory(name: str) -> None:
    here = decoder(name, 3)
    with torch.device("meta"):
        there = decoder(name, 3)
    there.to_empty(device="cpu")
    for module in reversed(list(there.modules())):  # in any order
        init_module(module)
    # `to_empty` unties weights, so that the head is compared as well.
    mine, theirs = here.state_dict(), there.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("name", TINY)
def test_another_seed_gives_other_weights(name: str) -> None:
    assert not torch.equal(decoder(name, 0).tokens.weight, decoder(name, 1).tokens.weight)


@pytest.mark.parametrize("name", TINY)
def test_an_untrained_model_guesses_evenly_and_sees_no_future(name: str) -> None:
    model = decoder(name)
    tokens = torch.arange(32).view(2, 16)
    targets = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert model(tokens, targets).item() == pytest.approx(math.log(256), abs=0.1)

    later = tokens.clone()
    later[:, 10:] += 100
    assert torch.equal(model(tokens)[:, :10], model(later)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(later)[:, 10:])


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_fp32_in_a_half_precision_model(name: str) -> None:
    model = decoder(name).bfloat16()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert model(tokens).dtype is torch.bfloat16
    assert model(tokens, tokens).dtype is torch.float32


def test_the_gpt_head_is_its_embedding() -> None:
    model = decoder("gpt-tiny")
    assert model.head.weight is model.tokens.weight


def test_rotary_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 12, 8) for _ in range(2))
    cosines, sines = rotary_angles(12, 8, 10_000.0, torch.device("cpu"))
    products = rotate(query, cosines, sines) @ rotate(key, cosines, sines).transpose(-1, -2)
    for distance in range(12):
        diagonal = products[0, 0].diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)

"""A model run once on fake tensors: micro-batches of all sizes from one recording, recomputation, work, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from zerokit.bench.plans.subjects import subject_named
from zerokit.errors import UsageError
from zerokit.planning.products import products_of
from zerokit.planning.trace import Traces
from zerokit.planning.work import Product, UnitWork
from zerokit.training.recomputation import blocks_of

OWN = "tests.planning.models"


def flops(units: tuple[UnitWork, ...], part: int) -> int:
    return sum(product.flops for unit in units for product in unit.parts[part].products)


@pytest.mark.parametrize(
    ("model", "recompute"),
    [("gpt-tiny", True), ("llama-tiny", False), (f"{OWN}:qwen", True), (f"{OWN}:contrastive", False)],
)
def test_one_recording_serves_micro_batches_of_all_sizes(model: str, recompute: bool) -> None:
    subject = subject_named(model)
    general = Traces(subject, on_cuda=False)
    exact = Traces(subject, on_cuda=False, exactly=True)
    for samples in (2, 5, 5000):
        one = general.get(samples, "bf16", recompute=recompute)
        other = exact.get(samples, "bf16", recompute=recompute)
        assert [(e.moment, e.units) for e in one.events] == [(e.moment, e.units) for e in other.events]
        assert np.array_equal(one.levels, other.levels)
        assert one.work == other.work


def test_recomputation_holds_less_and_repeats_the_forward_of_blocks() -> None:
    traces = Traces(subject_named("gpt-5m"), on_cuda=False)
    kept = traces.get(4, "fp32", recompute=False)
    again = traces.get(4, "fp32", recompute=True)
    assert again.levels.max() < kept.levels.max() / 2
    assert flops(kept.work.units, 2) == 0
    assert 0 < flops(again.work.units, 2) < flops(again.work.units, 0)
    assert flops(again.work.units, 1) == flops(kept.work.units, 1)


def test_dropout_is_recomputed_and_attention_with_it_fused_as_on_cuda() -> None:
    subject = subject_named(f"{OWN}:dropping")
    again = Traces(subject, on_cuda=True).get(2, "bf16", recompute=True)
    assert flops(again.work.units, 2) > 0
    attention = [
        one for use in again.work.units for part in use.parts for one in part.products if one.count > 1
    ]
    assert attention == [Product(8, 8, 8, 8)] * (2 + 5)


def test_flops_are_those_of_the_products() -> None:
    trace = Traces(subject_named("mlp-mnist"), on_cuda=False).get(8, "fp32", recompute=False)
    weights = 784 * 256 + 256 * 10
    assert flops(trace.work.units, 0) == 2 * 8 * weights
    # Backward makes the gradients of all weights, and of the one input that needs them.
    assert flops(trace.work.units, 1) == 2 * 8 * (weights + 256 * 10)


def test_the_products_of_experts_and_of_recurrent_layers_are_counted() -> None:
    rows, experts, weights = torch.empty(12, 8), torch.empty(4, 8, 16), torch.empty(12, 16)
    assert products_of("_grouped_mm", (rows, experts), []) == [Product(12, 16, 8)]
    assert products_of("_grouped_mm", (rows.T, weights), []) == [Product(8, 16, 12)]
    layer = torch.empty(5, 2, 3), torch.empty(16, 3), torch.empty(16, 4)
    assert products_of("mkldnn_rnn_layer", layer, []) == [Product(10, 16, 7)]
    assert products_of("mkldnn_rnn_layer_backward", layer, []) == [Product(10, 7, 16), Product(7, 16, 10)]


def test_blocks_in_lists_of_lists_are_recomputed() -> None:
    lists = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(3))
    assert [type(block) for block in blocks_of(nn.Sequential(lists))] == [nn.Linear] * 6


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("squares", "do not grow evenly: give one --batch-size"),
        ("mixing", "expected scalar type"),
        ("branching", r"cannot be traced: running it once on fake tensors failed \(.*\.item\(\)"),
        ("no_loss", r"must return the loss, a scalar, not a tensor of shape \[2, 4\]"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_in_a_sentence(
    model: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    exactly = model != "squares"
    traces = Traces(subject_named(f"{OWN}:{model}"), on_cuda=False, exactly=exactly)
    with pytest.raises(UsageError, match=message):
        traces.get(2, "fp32", recompute=False)
    assert not caplog.records

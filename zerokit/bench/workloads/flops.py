"""How many FLOPs a unit of a workload's throughput costs, forward and backward, without recomputation.

A multiplication and an addition count as two. Attention counts whole, whether or not half of it is masked, as in PaLM
(arXiv:2204.02311, appendix B) and in the published figures that are compared with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zerokit.bench.catalogue.sizes import TextConfig


def transformer_flops(multiplied: int, *, layers: int, width: int, length: int) -> float:
    """A token's FLOPs: 6N + 12·L·d·s.

    Args:
        multiplied: N, the parameters that take part in a product for every token.
        layers: L.
        width: d, of the residual.
        length: s, tokens a sequence.
    """
    return 6.0 * multiplied + 12.0 * layers * width * length


def text_flops(config: TextConfig, length: int) -> tuple[float, str]:
    """FLOPs a token of a language model at sequences of `length`, and in words how they were counted."""
    multiplied = config.parameters - config.looked_up
    flops = transformer_flops(multiplied, layers=config.layers, width=config.width, length=length)
    return flops, (
        f"6N + 12·L·d·s a token, N = {multiplied:,}: all parameters but embeddings that are only looked up; "
        f"L = {config.layers}, d = {config.width}, s = {length}, attention whole"
    )


def count_flops(build: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> tuple[float, str]:
    """FLOPs a sample of any other model, and in words how they were counted.

    Nothing is computed: model and batch are on meta. Raises whatever a model raises that cannot run there.

    Args:
        build: makes the model, whose `forward(*batch)` is the loss.
        batch: any of its micro-batches; the first dimension of its first tensor counts samples.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = build()
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(*(tensor.to("meta") for tensor in batch))
        loss.backward()
    return counter.get_total_flops() / len(batch[0]), (
        "counted by torch's FlopCounterMode over forward and backward: matrix products and convolutions only"
    )

"""Planned beside published memory, row by row: `python -m benchmarks.plan_memory`.

Rows of `plan_rows.json` whose sources say what a GPU held at the peak, which is reached in the backward of the loss.
The model is run on fake tensors as its source runs it; layout, placement and schedule are the runtime's own; the bytes
of an element in shards are FSDP's. These sources free the root's parameters after forward, so what zerokit keeps
gathered does not count. Reserved memory includes the pools that torch's allocator keeps for each of FSDP's streams: it
is only checked to be more than what is planned.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.measuring import bar_holds, plain_table, read_options
from benchmarks.plan_rows import SHAPES, PublishedMemory, Row, read_rows
from zerokit.bench.workloads.models import Decoder
from zerokit.placement import Mesh, Placement
from zerokit.planning.memory import StepMemory
from zerokit.planning.replay import Step
from zerokit.planning.subject import Subject
from zerokit.planning.trace import Traces
from zerokit.sizes import ElementBytes
from zerokit.training.recomputation import blocks_of

BAR = 0.05


class Model(nn.Module):
    """A Llama and its loss, which is computed in fp32 or in the dtype of the logits."""

    def __init__(self, row: Row, memory: PublishedMemory) -> None:
        super().__init__()
        self.decoder = Decoder(SHAPES[row.model])
        self._fp32 = memory.loss == "fp32"
        for block in blocks_of(self):
            options = _RECOMPUTATION[memory.recompute]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.decoder(tokens).flatten(0, 1)
        if self._fp32:
            return F.cross_entropy(logits.float(), targets.flatten())
        self.logits = logits  # a variable of the training loop
        return F.cross_entropy(logits, targets.flatten())


def _keep_every_second_product() -> Any:
    """torchtitan's `selective_ac_option = "op"`: attention and every second product are kept, all else runs again."""
    products = {False: 0, True: 0}

    def choose(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        kept = "scaled_dot_product" in str(operation)
        if operation == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


_RECOMPUTATION: dict[str, dict[str, Any]] = {
    "all": {},
    "operations": {"context_fn": _keep_every_second_product},
}


def plan_memory(row: Row) -> int:
    """The bytes that a GPU holds at the peak."""
    assert row.memory is not None

    def batch(samples: int) -> tuple[Tensor, ...]:
        tokens = torch.zeros(samples, row.seq_len, dtype=torch.int64)
        return tokens, tokens.clone()

    subject = Subject(row.model, partial(Model, row, row.memory), batch, "tokens", row.seq_len)
    trace = Traces(subject, on_cuda=True, exactly=True).get(row.micro_batch, "bf16", recompute=False)
    sizes = ElementBytes(2, row.reduce_bytes, 0, row.memory.held_bytes - 2 - row.reduce_bytes)
    placement = Placement.of(3, Mesh(1, row.gpus))
    step = Step(trace.layout.for_world(row.gpus), placement, sizes, on_cuda=True)
    planned = StepMemory(trace, step, accumulate=row.accumulate).of(trace)
    return planned.total - planned.gathered


def main() -> int:
    """Print all rows with published memory. Returns 1 if the bar is missed."""
    read_options(__doc__, None)
    lines, errors, above = list[list[str]](), list[float](), list[float]()
    for row in read_rows():
        if row.memory is None:
            continue
        gib = plan_memory(row) / 2**30
        error = gib / row.memory.gib - 1
        (above if row.memory.reserved else errors).append(error)
        published = f"{row.memory.gib:.1f}{' reserved' if row.memory.reserved else ''}"
        cell = (row.model, str(row.seq_len), str(row.gpus), str(row.micro_batch))
        lines.append([*cell, published, f"{gib:.1f}", f"{error:+.1%}", row.table])
    columns = ["model", "seq", "GPUs", "batch", "published", "planned", "error", "table"]
    print(plain_table("GiB on a GPU", columns, lines))
    holds = bar_holds("allocated memory, worst error", max(map(abs, errors)), BAR)
    return 0 if bar_holds("reserved memory, most that is planned above it", max(above), 0.0) and holds else 1


if __name__ == "__main__":
    sys.exit(main())

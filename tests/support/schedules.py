"""What a rank issues, and when: a chain of blocks is trained on a fake group, and each collective is noted down.

    training = Training(stage=3, blocks=3)
    training.step([0, 1, 2])
    training.step([0, 1, 2])
    training.told()     # "g0 g1 f0 g2 f1 f2 b2 g1 …": gathers and reductions, between the uses in forward and backward

Only the optimizer's public interface is used, and the two methods of `Collectives` that move units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import zerokit
from zerokit.placement import stage_of
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.collectives.route import Kind

WIDTH = 8
PADDED_BYTES = 4 * 128
"""A block's weights as two ranks hold them."""


@contextmanager
def fake_rank(world: int = 2) -> Iterator[None]:
    """Inside, this process is rank 0 of a group of which nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A product, maybe of a frozen weight with an adapter; tells when forward and backward are inside it."""

    def __init__(
        self, index: int, note: Callable[[str, int], None], *, trainable: bool, adapted: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=trainable and not adapted)
        self.adapter = nn.Parameter(torch.ones(WIDTH, WIDTH)) if adapted else None
        self.index, self.note = index, note

    def forward(self, x: Tensor) -> Tensor:
        self.note("f", self.index)
        y = x @ self.weight.t()
        if self.adapter is not None:
            y = y + x @ self.adapter
        if y.requires_grad:
            y.register_hook(lambda _: self.note("b", self.index))
        return y * 1


class Chain(nn.Module):
    """Uses the blocks of `uses` one after the other, and a scale of its own at both ends if it has one."""

    def __init__(
        self,
        blocks: int,
        note: Callable[[str, int], None],
        frozen: Sequence[int],
        *,
        scaled: bool,
        adapted: bool,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None
        self.blocks = nn.ModuleList(
            [Block(i, note, trainable=i not in frozen, adapted=adapted) for i in range(blocks)]
        )
        self.uses: Sequence[int] = range(blocks)
        self.recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * self.scale
        for index in self.uses:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x if self.scale is None else x * self.scale


CURRENT: list[Training] = []
"""The last one that was made, which is at work."""


class Training:
    """A chain, its optimizer, and the record. Units are numbered as they lie in the line."""

    def __init__(
        self,
        stage: int,
        blocks: int = 4,
        *,
        frozen: Sequence[int] = (),
        scaled: bool = False,
        adapted: bool = False,
        **options: Any,
    ) -> None:
        self.record: list[str] = []
        self.resident: list[int] = []
        """Units in memory at each use, in forward and backward; stage 3 alone counts them."""
        self.model = Chain(blocks, self._use, frozen, scaled=scaled, adapted=adapted)
        self.optimizer = zerokit.ZeroOptimizer(
            self.model,
            torch.optim.SGD,
            stage=stage_of(stage),
            precision="fp32",
            bucket_mb=1e-6,
            lr=0.0,
            **options,
        )
        self.x = torch.ones(2, WIDTH, requires_grad=True)
        CURRENT[:] = [self]

    def _use(self, kind: str, index: int) -> None:
        self.record.append(f"{kind}{index}")
        self.resident.append(self.units_in_memory())

    def units_in_memory(self) -> int:
        return self.optimizer.memory().gathered // PADDED_BYTES

    def note_collective(self, kind: str, unit: int) -> None:
        self.record.append(f"{kind}{unit}")

    def forward(self, uses: Sequence[int] | None = None) -> Tensor:
        self.model.uses = range(len(self.model.blocks)) if uses is None else uses
        loss: Tensor = self.model(self.x).sum()
        return loss

    def step(self, uses: Sequence[int] | None = None) -> None:
        self.optimizer.backward(self.forward(uses))
        self.update()

    def update(self) -> None:
        self.record.append("step")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def told(self, kinds: str = "grfbs") -> str:
        """What was noted since the last call, without what is of no kind of these."""
        record, self.record, self.resident = self.record, [], []
        return " ".join(entry for entry in record if entry[0] in kinds)


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, `Training`s note the collectives of their units."""
    start = Collectives.start

    def note(collectives: Collectives, kind: Kind, unit: int, *rest: Any) -> Any:
        if CURRENT:
            CURRENT[-1].note_collective("gr"[kind], unit)
        return start(collectives, kind, unit, *rest)

    with fake_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "start", note)
        yield
    CURRENT.clear()

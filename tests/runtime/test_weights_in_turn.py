"""Whole weights one after another: the bits of a consolidated file, one unit at a time, and loops that end early."""

from __future__ import annotations

import gc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from zerokit.errors import UsageError
from zerokit.placement import stage_of
from zerokit.runtime.precision import DtypeName
from zerokit.runtime.torch_internals import without_torch_function

CASES: list[dict[str, Any]] = [
    *({"stage": stage, "precision": precision} for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
]


class Net(nn.Module):
    """Blocks, a frozen one, a tied weight, and integers that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(4)])
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.blocks[0].weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def made(stage: int, precision: DtypeName, steps: int = 2) -> tuple[Net, zerokit.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage_of(stage), precision=precision, lr=1e-4, bucket_mb=0.001
    )
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: Net, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 24)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def _handed_out(folder: str) -> None:
    for number, case in enumerate(CASES):
        _, optimizer = made(**case)
        run = Path(folder) / str(number)
        zerokit.save(run, optimizer, step=2)
        for dtype, name in ((None, "fp32"), (torch.bfloat16, "bf16")):
            found = dict(optimizer.weights(dtype=dtype))
            if dist.get_rank() == 0:
                out = run.with_suffix(f".{name}")
                zerokit.consolidate(run, out, dtype=name)
                expected = load_file(out / "model.safetensors")
                assert found.keys() <= expected.keys()
                for key, value in found.items():
                    assert dtype is None or value.dtype == dtype, (case, key)
                    assert torch.equal(value.to(expected[key].dtype), expected[key]), (case, key)
                assert len(found) == len({id(p) for p in Net().parameters()})


def test_weights_have_the_bits_of_a_consolidated_file(tmp_path: Path) -> None:
    run_ranks(2, _handed_out, str(tmp_path))


def _interrupted() -> list[bool]:
    """Ten loops that ranks leave at different places, and a step after each."""
    model, optimizer = made(3, "bf16")
    other, plain = made(3, "bf16")
    for number in range(10):
        taken = list(islice(optimizer.weights(), 1 + number * (1 + dist.get_rank()) % 8))
        assert len(taken) <= 8
        one_step(model, optimizer)
        one_step(other, plain)
    pairs = zip(optimizer.weights(), plain.weights(), strict=True)
    return [torch.equal(a, b) for (_, a), (_, b) in pairs]


def test_loops_that_end_early_leave_every_rank_able_to_step() -> None:
    for same in run_ranks(3, _interrupted):
        assert same
        assert all(same)


def _held() -> int:
    _, optimizer = made(3, "fp32")

    def held() -> int:
        gc.collect()
        with without_torch_function():  # guarded parameters refuse to show their storage
            return sum(
                1
                for each in gc.get_objects()
                if isinstance(each, torch.Tensor)
                and each.numel() >= 24 * 24
                and each.device.type == "cpu"
                and each.untyped_storage().nbytes() >= 4 * 24 * 24
            )

    before = held()
    return max(held() - before for _ in optimizer.weights())


def test_one_unit_is_held_at_a_time() -> None:
    # The unit, views of it, and the weight that is handed out: as many for any number of units.
    assert max(run_ranks(2, _held)) <= 6


def _refused() -> None:
    model, optimizer = made(2, "fp32")
    optimizer.backward(model(torch.ones(2, 24)).sum())
    for _ in optimizer.weights():
        with pytest.raises(UsageError, match="has not ended"):
            optimizer.step()
        break
    optimizer.step()


def test_steps_wait_for_the_end_of_the_loop() -> None:
    run_ranks(2, _refused)

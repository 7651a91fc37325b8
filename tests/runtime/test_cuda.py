"""What only a GPU shows: streams, NCCL, fp16 kernels. One GPU serves: NCCL alone on it, or gloo for several ranks."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.support.distributed import run_ranks
from zerokit import ZeroOptimizer

pytestmark = pytest.mark.gpu

STAGES = (0, 1, 2, 3)
STEPS = 8


def model_on_gpu() -> torch.nn.Module:
    """A few blocks with a rest before and after them, deterministic to build."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(96), torch.nn.Linear(96, 200), torch.nn.GELU(), torch.nn.Linear(200, 96)
        )
        for _ in range(4)
    ]
    return torch.nn.Sequential(torch.nn.Linear(32, 96), *blocks, torch.nn.Linear(96, 7)).cuda()


def train(stage: int, precision: str, accumulate: bool = False) -> tuple[list[str], bool, bool]:
    """Losses and norms as hex, and whether memory and traffic equal their predictions."""
    torch.use_deterministic_algorithms(True)
    model = model_on_gpu()
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, precision=precision, bucket_mb=0.1, lr=3e-3, weight_decay=0.1
    )
    data = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(STEPS):
        for micro in range(2 if accumulate else 1):
            x = torch.randn(16, 32, generator=data).cuda()
            y = torch.randint(7, (16,), generator=data).cuda()
            loss = F.cross_entropy(model(x).float(), y)
            if accumulate and micro == 0:
                with optimizer.accumulate():
                    optimizer.backward(loss)
            else:
                optimizer.backward(loss)
        held = optimizer.memory()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += [float(value).hex() for value in (loss.detach(), norm)]
    moved = optimizer.traffic().by_operation
    predicted = optimizer.predicted_traffic(micro_batches=2 if accumulate else 1).by_operation
    return seen, held == optimizer.predicted_memory(), moved == predicted


def train_all(precision: str, backend: str) -> list[tuple[list[str], bool, bool]]:
    """Every stage, without and with accumulation, on the only GPU."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(0)
    if backend == "nccl":
        dist.destroy_process_group()
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    return [train(stage, precision, accumulate) for accumulate in (False, True) for stage in STAGES]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_stages_are_identical_bits(backend: str, world: int, precision: str) -> None:
    for results in run_ranks(world, train_all, precision, backend):
        for number, (seen, memory, traffic) in enumerate(results):
            stage = number % len(STAGES)
            assert seen == results[number - stage][0], f"stage {stage} differs from stage 0"
            assert memory, f"stage {stage}: memory() is not its prediction"
            assert traffic, f"stage {stage}: traffic() is not its prediction"

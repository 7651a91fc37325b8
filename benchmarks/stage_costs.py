"""What each stage holds and moves: measured on two gloo ranks, beside the formula.

python benchmarks/stage_costs.py
python benchmarks/stage_costs.py --model gpt-5m --world 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

STEPS = 2
"""The first step of stages 1 and 2 gathers nothing: the second one is counted."""


def measure(rank: int, world: int, store: str, model_name: str, stage: int) -> None:
    """Train a few steps as `rank` of `world`; rank 0 prints a row."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from zerokit import ZeroOptimizer
    from zerokit.bench.workloads.build import build

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
    model = build(model_name)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="fp32", lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (1, 33), generator=generator)
        optimizer.backward(model(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
    # Once more, so that the optimizer's states are counted at the end of a backward pass.
    optimizer.backward(model(tokens[:, :-1], tokens[:, 1:]))
    held, predicted = optimizer.memory(), optimizer.predicted_memory()
    moved, formula = optimizer.traffic(), optimizer.predicted_traffic()
    if rank == 0:
        psi = optimizer.layout.trainable_numel
        state = held.parameters + held.gradients + held.optimizer + held.padding
        exact = held == predicted and moved.by_operation == formula.by_operation
        print(
            f"stage {stage}: {state / 1e6:7.1f} MB = {state / psi:5.2f} bytes x psi,"
            f" moves {moved.elements / psi / max(1, world - 1):.2f} psi (N-1) = {moved.bytes / 1e6:6.1f} MB;"
            f" equal to the formula to the byte: {'yes' if exact else 'NO'}"
        )
    dist.destroy_process_group()


def main() -> int:
    """Run every stage in fresh processes; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-34m")
    parser.add_argument("--world", type=int, default=2)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(f"{arguments.model}, {arguments.world} ranks, fp32, AdamW")
    with tempfile.TemporaryDirectory() as folder:
        for stage in range(4):
            ranks = [
                context.Process(
                    target=measure,
                    args=(rank, arguments.world, f"{folder}/{stage}", arguments.model, stage),
                )
                for rank in range(arguments.world)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

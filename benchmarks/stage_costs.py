"""What each stage holds and moves: measured on two gloo ranks, beside the formula.

python benchmarks/stage_costs.py
python benchmarks/stage_costs.py --model gpt-5m --world 3
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import make_parser
from benchmarks.ranks import run_ranks
from zerokit import ZeroOptimizer
from zerokit.bench.workloads.build import build
from zerokit.placement import stage_of

STEPS = 2
"""The first step of stages 1 and 2 gathers nothing: the second one is counted."""


def measure(model_name: str, stage: int) -> str:
    """Train a few steps on this rank; its row."""
    model = build(model_name)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32", lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (1, 33), generator=generator)
        optimizer.backward(model(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
    # Once more, so that the optimizer's states are counted at the end of a backward pass.
    optimizer.backward(model(tokens[:, :-1], tokens[:, 1:]))
    held, predicted = optimizer.memory(), optimizer.predicted_memory()
    moved, formula = optimizer.traffic(), optimizer.predicted_traffic()
    psi, others = optimizer.layout.trainable_numel, max(1, dist.get_world_size() - 1)
    state = held.parameters + held.gradients + held.optimizer + held.padding
    exact = held == predicted and moved.by_operation == formula.by_operation
    return (
        f"stage {stage}: {state / 1e6:7.1f} MB = {state / psi:5.2f} bytes x psi,"
        f" moves {moved.elements / psi / others:.2f} psi (N-1) = {moved.bytes / 1e6:6.1f} MB;"
        f" equal to the formula to the byte: {'yes' if exact else 'NO'}"
    )


def main() -> None:
    """Every stage in fresh processes."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="gpt-34m")
    parser.add_argument("--world", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.model}, {options.world} ranks, fp32, AdamW")
    for stage in range(4):
        print(run_ranks(measure, options.model, stage, world=options.world)[0], flush=True)


if __name__ == "__main__":
    main()

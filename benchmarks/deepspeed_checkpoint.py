"""A checkpoint of DeepSpeed's own, for `compare_checkpoints.py --deepspeed`.

    DS_ACCELERATOR=cpu .peers/bin/torchrun --nproc-per-node 4 benchmarks/deepspeed_checkpoint.py OUT --stage 2

`scripts/peers` makes the environment. With the defaults it has 176 million parameters in fp32 and takes 2.8 GB.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

WIDTH = 1024


class Block(nn.Module):
    """A transformer's matrices, without attention: 14 · WIDTH² parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = self.mlp(self.attention(hidden))
        return hidden + changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="a directory")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(*(Block() for _ in range(options.blocks)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": options.stage},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.bf16},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    hidden = torch.randn(1, WIDTH, dtype=next(model.parameters()).dtype)
    for _ in range(2):
        engine.backward(engine(hidden).float().square().mean())
        engine.step()
    engine.save_checkpoint(options.output)


if __name__ == "__main__":
    main()

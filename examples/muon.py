"""Muon for the matrices of the hidden layers, AdamW for the rest.

torchrun --nproc-per-node 2 examples/muon.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zerokit

VOCABULARY = 64


class Block(nn.Module):
    """A norm and two layers, beside what passes by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Predicts the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.blocks = nn.ModuleList([Block(64) for _ in range(4)])
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    """Train on counting modulo 64."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model().to(device)
    names = dict(model.named_parameters())
    hidden = [name for name, p in names.items() if name.startswith("blocks.") and p.ndim == 2]
    rest = [name for name in names if name not in hidden]
    optimizer = zerokit.ZeroOptimizer(
        model,
        {
            torch.optim.Muon: [{"params": hidden, "lr": 0.02}],
            torch.optim.AdamW: [{"params": rest, "lr": 3e-3}],
        },
        stage=2,
        precision="fp32",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step in range(60):
        generator = torch.Generator().manual_seed(step * world + rank)
        tokens = torch.randint(0, VOCABULARY, (32,), generator=generator).to(device)
        loss = F.cross_entropy(model(tokens), (tokens * 3 + 1) % VOCABULARY)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and step % 20 == 19:
            moved = optimizer.traffic().by_operation
            print(f"step {step + 1}: loss {loss.item():.3f}, {moved['to_owners'].bytes} bytes to owners")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

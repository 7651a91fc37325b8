"""Sequences of unequal length: even batches for all ranks, and the mean over all of a step's tokens.

torchrun --nproc-per-node 2 examples/batches.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import zerokit

RUN = Path("runs/batches/run")
VOCABULARY = 64


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList([nn.GRU(32, 32, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        logits: torch.Tensor = self.head(x)
        return logits


def sequences() -> list[torch.Tensor]:
    """512 texts that count up, most of them short."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(512).log_normal_(3.2, 0.7, generator=generator).clamp(3, 200).long().tolist()
    starts = torch.randint(VOCABULARY, (512,), generator=generator).tolist()
    return [
        (torch.arange(length) + start) % VOCABULARY for length, start in zip(lengths, starts, strict=True)
    ]


def pad(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets that are -100 where there is nothing to predict."""
    inputs = nn.utils.rnn.pad_sequence([each[:-1] for each in batch], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([each[1:] for each in batch], batch_first=True, padding_value=-100)
    return inputs, targets


device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)
model = Model().to(device)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=3e-3)
data = sequences()
batches = zerokit.Batches([len(each) for each in data], samples=32, micro_tokens=400)
loader = DataLoader[torch.Tensor](data, batch_sampler=batches, collate_fn=pad)  # type: ignore[arg-type]

for step in batches.steps(loader):
    total = torch.zeros((), device=device)
    for inputs, targets in step:
        logits = model(inputs.to(device)).flatten(0, 1)
        targets = targets.flatten().to(device)
        loss_sum = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        optimizer.backward(loss_sum, count=(targets != -100).sum())
        total += loss_sum.detach()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if dist.get_rank() == 0 and batches.step % 16 == 0:
        print(
            f"step {batches.step}, epoch {batches.epoch:.2f}: loss {total / (optimizer.last_count or 1):.3f}"
        )
    if batches.step == 48:
        break

zerokit.save(RUN, optimizer, step=batches.step, extra={"batches": batches.state_dict()})
dist.destroy_process_group()

"""Sequences that are shared by ranks: each holds a part of the tokens, and attention exchanges heads for tokens.

A rank with a part of a sequence is a rank with a count. Attention works as in DeepSpeed-Ulysses (arXiv:2309.14509): for
a moment a rank has all tokens of some heads instead of some tokens of all heads.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zerokit

RUN = Path("runs/context_parallel/run")
VOCABULARY, WIDTH, HEADS, LONGEST = 64, 32, 4, 128
SEQUENCES, STEPS = 8, 20


class Exchange(torch.autograd.Function):
    """Sends row r of `x` [ranks, ...] to rank r, and gets a row from each; gradients go back in the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=sharing)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return exchange(gradient.contiguous())


def exchange(x: torch.Tensor) -> torch.Tensor:
    """All ranks' rows for this one, in their order."""
    rows: torch.Tensor = Exchange.apply(x)  # type: ignore[no-untyped-call]
    return rows


def heads_for_tokens(x: torch.Tensor) -> torch.Tensor:
    """[batch, own tokens, heads, width] becomes [batch, tokens, own heads, width]."""
    rows = x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()  # a rank's heads of own tokens
    return exchange(rows).transpose(0, 1).flatten(1, 2)


def tokens_for_heads(x: torch.Tensor) -> torch.Tensor:
    """The way back."""
    rows = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # own heads of a rank's tokens
    return exchange(rows).permute(1, 2, 0, 3, 4).flatten(2, 3)


class Attention(nn.Module):
    """Causal, over whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (heads_for_tokens(part.unflatten(-1, (HEADS, -1))) for part in self.enter(x).chunk(3, -1))
        query, key, value = (part.transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        left: torch.Tensor = self.leave(tokens_for_heads(seen.transpose(1, 2)).flatten(2))
        return left


class Block(nn.Module):
    """Attention, and a network that sees each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def sequences(step: int) -> list[torch.Tensor]:
    """Texts that count up, of unequal length."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(8, LONGEST, (SEQUENCES,), generator=generator).tolist()
    starts = torch.randint(VOCABULARY, (SEQUENCES,), generator=generator).tolist()
    return [
        (torch.arange(length) + start) % VOCABULARY for length, start in zip(lengths, starts, strict=True)
    ]


def own_part(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, their positions, and targets, shifted before the cut; -100 where nothing is to be predicted."""
    inputs = nn.utils.rnn.pad_sequence([each[:-1] for each in batch], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([each[1:] for each in batch], batch_first=True, padding_value=-100)
    missing = -inputs.shape[1] % ranks
    inputs, targets = F.pad(inputs, (0, missing)), F.pad(targets, (0, missing), value=-100)
    part = inputs.shape[1] // ranks
    own = slice(place * part, (place + 1) * part)
    positions = torch.arange(own.start, own.stop)
    return inputs[:, own].to(device), positions.to(device), targets[:, own].to(device)


device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
world = dist.get_world_size()
ranks = min(world, 2)  # of a sequence; the others hold other sequences
mesh = init_device_mesh(device.type, (world // ranks, ranks), mesh_dim_names=("data", "context"))
sharing, place = mesh.get_group("context"), mesh.get_local_rank("context")
readers, reader = world // ranks, mesh.get_local_rank("data")

torch.manual_seed(0)
model = Model().to(device)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=3e-3)

for step in range(1, STEPS + 1):
    inputs, positions, targets = own_part(sequences(step)[reader::readers])
    logits = model(inputs, positions).flatten(0, 1)
    loss_sum = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)
    optimizer.backward(loss_sum, count=(targets != -100).sum())
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss_sum.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0 and step % 5 == 0:
        print(
            f"step {step}: loss {total / (optimizer.last_count or 1):.3f} over {optimizer.last_count:.0f} tokens"
        )

zerokit.save(RUN, optimizer, step=STEPS, overwrite=True)
dist.destroy_process_group()

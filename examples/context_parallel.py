"""Ranks that share sequences: each holds a part of the tokens, and attention exchanges heads for tokens.

A rank with a part of a sequence is a rank with a count. Attention is DeepSpeed-Ulysses' (arXiv:2309.14509).

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zerokit

VOCABULARY, WIDTH, HEADS, LONGEST, STEPS = 64, 32, 4, 128, 20


class Exchange(torch.autograd.Function):
    """Row r of `x` [ranks, ...] goes to rank r, whose row for this one takes its place; gradients go back alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(rows, x.contiguous(), group=sharing)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchange.forward(ctx, gradient)


class Attention(nn.Module):
    """Causal attention over whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.exchange: Any = Exchange.apply

    def forward(self, x: Tensor) -> Any:
        # [batch, own tokens, 3, ranks, heads of each, width] becomes [3, batch, own heads, all tokens, width]
        parts = self.enter(self.norm(x)).unflatten(-1, (3, ranks, HEADS // ranks, -1))
        parts = self.exchange(parts.permute(3, 0, 1, 2, 4, 5)).permute(3, 1, 4, 0, 2, 5)
        query, key, value = parts.flatten(3, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = self.exchange(seen.unflatten(2, (ranks, -1)).permute(2, 0, 3, 1, 4))
        return x + self.leave(seen.permute(1, 2, 0, 3, 4).flatten(2))


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.Sequential(Attention(), Attention(), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Any:
        positions = torch.arange(tokens.shape[1], device=device) + place * tokens.shape[1]
        return self.layers(self.token(tokens) + self.position(positions))


def own_parts(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of inputs and targets; texts count up and differ in length, and padding has the target -100."""
    pairs = torch.randint(8, LONGEST, (8, 2), generator=torch.Generator().manual_seed(step)).tolist()
    texts = [(torch.arange(length) + start) % VOCABULARY for length, start in pairs][reader :: mesh.size(0)]
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
    padded = F.pad(padded, (0, (1 - padded.shape[1]) % ranks), value=-100).to(device)
    inputs, targets = padded[:, :-1].clamp(min=0), padded[:, 1:]  # shifted before they are cut
    return inputs.chunk(ranks, 1)[place], targets.chunk(ranks, 1)[place]


device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
ranks = min(dist.get_world_size(), 2)  # that share a sequence; other pairs of them share others
mesh = init_device_mesh(device.type, (dist.get_world_size() // ranks, ranks))
sharing, place, reader = mesh.get_group(1), mesh.get_local_rank(1), mesh.get_local_rank(0)
torch.manual_seed(0)
model = Model().to(device)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=3e-3)
for step in range(1, STEPS + 1):
    inputs, targets = own_parts(step)
    logits = model(inputs).flatten(0, 1)
    loss_sum = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)
    optimizer.backward(loss_sum, count=(targets != -100).sum())
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss_sum.detach().clone())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total / (optimizer.last_count or 1):.3f}")
zerokit.save("runs/context_parallel/run", optimizer, step=STEPS)
dist.destroy_process_group()

# mypy: disable-error-code="no-any-return"
"""A decoder with tied embeddings, an encoder, an encoder-decoder; activation checkpointing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models.base import (
    Batch,
    Groups,
    case,
    labels,
)

VOCABULARY = 59


def _tokens(generator: torch.Generator, rank: int) -> Batch:
    text = labels(generator, VOCABULARY, 2, 12)
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int = 20, heads: int = 4, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the token embedding's weight."""

    def __init__(
        self, width: int = 20, depth: int = 3, dropout: float = 0.0, recompute: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def decay_groups(model: nn.Module) -> Groups:
    """Weight decay for matrices only, the usual two groups, with different learning rates too."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]


case("gpt", _tokens)(Gpt)
case("gpt_groups", _tokens, groups=decay_groups)(Gpt)


@case("gpt_checkpoint_each", _tokens)
def _gpt_checkpoint_each() -> nn.Module:
    return Gpt(recompute=True, dropout=0.1)


def _masked_tokens(generator: torch.Generator, rank: int) -> Batch:
    text = labels(generator, VOCABULARY, 3, 9)
    kept = torch.arange(9) < torch.tensor([9, 7, 4])[:, None]
    return {"x": text, "kinds": labels(generator, 2, 3, 9), "kept": kept, "y": text.masked_fill(~kept, -100)}


def _masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"], kinds=batch["kinds"], kept=batch["kept"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten(), ignore_index=-100)


@case("bert", _masked_tokens, loss=_masked_loss)
class Bert(nn.Module):
    """Post-norm encoder of torch's own layers, padding mask, tied masked-language-model head with a bias."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Embedding(16, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 2, 40, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.words.weight
        self.register_buffer("place", torch.arange(16), persistent=False)

    def forward(self, x: Tensor, *, kinds: Tensor, kept: Tensor) -> Tensor:
        place = self.get_buffer("place")[: x.shape[1]]
        hidden = self.norm(self.words(x) + self.positions(place) + self.kinds(kinds))
        hidden = self.encoder(hidden, src_key_padding_mask=~kept)
        return self.decoder(self.transform(hidden))


class Memory(nn.Module):
    """Attention to another sequence, as in an encoder-decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        keys, values = self.kv(memory).chunk(2, dim=-1)
        return x + F.scaled_dot_product_attention(self.q(self.norm(x)), keys, values)


def _pairs(generator: torch.Generator, rank: int) -> Batch:
    text = labels(generator, VOCABULARY, 2, 9)
    return {"source": labels(generator, VOCABULARY, 2, 7), "x": text[:, :-1], "y": text[:, 1:]}


def _pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(source=batch["source"], target=batch["x"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())


@case("encoder_decoder", _pairs, loss=_pair_loss)
class EncoderDecoder(nn.Module):
    """T5-like: nested ModuleLists that are never called themselves, one embedding shared three times."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder_tokens = self.shared
        self.decoder_tokens = self.shared
        encoder = nn.ModuleList(nn.ModuleList([Block(width, 2, causal=False)]) for _ in range(2))
        decoder = nn.ModuleList(nn.ModuleList([Block(width, 2), Memory(width)]) for _ in range(2))
        self.stacks = nn.ModuleList([encoder, decoder])
        self.norms = nn.ModuleDict({"encoder": nn.LayerNorm(width), "decoder": nn.LayerNorm(width)})
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, *, source: Tensor, target: Tensor) -> Tensor:
        encoder, decoder = self.stacks
        assert isinstance(encoder, nn.ModuleList)
        assert isinstance(decoder, nn.ModuleList)
        memory = self.encoder_tokens(source)
        for layer in encoder:
            assert isinstance(layer, nn.ModuleList)
            memory = layer[0](memory)
        memory = self.norms["encoder"](memory)
        hidden = self.decoder_tokens(target)
        for layer in decoder:
            assert isinstance(layer, nn.ModuleList)
            hidden = layer[1](layer[0](hidden), memory)
        return self.head(self.norms["decoder"](hidden)) * 0.25

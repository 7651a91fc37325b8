"""Models of Hugging Face transformers, as users bring them: their outputs, their ties, their own checkpointing."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.training import SMALL, digest, exact, whole_weights

pytest.importorskip("transformers")

NAMES = ["gpt2", "bert", "t5", "llama"]


def _build(name: str) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    torch.manual_seed(8)
    model: Any
    if name == "gpt2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2)
        )
    elif name == "bert":
        model = hf.BertForMaskedLM(
            hf.BertConfig(
                vocab_size=61,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=40,
                max_position_embeddings=16,
            )
        )
    elif name == "t5":
        config = hf.T5Config(vocab_size=61, d_model=24, d_kv=12, d_ff=40, num_layers=2, num_heads=2)
        config.decoder_start_token_id = 0
        model = hf.T5ForConditionalGeneration(config)
    else:
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=61,
                hidden_size=24,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=16,
            )
        )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def _train(names: list[str], stages: tuple[int, ...]) -> dict[str, list[list[str]]]:
    """By name what each stage gave. All in one launch: transformers is imported anew on every rank."""
    import warnings

    warnings.filterwarnings("ignore", module="transformers")
    return {name: [_train_at(name, stage) for stage in stages] for name in names}


def _train_at(name: str, stage: int) -> list[str]:
    model = _build(name)
    model.train()
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, precision="fp32", bucket_mb=SMALL, lr=1e-3
    )
    found = []
    for step in range(3):
        torch.manual_seed(step * 7 + dist.get_rank())
        tokens = torch.randint(1, 61, (2, 9))
        output = model(input_ids=tokens, labels=tokens)
        optimizer.backward(output.loss)
        found += [exact(output.loss), exact(optimizer.clip_grad_norm_(math.inf))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, digest(whole_weights(model).items())]


def test_stages_are_identical_bits() -> None:
    for models in run_ranks(2, _train, NAMES, (0, 1, 2, 3)):
        for name, results in models.items():
            assert results == [results[0]] * 4, name

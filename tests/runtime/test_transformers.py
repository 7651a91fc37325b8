"""Models of Hugging Face transformers, as users bring them: their outputs, their ties, their own checkpointing."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.on_ranks import on_ranks
from tests.support.training import SMALL, digest, exact, whole_weights

pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 4}
_T5 = {"vocab_size": 61, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2}
_START = {"decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2},
    ),
    "BertForMaskedLM": ("BertConfig", _SIZES),
    "LlamaForCausalLM": ("LlamaConfig", _SIZES),
    "T5ForConditionalGeneration": ("T5Config", _T5 | _START),
    "SwitchTransformersForConditionalGeneration": (
        "SwitchTransformersConfig",
        _T5 | _START | {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "AlbertForMaskedLM": ("AlbertConfig", _SIZES | {"embedding_size": 16}),
    "MixtralForCausalLM": (
        "MixtralConfig",
        _SIZES | _EXPERTS | {"num_local_experts": 4, "output_router_logits": True},
    ),
    "GptOssForCausalLM": ("GptOssConfig", _SIZES | _EXPERTS | {"num_local_experts": 4}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _SIZES | {"head_dim": 12, "sliding_window": 4}),
    "MambaForCausalLM": ("MambaConfig", _SIZES | {"state_size": 4}),
    "RwkvForCausalLM": ("RwkvConfig", _SIZES | {"attention_hidden_size": 24, "context_length": 16}),
}
"""Classes of transformers and their configurations."""


def _build(name: str) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    torch.manual_seed(8)
    configuration, sizes = MODELS[name]
    model: Any = getattr(hf, name)(getattr(hf, configuration)(**sizes))
    if name == "LlamaForCausalLM":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def _optimize(model: nn.Module, stage: Any) -> zerokit.ZeroOptimizer:
    return zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, precision="fp32", bucket_mb=SMALL, lr=1e-3
    )


def _train(name: str, stage: int) -> list[str]:
    model = _build(name)
    model.train()
    optimizer = _optimize(model, stage)
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


# In one launch: transformers is imported anew on every rank.
@on_ranks(2)
def test_stages_are_identical_bits_and_a_model_that_rescales_its_weights_is_refused_at_stage_3() -> None:
    warnings.filterwarnings("ignore", module="transformers")
    for turn, name in enumerate(MODELS):
        assert _train(name, turn % 3) == _train(name, 3), name
    # RWKV divides some weights by a power of two in eval(), in forward, unless `rescale_every` is 0.
    model = _build("RwkvForCausalLM")
    optimizer = _optimize(model, 3)
    assert optimizer.stage == 3
    model.eval()
    words = r"rwkv\.blocks\.0\.attention\.output\.weight.*gathered"
    with torch.no_grad(), pytest.raises(zerokit.UsageError, match=words):
        model(input_ids=torch.ones(2, 9, dtype=torch.long))
    dist.barrier()  # the other rank may still be reading from this one's model

"""Small models of transformers trained at stages 0 to 3 and by plain torch (see scripts/every-model).

A class takes part if its configuration, with usual names set to small numbers, gives a model of at most 3 million
parameters that plain torch trains. Two ranks take three steps with clipping, and evaluate amid them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import multiprocessing
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerokit import ZeroOptimizer
from zerokit.placement import StageArgument
from zerokit.runtime.precision import DtypeName

WORLD, STEPS, SECONDS = 2, 3, 300
STAGES: tuple[StageArgument, ...] = (0, 1, 2, 3)
KINDS = ("refused", "failed", "differs", "left out", "equal")
MOST_PARAMETERS = 3_000_000
HEADS = (
    "FOR_CAUSAL_LM_",
    "FOR_MASKED_LM_",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM_",
    "FOR_SEQUENCE_CLASSIFICATION_",
    "FOR_IMAGE_CLASSIFICATION_",
    "FOR_OBJECT_DETECTION_",
    "FOR_SEMANTIC_SEGMENTATION_",
    "FOR_IMAGE_TEXT_TO_TEXT_",
    "FOR_CTC_",
    "FOR_AUDIO_CLASSIFICATION_",
    "FOR_PRETRAINING_",
    "",
)
SMALL: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("hidden_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "state_size", "mamba_d_state", "mamba_d_head"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "lru_width", "image_size"), 32),
    **dict.fromkeys(("embedding_size", "embed_dim", "projection_dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("num_mel_bins", "num_conv_pos_embeddings"), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "patch_size", "mamba_n_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_feat_extract_layers"), 2),
    **dict.fromkeys(("type_vocab_size", "num_conv_pos_embedding_groups"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "vocab_size": 96,
    "num_labels": 3,
    "time_step_rank": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="scripts/every-model", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="classes whose names match")
    parser.add_argument(
        "--checkpointing", action="store_true", help="with activation checkpointing, where known"
    )
    parser.add_argument(
        "--precision", default="fp32", help="of zerokit; plain torch is compared in fp32 only"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results: Counter[str] = Counter()
    chosen = [(name, kind) for name, kind in sorted(_classes().items()) if re.search(options.only, name)]
    for name, kind in track(chosen, "training", console=Console(stderr=True)):
        result = _in_processes(name, kind, options)
        results[result.split(":")[0]] += 1
        if result != "equal" and not result.startswith("left out"):
            print(f"{name}: {result}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in results.most_common()))
    sys.exit(any(not key.startswith(("equal", "left out", "refused")) for key in results))


def _classes() -> dict[str, str]:
    """Bare models and those with the most usual heads, and the types of their configurations."""
    found: dict[str, str] = {}
    for head in HEADS:
        for kind, names in getattr(modeling_auto, f"MODEL_{head}MAPPING_NAMES", {}).items():
            found.setdefault(names if isinstance(names, str) else names[0], kind)
    return found


def _in_processes(name: str, kind: str, options: argparse.Namespace) -> str:
    """What became of one class."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        said = context.SimpleQueue()
        ranks = [
            context.Process(target=_compare, args=(rank, folder, name, kind, options, said))
            for rank in range(WORLD)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(SECONDS)
            rank.kill()
        results: list[str] = [said.get() for _ in ranks if not said.empty()]
    if len(results) < WORLD:
        results.append("failed: a rank gave no answer")
    # A refusal on one rank may leave the other one waiting.
    return min(results, key=lambda result: [result.startswith(kind) for kind in KINDS].index(True))


def _compare(rank: int, folder: str, name: str, kind: str, options: argparse.Namespace, said: Any) -> None:
    torch.set_num_threads(1)
    try:
        make = _factory(name, kind, checkpointing=options.checkpointing)
        _loss(make(), _batch(make(), 0, 0)).backward()
    except Exception as error:
        said.put(f"left out: {type(error).__name__}")
        return
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=60),
        )
        plain = _train(make, None, options.precision)
        first, *others = [_train(make, stage, options.precision) for stage in STAGES]
        differing = [stage for stage, other in enumerate(others, 1) if not _equal(first, other)]
        distance = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(plain[0], first[0], strict=True))
        if differing:
            said.put(f"differs at stages {differing}: {first[0]}, {[other[0] for other in others]}")
        elif plain[1].keys() != first[1].keys():
            said.put("differs in the keys of its state_dict")
        elif options.precision == "fp32" and not distance < 1e-4:
            said.put(f"equal at all stages, but far from plain torch: by {distance:.1e}")
        else:
            said.put("equal")
    except Exception as error:
        refused = type(error).__name__ in ("UsageError", "UnsupportedOptimizer")
        said.put(
            f"{'refused' if refused else 'failed'}: {type(error).__name__}: {str(error).splitlines()[0]}"
        )


def _factory(name: str, kind: str, *, checkpointing: bool) -> Callable[[], nn.Module]:
    known = transformers.CONFIG_MAPPING[kind]
    taken = {*inspect.signature(known.__init__).parameters, *getattr(known, "__annotations__", {})}
    try:
        configuration = known(**{key: value for key, value in SMALL.items() if key in taken})
    except Exception:
        configuration = known()
    _shrink(configuration)
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in model_class(configuration).parameters()) > MOST_PARAMETERS:
            raise ValueError("too large")

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: Any = model_class(copy.deepcopy(configuration)).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made: nn.Module = model
        return made

    return make


def _shrink(configuration: Any) -> None:
    for key, value in list(vars(configuration).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value)
        elif key in SMALL and value is not None and not isinstance(value, bool):
            with contextlib.suppress(Exception):  # some are checked, and may not change by themselves
                setattr(configuration, key, SMALL[key])
        elif isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
            setattr(configuration, key, 0.0)
        elif key.endswith("_token_id"):
            setattr(configuration, key, 1)
        elif key == "layer_types" and isinstance(value, list):
            setattr(configuration, key, value[:2])


def _batch(model: Any, step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    main, configuration = model.main_input_name, model.config
    if main == "pixel_values":
        size = getattr(configuration, "image_size", 32)
        size = size if isinstance(size, int) else 32
        channels = getattr(configuration, "num_channels", 3) or 3
        return {main: torch.randn(2, channels, size, size, generator=generator)}
    if main == "input_values":
        return {main: torch.randn(2, 400, generator=generator)}
    if main == "input_features":
        bins = getattr(configuration, "num_mel_bins", 16)
        return {main: torch.randn(2, bins, 64, generator=generator)}
    return {"input_ids": torch.randint(3, 60, (2, 16), generator=generator)}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean squares of all outputs, so that every part of a model that has some is trained."""
    leaves = tree_leaves(list(model(**batch).values()))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().pow(2).mean() for leaf in found]).sum()


def _train(
    make: Callable[[], nn.Module], stage: StageArgument | None, precision: DtypeName
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the state_dict after them; without a stage by plain torch."""
    model, losses = make(), list[float]()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-3)
    if stage is not None:
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, stage=stage, precision=precision, lr=1e-3, bucket_mb=0.02
        )
    for step in range(STEPS):
        batch = _batch(model, step, dist.get_rank())
        torch.manual_seed(step)
        loss = _loss(model, batch)
        if stage is None:
            loss.backward()
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad.div_(WORLD))
            nn.utils.clip_grad_norm_(trained, 1.0)
        else:
            optimizer.backward(loss)
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            with torch.no_grad():
                losses.append(float(_loss(model.eval(), batch)))
            model.train()
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


def _equal(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    pairs = [(value, other[1][key]) for key, value in one[1].items()]
    return repr(one[0]) == repr(other[0]) and all(
        torch.equal(torch.nan_to_num(a.float()), torch.nan_to_num(b.float())) for a, b in pairs
    )


if __name__ == "__main__":
    main()

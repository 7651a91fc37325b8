"""A tiny language model, its data, and trainings of it by transformers' Trainer and by zerokit's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from zerokit.integrations.transformers import ZeroTrainer
from zerokit.placement import stage_of

VOCABULARY = 61


def build(dropout: float = 0.0, *, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def texts(count: int, ignored: Callable[[int], int] = lambda number: number % 5, seed: int = 1) -> Any:
    """A list of samples of 9 tokens, of which the loss leaves out the first ones: as many as are `ignored`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (9,), generator=generator)
        labels = tokens.clone()
        labels[: ignored(number)] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(directory: Path | str, *, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Arguments of Trainer, or those of this kind."""
    options: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }
    return kind(str(directory), **options | changes)


def trainer(stage: int | None, args: Any, **changes: Any) -> Any:
    """A `ZeroTrainer` of that stage; None is transformers' own Trainer, and so DDP."""
    options: dict[str, Any] = {"model": build(), "train_dataset": texts(22)} | changes
    return (
        Trainer(args=args, **options)
        if stage is None
        else ZeroTrainer(args=args, stage=stage_of(stage), **options)
    )


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):
    """Another trainer of transformers, as its users would bring it in."""


def translate(stage: int | None, directory: Path | str) -> tuple[list[float], Any]:
    """Train an encoder-decoder for three steps and generate; returns the losses and the tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    model = T5ForConditionalGeneration(T5Config(**sizes))
    args = arguments(directory, kind=Seq2SeqTrainingArguments, max_steps=3, predict_with_generate=True)
    kind: Any = Seq2SeqTrainer if stage is None else partial(ZeroSeq2SeqTrainer, stage=stage_of(stage))
    made = kind(model, args, train_dataset=texts(12))
    made.train()
    tokens = made.predict(
        texts(5), max_new_tokens=3 + made.args.process_index
    )  # ranks end at different lengths
    return [entry["loss"] for entry in history(made) if "loss" in entry], tokens.predictions


def history(of: Any) -> list[dict[str, float]]:
    """What was logged, without the seconds."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "train_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in of.state.log_history]

"""transformers' Trainer with ZeroOptimizer, beside the same Trainer with DDP."""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, EvalPrediction, TrainerCallback
from transformers.integrations import is_fsdp_managed_module

import zerokit
from tests.integrations.launched import as_launched
from tests.integrations.trainers import arguments, build, history, texts, trainer, translate
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from zerokit.errors import CheckpointError, UnsupportedOptimizer, UsageError
from zerokit.integrations.optimizer_list import OptimizerList
from zerokit.integrations.transformers import ZeroTrainer


def _close(found: list[dict[str, float]], expected: list[dict[str, float]], norms: float = 1e-5) -> None:
    assert [set(entry) for entry in found] == [set(entry) for entry in expected]
    for entry, other in zip(found, expected, strict=True):
        norm, expected_norm = entry.pop("grad_norm", 0.0), other.pop("grad_norm", 0.0)
        assert norm == pytest.approx(expected_norm, rel=norms)
        assert entry == pytest.approx(other, rel=1e-5, abs=1e-9)


def _accuracy(predictions: EvalPrediction) -> dict[str, float]:
    guesses, labels = np.argmax(predictions.predictions, axis=-1), predictions.label_ids
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


# ---- beside DDP


BESIDE_DDP: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((1, 2, 3), 1, {"lr_scheduler_type": "cosine"}),
    ((2, 3), 3, {}),
    ((1, 3), 3, {"max_grad_norm": 0.0, "optim": "sgd"}),
]
"""By turns: the stages, micro-batches, and other arguments."""


@on_ranks(2)
def test_the_same_training_as_under_ddp(tmp_path: Path) -> None:
    """22 samples by 2 ranks and batches of 2: every epoch ends with a step of fewer samples."""
    as_launched()
    for stages, micro, changes in BESIDE_DDP:
        found = []
        for stage in (None, *stages):
            args = arguments(tmp_path, eval_strategy="epoch", gradient_accumulation_steps=micro, **changes)
            # 7 samples by 2 ranks and batches of 2: the last batch is filled up with samples that must not count.
            made = trainer(stage, args, eval_dataset=texts(7), compute_metrics=_accuracy)
            made.train()
            prediction = made.predict(texts(1))
            found.append((history(made), prediction.predictions.shape, prediction.metrics["test_loss"]))
        (expected, shape, loss), *others = found
        assert expected[-1]["step"] == sum("grad_norm" in entry for entry in expected) == {1: 12, 3: 4}[micro]
        assert sum("eval_loss" in entry for entry in expected) == 2
        for other in others:
            _close(other[0], [dict(entry) for entry in expected])
            assert other[1:] == (shape, pytest.approx(loss, rel=1e-5))


class _Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(texts(self.count))


@on_ranks(2)
def test_losses_schedules_and_streams_as_under_ddp(tmp_path: Path) -> None:
    as_launched()
    variants: dict[str, dict[str, Any]] = {
        "plateau": {
            "num_train_epochs": 2,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "epoch",
            "metric_for_best_model": "loss",
        },
        "own loss": {"own_loss": True, "gradient_accumulation_steps": 2},
        "smoothing": {"label_smoothing_factor": 0.1, "optim": "rmsprop"},
        "a stream": {"stream": True, "max_steps": 5, "gradient_accumulation_steps": 2, "optim": "adagrad"},
        "own optimizer": {"own_optimizer": True},
        "muon": {"own_classes": True, "gradient_accumulation_steps": 2},
        "a factory of optimizers": {"factory": True},
        "adafactor": {"optim": "adafactor"},
        "recomputed": {"activation_checkpointing": True, "optim": "adamw_torch_fused"},
        "reduced at once": {
            "gradient_accumulation_steps": 2,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        },
    }
    for name, changes in variants.items():
        found = []
        for stage in (None, 3):
            options: dict[str, Any] = {"eval_dataset": texts(3)}
            # Trainer writes into accelerator_config.
            changed = {"num_train_epochs": 1} | copy.deepcopy(changes)
            if changed.pop("stream", False):
                options = {"train_dataset": _Stream(21), "eval_dataset": _Stream(5)}
            if changed.pop("own_loss", False):
                options["compute_loss_func"] = _own_loss
            if changed.pop("own_optimizer", False):
                options["model"] = build()
                optimizer = torch.optim.NAdam(options["model"].parameters(), lr=1e-2)
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                options["optimizers"] = (optimizer, schedule)
            if changed.pop("own_classes", False):
                options["model"] = build()
                options["optimizers"] = (_muon(options["model"], lr=1e-2), None)
            if changed.pop("factory", False):
                options["optimizer_cls_and_kwargs"] = (lambda: _muon, {"lr": 1e-2})
            made = trainer(stage, arguments(tmp_path, **changed), **options)
            made.train()
            metrics = made.evaluate()
            found.append([*history(made)[:-1], {"eval_loss": metrics["eval_loss"]}])
        expected, other = found
        assert len(expected) > 3, name
        # RMSprop and Adagrad divide by the root of what is nearly zero in the first steps.
        _close(other, expected, norms=1e-4)


def _muon(model: torch.nn.Module, lr: float) -> OptimizerList:
    """Muon for the matrices of the layers, and AdamW for the rest."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return OptimizerList([torch.optim.Muon(hidden, lr=lr), torch.optim.AdamW(rest, lr=lr, weight_decay=0.1)])


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    loss = torch.nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss / (num_items_in_batch if num_items_in_batch is not None else labels.numel())


# ---- checkpoints

DROPOUT: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
EVEN: dict[str, Any] = DROPOUT | {"lr_scheduler_type": "cosine"}


def _train_and_save(directory: Path) -> list[list[dict[str, float]]]:
    as_launched()
    first = trainer(3, arguments(directory / "dropout", **DROPOUT), model=build(dropout=0.1))
    first.train()
    second = trainer(3, arguments(directory / "even", **EVEN))
    second.train()
    third = trainer(3, arguments(directory / "muon", **DROPOUT), **_with_muon(build()))
    third.train()
    return [history(first), history(second), history(third)]


def _with_muon(model: torch.nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizers": (_muon(model, lr=1e-2), None)}


def _resume(
    directory: Path, stage: int, dropout: float, changes: dict[str, Any], *, muon: bool = False
) -> list[dict[str, float]]:
    as_launched()
    model = build(dropout)
    torch.nn.init.zeros_(model.lm_head.weight)  # whatever is not loaded shows
    made = trainer(
        stage, arguments(directory, **changes), **(_with_muon(model) if muon else {"model": model})
    )
    made.train(resume_from_checkpoint=True)
    return history(made)


def _resume_alone(directory: Path) -> list[dict[str, float]]:
    as_launched()
    made = trainer(2, arguments(directory, **EVEN))
    with pytest.raises(UsageError, match="was trained with 4 samples a step, this run has 2 on 1 ranks"):
        made.train(resume_from_checkpoint=True)
    return _resume(directory, 3, 0.0, EVEN | {"per_device_train_batch_size": 4})


def test_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    """To the bit with as many ranks, dropout included, else to rounding. Incomplete checkpoints do not count."""
    ((dropout, even, muon), _) = run_ranks(2, _train_and_save, tmp_path)
    for run in tmp_path / "dropout", tmp_path / "even", tmp_path / "muon":
        assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
        assert json.loads((run / "checkpoint-2/config.json").read_text())["vocab_size"] == 61
        assert not list(run.glob("checkpoint-*/*.safetensors"))
        # As a run that is killed while it saves leaves it, in three ways.
        (run / "checkpoint-4/trainer_state.json").write_text('{"epoch": 1')
        (run / "checkpoint-98").mkdir()
        shutil.copytree(run / "checkpoint-2", run / "checkpoint-99")
        (run / "checkpoint-99/latest").write_text("step-00000099 00000000\n")
    resumed = run_ranks(2, _resume, tmp_path / "dropout", 1, 0.1, DROPOUT)
    assert [history[:-1] for history in resumed] == [dropout[:-1]] * 2
    zerokit.verify(tmp_path / "dropout/checkpoint-4")
    resumed = run_ranks(2, _resume, tmp_path / "muon", 1, 0.0, DROPOUT, muon=True)
    assert [history[:-1] for history in resumed] == [muon[:-1]] * 2
    (alone,) = run_ranks(1, _resume_alone, tmp_path / "even")
    _close(alone[:-1], even[:-1])


@on_ranks(2)
def test_a_frozen_base_stays_out_of_checkpoints(tmp_path: Path) -> None:
    as_launched()

    def made(base: float) -> Any:
        model = build(tied=False)
        model.model.requires_grad_(False)
        torch.nn.init.constant_(model.model.norm.weight, base)
        return trainer(3, arguments(tmp_path, **EVEN), model=model, frozen="never")

    def losses(made: Any) -> list[dict[str, float]]:
        return [entry for entry in history(made) if "loss" in entry]

    (whole := made(1.0)).train()
    assert zerokit.inspect(tmp_path / "checkpoint-2").frozen == ""
    (resumed := made(1.0)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(losses(whole)) == 4
    _close(losses(resumed), losses(whole))
    with pytest.raises(CheckpointError, match=r"those of the training that saved it: model\.norm\.weight"):
        made(2.0).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def _save_models(directory: Path) -> None:
    as_launched()
    for tied in (True, False):
        for stage in (1, 3):
            made = trainer(stage, arguments(directory, max_steps=2), model=build(tied=tied))
            made.train()
            target = directory / f"model-{tied}-{stage}"
            made.save_model(str(target))
            dist.barrier()
            loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
            zero = made.zero_optimizer
            assert zero is not None
            # With the mark, encoders of speech would run layers that LayerDrop leaves out.
            assert not any(is_fsdp_managed_module(part) for part in made.model.model.modules())
            with zero.gathered():
                live = {name: value.detach().clone() for name, value in made.model.named_parameters()}
            assert live
            assert [name for name, value in live.items() if not torch.equal(loaded[name], value)] == []
            state = made.accelerator.get_state_dict(made.model)
            head, embedding = state["lm_head.weight"], state["model.embed_tokens.weight"]
            assert (head.data_ptr() == embedding.data_ptr()) == tied
    if find_spec("peft") is not None:  # which makes a prompt of its encoder's weights when it is saved
        warnings.simplefilter("ignore", FutureWarning)  # of names in PEFT that transformers has renamed
        from peft import PromptEncoderConfig, get_peft_model

        model = get_peft_model(build(), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        made = trainer(3, arguments(directory, max_steps=1), model=model)
        made.train()
        made.save_model(str(directory / "prompt"))
        dist.barrier()
        assert (directory / "prompt/adapter_model.safetensors").is_file()


class _Worse(TrainerCallback):
    """Makes every evaluation after the first one worse."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["metrics"]["eval_loss"] += state.global_step


def _load_best(directory: Path, only_model: bool) -> None:
    as_launched()
    args = arguments(
        directory,
        max_steps=4,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_only_model=only_model,
    )
    made = trainer(3, args, eval_dataset=texts(5), callbacks=[_Worse()])
    made.train()
    first = next(entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry)
    assert str(made.state.best_model_checkpoint).endswith("checkpoint-2")
    assert made.predict(texts(5)).metrics["test_loss"] == pytest.approx(first, rel=1e-6)
    dist.barrier()
    assert [path.name for path in directory.glob("checkpoint-*")] == ["checkpoint-2"]


@on_ranks(2)
def test_a_saved_model_loads_and_the_best_one_comes_back(tmp_path: Path) -> None:
    _save_models(tmp_path)
    _read_back(tmp_path / "back")
    _load_best(tmp_path / "divided", only_model=False)
    _load_best(tmp_path / "whole", only_model=True)


def _read_back(directory: Path) -> None:
    """Half precision at a rate that only masters show; checkpoints read by transformers and PEFT; three trainers."""
    model = build(dropout=0.0)
    changes: dict[str, Any] = {"learning_rate": 2e-5, "warmup_steps": 0, "bf16": True, "save_steps": 2}
    args = arguments(directory, max_steps=2, save_strategy="steps", **changes)
    made = trainer(2, args, model=model)
    made.train()
    made.save_model(str(directory / "whole"))
    state = model.state_dict()
    assert bool((state["model.norm.weight"] != 1).all())
    dist.barrier()
    for path in (directory / "whole", directory / "checkpoint-2"):
        read = AutoModelForCausalLM.from_pretrained(path)
        assert read.dtype == torch.float32
        assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
        assert read.generation_config == model.generation_config
    assert not list((directory / "checkpoint-2").glob("*.safetensors"))

    # Each phase begins with the weights of the one before, at its own stage and precision.
    before = made.evaluate(texts(3))["eval_loss"]
    for stage, name in ((3, "bf16"), (0, "fp32")):
        args = arguments(directory / name, max_steps=2, **({name: True} if name != "fp32" else {}))
        following = trainer(stage, args, model=model)
        assert following.evaluate(texts(3))["eval_loss"] == pytest.approx(before, rel=1e-2)
        following.train()
        before = following.evaluate(texts(3))["eval_loss"]
    with pytest.raises(UsageError, match="another trainer"):
        made.zero_optimizer.step()

    half = build().bfloat16()
    made = trainer(3, arguments(directory, max_steps=1, bf16=True), model=half)
    made.train()
    made.save_model(str(directory / "half"))
    dist.barrier()
    assert AutoModelForCausalLM.from_pretrained(directory / "half").dtype == torch.bfloat16
    if find_spec("peft") is not None:
        from peft import LoraConfig, PeftModel, get_peft_model

        adapted = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"]))
        args = arguments(directory / "lora", max_steps=2, save_strategy="steps", **changes)
        trainer(3, args, model=adapted).train()
        dist.barrier()
        state = adapted.state_dict()
        read = PeftModel.from_pretrained(build(), directory / "lora/checkpoint-2").state_dict()
        adapters = [name for name in read if "lora_" in name]
        assert len(adapters) == 4
        assert all(torch.equal(read[name], state[name]) for name in adapters)
        dist.barrier()
        again = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"]))
        args = arguments(directory / "lora", max_steps=4, save_strategy="no", **changes)
        resumed = trainer(2, args, model=again)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 4


# ---- precision, and a second train()


def _train_half(directory: Path) -> None:
    as_launched()
    losses = {}
    for name in ("fp32", "bf16", "fp16"):
        made = trainer(3, arguments(directory, max_steps=4, **({} if name == "fp32" else {name: True})))
        assert math.isfinite(made.evaluate(texts(3))["eval_loss"])
        made.train()
        losses[name] = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        assert made.zero_optimizer is not None
        assert made.zero_optimizer.precision == zerokit.Precision.of(name)
        # Once more with the same trainer: the divided model is taken as it is, steps begin anew.
        assert made.train().global_step == 4
        assert made.state.log_history[0]["loss"] < losses[name][0]
    for name in ("bf16", "fp16"):
        assert losses[name] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["bf16"] != losses["fp32"]


def _anew() -> Any:
    return build()


def _overflow(directory: Path) -> None:
    as_launched()
    scale = zerokit.LossScale(value=2.0**100)
    made = ZeroTrainer(
        None,
        arguments(directory, max_steps=3, fp16=True),
        model_init=_anew,
        train_dataset=texts(22),
        stage=2,
        zero_options={"loss_scale": scale},
    )
    made.train()
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert made.zero_optimizer is not None
    assert made.zero_optimizer.skipped_steps == 3
    assert rates == [rates[0]] * 3, "the schedule waits for steps that were taken"
    counts = [entry.get("skipped_steps") for entry in made.state.log_history if "loss" in entry]
    assert counts == [1, 2, 3]


def _generate(directory: Path) -> None:
    as_launched()
    losses, tokens = translate(None, directory)
    assert len(losses) == 3
    found, others = translate(3, directory)
    assert found == pytest.approx(losses, rel=1e-5)
    assert np.array_equal(others, tokens)


@on_ranks(2)
def test_generation_half_precision_skipped_steps_and_a_second_training(tmp_path: Path) -> None:
    _generate(tmp_path)
    _train_half(tmp_path)
    _overflow(tmp_path)


# ---- what is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"fp16_full_eval": True},
        "computes in torch.float32 in evaluations, too: leave it out, or train with fp16=True",
    ),
    ({"torch_compile": True}, "compile the model in place"),
    ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ({"save_on_each_node": True}, "all nodes share"),
    ({"enable_jit_checkpoint": True}, "save_steps"),
    ({"fsdp": True}, "stage=3"),
    ({"deepspeed": True}, "stage=1, 2 or 3"),
    ({"parallelism_config": True}, "data-parallel"),
    ({"accelerator_config": {"even_batches": False}}, "even_batches"),
]


@on_ranks(1)
def test_what_does_not_fit_is_refused_at_construction(tmp_path: Path) -> None:
    as_launched()
    for changes, words in REFUSED:
        later = {
            name: changes[name] for name in ("fsdp", "deepspeed", "parallelism_config") if name in changes
        }
        args = arguments(tmp_path, **{name: value for name, value in changes.items() if name not in later})
        for name, value in later.items():
            setattr(args, name, value)  # their own checks want packages and devices that are not here
        with pytest.raises((UsageError, UnsupportedOptimizer), match=words):
            ZeroTrainer(build(), args, train_dataset=texts(4))
    with pytest.raises(UnsupportedOptimizer, match=r'LBFGS.*optim="adamw_torch"'):
        ZeroTrainer(build(), arguments(tmp_path), optimizer_cls_and_kwargs=(torch.optim.LBFGS, {}))
    args = arguments(tmp_path, bf16=True)
    for options, words in (
        ({"precision": "fp16"}, "leave one of them out"),
        ({"precision": "fp8"}, "fp8"),
        ({"stage": 4}, "stage"),
        ({"zero_options": {"lr": 1}}, "zero_options"),
    ):
        with pytest.raises(UsageError, match=words):
            ZeroTrainer(build(), args, **options)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/trainer_state.json").write_text("{}")
    made = trainer(3, arguments(tmp_path))
    with pytest.raises(CheckpointError, match="No valid checkpoint found in output directory"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="from_pretrained"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert math.isfinite(made.evaluate(texts(3))["eval_loss"])  # nothing was divided by all that

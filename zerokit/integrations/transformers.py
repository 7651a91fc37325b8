"""`ZeroTrainer`: transformers' `Trainer`, training with `ZeroOptimizer` instead of DDP.

    trainer = ZeroTrainer(model, args, train_dataset=data, stage=3)  # was: Trainer(model, args, train_dataset=data)
    trainer.train()

Started by torchrun. Trainer's loop, loss scaling, schedules and logs are its own; what is replaced is how the model is
prepared, and what a checkpoint holds: `checkpoint-STEP` is a run directory of zerokit (`zerokit inspect` reads it) with
`trainer_state.json`, the configuration and the tokenizer beside. `from_pretrained` reads it, see `pretrained`.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, sort_checkpoints

import zerokit
from zerokit.checkpoint import rng
from zerokit.checkpoint.disk import despite_damage, read_whole
from zerokit.checkpoint.frozen import Frozen
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, UnsupportedOptimizer, UsageError
from zerokit.integrations.accelerate import ZeroAccelerator
from zerokit.integrations.mixed_precision import choose_precision
from zerokit.integrations.pretrained import read_sharded
from zerokit.integrations.torch_optimizer import Recipe, require_frozen
from zerokit.placement import StageArgument
from zerokit.runtime import Precision
from zerokit.runtime.precision import PrecisionArgument
from zerokit.runtime.trials import probe
from zerokit.training import ZeroOptimizer

read_sharded()

STATE_NAME = "trainer_state.json"


class ZeroTrainer(Trainer):
    """A `Trainer` whose model and optimizer are sharded across ranks.

    Args:
        model: as `Trainer` takes it; `model_init` works too.
        args: `bf16` and `fp16` choose the precision: weights of half precision with fp32 masters, no autocast.
        stage: what is sharded, as in `ZeroOptimizer`.
        precision: as in `ZeroOptimizer`, instead of `bf16` and `fp16`, or beside them for its other dtypes.
        zero_options: further arguments of `ZeroOptimizer`: units, bucket_mb, prefetch, init_fn, loss_scale,
            on_nonfinite, ….
        frozen: "never" leaves frozen parameters, such as the base under adapters, out of checkpoints: training then
            goes on with a model that was built with the same ones, and others are refused.
        **options: the other arguments of `Trainer`, or of the trainer it is combined with, by name: which come after
            the model differs among trainers.

    `save_model` writes the masters, each in the dtype that its parameter had in `model`: fp32 for a model in fp32, bf16
    for one that was loaded in bf16. No rank holds more than a unit of the model at a time, but where transformers makes
    other weights of them, as of merged experts. A model that an earlier trainer has sharded is taken from it when
    `train` begins.

    Other trainers are combined by inheritance, `class MyTrainer(ZeroTrainer, Seq2SeqTrainer)`. At stage 3 all ranks
    call `generate` together, which goes on until the longest text of any ends.

    Raises `UsageError` for arguments that shard or compile the model in another way, that need whole weights, or that
    do not fit several ranks, and `UnsupportedOptimizer` for an `optim` whose update of a tensor depends on others.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        stage: StageArgument = 3,
        precision: PrecisionArgument | None = None,
        zero_options: Mapping[str, Any] | None = None,
        frozen: Frozen = "always",
        **options: Any,
    ) -> None:
        args = args or TrainingArguments("tmp_trainer")
        require_supported(args)
        mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        self._zero_arguments: dict[str, Any] = {
            "stage": stage,
            "precision": choose_precision(precision, mixed, f"TrainingArguments({mixed}=True)"),
            "zero_options": zero_options,
        }
        _require_evaluation_in(self._zero_arguments["precision"], args)
        self._writes_checkpoint = False
        self._frozen = require_frozen(frozen)
        self._generators: dict[str, bytes] = {}
        super().__init__(model, args=args, **options)
        self._try_optimizer()

    @property
    def zero_optimizer(self) -> ZeroOptimizer | None:
        """The `ZeroOptimizer`, once `train` has begun: for `memory()`, `gathered()` and others."""
        return self.accelerator.zero_optimizer

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        """Log as Trainer does, in training also `skipped_steps` once there are any."""
        zero = self.zero_optimizer
        if zero is not None and zero.skipped_steps and "loss" in logs:
            logs = {**logs, "skipped_steps": zero.skipped_steps}
        super().log(logs, *more, **options)

    # ---- preparing

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        arguments["mixed_precision"] = "no"  # ZeroOptimizer casts, and scales the loss
        self._accelerator_arguments = arguments
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Make the `ZeroAccelerator`, from the arguments that Trainer's own was made from."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ZeroAccelerator(**self._accelerator_arguments, **self._zero_arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _try_optimizer(self) -> None:
        """Try the optimizer on small tensors now; `train` would find out only after the model is loaded and cut.

        A factory of optimizers is asked for one when `train` begins.
        """
        if self.optimizer is not None:
            tried: list[Any] = [(one.optimizer_class, one.options) for one in Recipe.of(self.optimizer).parts]
        else:
            model: Any = self.model
            chosen = self.optimizer_cls_and_kwargs
            tried = [chosen or self.get_optimizer_cls_and_kwargs(self.args, model)]
        for optimizer_class, options in tried:
            if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
                continue
            try:
                probe(optimizer_class, dict(options), self._zero_arguments["precision"].master)
            except UnsupportedOptimizer as error:
                raise UnsupportedOptimizer(
                    f"optim={self.args.optim!r}: {error}: write "
                    'TrainingArguments(optim="adamw_torch"), or "adafactor", "sgd", "adagrad", "rmsprop"'
                ) from error

    # ---- the loop

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of a step, and the tokens by which its losses are divided.

        With `average_tokens_across_devices` these are those of all ranks, and losses are multiplied by the number of
        ranks. Without it Trainer divides by each rank's own, which weighs the tokens of a rank with few of them more;
        here it is the mean over ranks, which gives the same as with it.
        """
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if count is not None and not self.args.average_tokens_across_devices:
            count = self.accelerator.reduce(torch.as_tensor(count, device=device).float(), "mean")
        return samples, count

    # ---- writing

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        directory = (
            Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        self._together().on_first(lambda: _remove(directory))
        self._writes_checkpoint = not self.args.save_only_model
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._writes_checkpoint = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._writes_checkpoint:
            directory = Path(str(output_dir or self.args.output_dir))
            self._together().on_first(lambda: self._save_description(directory))
            if not _saves_adapters(self.model):
                return  # the weights are written with the optimizer's state, in pieces
        zero = self.zero_optimizer
        if zero is None or state_dict is not None:
            super()._save(output_dir, state_dict)
        elif getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            # PEFT computes prompts anew, from the weights of their encoder.
            with zero.gathered():
                if self.args.should_save:
                    super()._save(output_dir)
        else:
            zero.runtime.weights.in_turn(
                lambda: super(ZeroTrainer, self)._save(output_dir),
                trained_at_once=_saves_adapters(self.model),
            )

    def _save_description(self, directory: Path) -> None:
        """What a checkpoint has beside zerokit's files, so that a model and a tokenizer can be built from it."""
        directory.mkdir(parents=True, exist_ok=True)
        described: Any = (
            getattr(self.model, "config", None),
            getattr(self.model, "generation_config", None),
            self.processing_class or getattr(self.data_collator, "tokenizer", None),
        )
        for part in described:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(directory)
        (directory / "LOADING.txt").write_text(_DESCRIPTION.format(name=directory.name))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": self._schedule().state_dict(), "global_batch": self._global_batch()}
        zerokit.save(
            output_dir, self._prepared(), step=self.state.global_step, extra=extra, frozen=self._frozen
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: `zerokit.save` has written all ranks' generators."""

    # ---- reading

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **options: Any) -> Any:
        """Train, or continue from a checkpoint of any number of ranks.

        Args:
            resume_from_checkpoint: a `checkpoint-STEP`; True for the newest complete one in `output_dir`.

        Raises `CheckpointError` for a checkpoint that is incomplete, damaged or not zerokit's, and `UsageError` if the
        global batch differs from the saved one, since the position in the data would then be another.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_complete()
        return super().train(resume_from_checkpoint, *more, **options)

    def _newest_complete(self) -> str:
        """The newest checkpoint that was written to its end; rank 0 looks, all ranks take the same."""
        newest, fault = "", ""
        if self.args.process_index == 0:
            try:
                complete = [
                    path for path in sort_checkpoints(str(self.args.output_dir)) if _complete(Path(path))
                ]
                newest = complete[-1] if complete else ""
            except (OSError, CheckpointError) as error:
                fault = str(error)
        found = [newest, fault]
        torch.distributed.broadcast_object_list(found)
        newest, fault = found
        if fault:
            raise CheckpointError(fault)
        if not newest:
            raise CheckpointError(
                f"No valid checkpoint found in output directory ({self.args.output_dir}), none that is complete: write "
                "train() to begin anew"
            )
        return newest

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check what can be checked before the model is cut; `zerokit.load` then fills the shards."""
        path = Path(resume_from_checkpoint)
        if not (path / STATE_NAME).is_file():
            raise CheckpointError(
                f"Can't find a valid checkpoint at {path}: it has no {STATE_NAME}, so it was not written to its end, "
                "or not by a Trainer"
            )
        user: Any = None
        try:
            user = zerokit.Checkpoint(path).extra()["user"]
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {_own_checkpoints(path)}") from error
        if not (isinstance(user, dict) and user.keys() >= {"scheduler", "global_batch"}):
            raise CheckpointError(
                f"{path}: written by zerokit.save(), not by ZeroTrainer. {_own_checkpoints(path)}"
            )
        saved, now = user["global_batch"], self._global_batch()
        if saved != now and not self.args.ignore_data_skip:
            raise UsageError(
                f"{path} was trained with {saved} samples a step, this run has {now} on {self.args.world_size} "
                "ranks, so steps would not give the position in the data: choose per_device_train_batch_size times "
                f"gradient_accumulation_steps times ranks to be {saved}, or write ignore_data_skip=True"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        zero = self._prepared()
        extra = zerokit.load(checkpoint, zero)
        self._schedule().load_state_dict(extra["scheduler"])
        self._generators = rng.capture(zero.runtime.collectives.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once more what `zerokit.load` has restored: skipping trained batches may have drawn numbers since."""
        if checkpoint is not None:
            rng.restore(self._generators, self._prepared().runtime.collectives.device)

    def _load_best_model(self) -> None:
        if self.args.save_only_model:
            super()._load_best_model()
            return
        zero = self._prepared()
        device = zero.runtime.collectives.device
        generators = rng.capture(device)
        zerokit.load(str(self.state.best_model_checkpoint), zero)
        rng.restore(generators, device)

    # ----

    def _prepared(self) -> ZeroOptimizer:
        return self.accelerator.prepared("this")

    def _schedule(self) -> LRScheduler:
        assert self.lr_scheduler is not None
        return cast(LRScheduler, self.lr_scheduler)

    def _together(self) -> Together:
        return Together(self._prepared().runtime.collectives)

    def _global_batch(self) -> int:
        """Samples of one step, over all ranks and micro-batches."""
        batch: int = self._train_batch_size * self.args.gradient_accumulation_steps
        return batch if self.accelerator.split_batches else batch * self.args.world_size


_REFUSED = {
    "deepspeed": "leave it out and choose ZeroTrainer(..., stage=1, 2 or 3)",
    "fsdp": "leave it out and choose ZeroTrainer(..., stage=3)",
    "parallelism_config": "leave it out: ZeroTrainer's ranks are all data-parallel",
    "torch_compile": "leave it out and compile the model in place, `model.compile()`, or its layers, "
    "`for layer in model.model.layers: layer.compile()`",
    "auto_find_batch_size": "leave it out and set per_device_train_batch_size; one rank out of memory cannot start "
    "over alone",
    "save_on_each_node": "leave it out and set output_dir to a directory that all nodes share: ranks write one "
    "checkpoint",
    "enable_jit_checkpoint": "leave it out and set save_steps: ranks would not notice the signal at the same step",
    "hub_strategy": 'write hub_strategy="end": checkpoints hold sharded weights, whole ones are pushed at the end',
}
"""Arguments that cannot mean under ZeRO what they mean to Trainer, and what to write instead."""


def require_supported(args: TrainingArguments) -> None:
    """Raise `UsageError` for arguments that ZeroTrainer has no place for, with those to write."""
    for name, advice in _REFUSED.items():
        value = getattr(args, name)
        if value and (name != "hub_strategy" or (args.push_to_hub and value != HubStrategy.END)):
            shown = getattr(value, "value", value)
            raise UsageError(f"TrainingArguments({name}={shown!r}) does not fit ZeroTrainer: {advice}")


_EVALUATIONS = {"fp16_full_eval": torch.float16, "bf16_full_eval": torch.bfloat16}


def _require_evaluation_in(precision: Precision, args: TrainingArguments) -> None:
    """Raise `UsageError` for an evaluation in another dtype, to which Trainer would convert the sharded model."""
    for name, dtype in _EVALUATIONS.items():
        if getattr(args, name) and precision.compute != dtype:
            raise UsageError(
                f"TrainingArguments({name}=True) does not fit ZeroTrainer, whose model computes in {precision.compute} "
                f"in evaluations, too: leave it out, or train with {name.removesuffix('_full_eval')}=True as well"
            )


def _remove(directory: Path) -> None:
    """Make way for a checkpoint of the same step; the file that makes the old one complete goes first."""
    (directory / STATE_NAME).unlink(missing_ok=True)
    if directory.exists():
        shutil.rmtree(directory)


def _own_checkpoints(path: Path) -> str:
    return (
        "ZeroTrainer continues from its own checkpoints; weights of another Trainer's are taken by "
        f"AutoModelFor….from_pretrained({str(path)!r})"
    )


def _saves_adapters(model: Any) -> bool:
    """Whether `save_pretrained` writes adapters alone: PEFT's models, and transformers' own with adapters."""
    return hasattr(model, "peft_config")


_DESCRIPTION = """\
{name} of a training with zerokit: ranks have written the weights and the optimizer's states in pieces, without a second
copy of the weights. `train(resume_from_checkpoint="{name}")` continues from it on any number of ranks. For whole
weights:

    zerokit consolidate {name} -o model --like {name}

Where `zerokit.integrations.transformers` is imported, `from_pretrained("{name}")` reads it as it is. Adapters are in
adapter_model.safetensors.
"""


def _complete(directory: Path) -> bool:
    """Whether a checkpoint was written to its end. Raises `StorageError` where that cannot be read."""
    with despite_damage(), suppress(ValueError):
        json.loads(read_whole(directory / STATE_NAME))
        return directory.name == f"{PREFIX_CHECKPOINT_DIR}-{zerokit.Checkpoint(directory).step}"
    return False

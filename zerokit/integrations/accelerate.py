"""`ZeroAccelerator`: accelerate's `Accelerator`, which shards what it prepares instead of wrapping it in DDP.

    accelerator = ZeroAccelerator(stage=3)  # was: Accelerator()
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

The loop stays as it is. One line that DDP forgives and this does not: clip under `if accelerator.sync_gradients:`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zerokit
from zerokit.checkpoint.frozen import Frozen
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, UsageError, ZerokitWarning
from zerokit.integrations.marks import is_unsharded, mark, take_back
from zerokit.integrations.mixed_precision import choose_precision
from zerokit.integrations.torch_optimizer import JOINED, ZERO_OPTIONS, Recipe, hand_over, require_frozen
from zerokit.placement import StageArgument, require_stage
from zerokit.runtime.counts import Count
from zerokit.runtime.precision import PrecisionArgument
from zerokit.runtime.whole import is_managed
from zerokit.training import ZeroOptimizer

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer

    from zerokit.integrations.handlers import require_known, with_handlers
    from zerokit.integrations.writing import whole_state, write_weights
except ImportError as error:
    raise ImportError("accelerate is not installed: pip install 'zerokit[accelerate]'") from error

CHECKPOINT_NAME = "zerokit"
"""The directory of zerokit's checkpoint inside the one that `save_state` writes."""

_OTHER_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class ZeroAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A `ZeroOptimizer` as accelerate holds it: steps with the last micro-batch only, reports skipped steps."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Any = None) -> None:
        """Update, if this is the last micro-batch; a step whose gradients are inf or nan is skipped."""
        skipped = self.optimizer.skipped_steps
        super().step(closure)
        self._is_overflow = self.optimizer.skipped_steps > skipped


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose `prepare` shards one model and its optimizer.

    Args:
        stage: what is sharded, as in `ZeroOptimizer`.
        precision: as in `ZeroOptimizer`; by default that of `mixed_precision`. Weights of "bf16" and "fp16" are
            half precision with fp32 masters, there is no autocast.
        zero_options: further arguments of `ZeroOptimizer`: units, bucket_mb, prefetch, init_fn, loss_scale,
            on_nonfinite, ….
        frozen: "never" leaves frozen parameters, such as the base under adapters, out of what `save_state` writes:
            `load_state` then takes a model that was built with the same ones, and refuses others.
        mixed_precision: "no", "bf16" or "fp16"; by default that of `accelerate launch`.
        **options: the other arguments of `Accelerator`; docs/integrations.md lists what becomes of `kwargs_handlers`.

    Micro-batches add up in whole gradients, as under `no_sync`; `GradientAccumulationPlugin(sync_each_batch=True)`
    keeps them sharded at stages 2 and 3, and reduces each.

    Raises `UsageError` for another engine (DeepSpeed, FSDP, Megatron-LM), torch.compile, `even_batches=False`, handlers
    that cannot be followed, and without a process group.
    """

    def __init__(
        self,
        *,
        stage: StageArgument = 2,
        precision: PrecisionArgument | None = None,
        zero_options: Mapping[str, Any] | None = None,
        frozen: Frozen = "always",
        mixed_precision: str | None = None,
        **options: Any,
    ) -> None:
        zero_options = dict(zero_options or {})
        if strange := zero_options.keys() - (expected := {*ZERO_OPTIONS, "process_group", "timeout"}):
            raise UsageError(
                f"zero_options: {', '.join(sorted(strange))} is not among {', '.join(sorted(expected))}; the "
                "optimizer's own options belong to the optimizer, stage and precision are arguments"
            )
        mixed = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
        self.zero_arguments = {
            "stage": require_stage(stage),
            "precision": choose_precision(precision, mixed, "mixed_precision"),
            **zero_options,
        }
        self._frozen = require_frozen(frozen)
        require_known(options.get("kwargs_handlers") or ())
        super().__init__(mixed_precision="no", **options)
        self._require_plain_ranks()
        self._arguments()

    def _require_plain_ranks(self) -> None:
        if self.distributed_type in _OTHER_ENGINES or self.parallelism_config is not None:
            raise UsageError(
                f"this run is set up for {self.distributed_type.value} or a parallelism_config, which shard the model "
                "themselves: start it with torchrun, or `accelerate launch --multi_gpu`, and leave their plugins out"
            )
        if self.distributed_type == DistributedType.NO or not dist.is_initialized():
            raise UsageError(
                "no process group: start with `torchrun --nproc-per-node N script.py`, and on a machine without GPUs "
                "write ZeroAccelerator(cpu=True) or TrainingArguments(use_cpu=True)"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise UsageError(
                "prepare() would return another model, a compiled one: leave dynamo_backend out, and compile the model "
                "in place, `model.compile()`, or its blocks, `for block in model.blocks: block.compile()`"
            )
        if not self.even_batches:
            raise UsageError(
                "even_batches=False gives ranks unequal numbers of batches, and a rank without one would not meet the "
                "others' collectives: leave it out; gather_for_metrics() drops what was repeated"
            )

    def _arguments(self) -> dict[str, Any]:
        """The arguments of `ZeroOptimizer`; Trainer sets the handler for DistributedDataParallel late."""
        return with_handlers(
            self.zero_arguments,
            scaler=self.scaler_handler,
            ddp=self.ddp_handler,
            group=self.init_handler,
            autocast=self.autocast_handler,
        )

    @property
    def zero_optimizer(self) -> ZeroOptimizer | None:
        """The `ZeroOptimizer` that was prepared, for `memory()`, `gathered()` and others."""
        for optimizer in self._optimizers:
            return optimizer.optimizer  # type: ignore[no-any-return]
        return None

    def prepared(self, call: str) -> ZeroOptimizer:
        """The `ZeroOptimizer` that was prepared. Raises `UsageError`, naming `call`, if there is none."""
        zero = self.zero_optimizer
        if zero is None:
            raise UsageError(
                f"{call} before prepare(): write model, optimizer = accelerator.prepare(model, optimizer)"
            )
        return zero

    # ---- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard the model and the optimizer, prepare loaders and schedulers as accelerate does; returns all in order.

        A model that an earlier accelerator or trainer has sharded is taken from it, with its weights: their optimizer
        refuses to step from then on. Raises `UsageError` unless one trainable model comes together with its one
        optimizer.
        """
        new_optimizers = [obj for obj in args if isinstance(obj, Optimizer) and not _prepared(obj)]
        if new_optimizers and self.zero_optimizer is None:
            for obj in args:
                if isinstance(obj, nn.Module) and is_managed(obj):
                    take_back(obj)
        new_models = [obj for obj in args if isinstance(obj, nn.Module) and is_unsharded(obj)]
        if not new_models and not new_optimizers:
            return super().prepare(*args, device_placement=device_placement)
        if (len(new_models), len(new_optimizers)) != (1, 1) or self.zero_optimizer is not None:
            raise UsageError(
                f"prepare() was given {len(new_models)} trainable models and {len(new_optimizers)} optimizers"
                f"{' after one of each' if self.zero_optimizer is not None else ''}: a ZeroAccelerator takes one model "
                "together with its optimizer, prepare(model, optimizer, ...); put several models into one module, and "
                f"several optimizers into one: {JOINED}"
            )
        model, optimizer = new_models[0], new_optimizers[0]
        on_device = next(
            (moves for obj, moves in zip(args, device_placement or (), strict=False) if obj is model), None
        )
        zero = self._shard(model, optimizer, on_device)
        return super().prepare(
            *(zero if obj is optimizer else obj for obj in args), device_placement=device_placement
        )

    def _shard(self, model: nn.Module, optimizer: Optimizer, on_device: bool | None) -> ZeroOptimizer:
        recipe = Recipe.of(optimizer)
        # What lies on meta is initialised where it belongs, by ZeroOptimizer.
        meta = any(parameter.is_meta for parameter in model.parameters())
        if not meta and (self.device_placement if on_device is None else on_device):
            model.to(self.device)
        zero = recipe.build(model, **self._arguments())
        hand_over(optimizer, zero)
        mark(model, zero, shares=self.ddp_handler is None or self.ddp_handler.broadcast_buffers)
        return zero

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model that is only evaluated; one that is trained goes to `prepare` with its optimizer."""
        if not evaluation_mode and is_unsharded(model):
            raise UsageError("prepare_model() of a trainable model: write prepare(model, optimizer) instead")
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Take a `ZeroOptimizer`; any other goes to `prepare` with its model."""
        if isinstance(optimizer, ZeroOptimizer):
            optimizer = ZeroAcceleratedOptimizer(optimizer)
            optimizer._is_accelerate_prepared = True
        elif not _prepared(optimizer):
            raise UsageError(
                "prepare_optimizer() of a torch optimizer: write prepare(model, optimizer) instead"
            )
        prepared: Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    # ---- the loop

    def backward(self, loss: Tensor, *, count: Count | None = None, **kwargs: Any) -> None:
        """Differentiate `loss` (0-d), divided by `gradient_accumulation_steps`; `kwargs` as for `Tensor.backward`.

        With a `count`, as in `ZeroOptimizer.backward`, `loss` is a sum over so many samples or tokens, and nothing but
        the sum of all counts divides it.
        """
        divisor = self.gradient_accumulation_steps if count is None else 1
        self.prepared("backward()").backward(loss / divisor, count=count, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, gradients add up on this rank; `accumulate(model)` does this by itself."""
        with self.prepared("no_sync()").accumulate():
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of all gradients over all ranks; returns the norm before, 0-d fp32.

        Raises `UsageError` for some of the parameters only, and before the last micro-batch.
        """
        zero = self._require_whole("clip_grad_norm_", parameters)
        return zero.clip_grad_norm_(float(max_norm), norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip every element of the gradients, which are gathered for it. Raises as `clip_grad_norm_` does."""
        zero = self._require_whole("clip_grad_value_", parameters)
        with zero.gathered_gradients():
            nn.utils.clip_grad_value_(zero.runtime.model.parameters(), clip_value)

    def _require_whole(self, call: str, parameters: Iterable[Tensor] | Tensor) -> ZeroOptimizer:
        zero = self.prepared(f"{call}()")
        if not self.sync_gradients:
            raise UsageError(
                f"{call}() before the last micro-batch would see this rank's gradients alone: write "
                f"`if accelerator.sync_gradients: accelerator.{call}(...)`"
            )
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        left = [n for n, p in zero.runtime.model.named_parameters() if p.requires_grad and id(p) not in given]
        if left:
            raise UsageError(
                f"{call}() of some parameters only ({', '.join(left[:3])}{' …' if len(left) > 3 else ''} are not among "
                f"them): write accelerator.{call}(model.parameters(), ...), or change gradients inside "
                "accelerator.zero_optimizer.gathered_gradients()"
            )
        return zero

    # ---- whole weights, and checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights and buffers, each in memory of its own; tied names share one. Collective.

        Trained weights are the masters, so they are fp32 in half precision. Every rank holds the whole model for as
        long as it keeps this.
        """
        return whole_state(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the whole weights as accelerate does, each in the dtype that it had when it was prepared. Collective.

        No rank holds more than a unit of them at a time, unless `safe_serialization` is False.
        """
        zero, plain = self.zero_optimizer, super().save_model
        if zero is None or zero.runtime.model is not model:
            plain(model, save_directory, max_shard_size, safe_serialization)
            return

        def save() -> None:
            state: dict[str, Any] = self.get_state_dict(model)
            later = any(isinstance(value, Tensor) and value.is_meta for value in state.values())
            if safe_serialization and later and all(isinstance(value, Tensor) for value in state.values()):
                write_weights(state, save_directory, max_shard_size)
            else:
                plain(model, save_directory, max_shard_size, safe_serialization)

        on_each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if on_each_node else self.is_main_process
        zero.runtime.weights.in_turn(save if writes else lambda: None)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Write accelerate's own files, and model and optimizer as a zerokit checkpoint in `zerokit/` beside them.

        Collective; the directory must be shared by all nodes. A checkpoint that is there already is removed when the
        new one is complete. Gradients of micro-batches are not written: a warning says so. Returns the directory.
        """
        zero = self.prepared("save_state()")
        if zero.runtime.gradients.received and not self.sync_gradients:
            warnings.warn(
                "save_state() before the last micro-batch: gradients are not saved, and the step that a loaded state "
                "makes next will lack them: call it under `if accelerator.sync_gradients:`",
                ZerokitWarning,
                stacklevel=2,
            )
        self._require_no_hooks(self._save_model_state_pre_hook, "register_save_state_pre_hook()")
        with self._without_sharded():
            directory = super().save_state(output_dir, safe_serialization, **kwargs)
        save_inside(Path(directory), zero, {"micro_step": self.step}, self._frozen)
        return directory

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Take back what `save_state` wrote, on any number of ranks. Collective.

        Without a directory it is the newest complete one, if automatic_checkpoint_naming has named them. Random number
        generators are the saved ones at the same world size, else derived for each rank.
        """
        zero = self.prepared("load_state()")
        self._require_no_hooks(self._load_model_state_pre_hook, "register_load_state_pre_hook()")
        if input_dir is None:
            input_dir = Together(zero.runtime.collectives).on_first(self._newest_state)
        path = Path(input_dir).expanduser() / CHECKPOINT_NAME
        if not path.is_dir():
            raise UsageError(
                f"{path}: not there: {input_dir} was not written by ZeroAccelerator.save_state()"
            )
        with self._without_sharded():
            super().load_state(input_dir, load_kwargs, **kwargs)
        # accelerate keeps it in a file of each rank; ranks that had none must count the same micro-batches.
        self.step = zerokit.load(path, zero)["micro_step"]

    def _newest_state(self) -> str:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise UsageError(
                "load_state() without a directory: write accelerator.load_state(directory) with what save_state() "
                "has returned, or ProjectConfiguration(directory, automatic_checkpoint_naming=True) for both"
            )
        folder = Path(self.project_dir) / "checkpoints"
        numbered = [
            (int(found[0]), path) for path in folder.glob("*") if (found := re.findall(r"\d+", path.name))
        ]
        complete = [path for _, path in sorted(numbered) if zerokit.list_steps(path / CHECKPOINT_NAME)]
        if not complete:
            raise CheckpointError(f"{folder}: no complete checkpoint in it: omit load_state() to begin anew")
        return str(complete[-1])

    @contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Inside, accelerate sees no model and no optimizer: it would write each rank's part as the whole."""
        hidden = {name: self.__dict__.pop(name) for name in ("_models", "_optimizers")}
        self.__dict__ |= {name: [] for name in hidden}
        try:
            yield
        finally:
            self.__dict__ |= hidden

    @staticmethod
    def _require_no_hooks(hooks: Mapping[Any, Any], call: str) -> None:
        if hooks:
            raise UsageError(
                f"{call} registers a hook over whole weights, which save_state() and load_state() never hold: remove "
                "it, and write accelerator.save_model(model, directory) where whole weights are wanted"
            )


def save_inside(directory: Path, zero: ZeroOptimizer, extra: Any, frozen: Frozen) -> None:
    """Write a checkpoint into the run directory `directory/zerokit`, then remove the earlier ones. Collective."""
    run, together = directory / CHECKPOINT_NAME, Together(zero.runtime.collectives)
    step = together.on_first(lambda: max(zerokit.list_steps(run), default=-1) + 1)
    zerokit.save(run, zero, step=step, extra=extra, keep_last=1, frozen=frozen)


def _prepared(thing: object) -> bool:
    return bool(getattr(thing, "_is_accelerate_prepared", False))

"""`ZeroStrategy`: zerokit's runtime and checkpoints for `lightning.Trainer(strategy=ZeroStrategy(stage=3))`.

The whole of `training_step` runs as one forward pass of the runtime, so it may call the module itself, parts of it, or
read parameters. With manual optimization it runs as it is, because backward passes happen inside it: there, only
`forward` and submodules may be called.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.frozen import Frozen
from zerokit.checkpoint.load import load
from zerokit.checkpoint.plan import read_extra
from zerokit.checkpoint.prune import foreign_to_step
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import Staging
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, UsageError
from zerokit.integrations.lightning_loading import of_lightning, read_sharded
from zerokit.integrations.lightning_precision import (
    PRECISIONS,
    ZeroPrecision,
    count_in,
    flag_of,
    lightning_package,
)
from zerokit.integrations.lightning_refusals import only_optimizer, refuse_conflicts
from zerokit.integrations.pretrained import whole_weights
from zerokit.integrations.torch_optimizer import ZERO_OPTIONS, Recipe, hand_over, require_frozen
from zerokit.placement import StageArgument, require_stage
from zerokit.runtime import Precision, release
from zerokit.runtime.counts import Count
from zerokit.runtime.precision import PrecisionArgument
from zerokit.runtime.whole import is_managed
from zerokit.training import ZeroOptimizer

_NAME = lightning_package()
read_sharded(_NAME)
_DDPStrategy: Any = import_module(f"{_NAME}.strategies").DDPStrategy
_ForwardRedirection: Any = import_module(f"{_NAME}.strategies.strategy")._ForwardRedirection


class ZeroStrategy(_DDPStrategy):  # type: ignore[misc]
    """Trains a LightningModule with `ZeroOptimizer`, and checkpoints it with `zerokit.save`.

    `configure_optimizers` returns a torch optimizer as always (AdamW, Muon, an `OptimizerList` of both); before
    training it is turned into a `ZeroOptimizer` of the same classes, groups and options, and schedulers are attached to
    that one.
    Losses, steps and norms are those of `strategy="ddp"`.

        trainer = lightning.Trainer(strategy=ZeroStrategy(stage=3), devices=8, precision="bf16-mixed")

    A checkpoint is a zerokit directory: `trainer.fit(…, ckpt_path=…)` continues from it at any world size and
    stage, `zerokit consolidate` makes a folder for Hugging Face's loaders of it; `save_weights_only=True` leaves the
    optimizer's state out, for `validate`, `test`, `predict` and `zerokit.load`. Lightning's own state and what
    `on_save_checkpoint` adds are its `extra`: JSON-like data and tensors; other objects are refused by name. After
    `fit` the module stays sharded: `validate`, `test` and `predict` run as in training, and another `fit` shards it
    anew from its weights. Without a `fit` before, they run with the whole module on every rank. Where this module is
    imported, `Net.load_from_checkpoint` reads these checkpoints.

    Args:
        stage: what is sharded across ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        precision: "fp32", "bf16", "fp16" or a `Precision`; by default that of `Trainer(precision=…)`.
        count_key: where `training_step` returns {"loss": a sum, count_key: of how many samples or tokens}. The update
            is that of their mean, as in `ZeroOptimizer.backward`. With manual optimization write
            `self.manual_backward(loss_sum, count=n)`.
        frozen: "never" leaves frozen parameters, such as the base under adapters, out of checkpoints: `fit` then
            continues with a module that was built with the same ones, and refuses others.
        units, bucket_mb, prefetch, mesh, init_fn, loss_scale, on_nonfinite, row_blocks, update_cost, states, shares: as
            for `ZeroOptimizer`.
        **options: of Lightning's `DDPStrategy`: accelerator, cluster_environment, process_group_backend, start_method,
            timeout.

    Raises:
        UsageError: for what does not go together, with the line to write instead, when training is set up.
    """

    strategy_name = "zerokit"

    def __init__(
        self,
        stage: StageArgument = 3,
        *,
        precision: PrecisionArgument | None = None,
        count_key: str | None = None,
        frozen: Frozen = "always",
        **options: Any,
    ) -> None:
        if unknown := options.keys() - ZERO_OPTIONS - _OPTIONS:
            raise UsageError(
                f"ZeroStrategy has no option {', '.join(sorted(unknown))}: expected stage, precision, count_key, "
                f"{', '.join(sorted(ZERO_OPTIONS | _OPTIONS))}"
            )
        self._count_key = count_key
        self._count: Count | None = None  # of the training step whose backward pass comes
        self._chosen = None if precision is None else Precision.of(precision)
        given = {name: options.pop(name) for name in ZERO_OPTIONS & options.keys()}
        self._settings: dict[str, Any] = {"stage": require_stage(stage), **given}
        self._frozen = require_frozen(frozen)
        self.zero_optimizer: ZeroOptimizer | None = None
        """The optimizer that trains; None before `fit` has set it up."""
        super().__init__(**options)
        self._forward_redirection = _ForwardRedirection()

    # ---- precision

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin if self._precision_plugin is not None else ZeroPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, ZeroPrecision):
            plugin = ZeroPrecision(flag_of(plugin, chosen=self._chosen is not None))
        self._precision_plugin = plugin

    # ---- setting up

    def setup(self, trainer: Any) -> None:
        """Called by the Trainer: moves the module to its device, and shards it if it is to be trained."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fitting = trainer.state.fn == "fit"
        managed: tuple[nn.Module, ZeroOptimizer] | None = module.__dict__.get(_MANAGED)
        if managed is not None and fitting:
            root, zero = managed
            if is_managed(root):
                release(root)
            zero.methods.remove(module)
            del module.__dict__[_MANAGED]
        elif managed is not None:
            # Its weights stay sharded: validate, test and predict run as in training.
            self.model, self.zero_optimizer = managed
            return
        self.model = module
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            self.model_to_device()
        if fitting:
            refuse_conflicts(module, trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Turn what `configure_optimizers` returns into a `ZeroOptimizer` over the module."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        given = only_optimizer(self.optimizers)
        # Manual optimization differentiates inside the step, which then cannot be one forward pass.
        root = _Root(module) if module.automatic_optimization else module
        precision = self._chosen or Precision.of(PRECISIONS[self.precision_plugin.precision])
        zero = Recipe.of(given).build(root, precision=precision, **self._settings)
        # Loggers name learning rates after the optimizer's class.
        zero.__class__ = type(type(given).__name__, (ZeroOptimizer,), {})
        # A `state_dict()` that gathers, and others, which call the module's own.
        zero.methods.install(module)
        module.__dict__[_MANAGED] = root, zero
        hand_over(given, zero)
        self.optimizers = [zero]
        self.zero_optimizer = zero
        self.precision_plugin.optimizer = zero
        self.model = root

    @property
    def optimizers(self) -> list[Any]:
        optimizers: list[Any] = self._optimizers
        return optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        _DDPStrategy.optimizers.fset(self, optimizers)
        # Lightning's wrapper takes over the class: its methods would set the wrapper's attributes, not the optimizer's.
        for wrapper, zero in zip(self._lightning_optimizers, optimizers, strict=True):
            if isinstance(zero, ZeroOptimizer):
                for name, value in vars(ZeroOptimizer).items():
                    if callable(value) and not name.startswith("__") and name != "step":
                        wrapper.__dict__[name] = getattr(zero, name)

    # ---- the loop

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, whose count is kept for the backward pass."""
        output = super().training_step(*args, **kwargs)
        if self._count_key is not None and self.lightning_module.automatic_optimization:
            self._count = count_in(output, self._count_key)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate the loss; Lightning has divided it by `accumulate_grad_batches`, which a sum must not be."""
        if self._count is not None:
            kwargs["count"], self._count = self._count, None
            closure_loss = closure_loss * self.lightning_module.trainer.accumulate_grad_batches
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backward passes add up on this rank, for `accumulate_grad_batches`."""
        with self._require_optimizer().accumulate():
            yield

    def _require_optimizer(self) -> ZeroOptimizer:
        if self.zero_optimizer is None:
            raise UsageError("there is no ZeroOptimizer before fit() has set the training up")
        return self.zero_optimizer

    def teardown(self) -> None:
        """Leave the module where it is: its weights lie in zerokit's storage."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    @property
    def checkpoint_io(self) -> Any:
        return _DDPStrategy.checkpoint_io.fget(self)

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if io is not None:
            raise UsageError(
                f"{type(io).__name__} cannot write what ranks hold in pieces: leave the CheckpointIO plugin out, "
                "ZeroStrategy writes zerokit's directories"
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing where zerokit writes the weights itself."""
        return {} if self.zero_optimizer is not None else self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: zerokit writes it."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write `filepath` as a step's directory; an existing one is replaced when the new one is complete."""
        if storage_options is not None:
            raise UsageError("storage_options have no meaning for zerokit's directories: leave them out")
        zero = self._require_optimizer()
        target = Path(filepath).absolute()
        together = Together(zero.runtime.collectives)
        extra = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }

        def begin() -> Path:
            try:
                encode(extra)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}. Lightning's checkpoint has it from save_hyperparameters(), which takes ignore=[…], from "
                    "a callback's state_dict() or from on_save_checkpoint(): leave it out there"
                ) from None
            target.parent.mkdir(parents=True, exist_ok=True)
            run = target.parent / f".{target.name[:60]}.run-{secrets.token_hex(6)}"
            stack.callback(shutil.rmtree, run, ignore_errors=True)
            return run

        def commit() -> None:
            if target.is_symlink():
                target.unlink()
            with Staging(target, force=True, foreign=foreign_to_step) as staging:
                for file in written.iterdir():
                    file.rename(staging.work / file.name)
                staging.commit()

        with ExitStack() as stack:
            run = together.on_first(begin)
            written = save(
                run,
                zero,
                step=int(checkpoint["global_step"]),
                extra=extra if zero.runtime.collectives.rank == 0 else None,  # as Lightning's own strategies
                weights_only="optimizer_states" not in checkpoint,  # Lightning's mark of save_weights_only
                frozen=self._frozen,
            )
            together.on_first(commit)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load from a directory that any number of ranks saved: all of it for `fit`, else weights and buffers.

        Lightning's part is returned. Raises `CheckpointError` if `fit` is to continue from weights only.
        """
        if not (path := Path(checkpoint_path)).is_dir():
            raise CheckpointError(
                f"{path}: not a zerokit checkpoint. For weights of a .ckpt file write "
                "module.load_state_dict(torch.load(path)['state_dict']) before fit(), without ckpt_path"
            )
        strict = bool(self.lightning_module.strict_loading)
        zero, fitting = self.zero_optimizer, self.lightning_module.trainer.state.fn == "fit"
        if zero is not None:
            if fitting:
                Together(zero.runtime.collectives).each(lambda: _require_whole(path))
            loaded = load(path, zero, strict=strict, weights_only=not fitting)
        else:
            checkpoint = Checkpoint(path)
            self.lightning_module.load_state_dict(whole_weights(checkpoint), strict=strict)
            loaded = read_extra(checkpoint, rank=0, weights_only=True)["user"]
        return {**of_lightning(path, loaded), "state_dict": {}, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: `load_checkpoint` has loaded the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do: `load_checkpoint` has loaded the states."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """It has no name: it is given to the Trainer as an object."""


_OPTIONS = {
    *(
        "accelerator",
        "cluster_environment",
        "parallel_devices",
        "process_group_backend",
        "start_method",
        "timeout",
    )
}
_MANAGED = "_zerokit_strategy"
"""The attribute of a sharded module, whose weights stay sharded: the root and the optimizer it was handed to."""


class _Root(nn.Module):
    """A module's own parameters, buffers and submodules under a second root, whose forward is the whole step.

    The runtime announces passes by the root's hooks, so that the module's `forward` may be called inside.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__ |= {"module": module, **{name: module.__dict__[name] for name in _SHARED}}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["module"].forward(*args, **kwargs)


_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _require_whole(path: Path) -> None:
    if Checkpoint(path).weights_only:
        raise CheckpointError(
            f"{path}: has weights only (ModelCheckpoint's save_weights_only=True) and no optimizer state: "
            f'leave ckpt_path out, and write zerokit.load("{path}", trainer.strategy.zero_optimizer, '
            "weights_only=True) in on_fit_start, or give a whole checkpoint"
        )

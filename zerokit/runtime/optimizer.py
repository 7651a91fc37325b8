"""`ZeroOptimizer`: a `torch.optim.Optimizer` whose memory and work are sharded across ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerokit.errors import UsageError
from zerokit.formulas import TrafficReport
from zerokit.owners import Cost
from zerokit.placement import StageArgument
from zerokit.runtime.build import Runtime
from zerokit.runtime.changes import ONE_RANK_SAYS, buffers_from, require_rank
from zerokit.runtime.classes import OptimizerClasses
from zerokit.runtime.counts import Count, checked
from zerokit.runtime.hooks import differentiate, profiled
from zerokit.runtime.host_copy import HostCopy
from zerokit.runtime.interface import refuse_step_options
from zerokit.runtime.loss import Loss, differentiating
from zerokit.runtime.memory_watch import MemoryWatch
from zerokit.runtime.model import UnitRule
from zerokit.runtime.modes import Modes
from zerokit.runtime.nonfinite import OnNonfinite
from zerokit.runtime.options import Options
from zerokit.runtime.precision import LossScale, Precision, PrecisionArgument
from zerokit.runtime.rebalancing import Rebalancing
from zerokit.runtime.shares import BY_MEMORY
from zerokit.runtime.states import (
    AfterSteps,
    Average,
    BetweenIslands,
    Islands,
    load_state,
    take_state,
)
from zerokit.runtime.step import INTERRUPTED, unless_updated, update_masters
from zerokit.runtime.totals import Totals
from zerokit.runtime.whole import ModelMethods


class ZeroOptimizer(Rebalancing):
    """A torch optimizer that shards its states and, by stage, gradients and parameters across the ranks of a group.

    Gradients are averaged over ranks, as in DDP.

    Args:
        model: its parameters become views of flat storages in the compute dtype; those on `meta` are initialised here.
        optimizer_class: AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, or any class that updates each element by itself;
            also one that updates each tensor by itself (Muon, Adafactor, SOAP, LAMB), which the tensor's owner does. Or
            several classes, each with its `params`: tensors, names or groups.
        stage: what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters
            (ZeRO, arXiv:1910.02054, §5). Losses are bitwise-identical at every stage. With a mesh of two axes also a
            pair (outer, inner), such as (0, 3). ("local", 3) makes islands of the inner axis: no gradients cross the
            outer one, over which `zerokit.LocalSteps` synchronises weights. Modules may have stages of their own:
            {"backbone": 3, "*": 2} by path or its end, "*" the rest, or a function of a module's path.
        mesh: the ranks as (outer, inner), for example (nodes, ranks of a node), or a `DeviceMesh`. By default one
            axis; on gloo, several nodes with equally many ranks are the outer axis.
        precision: "fp32", "bf16", "fp16" or a `Precision`; {"router": "fp32", "*": "bf16"} by module.
        params: the parameters to train, in groups as any torch optimizer takes them. By default all of them.
        units: the modules that are communicated together: a class, several, or a function of a module. By default
            the children of every `ModuleList` and `Sequential`.
        bucket_mb: neighbouring units join up to this many MiB, counted in fp32. By default 16, less for small models.
        prefetch: how many units stage 3 gathers ahead of the one that computes; each holds memory.
        process_group: the ranks to shard over. By default all.
        timeout: of collectives. By default the process group's.
        init_fn: initialises one module in place, for models on `meta`. By default its `reset_parameters()`.
        loss_scale: dynamic loss scaling, for fp16.
        on_nonfinite: of a step with inf or nan in some rank's gradients: "skip" and count it, "raise" `NonFiniteError`
            on every rank before anything changes, or "ignore". fp16 always skips, and lowers its loss scale.
        row_blocks: parameters whose blocks of rows are tensors of their own for optimizers that update tensors whole,
            by name or its end: {"attn.qkv.weight": 3} equal ones, or the rows of each.
        update_cost: the cost of one tensor's update by its shape, from which owners are chosen. By default 4m²n + 2m³
            for a matrix with m ≤ n, and the number of elements for others.
        states: where masters and the optimizer's states are between steps: on the "device"; on the "host"; in a file in
            the directory of this path, on a disk of the node; or on the device with moments in "fp8". From elsewhere
            they visit the device unit by unit, and all bits stay as they are on it; fp8 rounds.
        shares: how much of what is sharded each rank holds, such as (3, 3, 1, 1), by rank or along the inner axis of
            the mesh; a rank of share 0 holds nothing. "memory" takes the free memory of each rank's device, agreed over
            ranks and printed, and changes shares where a rank runs out of it (`recut`). By default all the same. Losses
            do not depend on shares where sums go in rank order (gloo).
        **optimizer_options: passed to `optimizer_class`. `fused=True` is added where it is accepted.

    Raises:
        UsageError: for arguments that do not exist or do not fit together.
        UnsupportedOptimizer: for an optimizer whose update of a tensor depends on other tensors.
        LayoutMismatch: on every rank, when ranks disagree about the model or the settings.
    """

    islands: Islands | None = None
    """The islands that the ranks train as; only `zerokit.ZeroOptimizer` makes some."""
    local_steps: BetweenIslands | None = None
    """What synchronises the islands, if there are any: made by `zerokit.LocalSteps(optimizer, every=...)`."""
    copies: AfterSteps | None = None
    """What saves the state after steps, if there is something: made by `zerokit.Copies(optimizer, path)`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: OptimizerClasses,
        *,
        stage: StageArgument = 2,
        mesh: tuple[int, int] | DeviceMesh | None = None,
        precision: PrecisionArgument = "bf16",
        params: Iterable[Any] | None = None,
        units: UnitRule | None = None,
        bucket_mb: float | None = None,
        prefetch: int = 1,
        process_group: dist.ProcessGroup | None = None,
        timeout: datetime.timedelta | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        loss_scale: LossScale | None = None,
        on_nonfinite: OnNonfinite = "skip",
        row_blocks: Mapping[str, int | Sequence[int]] | None = None,
        update_cost: Cost | None = None,
        states: str | os.PathLike[str] = "device",
        shares: Sequence[int] | str | None = None,
        **optimizer_options: Any,
    ) -> None:
        self.precision = Precision.of(precision)
        scale = LossScale.of(loss_scale)
        self.scaler = scale if self.precision.scaled else None
        ranks = stage, mesh, process_group, timeout
        options = Options(
            *ranks,
            self.precision,
            params,
            units,
            bucket_mb,
            prefetch,
            init_fn,
            on_nonfinite,
            row_blocks,
            update_cost,
            states,
            shares,
        )
        self.runtime = made = Runtime(model, optimizer_class, self.with_own_ranks(options), optimizer_options)
        """What the optimizer is made of; for zerokit's own checkpoints."""
        self._collectives, self._control = made.collectives, made.control
        self._gradients, self._engine, self._walk = made.gradients, made.engine, made.walk
        super().__init__(made.inner)
        self.ema: Average | None = None
        """The average of the weights, if there is one: made by `zerokit.Ema(optimizer, decay)`."""
        self.host_copy: HostCopy | None = None
        """The buffer that background saves write from, once there was one."""
        self._last_traffic = TrafficReport()
        self._modes = Modes(made)
        self._watch = MemoryWatch(made) if shares == BY_MEMORY and self.islands is None else None
        self._totals = Totals(self._control, on_nonfinite, scaled=self.precision.scaled)
        self.methods = ModelMethods(made.model, self._engine, made.weights, made.hooks, self)
        """The model's own methods while it is managed."""
        self._collectives.take_traffic()

    # ---- what ranks that train apart do otherwise

    def with_own_ranks(self, options: Options) -> Options:
        """Options for the ranks that this one trains with."""
        return options

    def require_steppable(self) -> None:
        """Raise `UsageError` where a step cannot be made now."""
        if self.refusal:
            raise UsageError(f"step() refused: {self.refusal}")

    def after_update(self) -> None:
        """A step is over, made or left out for an overflow; `refusal` stands until this returns."""

    # ---- the training loop

    def backward(
        self,
        loss: Tensor,
        *,
        count: Count | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Differentiate `loss` (0-d), scaled in fp16; gradients are reduced while they arrive.

        Without a `count`, gradients are averaged over ranks and summed over passes, as with DDP. With one, `loss` is a
        sum over so many samples or tokens (a number or a 0-d tensor; 0 is one), in all passes of a step, and the update
        uses the sum of all gradients divided by the sum of all counts, of all ranks and passes.

        `retain_graph` and `create_graph` are those of `Tensor.backward`. Raises `UsageError` for a negative count.
        """
        count = checked(count, self._collectives.device)
        with differentiating(Loss(None if self.scaler is None else self.scaler.value, count)):
            differentiate(
                loss if self.scaler is None else loss * self.scaler.value,
                retain_graph=retain_graph,
                create_graph=create_graph,
                frees_weights=self.runtime.placement.cuts_parameters,
            )

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which backward passes add up gradients on this rank; the first one outside reduces them all.

        Costs whole gradients at every stage, and gives the same bits at every stage.
        """
        return self._gradients.accumulate()

    no_sync = accumulate
    """The name that DDP and FSDP have for it."""

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale gradients down to a global norm of at most `max_norm`, like torch's function of the same name.

        Costs one small all-reduce. Returns the norm before clipping, a 0-d fp32 tensor. With
        `error_if_nonfinite`, a norm that is inf or nan raises `NonFiniteError` on every rank and leaves the gradients
        as they are, which waits for the device. `foreach` changes nothing here.
        """
        self._gradients.require_reduced("clip_grad_norm_()", scaled=self.scaler is not None)
        self._walk.finish()
        return self._totals.clip(max_norm, norm_type, self.scaler, error_if_nonfinite=error_if_nonfinite)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, **options: object) -> float | None:
        """Update the parameters from the gradients of the backward passes since `zero_grad`.

        With inf or nan in some rank's gradients, `on_nonfinite` says what becomes of it. A parameter without gradient
        is updated with zeros; one that requires no gradient any more keeps its value and its states.

        Args:
            closure: runs forward and backward and returns the loss, as torch's optimizers take it; run once.

        After an exception that ends the torch optimizer's update halfway, steps and saves are refused until a load
        succeeds. After any other, `zero_grad()` and a new pass continue.
        """
        if options:
            refuse_step_options(options)
        self._gradients.require_reduced("step()", scaled=self.scaler is not None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.require_steppable()
        self._walk.finish()
        agreed, self.scaler = self._totals.settle(self.scaler)
        if agreed.updates:
            self._engine.take_changes()
            self._collectives.wait_for_readers()
            for hook in self._optimizer_step_pre_hooks.values():
                hook(self, (), {})
        self.refuse(INTERRUPTED)
        if agreed.updates:
            made = self.runtime
            unchanged = unless_updated(self._inner, self._control, self._note_no_update)
            with profiled("update"), unchanged as agree:
                tour = partial(made.home.tour, writes=True, agree=agree)
                update_masters(made.units, self._gradients, self._inner, made.wholes, tour, agreed.left_out)
        self._last_traffic = self._collectives.take_traffic()
        if agreed.updates:
            self._engine.gather_updated()
        self.after_update()
        self.refuse("")
        for hook in self._optimizer_step_post_hooks.values() if agreed.updates else ():
            hook(self, (), {})
        self.follow_memory()
        if self.copies is not None:
            self.copies.after_step()
        return loss

    def _note_no_update(self) -> None:
        self._collectives.note_path(-1)  # ranks that have made the step differ from now on
        self.refuse("")

    @property
    def train(self) -> Callable[[], None]:
        """The optimizer's own `train()`, where it has one, as schedule-free optimizers do. All ranks call it."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """The optimizer's own `eval()`, where it has one: the model then has the weights to evaluate.

        All ranks call it, and `train()` before the next step.
        """
        return self._mode("eval")

    def _mode(self, name: str) -> Callable[[], None]:
        self.require_own_weights(f"{name}()")
        return self._modes.method(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those of an unfinished backward pass."""
        if self._gradients.shown:
            raise UsageError("zero_grad() inside gathered_gradients(): leave the context first")
        self._walk.forget()

    @contextmanager
    def gathered(self, source: int | None = None) -> Iterator[None]:
        """A context in which every parameter of the model is whole and current; all ranks must enter together.

        In-place changes made alike on all ranks are kept. The model can run inside, too.

        Args:
            source: the rank of the optimizer's group whose changes of parameters and buffers all ranks get at the end;
                those of others are dropped. Inside, steps and saves are refused.

        Raises `UsageError`, on every rank, for changes that differ; all ranks have rank 0's then.
        """
        require_rank(source, self.layout.world)
        self._control.finish()
        if source is None:
            with self._engine.opened(agree=True):
                yield
        else:
            buffers = buffers_from(source, self.runtime.model, self._collectives)
            with self.refusing(ONE_RANK_SAYS), self._engine.opened(source, agree=True), buffers:
                yield

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and whole current value, one after another, for exports and serving engines.

            for name, weight in optimizer.weights(dtype=torch.bfloat16):
                engine.update(name, weight)

        Values are the masters', rounded to `dtype` as `zerokit consolidate` does. One whole unit is in memory at a
        time. All ranks loop; one that leaves early takes part in the rest before it goes on. Inside, steps and saves
        are refused.
        """
        with self.refusing("the loop over weights() has not ended: leave it first"):
            yield from self.runtime.weights.each(dtype)

    @contextmanager
    def gathered_gradients(self, source: int | None = None) -> Iterator[None]:
        """A context in which every `parameter.grad` is whole and averaged over ranks; all ranks must enter together.

        In-place changes are kept: those made alike on all ranks, or rank `source`'s. Others raise `UsageError` on every
        rank, and none is kept then, nor after any other exception. torch's functions over gradients work here. Costs an
        all-gather and the memory of whole gradients. Elsewhere `parameter.grad` only shows that there is one.
        """
        require_rank(source, self.layout.world)
        self._gradients.require_reduced("gathered_gradients()", scaled=self.scaler is not None)
        self._walk.finish()
        self._totals.show(self.scaler)
        with self._gradients.show(source):
            yield

    # ---- one rank's part of the state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, which only the same rank of an equal run can load; not of local steps."""
        self.require_own_weights("state_dict()")
        if self.refusal:
            raise UsageError(f"state_dict() refused: {self.refusal}")
        self._control.finish()
        return self.hooked_state(self._take_state)

    def _take_state(self) -> dict[str, Any]:
        state = take_state(self.runtime)
        state["loss_scale"] = None if self.scaler is None else (self.scaler.value, self.scaler.good_steps)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. Raises `LayoutMismatch` for another layout, stage or rank."""
        self.require_own_weights("load_state_dict()")
        self.require_loadable()
        self.hooked_load(state_dict, self._load_state)

    def _load_state(self, state_dict: Mapping[str, Any]) -> None:
        load_state(self.runtime, state_dict)
        if self.scaler is not None:
            self.scaler = self.scaler.restored(*state_dict["loss_scale"])
        self.refuse("")

    def __repr__(self) -> str:
        return (
            f"ZeroOptimizer(stage={self.runtime.placement}, world={self.layout.world}, "
            f"precision={self.precision.as_dict()}, {self._inner!r})"
        )

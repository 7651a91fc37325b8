"""A trace: a model run once, forward and backward, on fake tensors, with its memory, gradients and work in order.

Fake tensors have shapes, dtypes and storages, and no memory. Every storage that an operation returns is followed until
it dies, so activations include temporaries, logits and the loss. The same hooks as the runtime's note when a unit is
entered, when its outputs receive gradients, and when each parameter's gradient is ready. Nothing here depends on the
number of ranks or on a stage: `memory` replays a trace for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerokit.errors import UsageError
from zerokit.layout import Layout, build_layout, default_bucket_bytes
from zerokit.planning.products import products_of
from zerokit.planning.work import ModelWork, Product, UnitWork, Work
from zerokit.runtime.hooks import in_backward, origin, tensors_in
from zerokit.runtime.model import Anatomy, announcers, take_apart
from zerokit.runtime.precision import FLOATING, Precision, cast_inputs, keep_statistics, modules_that_cast
from zerokit.training.recomputation import blocks_of, recompute_blocks


class Moment(Enum):
    """An event between two operations of a traced step."""

    ENTER = "a module is about to use units"
    LEAVE = "a module that used units has returned"
    END_FORWARD = "the model has returned its loss"
    BACKWARD = "an output made by units has its gradient"
    RECOMPUTE = "a checkpoint runs a module of units again"
    GRADIENT = "a parameter's gradient is ready"
    END = "backward has ended"


@dataclass(frozen=True, slots=True)
class Event:
    """A moment, the units it is about, and the first of `ModelTrace.levels` from then on.

    `parameter` is the position of a gradient's parameter in its unit, `gradient_bytes` the gradient's memory. `watched`
    says of a module that returned whether backward will show when it comes to its units.
    """

    moment: Moment
    sample: int
    units: tuple[int, ...] = ()
    parameter: int = 0
    gradient_bytes: int = 0
    watched: bool = True


@dataclass(frozen=True)
class ModelTrace:
    """One micro-batch through a model.

    Attributes:
        layout: of one rank; `Layout.for_world` cuts it for others.
        samples: sequences or images of the micro-batch.
        events: in order.
        levels: bytes of activations after each operation and at each event.
        work: of units in the order of forward, for the time of a step.
        kept_lazily: units whose uses are all announced by modules, so that they are gathered when those are entered.
        buffer_bytes: of the model's buffers.
    """

    layout: Layout
    samples: int
    events: tuple[Event, ...]
    levels: NDArray[np.int64]
    work: ModelWork
    kept_lazily: frozenset[int]
    buffer_bytes: int


SAMPLES = 997
"""Samples of the micro-batch that stands for those of all sizes. It is a prime that hardly any other dimension is a
multiple of, so a dimension, or a tensor's bytes, that it divides grows with the samples, and others do not."""


_MOST_OPERATIONS = 300_000
"""Ten times those of a transformer of 80 blocks; so many take about a minute."""


@dataclass(slots=True)
class _Stretch:
    """Work being collected until the next unit is entered; of a `general` one, bytes that grow are apart."""

    unit: int
    products: list[Product] = field(default_factory=list)
    moved_bytes: int = 0
    moved_per_sample: int = 0
    kernels: int = 0

    def work(self, samples: int | None) -> Work:
        """The trace as recorded or, if it is general, for this number of samples."""
        if samples is None:
            return Work(tuple(self.products), self.moved_bytes, self.kernels)
        products = tuple(
            Product(*(_grown(size, samples) for size in (one.m, one.n, one.k, one.count)))
            for one in self.products
        )
        return Work(products, self.moved_bytes + samples * self.moved_per_sample, self.kernels)


def _grown(size: int, samples: int) -> int:
    return size // SAMPLES * samples if size % SAMPLES == 0 else size


@dataclass(frozen=True)
class Recording:
    """A recorded step of one micro-batch; a `general` one, of `SAMPLES`, gives the traces of all sizes."""

    general: bool
    trace: ModelTrace
    per_sample: NDArray[np.int64]
    uses: tuple[tuple[_Stretch, _Stretch | None, _Stretch | None], ...]
    units_per_sample: int

    def at(self, samples: int) -> ModelTrace:
        """The trace of a micro-batch of this size; a recording that is not general has only its own size."""
        count = samples if self.general else None
        units = tuple(
            UnitWork(parts[0].unit, *(Work() if part is None else part.work(count) for part in parts))
            for parts in self.uses
        )
        levels = self.trace.levels + samples * self.per_sample
        work = ModelWork(units, samples * self.units_per_sample, _fresh_bytes(self.trace, levels))
        return replace(self.trace, samples=samples, levels=levels, work=work)


def _fresh_bytes(trace: ModelTrace, levels: NDArray[np.int64]) -> int:
    """By how much activations outgrow what the heap still has, where it hands freed memory back at three moments.

    These are the end of forward, and when backward comes to the first and to the last unit (`runtime.gathering`).
    """
    scoped = [
        event.sample
        for event in trace.events
        if event.moment is Moment.BACKWARD and any(trace.layout.units[unit].scopes for unit in event.units)
    ]
    end = next(event.sample for event in trace.events if event.moment is Moment.END_FORWARD)
    first, last = (scoped[0], scoped[-1]) if scoped else (end, end)
    after = max(
        levels[last:].max(), levels[: end + 1].max()
    )  # the next pass begins with what this one leaves
    stretches = ((end, levels[end : first + 1].max()), (first, levels[first : last + 1].max()), (last, after))
    return int(sum(most - levels[start] for start, most in stretches))


class _Recorder(TorchDispatchMode):
    """Follows storages and work through every operation."""

    def __init__(self, held: Iterable[Tensor], *, general: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._divisor = SAMPLES if general else 0
        self.events: list[Event] = []
        self.levels: list[tuple[int, int]] = []
        """Bytes, and bytes a sample."""
        self.forward: list[_Stretch] = []
        self.backward: list[_Stretch] = []
        self.recomputed: list[_Stretch] = []
        self.recomputing = 0
        self._held = [tensor.untyped_storage() for tensor in held]
        self._alive: dict[int, weakref.ref[Any] | None] = {storage._cdata: None for storage in self._held}
        self._level = self._per_sample = self._operations = 0
        self._into = _Stretch(-1)
        """What operations before the first unit are counted in: the first unit takes it over."""

    def note(self, moment: Moment, units: Iterable[int] = (), **more: Any) -> None:
        """Record an event."""
        units = tuple(units)
        self.events.append(Event(moment, len(self.levels), units, **more))
        self.levels.append((self._level, self._per_sample))
        if not units:
            return
        if moment is Moment.ENTER:
            before = self._into
            self._into = _Stretch(units[0])
            if not self.forward:
                self._into = replace(before, unit=units[0])
            self.forward.append(self._into)
        elif moment is Moment.BACKWARD:
            self._begin_backward(units[0])

    def end_forward(self) -> None:
        """Assign what follows to the unit used last, until an output of another unit has its gradient."""
        self.note(Moment.END_FORWARD)
        self._begin_backward(self.forward[-1].unit if self.forward else -1)

    def _begin_backward(self, unit: int) -> None:
        if self.backward and self.backward[-1].unit == unit:
            return
        self._into = _Stretch(unit)
        self.backward.append(self._into)
        self.recomputed.append(_Stretch(unit))

    def hold(self, tensor: Tensor) -> None:
        """Count the tensor's memory as activations, although no operation made it."""
        self._follow(tensor)

    def _follow(self, tensor: Tensor) -> bool:
        """Count the tensor's storage. Returns whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return False
        fixed, per_sample = self._divide(storage.nbytes())
        self._level += fixed
        self._per_sample += per_sample

        def gone(_: object) -> None:
            self._level -= fixed
            self._per_sample -= per_sample
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        return True

    def _divide(self, size: int) -> tuple[int, int]:
        """Bytes, and bytes a sample."""
        if self._divisor and size % self._divisor == 0:
            return 0, size // self._divisor
        return size, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # which autograd asks for more often than for all else
            return args[0].fake_device
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise UsageError(
                f"the model runs more than {_MOST_OPERATIONS:,} operations in one micro-batch, as in a loop over "
                "tokens: give a smaller --seq-len, or measure it with zerokit bench"
            )
        result = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if not made:
            return result
        new = [self._follow(value) for value in made]
        self.levels.append((self._level, self._per_sample))
        if any(new) or func._schema.is_mutable:
            self._count(func, args, kwargs, made)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        name = func.name().split("::")[-1].split(".")[0]
        if name.startswith(("empty", "new_empty")):
            return
        into = self.recomputed[-1] if self.recomputing and self.recomputed else self._into
        into.kernels += 1
        products = products_of(name, args, made)
        if products:
            into.products += products
            return
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if name == "embedding":  # of the table only the rows that are looked up
            given = made
        for value in (*given, *made):
            fixed, per_sample = self._divide(value.numel() * value.element_size())
            into.moved_bytes += fixed
            into.moved_per_sample += per_sample


_DEVICE = torch.ops.prim.device.default


class _AsOnCuda(TorchFunctionMode):
    """Operations that save other tensors on CUDA than on a CPU, replaced by what CUDA runs.

    CUDA's fused attention keeps a seed for its dropout, where a CPU falls back to whole matrices; its dropout keeps a
    mask of one byte an element; its RMSNorm is one kernel, which saves its input and one number a row.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        elif func is F.dropout:
            names = ("input", "p", "training", "inplace")
            given = {
                "p": 0.5,
                "training": True,
                "inplace": False,
                **dict(zip(names, args, strict=False)),
                **kwargs,
            }
            if not given["training"] or given["p"] == 0:
                return given["input"]
            return torch.native_dropout(given["input"], given["p"], True)[0]
        elif func is F.rms_norm and hasattr(torch.ops.aten, "_fused_rms_norm"):
            names = ("input", "normalized_shape", "weight", "eps")
            given = {"weight": None, "eps": None, **dict(zip(names, args, strict=False)), **kwargs}
            return torch.ops.aten._fused_rms_norm(
                given["input"], list(given["normalized_shape"]), given["weight"], given["eps"]
            )[0]
        return func(*args, **kwargs)


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Replace them in forward, and in modules that backward runs again: autograd turns function modes off."""
    again: list[ExitStack] = []

    def before(module: nn.Module, args: Any) -> None:
        if in_backward():
            again.append(ExitStack())
            again[-1].enter_context(_AsOnCuda())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            again.pop().close()

    entering = register_module_forward_pre_hook(before)
    leaving = register_module_forward_hook(after, always_call=True)
    try:
        with _AsOnCuda():
            yield
    finally:
        entering.remove()
        leaving.remove()


def trace_model(
    build: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, ...]],
    *,
    samples: int | None,
    units_per_sample: int,
    precision: Precision,
    recompute: bool = False,
    on_cuda: bool = False,
    bucket_mb: float | None = None,
) -> Recording:
    """Run one micro-batch on fake tensors.

    Args:
        build: makes the model, whose `forward(*batch)` returns the loss; called with `meta` as the default device.
        batch: makes a micro-batch of so many samples on the CPU.
        samples: of the micro-batch; None makes a general recording.
        units_per_sample: tokens of a sequence, or 1.
        precision: as the runtime's.
        recompute: whether blocks are checkpointed, as `recompute_blocks` does it.
        on_cuda: whether operations save what they save on CUDA.
        bucket_mb: as the runtime's.

    Raises `UsageError`, which says what failed, for a model that cannot be run so.
    """
    try:
        with torch.device("meta"):
            model = build()
    except UsageError:
        raise
    except Exception as error:  # whatever the model does when it is built
        raise UsageError(
            f"the model cannot be built without memory ({type(error).__name__} on torch.device('meta'): "
            f"{_first_line(error)}): build it without reading values of tensors, or measure it with zerokit bench"
        ) from error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient, so there is nothing to plan")
    anatomy = take_apart(model, None, {})
    bucket_bytes = default_bucket_bytes(anatomy.segments) if bucket_mb is None else int(bucket_mb * 2**20)
    layout = build_layout(anatomy.segments, world=1, bucket_bytes=bucket_bytes)
    inputs = _inputs(batch, samples)
    try:
        return _trace(
            model, anatomy, layout, inputs, samples, units_per_sample, precision, recompute, on_cuda
        )
    except UsageError:
        raise
    except Exception as error:  # whatever the model does on fake tensors
        raise UsageError(
            f"the model cannot be traced: running it once on fake tensors failed ({type(error).__name__}: "
            f"{_first_line(error)}). A model that reads values of tensors (.item(), a branch on data) cannot be "
            "planned; measure it with zerokit bench"
        ) from error


_Input: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor of the micro-batch."""


def _inputs(batch: Callable[[int], tuple[Tensor, ...]], samples: int | None) -> list[_Input]:
    """What a micro-batch consists of. A general one follows from two small ones: what differs grows."""
    if samples is not None:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in batch(samples)]
    few, more = batch(2), batch(3)
    return [
        (
            tuple(
                a if a == b else a + (b - a) * (SAMPLES - 2)
                for a, b in zip(one.shape, two.shape, strict=True)
            ),
            one.dtype,
        )
        for one, two in zip(few, more, strict=True)
    ]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _trace(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    wanted: Sequence[_Input],
    samples: int | None,
    units_per_sample: int,
    precision: Precision,
    recompute: bool,
    on_cuda: bool,
) -> Recording:
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        parameters = _become_fake(model, precision)
        named = {name: parameters[parameter] for name, parameter in anatomy.named.items()}
        keep_statistics(model, precision.compute)
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in wanted]
        recorder = _Recorder([*parameters.values(), *model.buffers()], general=samples is None)
        for tensor in inputs:
            recorder.hold(tensor)
        watch = _Watch(model, anatomy, layout, named, recorder, precision)
        if recompute:
            _note_recomputation(model, recorder, on_cuda=on_cuda)
            recompute_blocks(model)
        if on_cuda:
            stack.enter_context(_as_on_cuda())
        stack.enter_context(recorder)
        loss = model(*inputs)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise UsageError(f"the model's forward must return the loss, a scalar, not {_describe(loss)}")
        recorder.end_forward()
        loss.register_hook(lambda gradient: recorder.note(Moment.BACKWARD))
        torch.autograd.backward(
            loss
        )  # a function mode is off inside `loss.backward()`, whose recomputation needs it
        recorder.note(Moment.END)
        buffer_bytes = sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
        levels = np.array(recorder.levels, dtype=np.int64)
        trace = ModelTrace(
            layout,
            samples or SAMPLES,
            tuple(recorder.events),
            levels[:, 0],
            ModelWork((), 0),
            watch.kept_lazily(),
            buffer_bytes,
        )
        return Recording(samples is None, trace, levels[:, 1], _uses(recorder), units_per_sample)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without gradient")
    return f"a {type(value).__name__}"


def _become_fake(model: nn.Module, precision: Precision) -> dict[nn.Parameter, nn.Parameter]:
    """Replace every tensor on meta by a fake one on the CPU, in the runtime's dtypes; the new parameter of each."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                dtype = precision.compute if parameter.dtype in FLOATING else parameter.dtype
                memory = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                made[parameter] = nn.Parameter(memory, parameter.requires_grad)
            module._parameters[name] = made[parameter]
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, Tensor) and value.is_meta:
                    holder[name] = torch.empty_strided(
                        value.shape,
                        value.stride(),
                        dtype=value.dtype,
                        device="cpu",
                        requires_grad=value.requires_grad,
                    )
    return made


def _note_recomputation(model: nn.Module, recorder: _Recorder, *, on_cuda: bool) -> None:
    """Let the recorder know when blocks run again in backward."""
    for block in blocks_of(model):
        block.forward = _noting(block.forward, recorder, on_cuda=on_cuda)


def _noting(inner: Callable[..., Any], recorder: _Recorder, *, on_cuda: bool) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        again = in_backward()
        with (
            _recomputing(recorder) if again else nullcontext(),
            _AsOnCuda() if again and on_cuda else nullcontext(),
        ):
            return inner(*args, **kwargs)

    return forward


@contextmanager
def _recomputing(recorder: _Recorder) -> Iterator[None]:
    recorder.recomputing += 1
    try:
        yield
    finally:
        recorder.recomputing -= 1


class _Watch:
    """The hooks on a model's modules and parameters, as `Announcements` and `ModelWalk` set them."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        layout: Layout,
        named: dict[str, nn.Parameter],
        recorder: _Recorder,
        precision: Precision,
    ) -> None:
        self._recorder = recorder
        self._precision = precision
        self._announcers = announcers(model, anatomy, layout.units)
        self._casting = modules_that_cast(model) if precision.compute != torch.float32 else set()
        self._called: set[nn.Module] = set()
        self._active: dict[int, int] = {}
        self._given: dict[nn.Module, set[tuple[object, int]]] = {}
        modules = dict(model.named_modules())
        users: dict[nn.Module, list[int]] = {module: [] for module in self._casting}
        for unit in layout.units:
            inside = {modules[scope] for scope in unit.scopes}
            owners = {
                owner for p in unit.parameters for owner in anatomy.owners[p.name] if owner is not model
            }
            for module in inside or owners:
                users.setdefault(module, []).append(unit.index)
            for module in owners - inside if inside else ():
                users.setdefault(module, [])
            for position, parameter in enumerate(unit.parameters):
                if parameter.trainable:
                    named[parameter.name].register_post_accumulate_grad_hook(
                        self._on_gradient(unit.index, position)
                    )
        for module, units in users.items():
            module.register_forward_pre_hook(self._before(sorted(units)), with_kwargs=True, prepend=True)
            if units:
                module.register_forward_hook(self._after(sorted(units)))

    def kept_lazily(self) -> frozenset[int]:
        return frozenset(
            index for index, sets in self._announcers.items() if any(one <= self._called for one in sets)
        )

    def _before(self, units: list[int]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._called.add(module)
            if in_backward():
                if units:
                    self._recorder.note(Moment.RECOMPUTE, units)
            elif units:
                self._recorder.note(Moment.ENTER, units)
                for unit in units:
                    self._active[unit] = self._active.get(unit, 0) + 1
                self._given[module] = {origin(tensor) for tensor in tensors_in((args, kwargs))}
            if module in self._casting:
                return cast_inputs(args, kwargs, self._precision.compute, "cpu")
            return None

        return hook

    def _after(self, units: list[int]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return
            for unit in units:
                self._active[unit] -= 1
            outermost = [unit for unit in units if not self._active[unit]]
            given = self._given.pop(module, set())
            tensors = list(tensors_in(output))
            for tensor in tensors:
                if outermost and tensor.requires_grad and origin(tensor) not in given:
                    tensor.register_hook(lambda gradient: self._recorder.note(Moment.BACKWARD, outermost))
            self._recorder.note(Moment.LEAVE, units, watched=bool(tensors))

        return hook

    def _on_gradient(self, unit: int, position: int) -> Any:
        def hook(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            assert gradient is not None
            size = gradient.untyped_storage().nbytes()
            del gradient
            parameter.grad = None
            self._recorder.note(Moment.GRADIENT, (unit,), parameter=position, gradient_bytes=size)

        return hook


def _uses(recorder: _Recorder) -> tuple[tuple[_Stretch, _Stretch | None, _Stretch | None], ...]:
    """Each use of a unit in forward with the backward work that belongs to it: later uses come first in backward."""
    backward: dict[int, list[tuple[_Stretch, _Stretch]]] = {}
    for stretch, again in zip(recorder.backward, recorder.recomputed, strict=True):
        backward.setdefault(stretch.unit, []).append((stretch, again))
    found: list[tuple[_Stretch, _Stretch | None, _Stretch | None]] = []
    for stretch in reversed(recorder.forward):
        parts = backward.get(stretch.unit, [])
        found.append((stretch, *(parts.pop(0) if parts else (None, None))))
    return tuple(reversed(found))

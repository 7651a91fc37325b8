"""A trace: a model run once, forward and backward, on fake tensors, with its memory, gradients and work in order.

Fake tensors have shapes, dtypes and storages, and no memory. The same hooks as the runtime's note when a unit is
entered, when its outputs receive gradients, and when each parameter's gradient is ready. Nothing here depends on the
number of ranks or on a stage: `memory` replays a trace for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zerokit.by_module import REST
from zerokit.errors import UsageError
from zerokit.layout import Layout, build_layout, default_bucket_bytes
from zerokit.planning.as_on_cuda import as_on_cuda
from zerokit.planning.matrices import matrices_of, trainable
from zerokit.planning.recording import SAMPLES, ModelTrace, Moment, Recorder, Recording, uses_of
from zerokit.planning.subject import Subject
from zerokit.planning.work import MATRICES, ModelWork
from zerokit.runtime.casts import cast_inputs, keep_statistics, modules_that_cast
from zerokit.runtime.hooks import origin, tensors_in
from zerokit.runtime.model import Anatomy, announcers, settings_of, take_apart
from zerokit.runtime.options import require_trainable_dtypes
from zerokit.runtime.precision import FLOATING, Precision
from zerokit.runtime.torch_internals import in_backward
from zerokit.training.recomputation import blocks_of, recompute_blocks


def trace_model(
    subject: Subject,
    samples: int | None,
    precision: Precision,
    *,
    recompute: bool = False,
    on_cuda: bool = False,
    bucket_mb: float | None = None,
    module_stages: Mapping[str, int] | None = None,
    optimizer: str = "adamw",
) -> Recording:
    """Run one micro-batch of `subject` on fake tensors.

    Args:
        subject: its model is built with `meta` as the default device.
        samples: of the micro-batch; None makes a general recording.
        precision: as the runtime's.
        recompute: whether blocks are checkpointed, as `recompute_blocks` does it.
        on_cuda: whether operations save what they save on CUDA.
        bucket_mb: as the runtime's.
        module_stages: of modules that have a stage of their own, by path.
        optimizer: "adamw", or "muon" for the matrices of the blocks.

    Raises `UsageError`, which says what failed, for a model that cannot be run so.
    """
    with explained(UNBUILT), torch.device("meta"):
        model = subject.build()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient, so there is nothing to plan")
    require_trainable_dtypes(model)
    groups = {} if optimizer == "adamw" else _groups_of_muon(model)
    wanted = _inputs(subject.batch, samples)
    sizes = f". {SAMPLES} samples stood for all sizes: give one --batch-size if the model needs certain sizes"
    failed = (
        "the model cannot be traced: running it once on fake tensors failed ({}: {}). A model that reads values of "
        "tensors (.item(), a branch on data) cannot be planned; measure it with zerokit bench"
    )
    with explained(failed + (sizes if samples is None else "")), ExitStack() as stack:
        log = logging.getLogger("torch._subclasses.fake_tensor")  # which prints the traceback of every error
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        anatomy = take_apart(model, None, groups)
        bucket_bytes = default_bucket_bytes(anatomy.segments) if bucket_mb is None else int(bucket_mb * 2**20)
        by_module = {**(module_stages or {}), REST: None}
        own = settings_of("module stages", by_module, model, anatomy)
        layout = build_layout(anatomy.segments, world=1, bucket_bytes=bucket_bytes, settings=own)
        stack.enter_context(FakeTensorMode())
        parameters = _become_fake(model, precision)
        named = {name: parameters[parameter] for name, parameter in anatomy.named.items()}
        keep_statistics(dict.fromkeys(model.modules(), precision.compute))
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in wanted]
        recorder = Recorder([*parameters.values(), *model.buffers()], general=samples is None)
        for tensor in inputs:
            recorder.hold(tensor)
        watch = _Watch(model, anatomy, layout, named, recorder, precision)
        blocks = list(blocks_of(model))
        if recompute:
            for block in blocks:
                _count_recomputation(block, recorder)
            recompute_blocks(model)
        if on_cuda:
            stack.enter_context(as_on_cuda())
        stack.enter_context(recorder)
        loss = model(*inputs)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise UsageError(f"the model's forward must return the loss, a scalar, not {_describe(loss)}")
        recorder.end_forward()
        loss.register_hook(lambda gradient: recorder.note(Moment.BACKWARD))
        torch.autograd.backward(loss)
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
            bool(blocks),
            {u.index: own[name] for u in layout.units if own[name := u.parameters[0].name] is not None},
        )
        uses = uses_of(recorder)
        return Recording(samples is None, trace, levels[:, 1:], uses, subject.units_per_sample)


def _groups_of_muon(model: nn.Module) -> dict[nn.Parameter, int]:
    """The group of each trainable parameter. Raises `UsageError` for a model without matrices."""
    matrices = set(matrices_of(model))
    if not matrices:
        raise UsageError(
            "the model has no matrices that Muon could train: it trains the two-dimensional weights of blocks, the "
            "children of a model's ModuleLists; use --optimizer adamw"
        )
    return {p: MATRICES if p in matrices else MATRICES + 1 for p in trainable(model.parameters())}


class Traces:
    """Traces of a subject: a general recording serves micro-batches of all sizes, unless exact ones are asked for.

    Args:
        subject: the model.
        on_cuda: whether operations save what they save on CUDA.
        bucket_mb: as the runtime's.
        exactly: whether each size of a micro-batch is run by itself, for models that treat some sizes differently.
        module_stages: of modules that have a stage of their own, by path.
        optimizer: "adamw", or "muon" for the matrices of the blocks.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        on_cuda: bool,
        bucket_mb: float | None = None,
        exactly: bool = False,
        module_stages: Mapping[str, int] | None = None,
        optimizer: str = "adamw",
    ) -> None:
        traced = partial(trace_model, subject, on_cuda=on_cuda, bucket_mb=bucket_mb, optimizer=optimizer)
        record = cache(partial(traced, module_stages=module_stages))

        @cache
        def trace(samples: int, precision: str, recompute: bool) -> ModelTrace:
            recorded = samples if exactly else None
            return record(recorded, Precision.of(precision), recompute=recompute).at(samples)

        self._trace = trace

    def get(self, samples: int, precision: str, *, recompute: bool) -> ModelTrace:
        """The trace of a micro-batch. Raises `UsageError` for a model that cannot be traced."""
        return self._trace(samples, precision, recompute)


UNBUILT = (
    "the model cannot be built without memory ({} on torch.device('meta'): {}): build it without reading values of "
    "tensors, or measure it with zerokit bench"
)


@contextmanager
def explained(sentence: str) -> Iterator[None]:
    """What somebody's code raises inside becomes a `UsageError` of this sentence, with the error's type and text."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:200]
        raise UsageError(sentence.format(type(error).__name__, text)) from error


_MADE_SAMPLES = 1024
"""Larger micro-batches are not made, as they would fill the memory of this process."""

_Input: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor of the micro-batch."""


def _inputs(batch: Callable[[int], tuple[Tensor, ...]], samples: int | None) -> list[_Input]:
    """What a micro-batch consists of. A general or a large one follows from two small ones: what differs grows."""
    if samples is not None and samples <= _MADE_SAMPLES:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in _made(batch, samples)]
    few, more, most = ([tensor.shape for tensor in _made(batch, count)] for count in (2, 3, 5))
    if [list(map(len, few)), _grown(few, more, 5)] != [list(map(len, more)), [tuple(one) for one in most]]:
        raise UsageError(
            "the tensors of micro-batches of 2, 3 and 5 samples do not grow evenly: give one --batch-size of at most "
            f"{_MADE_SAMPLES}"
        )
    shapes = _grown(few, more, samples or SAMPLES)
    return [(shape, tensor.dtype) for shape, tensor in zip(shapes, _made(batch, 2), strict=True)]


def _grown(
    few: Sequence[Sequence[int]], more: Sequence[Sequence[int]], samples: int
) -> list[tuple[int, ...]]:
    """The shapes for so many samples, from those for 2 and for 3."""
    return [
        tuple(a + (b - a) * (samples - 2) for a, b in zip(one, two, strict=False))
        for one, two in zip(few, more, strict=False)
    ]


def _made(batch: Callable[[int], tuple[Tensor, ...]], samples: int) -> tuple[Tensor, ...]:
    with explained(
        f"the micro-batch of {samples} samples cannot be made ({{}}: {{}}): give one --batch-size if only certain "
        "sizes can"
    ):
        made = batch(samples)
    values: tuple[object, ...] = tuple(made)
    if wrong := [value for value in values if not isinstance(value, Tensor)]:
        raise UsageError(
            f"a micro-batch must be a tuple of tensors, the arguments of forward, and holds a {type(wrong[0]).__name__}"
        )
    return made


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


def _count_recomputation(block: nn.Module, recorder: Recorder) -> None:
    """Let the recorder know when the block runs again in backward."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        again = in_backward()
        recorder.recomputing += again
        try:
            return inner(*args, **kwargs)
        finally:
            recorder.recomputing -= again

    block.forward = forward


class _Watch:
    """The hooks on a model's modules and parameters, as `ModelWalk` sets them."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        layout: Layout,
        named: dict[str, nn.Parameter],
        recorder: Recorder,
        precision: Precision,
    ) -> None:
        self._recorder = recorder
        self._precision = precision
        self._announcers = announcers(model, anatomy, layout.units)
        self._casting = modules_that_cast(model) if precision.compute != torch.float32 else set()
        self._called: set[nn.Module] = set()
        self._active: dict[int, int] = {}
        self._given: dict[nn.Module, set[tuple[object, int]]] = {}
        users: dict[nn.Module, list[int]] = {module: [] for module in self._casting}
        for unit in layout.units:
            for module in self._announcers[unit.index] - {model}:
                users.setdefault(module, []).append(unit.index)
            for position, parameter in enumerate(unit.parameters):
                if parameter.trainable:
                    hook = partial(self._on_gradient, unit.index, position)
                    named[parameter.name].register_post_accumulate_grad_hook(hook)
        for module, units in users.items():
            before = partial(self._before, sorted(units))
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            if units:
                module.register_forward_hook(partial(self._after, sorted(units)))

    def kept_lazily(self) -> frozenset[int]:
        return frozenset(index for index, modules in self._announcers.items() if modules <= self._called)

    def _before(self, units: list[int], module: nn.Module, args: Any, kwargs: Any) -> Any:
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

    def _after(self, units: list[int], module: nn.Module, args: Any, output: Any) -> None:
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

    def _on_gradient(self, unit: int, position: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        size = parameter.grad.untyped_storage().nbytes()
        parameter.grad = None
        self._recorder.note(Moment.GRADIENT, (unit,), parameter=position, gradient_bytes=size)

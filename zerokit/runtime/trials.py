"""What kind of optimizer a class is, found by a trial: it decides where its updates are computed.

elementwise   a cut of a tensor changes nothing: each rank updates its shards (AdamW, SGD)
whole         a tensor is updated by itself, whatever else there is, but not in pieces: its owner updates it
              (Muon, Adafactor, SOAP, LAMB)
neither       refused: norms over all parameters, LBFGS
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from zerokit.errors import UnsupportedOptimizer
from zerokit.runtime.moments import moments_of
from zerokit.runtime.torch_internals import FakeTensorMode, TorchDispatchMode
from zerokit.runtime.turns import Turns

_SHAPE = (16, 24)
_OTHER_SHAPE = (12, 20)
_STEPS = 30
"""As many as show what begins late: preconditioners that are refreshed every tenth step, rectified variances."""
_LEARNING_RATE = 1.0
"""At least: with a small one, what is estimated from how far weights have come (Prodigy) stays at its tiny start."""
_ADVICE = (
    "zerokit shards elementwise optimizers (AdamW, Adam, SGD, Adagrad, RMSprop, NAdam), and steps those that update "
    "each tensor by itself (Muon, Adafactor) on its owner"
)
TRIAL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, AssertionError)
"""What classes raise for tensors that they do not take."""


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """The optimizer's tensors for one tensor: bytes per element and fixed; `kinds` have its shape, `scalars` not.

    `whole` is None for an elementwise optimizer, whose tensors are flat.
    """

    element_bytes: int
    scalar_bytes: int
    kinds: frozenset[str]
    scalars: frozenset[str]
    whole: WholeStates | None = None
    moments: int = 0
    """How many of them are moments in float32."""


class WholeStates:
    """What a trial has shown of a class that updates whole tensors, and the sizes of its states for any shape."""

    def __init__(
        self, name: str, make: Callable[[list[nn.Parameter]], Optimizer], master: torch.dtype
    ) -> None:
        """Raises `UnsupportedOptimizer`, with the class's `name`, where tensors depend on each other."""
        self._make, self._master = make, master
        self._require_apart(name)
        self.takes_vectors = self._takes((8,))
        self._trials: dict[tuple[int, ...], _States] = {}  # by shape

    def _require_apart(self, name: str) -> None:
        shapes = (_SHAPE, _OTHER_SHAPE)
        try:
            alone = [self._run([number], shapes) for number in range(2)]
            together = self._run([0, 1], shapes)
            in_turn = self._run([0, 1], shapes, in_turn=True)
        except TRIAL_ERRORS as error:
            raise UnsupportedOptimizer(
                f"{name} cannot step one of two tensors alone ({type(error).__name__}: {error}). {_ADVICE}"
            ) from error
        for number in range(2):
            for other in (together[number], in_turn[number]):
                if not torch.allclose(alone[number][0], other, rtol=1e-4, atol=1e-6):
                    raise UnsupportedOptimizer(
                        f"{name} updates a tensor depending on others (through a norm over all parameters, or what it "
                        f"counts or shares between them), so sharding would change the training. {_ADVICE}"
                    )

    def _takes(self, shape: tuple[int, ...]) -> bool:
        try:
            self._run([0], [shape], steps=1)
        except TRIAL_ERRORS:
            return False
        return True

    def _run(
        self,
        numbers: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        *,
        in_turn: bool = False,
        steps: int = _STEPS,
    ) -> list[Tensor]:
        """What tensors of these `shapes` become, those that have the `numbers`, in one optimizer."""
        starts, gradients = _trial_data(shapes, steps)
        tensors = [nn.Parameter(starts[number].to(self._master)) for number in numbers]
        optimizer = self._make(tensors)
        _begin(optimizer)
        for step in range(steps):
            own = {t: gradients[step][n].to(self._master) for t, n in zip(tensors, numbers, strict=True)}
            turns = Turns(optimizer)
            for batch in [{tensor: gradient} for tensor, gradient in own.items()] if in_turn else [own]:
                turns.take(batch)
        return [tensor.detach().float() for tensor in tensors]

    def nbytes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of the states of a tensor of this shape, and of those among them that are single numbers.

        Found by steps of a tensor of this very shape without memory. Classes that look at values cannot make them: what
        they keep of a small tensor of as many dimensions is scaled up, states included that a class leaves out above
        some size.
        """
        sizes = self._states(shape).sizes
        whole = sum(width * math.prod(dims) for dims, width in sizes)
        return whole, sum(width for dims, width in sizes if not dims)

    def moments(self, shape: tuple[int, ...]) -> int:
        """How many of the states are moments in float32, of the tensor's shape."""
        return self._states(shape).moments

    def kinds(self, shape: tuple[int, ...]) -> tuple[frozenset[str], frozenset[str]]:
        """The states that have this shape of their tensor from the first step on, and all that there may be."""
        states = self._states(shape)
        return states.alike, states.all

    def _states(self, shape: tuple[int, ...]) -> _States:
        if shape not in self._trials:
            try:
                with FakeTensorMode():
                    self._trials[shape] = self._try(shape)
            except TRIAL_ERRORS:
                # Sizes that no count or other dimension is taken for.
                small = tuple(1 if size == 1 else 11 + 2 * at for at, size in enumerate(shape))
                which = {math.prod(small): math.prod(shape)}
                which |= {tried: size for tried, size in zip(small, shape, strict=True) if tried > 1}
                tried = self._try(small)
                sizes = [
                    (tuple(which.get(size, size) for size in dims), width) for dims, width in tried.sizes
                ]
                self._trials[shape] = tried._replace(sizes=sizes)
        return self._trials[shape]

    def _try(self, shape: tuple[int, ...]) -> _States:
        (start,), gradients = _trial_data([shape], 2)
        tensor = nn.Parameter(start.to(self._master))
        optimizer = self._make([tensor])
        _begin(optimizer)
        kinds: list[set[str]] = []
        for (gradient,) in gradients:
            Turns(optimizer).take({tensor: gradient.to(self._master)})
            state = optimizer.state[tensor]
            kinds.append({k for k, v in state.items() if isinstance(v, Tensor) and v.shape == tensor.shape})
        sizes = [(tuple(value.shape), value.element_size()) for value in tensors_in(list(state.values()))]
        moments = len(moments_of(state, tensor.shape))
        return _States(sizes, frozenset(set.intersection(*kinds)), frozenset(state), moments)


class _States(NamedTuple):
    """The states of one tensor: each one's shape, and its bytes an element; and their kinds."""

    sizes: list[tuple[tuple[int, ...], int]]
    alike: frozenset[str]
    """Those of the tensor's shape."""
    all: frozenset[str]
    moments: int


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of a state, which may be lists or dicts of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def _trial_data(shapes: Sequence[tuple[int, ...]], steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Start values of tensors, and gradients of each step, whose sizes rise and fall apart."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    scales = [(2.0 ** (step % 5 - 2), 2.0 ** -(step // 5 % 3)) for step in range(steps)]
    # In one direction: an estimate of distance from all gradients (D-Adaptation) otherwise stays at its tiny start.
    gradients = [
        [
            (0.3 * torch.randn(start.shape, generator=generator) + start.sign()) * scale[number % 2]
            for number, start in enumerate(starts)
        ]
        for scale in scales
    ]
    return starts, gradients


def choose_kernel(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    device: torch.device,
    master: torch.dtype,
) -> dict[str, Any]:
    """Choose the fused kernel, three times as fast on a CPU, if the user did not choose and it works on `device`."""
    accepted = inspect.signature(optimizer_class).parameters
    unsuited = any(options.get(name) for name in ("foreach", "differentiable", "capturable"))
    # On hosts SGD's kernel keeps a wrong momentum in half precision (PyTorch 2.11 and 2.13).
    halves = device.type == "cpu" and master.itemsize < 4 and optimizer_class is SGD
    if halves or "fused" not in accepted or "fused" in options or unsuited:
        return options
    fused = {**options, "fused": True}
    tried = nn.Parameter(torch.ones(64, dtype=master, device=device))
    try:
        _run(optimizer_class([tried], **fused), tried, [torch.ones_like(tried)])
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        # Which kernels exist differs with the device and PyTorch's version: Adagrad's came to CUDA in 2026.
        return options
    return fused


def probe(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    master: torch.dtype,
    group: Mapping[str, Any] | None = None,
) -> OptimizerStates:
    """Step `optimizer_class` on a matrix, and on each half of it separately: the results agree if it is elementwise.

    `group` has the options of the group that is tried, beside those of all.

    Raises `UnsupportedOptimizer` where they do not agree, and a tensor depends on others, too.
    """
    name = optimizer_class.__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    half = start.numel() // 2
    # In one direction: an estimate of distance from all gradients (D-Adaptation) otherwise stays at its tiny start.
    # The halves' sizes rise and fall apart: a norm of both, or whether it rises or falls, is not that of one.
    sizes = 2.0 ** torch.stack([torch.arange(_STEPS) % 5 - 2, -(torch.arange(_STEPS) // 5 % 3)], dim=1)
    gradients = [
        (0.3 * torch.randn(_SHAPE, generator=generator) + start.sign())
        * size.repeat_interleave(half).view(_SHAPE)
        for size in sizes
    ]
    make = _Maker(optimizer_class, _lively(options), _lively(group or {}))
    whole = nn.Parameter(start.clone())
    optimizer = make([whole])  # a wrong option raises its own error
    try:
        with _Alone(name):
            _run(optimizer, whole, gradients)
    except TRIAL_ERRORS as error:
        raise UnsupportedOptimizer(
            f"{name} cannot be stepped without a closure, or not on a matrix ({type(error).__name__}: {error}). "
            f"{_ADVICE}"
        ) from error
    try:
        cut = [nn.Parameter(piece.clone()) for piece in start.flatten().split(half)]
        for number, piece in enumerate(cut):
            # In an optimizer of its own, as on a rank of its own: norms over all parameters show as well.
            _run(make([piece]), piece, [g.flatten().split(half)[number] for g in gradients])
        together = torch.cat([piece.detach() for piece in cut]).view(_SHAPE)
        elementwise = torch.allclose(whole.detach(), together, rtol=1e-4, atol=1e-6)
    except TRIAL_ERRORS:
        elementwise = False  # a class that wants matrices
    shapes = None if elementwise else WholeStates(name, make, master)
    # Also of one that looks elementwise: ScalableShampoo's preconditioners change nothing in its first 999 steps.
    _require_plain(name, optimizer.state[whole])
    start, gradients = start.to(master), [gradient.to(master) for gradient in gradients[:3]]
    if elementwise:
        start, gradients = start.flatten(), [gradient.flatten() for gradient in gradients]
    typed = nn.Parameter(start)
    optimizer = make([typed])
    try:
        _run(optimizer, typed, gradients)
    except TRIAL_ERRORS as error:
        raise UnsupportedOptimizer(
            f"{name} cannot be stepped in {master} ({type(error).__name__}: {error}). {_ADVICE}"
        ) from error
    state = optimizer.state[typed]
    tensors = {k: value for k, value in state.items() if isinstance(value, Tensor)}
    alike = {kind: value for kind, value in tensors.items() if value.shape == typed.shape}
    others = tensors.keys() - alike.keys()
    return OptimizerStates(
        sum(value.element_size() for value in alike.values()),
        sum(tensors[kind].untyped_storage().nbytes() for kind in others),
        frozenset(alike),
        frozenset(others),
        shapes,
        len(moments_of(tensors, typed.shape)),
    )


def probe_groups(
    optimizer_class: Callable[..., Optimizer],
    options: dict[str, Any],
    master: torch.dtype,
    groups: Sequence[Mapping[str, Any]],
    *,
    in_turns: bool = False,
) -> list[OptimizerStates]:
    """What each group of a class leads to; groups that differ in numbers alone are tried once.

    `in_turns`: elementwise classes too must step some tensors without others. Raises `UnsupportedOptimizer`.
    """
    tried: dict[str, OptimizerStates] = {}
    found = []
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        choices = {name: value for name, value in own.items() if isinstance(value, bool | str)}
        key = repr(sorted(choices.items()))
        if key not in tried:
            tried[key] = probe(optimizer_class, options, master, own)
            if in_turns and tried[key].whole is None:
                make = _Maker(optimizer_class, _lively(options), _lively(own))
                WholeStates(optimizer_class.__name__, make, master)
        found.append(tried[key])
    return found


def _lively(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a learning rate that shows what depends on how far weights have come."""
    rate = options.get("lr")
    if isinstance(rate, float | int):
        return {**options, "lr": max(rate, _LEARNING_RATE)}
    return dict(options)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes optimizers of a class with one group."""

    optimizer_class: Callable[..., Optimizer]
    options: dict[str, Any]
    group: dict[str, Any]

    def __call__(self, tensors: list[nn.Parameter]) -> Optimizer:
        return self.optimizer_class([{**self.group, "params": tensors}], **self.options)


class _Alone(TorchDispatchMode):
    """Raises `UnsupportedOptimizer` where a step communicates: ranks step other numbers of tensors, and would wait."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise UnsupportedOptimizer(
                f"{self._name} communicates between ranks itself, and so does zerokit: take a class for one process"
            )
        return func(*args, **(kwargs or {}))


def _require_plain(name: str, state: object) -> None:
    """Raise `UnsupportedOptimizer` for states that no checkpoint can hold."""
    if isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            _require_plain(name, one)
    elif not isinstance(state, Tensor | int | float | str | None):
        raise UnsupportedOptimizer(
            f"{name} keeps a {type(state).__name__} for a tensor, which no checkpoint could hold without running "
            f"pickled code: states must be tensors, numbers, text, lists or dicts. {_ADVICE}"
        )


def _run(optimizer: Optimizer, parameter: nn.Parameter, gradients: Sequence[Tensor]) -> None:
    _begin(optimizer)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


def _begin(optimizer: Optimizer) -> None:
    train: Any = getattr(optimizer, "train", None)
    if callable(train):  # schedule-free optimizers step in this mode alone
        train()

"""Notes when the modules that announce units are at work, by hooks of PyTorch.

[Note: backward of a module] It lasts from the gradient of the module's output to that of the next module's, or to the
end of backward. What a module only hands through, such as T5's position bias, gets its gradient later, in an earlier
module's backward, and is no output of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerokit.bench.trace.recorder import Recorder
from zerokit.bench.trace.spans import Stretch
from zerokit.runtime.hooks import origin, tensors_in
from zerokit.runtime.torch_internals import at_end_of_backward, in_backward


class ModuleHooks:
    """The hooks on one model; `announcers` has, for each unit, the modules whose calls announce it."""

    def __init__(
        self, model: nn.Module, announcers: Mapping[int, set[nn.Module]], recorder: Recorder
    ) -> None:
        self._recorder = recorder
        self._paths = {module: path for path, module in model.named_modules()}
        self._units: dict[nn.Module, list[int]] = {}
        for unit, modules in announcers.items():
            for module in modules - {model}:
                self._units.setdefault(module, []).append(unit)
        self._at_work: dict[nn.Module, list[tuple[Stretch, set[tuple[object, int]]]]] = {}
        self._queued = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which modules are watched."""
        handles = []
        for module in self._units:
            # Before the runtime's own: its waits for a module's gathers are part of the module's time.
            handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                # Checkpoints end a forward that they run again by an exception.
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
        recomputed = [module for module in self._units if _checkpointed(module) is not None]
        before = [(module, module.__dict__["forward"]) for module in recomputed]
        for module, forward in before:
            again = partial(self._again, module, forward.args[0])
            module.__dict__["forward"] = partial(checkpoint, again, *forward.args[1:], **forward.keywords)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, forward in before:
                module.__dict__["forward"] = forward

    def _begin(self, module: nn.Module) -> Stretch:
        return self._recorder.begin_module(self._paths[module], self._units[module], again=in_backward())

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = {origin(tensor) for tensor in tensors_in((args, kwargs))}
        self._at_work.setdefault(module, []).append((self._begin(module), given))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        stretch, given = self._at_work[module].pop()
        stretch.end()
        if in_backward() or not torch.is_grad_enabled():
            return
        hook = partial(self._on_gradient, self._paths[module], self._units[module])
        for tensor in tensors_in(output):
            if tensor.requires_grad and origin(tensor) not in given:
                tensor.register_hook(hook)

    def _again(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward inside a checkpoint, which no hook of the module sees when it is run again."""
        if not in_backward():
            return forward(*args, **kwargs)
        stretch = self._begin(module)
        try:
            return forward(*args, **kwargs)
        finally:
            stretch.end()

    def _on_gradient(self, path: str, units: Sequence[int], gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            with suppress(RuntimeError):  # no backward of its own, but a call of a hook
                at_end_of_backward(self._end_backward)
        self._recorder.come_to(path, units)

    def _end_backward(self) -> None:
        self._queued = False
        self._recorder.end_backward()


def _checkpointed(module: nn.Module) -> Any:
    """A module's own `forward` where it is a checkpoint of another one, as `recompute_blocks` makes it."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, partial) and forward.func is checkpoint else None

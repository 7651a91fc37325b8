"""Models built on `meta`: initial values made a few modules at a time, so that the model never exists whole.

Each module is initialised from a seed of its own (the run's seed and the module's name), so that values depend
neither on the world size nor on the stage, nor on which parameters of the module lie in which unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError

InitFunction = Callable[[nn.Module], None]


class Materializer:
    """Makes the initial values of parameters and buffers that are on `meta`."""

    def __init__(self, model: nn.Module, init: InitFunction | None, device: torch.device, seed: int) -> None:
        self._init = init
        self._device = device
        self._seed = seed
        self._paths = {module: path for path, module in model.named_modules()}
        self._owners: dict[nn.Parameter, nn.Module] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, module)
        # A parameter that lies in an earlier unit has lost both by the time its module is initialised again.
        self._forms = {parameter: (parameter.shape, parameter.dtype) for parameter in self._owners}

    def values_of(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Values for those of `parameters` that are on `meta`.

        A tied parameter takes the value that its first owner gives it. Raises `UsageError` for a module that
        cannot initialise itself.
        """
        wanted = [parameter for parameter in parameters if parameter.is_meta]
        values: dict[nn.Parameter, Tensor] = {}
        for owner in dict.fromkeys(self._owners[parameter] for parameter in wanted):
            with self._scratch_parameters(owner) as scratch:
                self._initialise(owner)
            values.update({p: scratch[p].detach() for p in wanted if self._owners[p] is owner})
        return values

    def fill_buffers(self) -> None:
        """Give buffers that are on `meta` memory and values."""
        for module in self._paths:
            meta = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
            if not meta:
                continue
            for name, buffer in meta.items():
                module._buffers[name] = torch.empty_like(buffer, device=self._device)
            with self._scratch_parameters(module):
                self._initialise(module)

    @contextmanager
    def _scratch_parameters(self, module: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Let `module` hold scratch parameters for a while: its own may be on `meta`, or freed already."""
        held = dict(module._parameters)
        scratch = {
            parameter: nn.Parameter(
                torch.empty(self._forms[parameter][0], dtype=self._forms[parameter][1], device=self._device),
                parameter.requires_grad,
            )
            for parameter in held.values()
            if parameter is not None
        }
        try:
            for name, parameter in held.items():
                if parameter is not None:
                    module._parameters[name] = scratch[parameter]
            yield scratch
        finally:
            module._parameters.update(held)

    def _initialise(self, module: nn.Module) -> None:
        path = self._paths[module]
        init = self._init
        if init is None:
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise UsageError(
                    f"{path or 'the model'} ({type(module).__name__}) has parameters or buffers on meta but no "
                    "reset_parameters(): pass init_fn=, a function that initialises one module in place"
                )
            init = _reset_parameters
        digest = hashlib.sha256(f"{self._seed}:{path}".encode()).digest()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            init(module)


def _reset_parameters(module: nn.Module) -> None:
    reset: object = module.reset_parameters
    assert callable(reset)
    reset()

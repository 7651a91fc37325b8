"""Which modules announce that they are about to use units, by hooks on their forward.

A unit's own modules do, and the modules that hold its weights: those may be called by themselves, past the unit's
module. Where the first pass went through all of a unit's modules, the hooks inside them are removed, which would cost
more than the rest of zerokit in a model of small modules; guarded parameters still notice a call past the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerokit.runtime.hooks import Compilers, Hook, TracedHook, is_compiled
from zerokit.runtime.model import Anatomy, announcers
from zerokit.runtime.storage import UnitState


class Announcements:
    """The hooks on a model's modules.

    Args:
        model: the root module, which has hooks of its own.
        anatomy: its parameters and who holds them.
        storages: the units.
        casting: modules whose inputs are cast.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, storages: Sequence[UnitState], casting: set[nn.Module]
    ) -> None:
        self.called: set[nn.Module] = set()
        """Modules that have been called until `drop_spare`."""
        self._casting = casting
        self._announcers = announcers(model, anatomy, [storage.unit for storage in storages])
        modules = dict(model.named_modules())
        self._users: dict[nn.Module, list[UnitState]] = {module: [] for module in casting - {model}}
        self._inside: dict[nn.Module, set[nn.Module]] = {}
        """For modules inside those of their only unit, the unit's modules."""
        for storage in storages:
            scopes = {modules[scope] for scope in storage.unit.scopes}
            for module in scopes:
                self._users.setdefault(module, []).append(storage)
            for parameter in storage.unit.parameters:
                for owner in anatomy.owners[parameter.name]:
                    if owner is not model and storage not in self._users.setdefault(owner, []):
                        self._users[owner].append(storage)
                        self._inside[owner] = scopes
        for module, units in self._users.items():
            if len(units) > 1:
                self._inside.pop(module, None)
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._cast: TracedHook | None = None

    def install(
        self,
        walk: weakref.ref[Any],
        before: Callable[..., Any],
        after: Callable[..., Any],
        cast: Callable[..., Any],
    ) -> None:
        """Call `before(units, ...)` and `after(units, ...)` around each module's forward, or `cast` alone."""
        self._cast = TracedHook(walk, cast)
        for module, units in self._users.items():
            self._handles[module] = [
                module.register_forward_pre_hook(Hook(walk, before, units), with_kwargs=True, prepend=True),
                module.register_forward_hook(Hook(walk, after, units)),
            ]

    def lazy_units(self) -> list[int]:
        """Units all of whose uses were announced by the modules that have been called."""
        return [index for index, sets in self._announcers.items() if any(one <= self.called for one in sets)]

    def drop_spare(self, *, after: bool) -> None:
        """Remove hooks inside units whose modules have all been called, and all of those `after` a forward, if so."""
        if after:
            for handles in self._handles.values():
                if len(handles) == 2:
                    handles.pop().remove()
        self._drop_inside(self.called)
        self._inside.clear()
        self.called.clear()

    def spare_compilers(self, model: nn.Module) -> None:
        """Where parts of the model are compiled, remove all hooks inside units: they would divide graphs for good."""
        if Compilers.seen or any(map(is_compiled, model.modules())):
            self._drop_inside(set(self._users))

    def _drop_inside(self, called: set[nn.Module]) -> None:
        for module in [module for module, scopes in self._inside.items() if scopes and scopes <= called]:
            del self._inside[module]
            for handle in self._handles.pop(module):
                handle.remove()
            if module in self._casting and self._cast is not None:
                handle = module.register_forward_pre_hook(self._cast, with_kwargs=True, prepend=True)
                self._handles[module] = [handle]
